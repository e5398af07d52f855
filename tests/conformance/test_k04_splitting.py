"""K04. Arguments: what is cut into rows, what goes whole to every shard."""

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from compare import check_same, rows
from reports import beyond, report
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree

from samestep import DataParallel, SplitError, data_parallel, register_batch_type

Pair = namedtuple("Pair", "a b")


class Checked(nn.Module):
    """A linear layer behind a function that looks at all arguments."""

    def __init__(self, function):
        super().__init__()
        self.fc = nn.Linear(3, 2).double()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.fc(self.function(*args, **kwargs))


@report("P22", "pytorch/pytorch#3779", "pytorch/pytorch#75442")
def test_lists_of_strings_and_of_lists_are_cut_with_the_batch():
    def use(x, names, labels):
        assert len(names) == len(labels) == len(x)
        return x * torch.tensor(
            [[len(name) + sum(row)] for name, row in zip(names, labels, strict=True)]
        )

    names = ["a", "bb", "ccc", "dddd", "e", "ff", "ggg"]
    labels = [[i, i + 1] for i in range(7)]
    check_same(Checked(use), rows(7, 3), names, labels)
    check_same(Checked(use), rows(7, 3), tuple(names), labels=labels)


@report("P25", "pytorch/pytorch#7890", "pytorch/pytorch#15260", "pytorch/pytorch#2418")
def test_hidden_state_is_cut_on_its_own_dim():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, num_layers=2, batch_first=True).double()

        def forward(self, x, h):
            return self.gru(x, h)

    options = {"in_dims": {"h": 1}, "out_dims": (0, 1)}
    check_same(Recurrent(), rows(7, 5, 3), rows(2, 7, 4, grad=True), options=options)
    # The output's dim needs no word where only one can have the rows.
    check_same(Recurrent(), rows(7, 5, 3), h=rows(2, 7, 4), options={"in_dims": {"h": 1}})


@report("P25", "pytorch/pytorch#7890", "pytorch/pytorch#10537")
def test_what_would_be_done_can_be_read_and_a_wrong_dim_shows_both_sizes():
    model = DataParallel(nn.GRU(3, 4, batch_first=True), replicas=2, in_dims={"hx": 0})
    told = str(
        DataParallel(nn.GRU(3, 4), replicas=2).explain(torch.ones(7, 5, 3), torch.ones(2, 7, 4))
    )
    assert "args[0] float32 [7, 5, 3]: cut on dim 0 into 4 3" in told
    assert "args[1] float32 [2, 7, 4]: whole" in told
    with pytest.raises(SplitError, match=r"\[2, 7, 4\] has 2 rows on dim 0, but the batch has 7"):
        model(torch.ones(7, 5, 3), torch.ones(2, 7, 4))


@report("P26", "huggingface/trl#2338", "huggingface/transformers#36492")
def test_a_zero_dim_tensor_goes_whole_to_every_shard():
    def use(x, n, scale):
        assert n.dim() == 0
        return x * n * scale["s"]

    scale = {"s": torch.tensor(2.0, dtype=torch.float64)}
    check_same(Checked(use), rows(7, 3), n=torch.tensor(3.0, dtype=torch.float64), scale=scale)
    factor = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    check_same(Checked(lambda n, x: x * n), factor, rows(7, 3))


class Bag:
    """Graphs of different sizes in one row, as a graph library batches them."""

    def __init__(self, nodes, sizes):
        self.nodes, self.sizes = nodes, list(sizes)

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        start = sum(self.sizes[: index.start])
        sizes = self.sizes[index]
        return Bag(self.nodes[start : start + sum(sizes)], sizes)


def split_bag(bag, sizes):
    stops = torch.tensor(sizes).cumsum(0).tolist()
    return [bag[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


def merge_bags(bags):
    return Bag(torch.cat([bag.nodes for bag in bags]), [s for bag in bags for s in bag.sizes])


@report("P27", "pytorch/pytorch#52597", "pytorch/pytorch#34516", "pyg-team/pytorch_geometric#101")
def test_a_registered_batch_class_is_cut_joined_and_differentiable():
    register_batch_type(Bag, split=split_bag, merge=merge_bags)

    class Pooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, bag):
            parts = self.fc(bag.nodes).split(bag.sizes)
            return torch.stack([part.sum(0) for part in parts]), Bag(self.fc(bag.nodes), bag.sizes)

    module = Pooling()
    model = DataParallel(module, replicas=3)
    bag = Bag(rows(16, 3), [1, 2, 3, 4, 5, 0, 1])
    (pooled, bags), (expected, _) = model(bag), module(bag)
    torch.testing.assert_close(pooled, expected)
    assert bags.sizes == bag.sizes
    (gradient,) = torch.autograd.grad(bags.nodes.sum(), module.fc.weight)
    torch.testing.assert_close(gradient, bag.nodes.sum(0).expand(2, 3))


@report("P27", "pytorch/pytorch#52597", "pyg-team/pytorch_geometric#101")
def test_a_type_known_to_pytree_needs_no_registration():
    class Known:
        def __init__(self, x, y):
            self.x, self.y = x, y

    _pytree.register_pytree_node(Known, lambda k: ([k.x, k.y], None), lambda c, _: Known(*c))

    def use(known):
        assert type(known) is Known
        return known.x + known.y

    check_same(Checked(use), Known(rows(7, 3), rows(7, 3)))


@report("P29", "pytorch/pytorch#1857", "pytorch/pytorch#1169")
def test_a_dict_as_the_only_argument_and_keywords_alone():
    check_same(Checked(lambda batch: batch["x"]), {"x": rows(7, 3)})
    check_same(Checked(lambda batch: batch["in"][0]["x"]), batch={"in": [{"x": rows(7, 3)}]})
    check_same(Checked(lambda x: x), x=rows(7, 3))
    check_same(Checked(lambda scale, x: x * scale), 2.0, x=rows(7, 3))


@report("P30", "pytorch/pytorch#15993")
def test_an_object_given_whole_is_the_callers_own_as_in_a_plain_call():
    def use(x, log, table):
        log.append(len(x))
        table[len(x)] = True
        return x

    log, table = deque(), {}
    DataParallel(Checked(use), replicas=3)(rows(7, 3), log, table)
    assert sorted(log) == [1, 3, 3]
    assert sorted(table) == [1, 3]


@report("P31", "pytorch/pytorch#44009")
def test_containers_keep_their_type_on_the_way_in():
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        x: torch.Tensor
        note: str = "n"

    class Mine(dict):
        pass

    def use(pair, ordered, default, mine, frozen, both):
        assert type(pair) is Pair
        assert type(ordered) is OrderedDict
        assert type(default) is defaultdict
        assert default.default_factory is list
        assert type(mine) is Mine
        assert type(frozen) is Frozen
        assert type(both[0]) is Pair
        assert type(both) is list
        return pair.a + ordered["x"] + default["x"] + mine["x"] + frozen.x + both[0].b["x"]

    x = rows(7, 3)
    check_same(
        Checked(use),
        Pair(x, None),
        OrderedDict(x=x),
        defaultdict(list, x=x),
        Mine(x=x),
        Frozen(x),
        [Pair(1, {"x": x})],
    )


@report("P32", "pytorch/pytorch#13214", "pytorch/pytorch#2312", "pytorch/pytorch#10537")
def test_lengths_in_a_list_are_cut_with_the_padded_batch():
    class Packing(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True).double()

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            return self.rnn(packed)[1][0]

    check_same(Packing(), rows(4, 5, 3), lengths=[5, 4, 3, 2], replicas=2)
    check_same(Packing(), rows(4, 5, 3), torch.tensor([5, 4, 3, 2]), replicas=3)


@report("P33", "facebookresearch/maskrcnn-benchmark#495")
def test_lists_of_unequal_images_and_boxes_are_cut_by_images():
    def use(images, targets):
        assert len(images) == len(targets)
        return torch.stack(
            [
                image.mean((1, 2)) + t["boxes"].sum()
                for image, t in zip(images, targets, strict=True)
            ]
        )

    images = [rows(3, 4 + i, 5) for i in range(7)]
    targets = [{"boxes": rows(i, 4), "id": i} for i in range(7)]
    check_same(Checked(use), images, targets)


@report("P33", "facebookresearch/maskrcnn-benchmark#495")
def test_an_unknown_object_goes_whole_and_explain_says_so():
    class ImageList:
        def __init__(self, tensors):
            self.tensors = tensors

    told = str(DataParallel(nn.Identity(), replicas=2).explain(rows(7, 3), ImageList(rows(7, 3))))
    assert "args[1] ImageList: whole" in told


@beyond("K04")
def test_numpy_arrays_and_packed_sequences_are_cut():
    def use(x, weights, packed):
        assert isinstance(weights, np.ndarray)
        assert len(weights) == len(x) == int(packed.batch_sizes[0])
        return x * torch.from_numpy(weights)[:, None] + packed.data.sum()

    packed = nn.utils.rnn.pack_sequence([torch.zeros(1 + i % 3, 2) for i in range(7)], False)
    check_same(Checked(use), rows(7, 3), np.arange(7.0), packed)


@beyond("K04")
def test_a_mask_as_long_as_the_batch_goes_whole_when_in_dims_says_so():
    def use(x, mask, extra):
        assert mask.shape == (7, 7)
        assert len(extra["names"]) == 7
        return x + mask.sum() + len(extra["names"])

    options = {"in_dims": {1: None, 2: {"names": None}}}
    mask, extra = torch.ones(7, 7), {"names": list("abcdefg")}
    check_same(Checked(use), rows(7, 3), mask, extra, options=options)


@beyond("K04")
@pytest.mark.parametrize("dim", [1, -2])
def test_rows_may_be_counted_on_another_dim(dim):
    class Time(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, x):
            return self.fc(x)

    check_same(Time(), rows(4, 7, 3, grad=True), options={"dim": dim})


@beyond("K04")
def test_the_same_tensor_twice_is_one_object_in_forward():
    def use(query, key, more):
        assert query is key
        assert more["value"] is key
        return query * key

    x = rows(7, 3)
    check_same(Checked(use), x, x, {"value": x})
    leaf = rows(7, 3, grad=True)
    module = Checked(use)
    gradients = []
    for net in (DataParallel(module, replicas=3), module):
        net(leaf, leaf, {"value": leaf}).sum().backward()
        gradients.append(leaf.grad)
        leaf.grad = None
    torch.testing.assert_close(*gradients)


@beyond("K04")
def test_what_a_loader_makes_of_samples_is_cut_by_samples():
    samples = [
        {"x": torch.randn(3, dtype=torch.float64), "y": i, "name": f"row {i}", "pair": (i, f"a{i}")}
        for i in range(7)
    ]
    (batch,) = torch.utils.data.DataLoader(samples, batch_size=7)

    class Echo(nn.Module):
        def forward(self, batch):
            assert len(batch["name"]) == len(batch["pair"][1]) == len(batch["x"])
            return batch

    check_same(Echo(), batch)


@beyond("K04")
def test_the_function_form_takes_keywords_alone():
    module = Checked(lambda x: x)
    x = rows(7, 3)
    devices = ["cpu"] * 3
    for output in (
        data_parallel(module, x, devices),
        data_parallel(module, (x,), devices),
        data_parallel(module, None, devices, module_kwargs={"x": x}),
        data_parallel(module, (), devices, module_kwargs={"x": x}),
    ):
        torch.testing.assert_close(output, module(x))
