"""Runs the K shards of a call and collects what they return.

What it holds: :class:`Job` (one shard's work), :class:`ThreadEngine` and :class:`SerialEngine`.
Why two: the serial one is the reference, slot by slot in the caller's thread (so that
``breakpoint()`` works in forward); the threaded one must give the same bits.

Guarantees:
- All shards are awaited before anything is returned or raised.
- The error of the lowest failing shard is raised: the object itself, with its own traceback and a
  note that says where; the other failures are notes on it. The next run works.
- With fewer workers than shards, each worker runs a contiguous run of shards in turn.
- Unless the caller said how many workers, the calling thread runs all shards where it is faster
  alone (see :mod:`samestep.pace`); no bit depends on it.
Must not: know what a job does.
"""

from __future__ import annotations

import abc
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from samestep.context import (
    CallerContext,
    Shard,
    ThreadGuard,
    close_checkpoints,
    has_modes,
    use_num_threads,
    use_shard,
)
from samestep.devices import count_cores
from samestep.errors import note_shard
from samestep.group import Group, Meet
from samestep.pace import Mode, Pace
from samestep.rng import Stream, current_stream, set_current_stream, use_stream
from samestep.workers import WorkerPool, pool

__all__ = ["Engine", "Job", "SerialEngine", "ThreadEngine", "plan_runs"]

# How a shard's random numbers are ruled: see the notes in rng.py. "swap" is for models that draw by
# functions that cannot be intercepted: the shard runs alone, with the default generator swapped.
# "plain": the default generator is this shard's, as if there were no shards.
Drawing = Literal["watch", "intercept", "swap", "plain"]


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """One shard's work.

    Attributes:
        shard: which one.
        function: what to call.
        stream: the shard's random numbers.
        drawing: how they are ruled.
    """

    shard: Shard
    function: Callable[[], Any]
    stream: Stream
    drawing: Drawing = "intercept"

    def __call__(self) -> Any:
        """Run in this thread."""
        with use_shard(self.shard):
            if self.drawing == "plain":
                return self.function()
            if self.drawing == "swap":
                with self.stream.swapped_in():
                    return self.function()
            with use_stream(self.stream, intercept=self.drawing == "intercept"):
                if self.shard.device.type in ("cpu", "meta"):
                    return self.function()
                with self.stream.seeded(self.shard.device):
                    return self.function()


class _Outcome:
    """What a job came to."""

    __slots__ = ("error", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None


class Engine(abc.ABC):
    """Runs jobs, one per shard.

    Args:
        num_threads: intra-op threads of each shard on the CPU; None leaves the caller's setting.
        workers: the pool to lease threads from.
    """

    def __init__(self, num_threads: int | None = None, *, workers: WorkerPool = pool) -> None:
        self._num_threads = num_threads
        self._pool = workers

    def run(
        self,
        jobs: Sequence[Job],
        context: CallerContext,
        *,
        together: bool = False,
        meet: Meet | None = None,
        inline: torch.device | None = None,
        kind: Hashable = None,
    ) -> list[Any]:
        """Run all jobs and return their values in shard order.

        Args:
            jobs: one per shard, in shard order.
            context: the caller's settings.
            together: the shards exchange values while they run (see :mod:`samestep.group`).
            meet: then, how values of other processes' shards are had; None if there are none.
            inline: a device whose jobs must run in the calling thread.
            kind: of work: runs of one kind are thought to take alike. None: nothing is known.

        Raises:
            BaseException: whatever the lowest failing shard raised.
            RuntimeError: ``together`` while a torch mode ties the run to the caller's thread.
        """
        outcomes = [_Outcome() for _ in jobs]
        guard, stream = ThreadGuard(), current_stream()
        try:
            if together and (len(jobs) > 1 or (jobs and meet is not None)):
                self._run_together(jobs, context, outcomes, meet)
            elif jobs:
                self._run(jobs, context, outcomes, inline, kind)
            _raise_first(jobs, outcomes)
            return [outcome.value for outcome in outcomes]
        except BaseException:  # Ctrl-C above all; raised again as it is
            guard.restore()
            set_current_stream(stream)
            raise
        finally:
            # A traceback refers to the frames that hold the outcomes: without this, a failed call
            # would be a cycle that keeps activations until the garbage collector runs.
            for outcome in outcomes:
                outcome.error = outcome.value = None

    @abc.abstractmethod
    def _run(
        self,
        jobs: Sequence[Job],
        context: CallerContext,
        outcomes: list[_Outcome],
        inline: torch.device | None,
        kind: Hashable,
    ) -> None:
        """Fill ``outcomes``; must not raise what a job raised."""

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """How many threads run shards on the CPU."""

    def share_work(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run plain work of the library's own, one part per worker."""
        for job in jobs:
            job()

    @property
    @abc.abstractmethod
    def _one_at_a_time(self) -> bool:
        """Whether shards that exchange values still run one at a time."""

    def _run_together(
        self,
        jobs: Sequence[Job],
        context: CallerContext,
        outcomes: list[_Outcome],
        meet: Meet | None,
    ) -> None:
        if has_modes():
            raise RuntimeError(
                "sync_batch_norm=True, all_reduce and all_gather let the shards wait for each "
                "other, each in a thread; but a torch function or dispatch mode is active, which "
                "ties them to the caller's thread. Leave the mode, or do without them"
            )
        if any(job.drawing == "swap" for job in jobs):
            raise RuntimeError(
                "sync_batch_norm=True, all_reduce and all_gather cannot be used with a model that "
                "draws random numbers by functions which cannot be given a generator: its shards "
                "would have to run alone"
            )
        group = Group(len(jobs), one_at_a_time=self._one_at_a_time, meet=meet)

        def member(index: int) -> Callable[[], None]:
            def run() -> None:
                with group.joined(index):
                    self._attempt(jobs[index], context, outcomes[index])
                    if outcomes[index].error is not None:
                        group.fail(index)

            return run

        mine, *others = [member(index) for index in range(len(jobs))]
        self._pool.run(mine, others)

    def _attempt(self, job: Job, context: CallerContext, outcome: _Outcome) -> bool:
        """Run one job; False if the user asked to stop (Ctrl-C, SystemExit)."""
        try:
            device = job.shard.device
            count = self._num_threads if device.type == "cpu" else None
            if count is None or count == torch.get_num_threads():
                outcome.value = context.run(job, device)
            else:
                with use_num_threads(count, keep=not context.is_own_thread):
                    outcome.value = context.run(job, device)
        except BaseException as error:
            close_checkpoints(error)
            outcome.error = error
            return isinstance(error, Exception)
        return True


class SerialEngine(Engine):
    """Shards one after another in the calling thread. The reference for every other engine."""

    _one_at_a_time = True
    num_workers = 1

    def _run(
        self,
        jobs: Sequence[Job],
        context: CallerContext,
        outcomes: list[_Outcome],
        inline: torch.device | None,
        kind: Hashable,
    ) -> None:
        for job, outcome in zip(jobs, outcomes, strict=True):
            if not self._attempt(job, context, outcome):
                return


class ThreadEngine(Engine):
    """Shards on worker threads; the calling thread is one of the workers and runs shard 0.

    Args:
        num_threads: intra-op threads of each shard on the CPU.
        num_workers: threads for CPU shards; None: one per core that this process may use now, or
            the calling thread alone where that is faster.
        workers: the pool to lease them from.
    """

    _one_at_a_time = False

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        num_workers: int | None = None,
        workers: WorkerPool = pool,
    ) -> None:
        super().__init__(num_threads, workers=workers)
        self._num_workers = num_workers or count_cores()
        self._pace = Pace() if num_workers is None else None
        self._planned: tuple[Any, list[list[int]]] | None = None

    @property
    def num_workers(self) -> int:
        """How many threads run shards on the CPU."""
        return self._num_workers

    def share_work(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run plain work of the library's own, one part per worker."""
        mine, *others = jobs
        self._pool.run(mine, others)

    def _run(
        self,
        jobs: Sequence[Job],
        context: CallerContext,
        outcomes: list[_Outcome],
        inline: torch.device | None,
        kind: Hashable,
    ) -> None:
        if has_modes():
            runs = [list(range(len(jobs)))]  # see [Note: modes] in context.py
        else:
            runs = self._plan_runs(tuple([job.shard.device for job in jobs]), inline)
        mode = Mode.WORKERS
        if self._pace is not None and kind is not None and len(runs) > 1:
            mode = self._pace.choose(kind)

        def work(run: list[int]) -> None:
            for index in run:
                if not self._attempt(jobs[index], context, outcomes[index]):
                    return

        if mode is Mode.WORKERS:
            mine, *others = [partial(work, run) for run in runs]
            self._pool.run(mine, others)
        else:
            self._run_timed(mode, work, runs, kind)

    def _run_timed(
        self, mode: Mode, work: Callable[[list[int]], None], runs: list[list[int]], kind: Hashable
    ) -> None:
        """Run the shards and tell the pace what they took."""
        assert self._pace is not None
        start = time.perf_counter()
        if mode is Mode.ALONE:
            work(list(itertools.chain(*runs)))
            self._pace.note_alone(kind, time.perf_counter() - start)
            return
        busy: list[float] = []
        mine, *others = [partial(_watch, busy, work, run) for run in runs]
        self._pool.run(mine, others)
        self._pace.note_workers(kind, time.perf_counter() - start, busy)

    def _plan_runs(
        self, devices: tuple[torch.device, ...], inline: torch.device | None
    ) -> list[list[int]]:
        """:func:`plan_runs`, remembered: the shards of most calls are those of the last one."""
        planned = self._planned
        if planned is None or planned[0] != (devices, inline):
            planned = (devices, inline), plan_runs(devices, self.num_workers, inline)
            self._planned = planned
        return planned[1]


def plan_runs(
    devices: Sequence[torch.device], num_workers: int, inline: torch.device | None = None
) -> list[list[int]]:
    """Decide which worker runs which shards; the first run is the caller's.

    Args:
        devices: of each shard.
        num_workers: how many threads the CPU shards may use. Each accelerator has one of its own,
            in which its shards take turns.
        inline: a device whose shards the caller must run itself.

    Returns:
        Lists of shard indices: contiguous runs, together every index once.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, device in enumerate(devices):
        by_device.setdefault(device, []).append(index)
    runs: list[list[int]] = []
    for device, indices in by_device.items():
        parts = 1 if device.type not in ("cpu", "meta") else min(num_workers, len(indices))
        cuts = [len(indices) * part // parts for part in range(parts + 1)]
        found = [indices[a:b] for a, b in itertools.pairwise(cuts)]
        runs = found + runs if device == inline else runs + found
    if inline is not None and inline not in by_device:
        runs.insert(0, [])
    return runs


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _watch(busy: list[float], work: Callable[[list[int]], None], run: list[int]) -> None:
    """Do the work, and note the processor time that this thread took for it."""
    start = time.thread_time()
    work(run)
    busy.append(time.thread_time() - start)


def _raise_first(jobs: Sequence[Job], outcomes: Sequence[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            break
    else:
        return
    first = _note(jobs, outcomes)
    try:
        raise first
    finally:
        del first


def _note(jobs: Sequence[Job], outcomes: Sequence[_Outcome]) -> BaseException:
    """Return the lowest failing shard's error, with the others' as notes."""
    (shard, first), *rest = [
        (job.shard, outcome.error)
        for job, outcome in zip(jobs, outcomes, strict=True)
        if outcome.error is not None
    ]
    note_shard(first, shard.describe())
    alike: list[int] = []
    for other, error in rest:
        if error is first:
            continue
        if type(error) is type(first) and str(error) == str(first):
            alike.append(other.index)  # 32 shards that fail alike are not 32 messages to read
        else:
            note_shard(first, f"{type(error).__name__} {other.describe()}: {error}")
    if alike:
        note_shard(first, f"the same in shard {', '.join(map(str, alike))}")
    return first
