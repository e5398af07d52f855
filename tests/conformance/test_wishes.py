"""What users asked of torch.nn.DataParallel and did not get."""

import dataclasses
import io
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from compare import check_same, rows, twin
from reports import wish
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from samestep import DataParallel, SplitError, current_shard, scatter


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4).double()
        self.head = nn.Linear(4, 2).double()
        self.unused = nn.Linear(4, 2).double()

    def forward(self, x):
        return self.head(self.body(x).tanh())

    def generate(self, x):
        return self(x).argmax(1), torch.full((len(x),), current_shard().index)


@wish("FR1", "pytorch/pytorch#44938", "pytorch/pytorch#7457", "pytorch/pytorch#17065")
def test_several_cores_of_one_machine():
    check_same(Net(), rows(7, 3, grad=True), replicas=4)


@wish("FR2", "pytorch/pytorch#31553", "pytorch/pytorch#34516")
def test_shares_of_the_batch_by_weight():
    model, _ = check_same(Net(), rows(10, 3), options={"split": [1, 2, 2]})
    assert model.explain(torch.ones(10, 3)).endswith("into 2 4 4")


@wish("FR3", "pytorch/pytorch#1893")
def test_the_loss_is_computed_in_parallel_and_is_the_batchs():
    class WithLoss(Net):
        def forward(self, x, target):
            return F.cross_entropy(super().forward(x), target)

    check_same(WithLoss(), rows(13, 3), torch.randint(2, (13,)), num_calls=2)


@wish("FR4", "pytorch/pytorch#27046", "pytorch/pytorch#52597", "pytorch/pytorch#55304")
def test_the_user_chooses_which_inputs_are_cut():
    class Choosing(nn.Module):
        def forward(self, x, table, names):
            assert table.shape == (7, 3)
            assert len(names) == len(x)
            return x @ table.T

    options = {"in_dims": {"table": None, "names": "rows"}}
    check_same(Choosing(), rows(7, 3), rows(7, 3), list("abcdefg"), options=options)


@dataclasses.dataclass
class Everything:
    y: torch.Tensor
    names: list
    nested: dict
    count: int = 3


@wish("FR5", "pytorch/pytorch#62466", "pytorch/pytorch#13447", "pytorch/pytorch#41327")
def test_anything_can_be_gathered():
    class Anything(Net):
        def forward(self, x, names):
            y = super().forward(x)
            return Everything(y, names, {"boxes": [[row] for row in y], "tag": ("a", 1.5)})

    check_same(Anything(), rows(7, 3), list("abcdefg"))


@wish("FR6", "pytorch/pytorch#31422", "pytorch/pytorch#1591", "pytorch/pytorch#6299")
def test_packed_sequences_go_in_and_come_out():
    module = nn.GRU(3, 5).double()
    packed = pack_sequence([rows(n, 3) for n in (2, 5, 1, 4)], enforce_sorted=False)
    output, hidden = DataParallel(module, replicas=3)(packed)
    expected, last = module(packed)
    torch.testing.assert_close(pad_packed_sequence(output)[0], pad_packed_sequence(expected)[0])
    torch.testing.assert_close(hidden, last)


@wish("FR7", "pytorch/pytorch#7890")
def test_each_argument_has_its_own_dim():
    module = nn.LSTM(3, 4, num_layers=2, batch_first=True).double()
    state = (rows(2, 7, 4), rows(2, 7, 4))
    check_same(module, rows(7, 5, 3), state, options={"in_dims": {"hx": 1}})


@wish("FR8", "pytorch/pytorch#4216", "pytorch/pytorch#17540", "pytorch/pytorch#13824")
def test_replicas_are_kept_and_can_be_made_by_hand():
    model = DataParallel(Net(), replicas=3)
    model(rows(7, 3))
    model(rows(7, 3))
    builds = model.stats().num_builds
    model(rows(7, 3))
    model.refresh(force=True)
    assert model.stats().num_builds == builds


@wish("FR9", "pytorch/pytorch#38940", "NVIDIA/apex#160")
def test_synchronised_batchnorm_in_one_process():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    check_same(module, rows(11, 3, grad=True), options={"sync_batch_norm": True})


@wish("FR10", "pytorch/pytorch#16885", "pytorch/pytorch#8071", "huggingface/transformers#6821")
def test_attributes_pass_through_and_generate_runs_in_parallel():
    model = DataParallel(Net(), replicas=3)
    assert model.head is model.module.head
    _, shards = model.call("generate", rows(7, 3))
    assert shards.tolist() == [0, 0, 0, 1, 1, 1, 2]


@wish("FR11", "pytorch/pytorch#9176", "pytorch/pytorch#3805")
def test_a_saved_model_has_no_prefix():
    model, file = DataParallel(Net(), replicas=2), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    Net().load_state_dict(torch.load(file))


@wish("FR12", "pytorch/pytorch#7365", "pytorch/pytorch#23938")
def test_an_unused_parameter_has_no_gradient():
    module = Net()
    DataParallel(module, replicas=3)(rows(7, 3)).sum().backward()
    assert module.unused.weight.grad is None
    assert module.head.weight.grad is not None


@wish("FR13", "Lightning-AI/pytorch-lightning#565")
def test_state_is_kept_from_call_to_call():
    class Remembering(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(2, dtype=torch.float64))
            self.num_calls = 0

        def forward(self, x):
            y = super().forward(x)
            self.num_calls += 1
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
            return y

    check_same(Remembering(), rows(7, 3), num_calls=3)


@wish("FR14", "pytorch/pytorch#38493", "pytorch/pytorch#36035")
def test_replicas_have_parameters():
    class Counting(Net):
        def forward(self, x):
            assert len(list(self.parameters())) == len(self.state_dict()) == 6
            return super().forward(x)

    check_same(Counting(), rows(7, 3))


@wish("FR15", "pytorch/pytorch#94636", "pytorch/pytorch#15421", "pytorch/pytorch#13234")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_scripted_and_checkpointed_parts_together():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.last = torch.compile(nn.Linear(2, 2).double(), backend="eager")

        def forward(self, x):
            y = torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)
            return self.last(y)

    module = Parts()
    x = rows(7, 3)
    output, expected = DataParallel(module, replicas=3)(x), module(x)
    torch.testing.assert_close(output, expected)
    parameters = [p for p in module.parameters() if p is not module.net.unused.weight][:4]
    for one, other in zip(
        torch.autograd.grad(output.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@wish("FR16", "pytorch/pytorch#55304")
def test_a_list_is_not_mistaken_for_the_batch():
    class Sizes(nn.Module):
        def forward(self, x, sizes, images):
            assert sizes == [1, 2, 3]
            assert len(images) == 2
            return x

    images = [rows(7, 2), rows(7, 4)]
    check_same(Sizes(), rows(7, 3), [1, 2, 3], images)
    with pytest.raises(SplitError, match="list of 3 has 3 rows, but the batch has 7 rows"):
        DataParallel(Sizes(), replicas=2, in_dims={"sizes": "rows"})(rows(7, 3), [1, 2, 3], images)


@wish("FR18", "pytorch/pytorch#37444", "pytorch/pytorch#28275")
def test_one_process_has_one_thread_per_core_at_most():
    threads = set()

    class Looking(Net):
        def forward(self, x):
            threads.add(threading.get_ident())
            return super().forward(x)

    model = DataParallel(Looking(), replicas=16)
    model(rows(16, 3))
    threads.clear()
    model(rows(16, 3))
    assert 1 <= len(threads) <= len(os.sched_getaffinity(0))


@wish("FR19", "pytorch/pytorch#5778", "pytorch/pytorch#37474")
def test_the_numbers_are_one_devices():
    module = Net()
    plain = twin(module)
    for net in (DataParallel(module, replicas=5), plain):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for step in range(5):
            torch.manual_seed(step)
            optimizer.zero_grad()
            F.cross_entropy(net(rows(7, 3)), torch.randint(2, (7,))).backward()
            optimizer.step()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@wish("FR20", "pytorch/pytorch#44873", "pytorch/pytorch#1169")
def test_no_arguments_and_keywords_alone():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(rows(3))

        def forward(self, x=None):
            return self.w * 2 if x is None else self.w * x

    check_same(Both())
    check_same(Both(), x=rows(7, 3))
    assert [len(part["x"]) for part in scatter({"x": rows(7, 3)}, ["cpu"] * 2)] == [4, 3]
