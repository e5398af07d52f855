"""K20. A worker that dies must not take the process or the numbers with it."""

import threading

import pytest
import torch
from compare import rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel, current_shard


class Raising(nn.Module):
    def __init__(self, error, in_shard):
        super().__init__()
        self.fc = nn.Linear(3, 2).double()
        self.register_buffer("count", torch.zeros(()))
        self.error = error
        self.in_shard = in_shard
        self.is_on = True

    def forward(self, x):
        self.count += 1
        shard = current_shard()
        if self.is_on and shard is not None and shard.index in self.in_shard:
            raise self.error("from the user")
        return self.fc(x)


@report("P129")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("in_shard", [(0,), (1,), (0, 1, 2)])
def test_exits_and_interrupts_come_back_and_the_next_call_works(error, in_shard):
    module = Raising(error, in_shard)
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    with pytest.raises(error, match="from the user"):
        model(x)
    assert module.count == 0  # nothing half written
    module.is_on = False
    torch.testing.assert_close(model(x), module.fc(x))


@report("P129")
def test_an_exit_in_backward_comes_back_and_the_next_call_works():
    class Leaving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if current_shard().index == 1 and switch["on"]:
                raise ValueError("in backward")
            return grad

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, x):
            return Leaving.apply(self.fc(x))

    switch = {"on": True}
    module = Module()
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    with pytest.raises(ValueError, match="in backward"):
        model(x).sum().backward()
    assert module.fc.weight.grad is None
    switch["on"] = False
    model(x).sum().backward()
    torch.testing.assert_close(module.fc.weight.grad, x.sum(0).expand(2, 3))


@beyond("K20")
def test_all_shards_have_ended_when_an_error_comes_back():
    started, ended = [], []
    first_failed = threading.Event()

    class Slow(nn.Module):
        def forward(self, x):
            started.append(current_shard().index)
            if current_shard().index == 0:
                first_failed.set()
                raise RuntimeError("at once")
            assert first_failed.wait(30)
            ended.append(current_shard().index)
            return x

    with pytest.raises(RuntimeError, match="at once"):
        DataParallel(Slow(), replicas=2)(rows(4, 3))
    assert sorted(started) == [0, 1]
    assert ended == [1]


@beyond("K20")
def test_shards_that_wait_for_each_other_end_when_one_fails():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def forward(self, x):
            if current_shard() is not None and current_shard().index == 1:
                raise RuntimeError("before the norm")
            return self.norm(x)

    model = DataParallel(Uneven(), replicas=3, sync_batch_norm=True)
    with pytest.raises(RuntimeError, match="before the norm"):
        model(rows(7, 3))
    assert model.norm.num_batches_tracked == 0


@beyond("K20")
def test_paths_that_differ_through_a_synchronised_norm_are_an_error_not_a_hang():
    class Different(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3, track_running_stats=False).double()
            self.other = nn.BatchNorm1d(3, track_running_stats=False).double()

        def forward(self, x):
            if current_shard() is not None and current_shard().index == 1:
                x = self.norm(x)
            return self.other(x)

    model = DataParallel(Different(), replicas=2, sync_batch_norm=True)
    with pytest.raises(RuntimeError, match="wait for each other at different places"):
        model(rows(6, 3))
