"""A shard fails: its own error arrives, nothing is half written, the next step works."""

import _thread
import gc
import os
import signal
import threading
import time
import traceback
import weakref

import pytest
import torch
from helpers import assert_alike, use_workers
from interrupts import interrupting
from torch import nn

from samestep import DataParallel, MergeError, current_shard
from samestep.workers import pool

K = 4
ROWS = 12  # three a shard


class Plan:
    """What goes wrong: in shard k of step t, call a function. Shared by all replicas."""

    def __init__(self, **faults):
        self.step = 0
        self.forward = faults.get("forward", {})
        self.backward = faults.get("backward", {})

    def meet(self, faults):
        fault = faults.get((current_shard().index, self.step))
        if fault is not None:
            fault()


class Faulty(nn.Module):
    """Keeps state of every kind, and meets the faults of the plan after having written it."""

    plan = Plan()

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("total", torch.zeros(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.total += 1
        y = self.norm(self.body(x)).exp()
        type(self).plan.meet(type(self).plan.forward)
        if y.requires_grad:
            y.register_hook(self.meet_in_backward)
        return y + torch.rand(1)

    def meet_in_backward(self, gradient):
        type(self).plan.meet(type(self).plan.backward)


class Bang(Exception):
    """A user's own type, with arguments that a copy would lose."""

    def __init__(self, code, *, detail):
        super().__init__(code)
        self.detail = detail


def bang(code=1):
    raise Bang(code, detail="kept")


def stop(error):
    def work():
        raise error

    return work


@pytest.fixture
def faulty():
    """Makes the model with a plan; the plan is gone afterwards."""

    def make(**faults):
        Faulty.plan = Plan(**faults)
        torch.manual_seed(1)
        return use_workers(DataParallel(Faulty(), replicas=K), K)

    yield make
    Faulty.plan = Plan()


def take_step(model, seed=5):
    torch.manual_seed(seed)
    model.zero_grad()
    out = model(torch.randn(ROWS, 3))
    out.sum().backward()
    Faulty.plan.step += 1
    return out.detach(), [p.grad.clone() for p in model.parameters()]


def state_of(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, model.calls, torch.get_rng_state()


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("shard", range(K))
def test_an_error_in_forward_leaves_everything_as_it_was_and_the_next_step_works(
    faulty, shard, step
):
    expected = [take_step(model) for model in [faulty()] for _ in range(5)]
    model = faulty(forward={(shard, step): bang})
    for t in range(step):
        assert_alike(take_step(model), expected[t], atol=0)
    torch.manual_seed(5)
    x, before = torch.randn(ROWS, 3), state_of(model)
    with pytest.raises(Bang) as info:
        model(x)
    assert (info.value.args, info.value.detail) == ((1,), "kept")
    first, last = 3 * shard, 3 * shard + 2
    assert info.value.__notes__ == [f"in shard {shard} of {K} (rows {first}-{last} of {ROWS}, cpu)"]
    assert_alike(state_of(model), before, atol=0)
    Faulty.plan.forward.clear()
    for t in range(step, 5):
        assert_alike(take_step(model), expected[t], atol=0)


@pytest.mark.parametrize("shard", range(K))
def test_an_error_in_backward_leaves_no_gradient_and_the_next_step_works(faulty, shard):
    expected = [take_step(model) for model in [faulty()] for _ in range(2)]
    model = faulty(backward={(shard, 1): bang})
    take_step(model)
    model.zero_grad()
    torch.manual_seed(5)
    out = model(torch.randn(ROWS, 3))
    with pytest.raises(Bang) as info:
        out.sum().backward()
    assert any(f"in shard {shard} of {K}" in note for note in info.value.__notes__)
    assert all(p.grad is None for p in model.parameters())
    Faulty.plan.backward.clear()
    again = take_step(model)
    assert_alike(again[1][:2], expected[1][1][:2], atol=1e-6)  # the same batch again


def test_the_traceback_shows_the_users_line(faulty):
    model = faulty(forward={(2, 0): bang})
    with pytest.raises(Bang) as info:
        model(torch.randn(ROWS, 3))
    lines = [frame.line for frame in traceback.extract_tb(info.tb)]
    assert lines[-1] == 'raise Bang(code, detail="kept")'
    assert any("type(self).plan.meet(type(self).plan.forward)" in line for line in lines)
    text = "".join(traceback.format_exception(info.value))
    assert "in shard 2 of 4 (rows 6-8 of 12, cpu)" in text


def test_of_several_failures_the_lowest_shards_is_raised_and_the_others_are_named(faulty):
    model = faulty(forward={(1, 0): lambda: bang(11), (2, 0): stop(KeyError("two")), (3, 0): bang})
    for _ in range(10):  # whichever ends first
        with pytest.raises(Bang) as info:
            model(torch.randn(ROWS, 3))
        assert info.value.args == (11,)
        assert info.value.__notes__ == [
            "in shard 1 of 4 (rows 3-5 of 12, cpu)",
            "KeyError in shard 2 of 4 (rows 6-8 of 12, cpu): 'two'",
            "Bang in shard 3 of 4 (rows 9-11 of 12, cpu): 1",
        ]


def test_the_other_shards_are_awaited_before_the_error_arrives(faulty):
    ended = []

    def slow():
        time.sleep(0.05)  # well after the failing shard
        ended.append(1)

    model = faulty(forward={(0, 0): bang, (1, 0): slow, (3, 0): slow})
    with pytest.raises(Bang):
        model(torch.randn(ROWS, 3))
    assert ended == [1, 1]


def test_failures_start_no_further_thread(faulty):
    model = faulty()
    take_step(model)
    started, running = pool.stats().num_started, threading.active_count()
    Faulty.plan.forward = {(k, Faulty.plan.step): bang for k in range(K)}
    for _ in range(20):
        with pytest.raises(Bang):
            model(torch.randn(ROWS, 3))
    assert pool.stats().num_started == started
    assert threading.active_count() == running


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("shard", [0, 2])
def test_a_wish_to_stop_inside_a_shard_ends_the_call(faulty, shard, error):
    model = faulty()
    take_step(model)
    before = state_of(model)[:2]
    Faulty.plan.forward = {(shard, 1): stop(error())}
    with pytest.raises(error):
        model(torch.randn(ROWS, 3))
    assert_alike(state_of(model)[:2], before, atol=0)
    Faulty.plan.forward = {}
    take_step(model)


def test_ctrl_c_in_the_callers_own_shard_ends_the_call(faulty):
    model = faulty()
    take_step(model)
    before = state_of(model)[:2]
    Faulty.plan.forward = {(0, 1): lambda: signal.raise_signal(signal.SIGINT)}
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(ROWS, 3))
    assert_alike(state_of(model)[:2], before, atol=0)
    Faulty.plan.forward = {}
    take_step(model)


@pytest.mark.parametrize(
    "interrupt",
    [_thread.interrupt_main, lambda: os.kill(os.getpid(), signal.SIGINT)],
    ids=["simulated", "signal"],
)
def test_ctrl_c_while_waiting_for_the_others_ends_the_call(faulty, interrupt):
    ended = []

    def slow():
        time.sleep(0.3)  # still at work when the interrupt comes, at 0.1 s
        ended.append(1)

    model = faulty()
    take_step(model)
    before = state_of(model)[:2]
    Faulty.plan.forward = {(2, 1): slow}
    with interrupting(interrupt, 0.1), pytest.raises(KeyboardInterrupt):
        model(torch.randn(ROWS, 3))
    assert ended == [1]  # nothing runs on behind the caller's back
    assert_alike(state_of(model)[:2], before, atol=0)
    Faulty.plan.forward = {}
    take_step(model)


def test_ctrl_c_in_backward_leaves_no_gradient(faulty):
    model = faulty()
    take_step(model)
    model.zero_grad()
    Faulty.plan.backward = {(0, 1): lambda: signal.raise_signal(signal.SIGINT)}
    out = model(torch.randn(ROWS, 3))
    with pytest.raises(KeyboardInterrupt):
        out.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    Faulty.plan.backward = {}
    take_step(model)


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_outputs_that_cannot_be_joined_leave_the_state_alone(first):
    class Odd(nn.Module):
        is_odd = first  # of the class: setting it renews nothing in the replicas

        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("total", torch.zeros(1))
            self.calls, self.history = 0, []

        def forward(self, x):
            self.calls += 1
            self.history.append(self.calls)
            self.total += 1
            x = self.norm(x) + torch.rand(1)
            return {"x": x} if Odd.is_odd and current_shard().index else x

    model = DataParallel(Odd(), replicas=3)
    if not first:
        model(torch.randn(7, 3))
        Odd.is_odd = True
    state, calls = {k: v.clone() for k, v in model.state_dict().items()}, model.calls
    for _ in range(2):
        with pytest.raises(MergeError, match="is of different types"):
            model(torch.randn(7, 3))
        assert_alike(dict(model.state_dict()), state, atol=0)
        assert model.calls == calls == len(model.history)
    Odd.is_odd = False
    model(torch.randn(7, 3))
    assert model.calls == calls + 1
    assert model.history == list(range(1, calls + 2))
    assert model.total.item() == calls + 1


def test_a_failing_first_call_of_a_lazy_module_can_be_repeated():
    model = DataParallel(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), replicas=2)
    with pytest.raises((RuntimeError, TypeError)):
        model(torch.ones(4, 3, dtype=torch.int64))
    assert model(torch.randn(4, 3)).shape == (4, 2)


# --------------------------------------------------------------------------------------------------
# Nothing is kept
# --------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Notes a weak reference to every activation."""

    seen: list = []  # noqa: RUF012  # one for all replicas, on purpose
    fails = False

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, x):
        y = self.body(x).exp()
        z = y * y
        Watched.seen += [weakref.ref(x), weakref.ref(y), weakref.ref(z)]
        if Watched.fails and current_shard().index == 1:
            raise Bang(3, detail="no")
        return z


@pytest.fixture
def watched(monkeypatch):
    """The model; the garbage collector is off, so that only reference counts free anything."""
    monkeypatch.setattr(Watched, "seen", [])
    gc.disable()
    yield use_workers(DataParallel(Watched(), replicas=3), 3)
    gc.enable()
    Watched.fails = False


def alive():
    return [ref for ref in Watched.seen if ref() is not None]


@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_step_keeps_no_activation(watched, wants_grad):
    for _ in range(3):
        x = torch.randn(7, 3, requires_grad=wants_grad)
        watched(x).sum().backward()
        del x
        assert alive() == []
    assert len(Watched.seen) == 27


def test_an_evaluation_keeps_no_activation(watched):
    with torch.no_grad():
        watched(torch.randn(7, 3))
    assert alive() == []


def test_a_forward_without_backward_keeps_no_activation(watched):
    out = watched(torch.randn(7, 3))
    assert alive()
    del out
    assert alive() == []


def test_a_second_order_step_keeps_no_activation(watched):
    x = torch.randn(7, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(watched(x).sum(), x, create_graph=True)
    slope.pow(2).sum().backward()
    del slope, x
    assert alive() == []


def test_a_failed_forward_keeps_no_activation(watched):
    Watched.fails = True
    for _ in range(3):
        try:
            watched(torch.randn(7, 3))
        except Bang:
            pass
        else:
            pytest.fail("it did not fail")
        assert alive() == []
    assert Watched.seen


def test_a_failed_backward_keeps_no_activation(watched):
    def refuse(gradient):
        raise Bang(4, detail="no")

    out = watched(torch.randn(7, 3))
    out.register_hook(refuse)
    try:
        out.sum().backward()
    except Bang:
        pass
    else:
        pytest.fail("it did not fail")
    del out
    assert alive() == []


def test_a_dropped_wrapper_is_freed():
    gc.disable()
    try:
        model = DataParallel(nn.Linear(3, 2), replicas=3)
        model(torch.randn(7, 3)).sum().backward()
        refs = [weakref.ref(r.module) for r in model._samestep_runtime.replicas._replicas.values()]
        assert len(refs) == 3
        del model
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()
