"""``all_reduce`` and ``all_gather`` inside forward: what the whole batch would say."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import DataParallel

REPLICAS = [1, 2, 3, 4]


class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        y = self.layer(x)
        return y - samestep.all_reduce(y.mean(0), "mean")


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        y = self.layer(x)
        shard = samestep.current_shard()
        start = 0 if shard is None else shard.start
        scores = y @ samestep.all_gather(y).T
        return F.cross_entropy(scores, torch.arange(start, start + len(x)))


def run(module, x, order=1, **options):
    model = DataParallel(module, **options) if options else module
    out = model(x)
    if order == 2:
        (out,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    (out**2).sum().backward()
    found = [out.detach(), x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    return found


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("kind", [Centre, Contrast])
def test_the_step_is_the_plain_modules(kind, replicas, order):
    module = kind()
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    expected = run(module, x, order)
    for _ in range(2):  # the first call learns that the shards meet
        for one, other in zip(run(module, x, order, replicas=replicas), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_and_turns_change_no_bit(monkeypatch, workers):
    module, x = Contrast(), torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    expected = run(module, x, replicas=4)
    found = run(module, x, replicas=4, workers=workers)
    monkeypatch.setenv("SAMESTEP_SERIAL", "1")
    for rows in (found, run(module, x, replicas=4)):
        assert all(torch.equal(a, b) for a, b in zip(rows, expected, strict=True))


def test_the_call_that_learns_it_draws_no_more_than_another():
    class Both(Contrast):
        def forward(self, x):
            return super().forward(F.dropout(x, 0.3))

    model = DataParallel(Both(), replicas=3)
    states, x = [], torch.randn(7, 4, dtype=torch.float64)
    for _ in range(2):
        torch.manual_seed(3)
        loss = model(x).detach()
        states.append((loss, torch.get_rng_state()))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


def test_outside_of_a_shard_they_return_what_they_are_given():
    x = torch.ones(3)
    assert samestep.all_reduce(x) is x
    assert samestep.all_gather(x) is x


def test_the_sum_and_the_weighted_mean():
    class Count(nn.Module):
        def forward(self, x):
            rows = torch.tensor(float(len(x)))
            return samestep.all_reduce(rows), samestep.all_reduce(rows, "mean")

    total, mean = DataParallel(Count(), replicas=3, out_dims="first")(torch.ones(7, 1))
    assert total == 7
    torch.testing.assert_close(mean, torch.tensor((3 * 3 + 3 * 3 + 1 * 1) / 7))


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="op is 'max'; it must be 'sum' or 'mean'"):
        samestep.all_reduce(torch.ones(1), "max")


def test_shards_that_take_different_paths_are_told():
    class Forks(nn.Module):
        def forward(self, x):
            shard = samestep.current_shard()
            return samestep.all_reduce(x.sum()) if shard.index else samestep.all_gather(x).sum()

    with pytest.raises(RuntimeError, match="wait for each other at different places"):
        DataParallel(Forks(), replicas=2)(torch.ones(4, 1))


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("how", ["one only", "unequally often", "other shapes", "in backward"])
def test_shards_that_do_not_meet_are_told_and_never_wait_for_ever(how, replicas):
    # Whoever woke up after the first error waited for ever; a shard that had ended counted as
    # having met.
    class Misses(nn.Module):
        def forward(self, x):
            index = samestep.current_shard().index
            if how == "one only" and index == 0:
                return x + samestep.all_reduce(x.mean(0))
            if how == "unequally often":
                for _ in range(index + 1):
                    x = x + samestep.all_reduce(x.mean(0))
            if how == "other shapes":
                shape = (1,) if index % 2 else (1, 1)
                x = x + samestep.all_reduce(x.sum().reshape(shape)).sum()
            if how == "in backward":
                mean = x.mean(0)
                x = x + samestep.all_reduce(mean if index % 2 else mean.detach())
            return x

    model = DataParallel(Misses(), replicas=replicas)
    for _ in range(20):
        x = torch.ones(8, 1, requires_grad=True)
        with pytest.raises(RuntimeError, match="wait for each other at different places"):
            model(x).sum().backward()
