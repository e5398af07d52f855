"""What is refused, each with its error and the message that says why."""

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from samestep import (
    DataParallel,
    MergeError,
    ReplicaError,
    SplitError,
    current_shard,
    register_batch_type,
)

x = torch.ones(7, 3)


def returning(function):
    """A module whose output is what ``function`` makes of its rows and its shard's index."""

    class Returning(nn.Module):
        def forward(self, x):
            return function(x, current_shard().index)

    return Returning()


def run(module, *args, replicas=2, **options):
    return DataParallel(module, replicas=replicas, **options)(*(args or (x,)))


def use_global():
    module = nn.Linear(3, 2)
    scope = {"net": module}
    exec("def f(x): return net(x)", scope)
    module.f = scope["f"]
    run(module)


def spread():
    run(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta")))


def count_rows():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.seen += len(x)
            return x

    module = Counting()
    module.seen += 1  # so that it is no first call that initialises something
    run(module)


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def synchronise_under_a_mode():
    with Mode():
        run(nn.BatchNorm1d(3), sync_batch_norm=True)


class Forking(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.BatchNorm1d(3, track_running_stats=False)
        self.two = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x):
        return self.one(x) if current_shard().index == 0 else self.two(x)


def hold_itself():
    endless = [x]
    endless.append(endless)
    run(nn.Identity(), endless)


def go_backward_twice():
    output = run(nn.Linear(3, 2)).sum()
    output.backward()
    output.backward()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One refusal: what the user does, the error's type, a part of its message."""

    what: str
    error: type[Exception]
    message: str
    do: Callable[[], object]


REFUSALS = [
    Refusal(
        "A function on the module that finds the module in a global variable",
        ReplicaError,
        "a replica cannot rebind a global. Pass the module as an argument or a default instead",
        use_global,
    ),
    Refusal(
        "A module whose parameters lie on several devices",
        ReplicaError,
        "a replica needs one. Move it to one device, or leave it unwrapped: it is spread already",
        spread,
    ),
    Refusal(
        "A batch in a layout that has no cut (CSR and the like)",
        SplitError,
        "has layout torch.sparse_csr, which cannot be cut",
        lambda: run(nn.Identity(), torch.eye(7).to_sparse_csr()),
    ),
    Refusal(
        "`in_dims` that does not fit the argument",
        SplitError,
        "has 3 rows on dim 1, but the batch has 7 rows",
        lambda: run(nn.Bilinear(3, 3, 2), x, x, in_dims={1: 1}),
    ),
    Refusal(
        "`in_dims` for a parameter that is not there",
        ValueError,
        "in_dims speaks about 'y', which is no parameter of this call",
        lambda: run(nn.Linear(3, 2), in_dims={"y": 0}),
    ),
    Refusal(
        "An argument that contains itself",
        ValueError,
        "is nested more than 100 levels deep: does it hold itself?",
        hold_itself,
    ),
    Refusal(
        "A number or a string that the shards disagree on",
        MergeError,
        "output differs between shards: shard 0 (4 rows): int 4; shard 1 (3 rows): int 3; "
        "pass out_dims='mean' (weighted by rows), 'sum', 'first' or 'list'",
        lambda: run(returning(lambda x, k: len(x))),
    ),
    Refusal(
        "None in some shards, a tensor in others",
        MergeError,
        "output[0] is None in some shards only",
        lambda: run(returning(lambda x, k: [x if k else None])),
    ),
    Refusal(
        "Outputs of different types",
        MergeError,
        "output['y'] is of different types",
        lambda: run(returning(lambda x, k: {"y": x if k else 1.0})),
    ),
    Refusal(
        "Dicts with different keys",
        MergeError,
        "output has 0 in shard 0 but not in shard 1",
        lambda: run(returning(lambda x, k: {k: x})),
    ),
    Refusal(
        "Lists of different lengths that are not one item per row",
        MergeError,
        "output has different lengths",
        lambda: run(returning(lambda x, k: [x] * (k + 1))),
    ),
    Refusal(
        "Rows that differ in another dim, such as sequences padded by each shard for itself",
        MergeError,
        "output has its rows on dim 0, but its other dims differ: "
        "shard 0 (4 rows): float32 [4, 1]; shard 1 (3 rows): float32 [3, 2]",
        lambda: run(returning(lambda x, k: x[:, : k + 1])),
    ),
    Refusal(
        "An output in which two dims could be the rows",
        MergeError,
        "output may have its rows on any of the dims [1, 2]",
        lambda: run(returning(lambda x, k: x.new_ones(1, len(x), len(x))), torch.ones(8, 3)),
    ),
    Refusal(
        "A strided nested tensor in an output that needs a gradient",
        MergeError,
        "build the batch with torch.nested.nested_tensor(..., layout=torch.jagged)",
        lambda: run(nn.Linear(3, 2), torch.nested.nested_tensor([x, x[:3], x[:2]])),
    ),
    Refusal(
        "An integer buffer that the shards leave different, without a rule in `buffers`",
        MergeError,
        "buffer 'seen' differs between the shards and cannot be averaged (5, 4); say what it is: "
        "buffers={'seen': 'sum'}",
        count_rows,
    ),
    Refusal(
        "`sync_batch_norm` while a function or dispatch mode is active",
        RuntimeError,
        "Leave the mode, or do without them",
        synchronise_under_a_mode,
    ),
    Refusal(
        "`sync_batch_norm` where shards take different paths",
        RuntimeError,
        "the shards wait for each other at different places",
        lambda: run(Forking(), sync_batch_norm=True),
    ),
    Refusal(
        "A device that is not there",
        ValueError,
        "asks for accelerator 99",
        lambda: DataParallel(nn.Linear(3, 2), device_ids=[99]),
    ),
    Refusal(
        "No device at all",
        ValueError,
        "device_ids is empty; name at least one device, or leave it out",
        lambda: DataParallel(nn.Linear(3, 2), device_ids=[]),
    ),
    Refusal(
        "Fewer replicas than devices",
        ValueError,
        "replicas=1 is smaller than the number of devices named (2)",
        lambda: DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], replicas=1),
    ),
    Refusal(
        "One device instead of a list",
        TypeError,
        "device_ids must be a sequence of devices, got 'cpu'; write device_ids=['cpu']",
        lambda: DataParallel(nn.Linear(3, 2), "cpu"),
    ),
    Refusal(
        "A function instead of a module",
        TypeError,
        "module must be a torch.nn.Module, got function",
        lambda: DataParallel(hold_itself, replicas=2),
    ),
    Refusal(
        "Weights in `split` that are not one per slot",
        ValueError,
        "split must have one weight per slot (weights: 2, slots: 3)",
        lambda: DataParallel(nn.Linear(3, 2), replicas=3, split=[1, 2]),
    ),
    Refusal(
        "A word in `reduction`, `split` or `buffers` that means nothing",
        ValueError,
        "the rules are merge, mean, sum, first, max, min",
        lambda: DataParallel(nn.Linear(3, 2), replicas=3, buffers="average"),
    ),
    Refusal(
        "`out_dims` for an output that is not there",
        ValueError,
        "out_dims speaks about 'loss' in output, which has 'y'",
        lambda: run(returning(lambda x, k: {"y": x}), out_dims={"loss": "sum"}),
    ),
    Refusal(
        "Registering a batch type for a built-in class",
        TypeError,
        "list has fixed rules; register a class of your own",
        lambda: register_batch_type(list, split=len, merge=len),
    ),
    Refusal(
        "A second backward without `retain_graph`",
        RuntimeError,
        "Trying to backward through the graph a second time",
        go_backward_twice,
    ),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.what)
def test_a_refusal_says_why(refusal):
    with pytest.raises(refusal.error, match=re.escape(refusal.message)) as caught:
        refusal.do()
    assert type(caught.value) is refusal.error
