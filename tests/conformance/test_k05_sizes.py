"""K05. Any number of rows on any number of replicas."""

import pytest
import torch
from compare import assert_same, check_same, rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel, current_shard


class Watched(nn.Module):
    """Tells which shards ran and how many rows each had."""

    def __init__(self, seen, inner=None):
        super().__init__()
        self.inner = inner or nn.Linear(3, 2).double()
        self.seen = seen

    def forward(self, x, note=None):
        shard = current_shard()
        self.seen((0 if shard is None else shard.index, len(x)))
        return self.inner(x)


def sizes_seen(num_rows, num_replicas, **options):
    seen = []
    model = DataParallel(Watched(seen.append), replicas=num_replicas, **options)
    model(rows(num_rows, 3), "a note")
    return [size for _, size in sorted(seen)]


@report("P35", "pytorch/pytorch#52260")
def test_36_rows_on_7_replicas():
    assert sizes_seen(36, 7) == [6, 6, 6, 6, 6, 6]  # nobody is called with nothing
    assert sizes_seen(36, 7, split="balanced") == [6, 5, 5, 5, 5, 5, 5]


@report("P36", "pytorch/pytorch#5039", "pytorch/pytorch#9226")
@pytest.mark.parametrize("split", ["chunk", "balanced"])
def test_any_number_of_rows_on_any_number_of_replicas(split):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for num_replicas in range(1, 6):
        for num_rows in range(10):
            module.zero_grad()
            x = rows(num_rows, 3, grad=True)
            check_same(module, x, replicas=num_replicas, options={"split": split})


@report("P37", "pytorch/pytorch#18563", "pytorch/pytorch#7716", "pyg-team/pytorch_geometric#1408")
@pytest.mark.parametrize(("num_rows", "sizes"), [(10, [3, 3, 4]), (5, [2, 3]), (4, [2, 2])])
def test_a_row_that_is_left_over_joins_its_neighbour_where_batchnorm_needs_two(num_rows, sizes):
    seen = []
    model = DataParallel(Watched(seen.append, nn.BatchNorm1d(3).double()), replicas=4)
    assert model(rows(num_rows, 3)).shape == (num_rows, 3)
    assert [size for _, size in sorted(seen[-len(sizes) :])] == sizes
    assert model.module.inner.num_batches_tracked == 1


@report("P37", "pytorch/pytorch#18563", "pytorch/pytorch#7716")
def test_balanced_sizes_leave_no_row_over():
    assert sizes_seen(10, 4, split="balanced") == [3, 3, 2, 2]
    assert sizes_seen(9, 4, split="balanced") == [3, 2, 2, 2]


@report("P37", "pytorch/pytorch#18563", "pytorch/pytorch#7716")
@pytest.mark.parametrize("num_rows", [10, 5, 4])
def test_synchronised_batchnorm_takes_shards_of_one_row(num_rows):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    options = {"sync_batch_norm": True}
    check_same(module, rows(num_rows, 3, grad=True), replicas=4, options=options)


@report("P39", "pytorch/pytorch#44873")
def test_a_module_without_arguments_is_called_once():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(rows(3))
            self.num_calls = 0

        def forward(self):
            self.num_calls += 1
            return self.w * 2

    module = Holder()
    check_same(module, num_calls=2)
    assert module.num_calls == 2


@report("P40", "pytorch/pytorch#3769")
def test_empty_containers_go_to_every_shard():
    class Extras(nn.Module):
        def forward(self, x, extras, table, nothing=()):
            assert (extras, table, nothing) == ([], {}, ())
            return x * 2, extras, table

    check_same(Extras(), rows(7, 3), extras=[], table={})
    check_same(Extras(), rows(7, 3), [], table={}, nothing=())


@report("P41", "pytorch/pytorch#25636")
def test_one_row_on_two_replicas_is_one_shard_and_explain_says_so():
    seen = []
    module = Watched(seen.append)
    model, _ = check_same(module, rows(1, 3), replicas=2)
    assert model.explain(torch.ones(1, 3)) == "args[0] float32 [1, 3]: cut on dim 0 into 1"
    assert {size for _, size in seen} == {1}


@report("P42", "pytorch/pytorch#5664")
def test_rows_on_one_dim_of_the_input_and_another_of_the_output():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, x):
            return self.fc(x)[-1]

    options = {"in_dims": 1, "out_dims": 0}
    check_same(Last(), rows(4, 5, 3, grad=True), options=options)
    check_same(Last(), rows(4, 5, 3, grad=True), options={"dim": 1})


@beyond("K05")
def test_no_rows_at_all_keep_the_shape_dtype_and_graph():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, x, names):
            return {"y": self.fc(x), "names": names, "n": len(names)}

    check_same(Branching(), rows(0, 3, grad=True), [])


@beyond("K05")
def test_sizes_by_weights_skip_a_slot_and_change_from_call_to_call():
    assert sizes_seen(10, 3, split=[2, 0, 3]) == [4, 6]
    module = nn.Linear(3, 2).double()
    model = DataParallel(module, replicas=3, split=[1, 2, 1])
    for num_rows in (9, 2, 30, 1, 0, 9):
        x = rows(num_rows, 3)
        assert_same(model(x), module(x))


@beyond("K05")
def test_more_replicas_than_rows_with_batchnorm_and_one_row_is_the_plain_error():
    module = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(torch.ones(1, 3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        DataParallel(module, replicas=4)(torch.ones(1, 3))


@report("P37", "pytorch/pytorch#18563", "pytorch/pytorch#7716")
@pytest.mark.parametrize(("num_rows", "num_replicas"), [(2, 3), (3, 3), (4, 4), (5, 4), (13, 4)])
def test_joined_rows_keep_their_places_and_weights(num_rows, num_replicas):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def forward(self, x):
            shard = current_shard()
            start = 0 if shard is None else shard.start
            self.norm(x)
            return x.mean(), torch.arange(start, start + len(x))

    module = Normed()
    x = rows(num_rows, 3)
    mean, places = DataParallel(module, replicas=num_replicas)(x)
    torch.testing.assert_close(mean, x.mean())
    assert places.tolist() == list(range(num_rows))
    torch.testing.assert_close(module.norm.running_mean, 0.1 * x.mean(0))


@beyond("K05")
def test_batches_of_every_size_in_a_row_through_a_norm():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model = DataParallel(module, replicas=3)
    for count, num_rows in enumerate((9, 7, 2, 12, 3, 2, 4), start=1):
        output = model(rows(num_rows, 3))
        assert output.shape == (num_rows, 2)
        output.sum().backward()
        assert module[1].num_batches_tracked == count
