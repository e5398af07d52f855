"""Injected delays change who ends when, never a bit of what comes out."""

import random
import time

import pytest
import torch
from helpers import assert_alike, use_workers
from torch import nn

from samestep import DataParallel, current_shard

MAX_DELAY_S = 0.002


class Delays:
    """How long each shard is held up, at each place of the model: a seeded plan.

    With seed None nothing is held up. ``ends`` notes the order in which shards came by.
    """

    def __init__(self, seed):
        self._random = None if seed is None else random.Random(seed)
        self._plan = {}
        self.ends = []
        if self._random is not None:
            for place in ("first", "second", "grad"):
                for shard in range(8):
                    self._plan[place, shard] = self._random.uniform(0, MAX_DELAY_S)

    def hold(self, place):
        index = current_shard().index
        time.sleep(self._plan.get((place, index), 0.0))  # the schedule under test
        self.ends.append((place, index))


DELAYS = []  # the plan of the moment; a global, so that every replica sees the same one


class Slow(nn.Module):
    """Dropout, an LSTM with dropout inside, batch statistics; held up in forward and backward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.cell = nn.LSTM(6, 4, num_layers=2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        self.hold("first")
        x = self.drop(self.norm(x).relu())
        if x.requires_grad:
            x.register_hook(lambda gradient: self.hold("grad"))
        x, _ = self.cell(x.unsqueeze(1))
        self.hold("second")
        return self.last(x.squeeze(1)) + torch.rand(len(x), 1)

    @staticmethod
    def hold(place):
        if DELAYS:
            DELAYS[0].hold(place)


@pytest.fixture
def delayed():
    """Sets the plan of delays; none is left behind."""

    def start(seed):
        DELAYS[:] = [Delays(seed)]
        return DELAYS[0]

    yield start
    DELAYS.clear()


def train(num_replicas, num_workers, steps=2, **options):
    """What a few steps leave behind: outputs, gradients, weights, statistics, the generator."""
    torch.manual_seed(3)
    model = DataParallel(Slow(), replicas=num_replicas, **options)
    if num_workers:
        use_workers(model, num_workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    left = []
    for _ in range(steps):
        x = torch.randn(17, 3, requires_grad=True)
        optimizer.zero_grad()
        out = model(x)
        out.pow(2).mean().backward()
        left.append([out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
        optimizer.step()
    return left, dict(model.state_dict()), torch.get_rng_state()


@pytest.fixture(scope="module")
def serial():
    """The reference by number of replicas, from the serial engine, without delays."""
    found = {}

    def of(num_replicas, **options):
        key = (num_replicas, *options.items())
        if key not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SAMESTEP_SERIAL", "1")
                found[key] = train(num_replicas, None, **options)
        return found[key]

    return of


@pytest.mark.parametrize("num_replicas", [2, 3, 5, 8])
def test_twenty_schedules_give_the_bits_of_the_serial_engine(num_replicas, serial, delayed):
    traces = set()
    for seed in range(5):
        delays = delayed(1000 * num_replicas + seed)
        assert_alike(train(num_replicas, num_replicas), serial(num_replicas), atol=0)
        traces.add(tuple(delays.ends))
    assert len(traces) > 1  # the schedules did differ; the numbers did not


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", range(2, 9))
def test_many_schedules_give_the_bits_of_the_serial_engine(num_replicas, serial, delayed):
    for seed in range(20):
        delayed(seed)
        assert_alike(train(num_replicas, num_replicas), serial(num_replicas), atol=0)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 6, 16])
def test_any_number_of_workers_gives_the_same_bits(num_workers, serial, delayed):
    delayed(num_workers)
    assert_alike(train(6, num_workers), serial(6), atol=0)


@pytest.mark.parametrize("num_replicas", [2, 5])
def test_synchronised_statistics_have_the_same_bits_under_delays(num_replicas, serial, delayed):
    for seed in range(3):
        delayed(seed)
        found = train(num_replicas, num_replicas, sync_batch_norm=True)
        assert_alike(found, serial(num_replicas, sync_batch_norm=True), atol=0)


def test_a_run_repeated_from_its_seed_has_the_same_bits():
    assert_alike(train(3, None), train(3, None), atol=0)


def test_another_seed_gives_other_numbers(serial, monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda _, seed=torch.manual_seed: seed(4))
    assert not torch.equal(train(3, None)[0][0][0], serial(3)[0][0][0])


def test_balanced_and_chunked_splits_are_other_steps_of_dropout_but_each_repeats(serial, delayed):
    delayed(1)
    assert_alike(train(5, 5, split="balanced"), serial(5, split="balanced"), atol=0)
    assert not torch.equal(serial(5)[0][0][0], serial(5, split="balanced")[0][0][0])


def test_intra_op_threads_are_those_asked_for():
    class Count(nn.Module):
        def forward(self, x):
            return x * torch.get_num_threads()

    before = torch.get_num_threads()
    model = DataParallel(Count(), replicas=3, threads_per_replica=2)
    assert set(model(torch.ones(6, 1)).flatten().tolist()) == {2.0}
    assert torch.get_num_threads() == before


def test_a_batch_of_one_row_has_the_threads_of_a_slot_in_backward_too():
    # It is not cut; its backward ran with the caller's threads, and its bits depended on these.
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.get_num_threads())
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.get_num_threads())
            return gradient * 1

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return nn.functional.dropout(Look.apply(self.layer(x)), 0.5)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        module, x = Looks(), torch.randn(1, 3)
        torch.manual_seed(1)
        out = DataParallel(module, replicas=4)(x)
        out.sum().backward()
        assert seen == [1, 1]
        torch.manual_seed(1)
        assert torch.equal(module(x), out)  # it draws what the plain module draws
    finally:
        torch.set_num_threads(before)
