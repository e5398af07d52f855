"""Threads that run jobs, kept and lent.

What it holds: a pool of daemon threads; a caller leases some, hands each one job, waits, and gives
them back. Why: a new thread per call costs a millisecond and a malloc arena, and a pool of futures
costs more per hand-over than the queue used here.

Guarantees:
- No two callers share a worker, so they cannot wait for each other.
- :meth:`WorkerPool.run` and :meth:`Running.wait` return only when every job has ended, also after
  Ctrl-C in the caller; a second Ctrl-C abandons the workers that still run (they end by themselves
  and are not lent again).
- Nothing starts at import; after a fork the child starts with an empty pool.
Must not: know anything of models, devices or shards. Jobs must not raise.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

__all__ = ["PoolStats", "Running", "WorkerPool", "pool"]

Job = Callable[[], None]
# What lies in a worker's inbox: the job, the list that counts those that ended, how many there are,
# and a queue to wake the caller by, which the last one does.
_Order = tuple[Job, list[None], int, SimpleQueue[None]]
_put = SimpleQueue.put


class PoolStats(NamedTuple):
    """What a pool holds now: threads that are idle, and how many were ever started."""

    num_idle: int
    num_started: int


class _Worker:
    """One daemon thread and its inbox."""

    def __init__(self, number: int) -> None:
        self.inbox: SimpleQueue[_Order | None] = SimpleQueue()
        name = f"samestep-worker-{number}"
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def stop(self) -> None:
        """Let the thread end, after the jobs it has."""
        self.inbox.put(None)

    def _loop(self) -> None:
        while True:
            order = self.inbox.get()
            if order is None:
                return
            job, finished, count, wake = order
            try:
                job()
            finally:
                # Dropped before the caller wakes: a waiting thread would keep activations alive.
                del job, order
                finished.append(None)
                if len(finished) >= count:
                    wake.put(None)
                del finished, wake


class Running:
    """Leased workers and their jobs, until somebody has waited for them.

    Args:
        pool: where the workers go back to.
        workers: they get one job each.
    """

    def __init__(self, pool: WorkerPool, workers: list[_Worker]) -> None:
        self._pool = pool
        self._workers = workers
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._finished: list[None] = []
        self._sent: list[None] = []

    def send(self, jobs: Sequence[Job]) -> None:
        """Hand each worker its job."""
        # Ctrl-C strikes between two bytecodes; this one call hands out all jobs or none.
        inboxes = [worker.inbox for worker in self._workers]
        count = len(self._sent) + len(jobs)
        orders = [(job, self._finished, count, self._wake) for job in jobs]
        self._sent.extend(map(_put, inboxes, orders))

    def wait(self, interrupt: KeyboardInterrupt | None = None) -> None:
        """Wait until all jobs have ended, and give the workers back.

        Args:
            interrupt: Ctrl-C that came before; it is raised at the end.

        Raises:
            KeyboardInterrupt: it arrived meanwhile; the jobs have ended all the same, unless it
                arrived twice.
        """
        try:
            # Not counted by what was taken from the queue: Ctrl-C may strike after a take.
            while len(self._finished) < len(self._sent):
                try:
                    self._wake.get()
                except KeyboardInterrupt as error:
                    if interrupt is not None:
                        raise
                    interrupt = error
        finally:
            if len(self._finished) < len(self._sent):
                self.abandon()
            else:
                self._pool.give_back(self._workers)
        if interrupt is not None:
            raise interrupt

    def abandon(self) -> None:
        """Wait for nobody: the workers end by themselves, and are not lent again."""
        for worker in self._workers:
            worker.stop()


class WorkerPool:
    """Idle workers, by process. Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._numbers = itertools.count(1)
        self._num_started = 0
        self._pid = os.getpid()

    def stats(self) -> PoolStats:
        """Return how many workers are idle and how many were started in this process."""
        return PoolStats(num_idle=len(self._idle), num_started=self._num_started)

    def run(self, mine: Job, others: Sequence[Job]) -> None:
        """Run ``others`` on one worker each and ``mine`` in the calling thread; wait for all.

        Raises:
            KeyboardInterrupt: it arrived meanwhile; the jobs have ended all the same.
        """
        running = self.lease(len(others))
        interrupt: KeyboardInterrupt | None = None
        try:
            running.send(others)
            mine()
        except KeyboardInterrupt as error:
            interrupt = error
        finally:
            running.wait(interrupt)

    def lease(self, count: int) -> Running:
        """Return so many workers, to be sent jobs; whoever leases must wait."""
        return Running(self, self._lease(count))

    def give_back(self, workers: Sequence[_Worker]) -> None:
        """Workers whose jobs have ended."""
        self._idle.extend(workers)

    def _lease(self, count: int) -> list[_Worker]:
        if self._pid != os.getpid():  # a forked child has the list but not the threads
            self._idle, self._pid, self._num_started = [], os.getpid(), 0
        workers: list[_Worker] = []
        while len(workers) < count:
            try:
                workers.append(self._idle.pop())
            except IndexError:
                workers.append(_Worker(next(self._numbers)))
                self._num_started += 1
        workers.reverse()
        return workers


#: The one pool of this process.
pool = WorkerPool()
