"""Leasing threads: who runs what, what is waited for, what comes back."""

import _thread
import gc
import os
import signal
import threading
import time
import weakref
from functools import partial

import pytest
from interrupts import interrupting

from samestep import workers
from samestep.workers import PoolStats, WorkerPool


@pytest.fixture
def pool():
    made = WorkerPool()
    yield made
    for worker in made._idle:
        worker.stop()


def nothing():
    pass


def test_the_caller_works_too_and_the_others_have_a_thread_each(pool):
    names = {}

    def job(key):
        return lambda: names.__setitem__(key, threading.current_thread())

    pool.run(job("mine"), [job(0), job(1)])
    assert names["mine"] is threading.current_thread()
    assert len({thread.ident for thread in names.values()}) == 3
    assert all(names[k].daemon and names[k].name.startswith("samestep-worker-") for k in (0, 1))


def test_run_returns_when_every_job_has_ended(pool):
    ended = []

    def slow():
        time.sleep(0.05)
        ended.append(1)

    pool.run(nothing, [slow, slow, slow])
    assert ended == [1, 1, 1]


def test_only_the_job_that_ends_last_wakes_the_caller(pool):
    running = pool.lease(3)
    running.send([partial(time.sleep, 0.02 * k) for k in range(3)])
    deadline = time.monotonic() + 10
    while running._wake.empty() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(running._finished) == 3
    assert running._wake.qsize() == 1
    running.wait()


def test_workers_are_used_again(pool):
    for _ in range(20):
        pool.run(nothing, [nothing, nothing])
    assert pool.stats() == PoolStats(num_idle=2, num_started=2)
    pool.run(nothing, [nothing] * 3)
    assert pool.stats() == PoolStats(num_idle=3, num_started=3)


def test_no_jobs_for_others_start_no_thread(pool):
    pool.run(nothing, [])
    assert pool.stats() == PoolStats(num_idle=0, num_started=0)


def test_a_job_may_lease_workers_itself(pool):
    seen = []

    def outer():
        pool.run(lambda: seen.append("mine"), [lambda: seen.append("other")])

    pool.run(outer, [outer, outer])
    assert sorted(seen) == ["mine"] * 3 + ["other"] * 3


def test_two_callers_never_share_a_worker(pool):
    barrier = threading.Barrier(4, timeout=5)

    def call():
        pool.run(barrier.wait, [barrier.wait])

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not barrier.broken
    assert pool.stats() == PoolStats(num_idle=2, num_started=2)


def test_a_waiting_worker_keeps_nothing_alive(pool):
    class Activation:
        pass

    gc.disable()
    try:
        held = Activation()
        ref = weakref.ref(held)
        pool.run(nothing, [lambda held=held: None])
        del held
        assert ref() is None
    finally:
        gc.enable()


def test_an_interrupt_waits_for_the_jobs_and_gives_the_workers_back(pool):
    ended, started = [], threading.Event()

    def slow():
        started.set()
        time.sleep(0.1)
        ended.append(1)

    def mine():
        assert started.wait(5)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        pool.run(mine, [slow])
    assert ended == [1]
    assert pool.stats() == PoolStats(num_idle=1, num_started=1)
    pool.run(nothing, [lambda: ended.append(2)])
    assert ended == [1, 2]


@pytest.mark.parametrize(
    "interrupt",
    [_thread.interrupt_main, lambda: os.kill(os.getpid(), signal.SIGINT)],
    ids=["simulated", "signal"],
)
def test_an_interrupt_while_waiting_waits_on(pool, interrupt):
    ended = []

    def slow():
        time.sleep(0.15)
        ended.append(1)

    with interrupting(interrupt, 0.05), pytest.raises(KeyboardInterrupt):
        pool.run(nothing, [slow])
    assert ended == [1]
    assert pool.stats().num_idle == 1


def test_an_interrupt_right_after_a_completion_was_taken_loses_nothing(pool, monkeypatch):
    ended = []

    def slow():
        time.sleep(0.05)
        ended.append(1)

    class Interrupting(workers.SimpleQueue):
        def get(self, *args):
            item = super().get(*args)
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGINT)  # the item is taken, nobody has noted it
            return item

    monkeypatch.setattr(workers, "SimpleQueue", Interrupting)
    with interrupting(nothing, 0), pytest.raises(KeyboardInterrupt):
        pool.run(nothing, [slow])
    assert ended == [1]


def test_an_interrupt_before_the_callers_own_job_still_waits_for_the_others(pool):
    ended = []

    def slow():
        time.sleep(0.05)
        ended.append(1)

    with pytest.raises(KeyboardInterrupt):
        pool.run(lambda: signal.raise_signal(signal.SIGINT), [slow, slow])
    assert ended == [1, 1]
    assert pool.stats().num_idle == 2


def test_a_second_interrupt_abandons_what_still_runs(pool):
    release, ended = threading.Event(), threading.Event()

    def stuck():
        for _ in range(2):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        release.wait(5)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        pool.run(nothing, [stuck])
    assert not ended.is_set()
    assert pool.stats().num_idle == 0  # it still runs and is not lent again
    release.set()
    assert ended.wait(5)
    done = []
    pool.run(nothing, [lambda: done.append(1)])
    assert done == [1]
    assert pool.stats().num_started == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_workers(pool):
    pool.run(nothing, [nothing])
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits for threads it does not have
        code = 1
        try:
            ran = []
            pool.run(nothing, [lambda: ran.append(1)])
            code = 0 if ran == [1] and pool.stats() == PoolStats(1, 1) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
