"""The contract that every engine keeps, and how shards are shared out among workers."""

import os
import threading
import time
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from samestep.context import CallerContext, Shard, current_shard
from samestep.engine import Job, SerialEngine, ThreadEngine, plan_runs
from samestep.group import current_group, sum_shards
from samestep.reduce import tree_sum
from samestep.rng import Draws, Stream

CPU = torch.device("cpu")
ENGINES = {
    "serial": SerialEngine(1),
    "one worker": ThreadEngine(1, num_workers=1),
    "two workers": ThreadEngine(1, num_workers=2),
    "three workers": ThreadEngine(1, num_workers=3),
    "a worker each": ThreadEngine(1, num_workers=8),
}
THREADED = [name for name in ENGINES if name not in ("serial", "one worker")]


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


def make_jobs(functions, drawing="watch"):
    draws, count = Draws(), len(functions)
    return [
        Job(Shard(k, count, 2 * k, 2 * k + 2, 2 * count, CPU), function, Stream(draws, k), drawing)
        for k, function in enumerate(functions)
    ]


def run(engine, functions, **options):
    drawing = options.pop("drawing", "watch")
    return engine.run(make_jobs(functions, drawing), CallerContext(), **options)


def fail(error):
    raise error


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_values_come_back_in_shard_order(engine, count):
    assert run(engine, [lambda k=k: k * k for k in range(count)]) == [k * k for k in range(count)]


def test_every_job_knows_its_shard(engine):
    shards = run(engine, [current_shard] * 3)
    assert [shard.index for shard in shards] == [0, 1, 2]
    assert [(shard.start, shard.stop) for shard in shards] == [(0, 2), (2, 4), (4, 6)]
    assert current_shard() is None


def test_the_lowest_failing_shards_own_error_is_raised_with_notes(engine):
    errors = {1: LookupError("first"), 3: KeyError("second")}
    ran = []

    def job(k):
        ran.append(k)
        return fail(errors[k]) if k in errors else k

    with pytest.raises(LookupError) as info:
        run(engine, [lambda k=k: job(k) for k in range(5)])
    assert info.value is errors[1]
    assert info.value.__notes__ == [
        "in shard 1 of 5 (rows 2-3 of 10, cpu)",
        "KeyError in shard 3 of 5 (rows 6-7 of 10, cpu): 'second'",
    ]
    assert sorted(ran) == [0, 1, 2, 3, 4]  # all were awaited
    assert info.traceback[-1].name == "fail"


def test_one_error_raised_by_all_shards_is_noted_once(engine):
    error = ValueError("the same object")
    with pytest.raises(ValueError, match="the same object"):
        run(engine, [lambda: fail(error)] * 3)
    assert error.__notes__ == ["in shard 0 of 3 (rows 0-1 of 6, cpu)"]


def test_shards_that_fail_alike_are_one_note(engine):
    errors = [ValueError("too long"), ValueError("too long"), ValueError("short")]
    errors += [KeyError("too long"), ValueError("too long")]
    with pytest.raises(ValueError, match="too long") as info:
        run(engine, [lambda error=error: fail(error) for error in errors])
    assert info.value is errors[0]
    assert info.value.__notes__ == [
        "in shard 0 of 5 (rows 0-1 of 10, cpu)",
        "ValueError in shard 2 of 5 (rows 4-5 of 10, cpu): short",
        "KeyError in shard 3 of 5 (rows 6-7 of 10, cpu): 'too long'",
        "the same in shard 1, 4",
    ]


def test_the_run_after_a_failure_works(engine):
    with pytest.raises(ZeroDivisionError):
        run(engine, [lambda: 1 / 0, lambda: 1])
    assert run(engine, [lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_wish_to_stop_is_passed_on(engine, stop):
    with pytest.raises(stop) as info:
        run(engine, [lambda: 1, lambda: fail(stop()), lambda: 2])
    assert "in shard 1 of 3" in info.value.__notes__[0]
    assert run(engine, [lambda: 1]) == [1]


def test_after_a_wish_to_stop_the_worker_starts_no_further_shard():
    ran = []
    with pytest.raises(KeyboardInterrupt):
        run(SerialEngine(), [lambda: fail(KeyboardInterrupt()), lambda: ran.append(1)])
    assert ran == []


def test_the_serial_engine_stays_in_the_callers_thread():
    assert set(run(SerialEngine(1), [threading.get_ident] * 5)) == {threading.get_ident()}


@pytest.mark.parametrize("name", THREADED)
def test_threads_do_run_at_the_same_time(name):
    barrier = threading.Barrier(2, timeout=5)
    threads = run(ENGINES[name], [lambda: (barrier.wait(), threading.get_ident())[1]] * 2)
    assert threads[0] == threading.get_ident()  # the caller runs shard 0
    assert threads[1] != threads[0]


def test_intra_op_threads_are_set_and_put_back():
    before = torch.get_num_threads()
    for make in (SerialEngine, ThreadEngine):
        for count in (1, 3):
            assert run(make(count), [torch.get_num_threads] * 3) == [count] * 3
            assert torch.get_num_threads() == before
    assert run(SerialEngine(None), [torch.get_num_threads]) == [before]


def test_intra_op_threads_are_put_back_after_an_error():
    before = torch.get_num_threads()
    for make in (SerialEngine, ThreadEngine):
        with pytest.raises(ZeroDivisionError):
            run(make(before + 1), [lambda: 1 / 0] * 2)
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", THREADED)
def test_a_function_mode_keeps_the_shards_in_the_callers_thread(name):
    class Counting(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.sin
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        threads = run(
            ENGINES[name], [lambda: (torch.sin(torch.ones(1)), threading.get_ident())[1]] * 4
        )
    assert set(threads) == {threading.get_ident()}
    assert mode.count == 4


def test_swapped_shards_draw_from_their_streams(engine):
    def draw():
        return float(torch.rand(()))

    state = torch.get_rng_state()
    numbers = run(engine, [draw] * 4, drawing="swap")
    assert len(set(numbers)) == 4
    torch.set_rng_state(state)
    assert run(engine, [draw] * 4, drawing="intercept") == numbers


# --------------------------------------------------------------------------------------------------
# Shards that exchange values
# --------------------------------------------------------------------------------------------------


def test_shards_that_run_together_get_the_sum(engine):
    def job(k):
        first = sum_shards(torch.tensor([float(k)]), tree_sum)
        return sum_shards(first * k, tree_sum).item()

    assert run(engine, [lambda k=k: job(k) for k in range(4)], together=True) == [36.0] * 4
    assert current_group() is None


def test_serially_only_one_of_them_runs_at_a_time_in_shard_order():
    inside, trace = [], []

    def job(k):
        for part in range(3):
            inside.append(k)
            time.sleep(0.001)  # long enough for another to come in, if it could
            assert inside == [k]
            trace.append((part, k))
            inside.clear()
            sum_shards(torch.ones(1), tree_sum)

    run(SerialEngine(1), [lambda k=k: job(k) for k in range(4)], together=True)
    assert trace == [(part, k) for part in range(3) for k in range(4)]


def test_a_shard_that_fails_is_not_waited_for(engine):
    def job(k):
        if k == 1:
            raise LookupError("gone")
        return sum_shards(torch.tensor([float(k)]), tree_sum)

    with pytest.raises(LookupError, match="gone"):
        run(engine, [lambda k=k: job(k) for k in range(3)], together=True)
    assert run(engine, [lambda: 1, lambda: 2], together=True) == [1, 2]


def test_shards_that_wait_for_different_things_are_told(engine):
    def job(k):
        for _ in range(k + 1):
            value = sum_shards(torch.tensor([1.0]), lambda parts: sum(parts))
        return value

    def deadlock(k):
        current_group().exchange(k, ("place", k), torch.ones(1))

    for function in (job, deadlock):
        with pytest.raises(RuntimeError, match="wait for each other at different places"):
            run(engine, [partial(function, k) for k in range(2)], together=True)


def test_running_together_under_a_mode_or_alone_is_refused(engine):
    with pytest.raises(RuntimeError, match="mode is active"), TorchFunctionMode():
        run(engine, [lambda: 1] * 2, together=True)
    with pytest.raises(RuntimeError, match="would have to run alone"):
        run(engine, [lambda: 1] * 2, together=True, drawing="swap")


# --------------------------------------------------------------------------------------------------
# Who runs what
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_shards", "num_workers", "runs"),
    [
        (1, 4, [[0]]),
        (3, 1, [[0, 1, 2]]),
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (5, 3, [[0], [1, 2], [3, 4]]),
        (3, 8, [[0], [1], [2]]),
    ],
)
def test_cpu_shards_are_contiguous_runs(num_shards, num_workers, runs):
    assert plan_runs([CPU] * num_shards, num_workers) == runs


def test_each_accelerator_has_one_worker_of_its_own():
    one, two = torch.device("cuda:0"), torch.device("cuda:1")
    devices = [one, one, two, two, CPU, CPU]
    assert plan_runs(devices, 2) == [[0, 1], [2, 3], [4], [5]]
    assert plan_runs(devices, 2, inline=two) == [[2, 3], [0, 1], [4], [5]]
    assert plan_runs([one, two], 2, inline=torch.device("cuda:2")) == [[], [0], [1]]


@pytest.mark.parametrize("num_workers", range(1, 10))
@pytest.mark.parametrize("num_shards", range(1, 18))
def test_every_shard_is_run_once_in_order(num_shards, num_workers):
    runs = plan_runs([CPU] * num_shards, num_workers)
    assert [index for run in runs for index in run] == list(range(num_shards))
    assert len(runs) == min(num_shards, num_workers)
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_a_checkpoint_that_an_error_came_through_is_left_by_its_own_thread(engine):
    # As torch's checkpoint did before 2.13: its generator holds hooks, and nobody closes it.
    source = """if True:
        def checkpoint(function, hooks):
            gen = hooks()
            next(gen)
            return function()
    """
    code = compile(source, os.path.join("torch", "utils", "checkpoint.py"), "exec")
    exec(code, space := {})
    left = []

    def hooks():
        try:
            yield
        finally:
            left.append(threading.get_ident())

    threads = []

    def work():
        threads.append(threading.get_ident())
        inner = partial(space["checkpoint"], lambda: 1 / 0, hooks)
        space["checkpoint"](inner, hooks)

    with pytest.raises(ZeroDivisionError) as info:
        run(engine, [work] * 3)
    # Two checkpoints each, left while the error (and what it holds) is still there.
    assert sorted(left) == sorted(threads * 2)
    del info
