"""Which of several ways to do the same work is faster: interleaved blocks, ratios, intervals.

What it holds: :func:`compare`, which times variants in turn; :func:`ratio`, what their times say;
:class:`Processes`, a variant that lives in processes of its own; :func:`describe_machine`. Why:
other work on a machine moves absolute times by tens of percent; what disturbs one block disturbs
its neighbour too, so the ratio of neighbours holds still.

Guarantees: variants alternate A B B A; a ratio comes with a 95 % bootstrap interval of its median,
the same for the same samples.
Must not: know what is timed, or change a setting of torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from samestep.devices import count_cores

__all__ = [
    "Processes",
    "Ratio",
    "Step",
    "compare",
    "describe_machine",
    "median_ratio",
    "ratio",
    "read_ticks",
]

BLOCK_S = 0.05
NUM_DROPPED = 2
NUM_RESAMPLES = 2000
MIN_KEPT = 3  # blocks that are run whatever they take
TIMEOUT_S = 300.0

Step = Callable[[], object]
Samples = dict[str, list[float]]


class Ratio(NamedTuple):
    """How many times as fast one variant is as another: the median and its 95 % interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.low:.2f}, {self.high:.2f}]"


@runtime_checkable
class OwnClock(Protocol):
    """A variant that times its blocks itself, such as one that runs in other processes."""

    def time_block(self, seconds: float) -> float:
        """Work for about so long; return milliseconds per step."""


def compare(
    variants: Mapping[str, Step | OwnClock],
    *,
    num_blocks: int = 40,
    max_seconds: float | None = None,
    block_seconds: float = BLOCK_S,
    num_dropped: int = NUM_DROPPED,
) -> Samples:
    """Time each variant in interleaved blocks: A B B A.

    Args:
        variants: name -> one step, or something with a ``time_block`` of its own. Each sets what it
            needs (thread counts) by itself.
        num_blocks: blocks per variant, the dropped ones included.
        max_seconds: begin no further round of blocks after this, but for three that are kept; None:
            no bound.
        block_seconds: the least time that a block takes. A block is at least one step.
        num_dropped: the first blocks of each variant, which warm up.

    Returns:
        name -> milliseconds per step, block by block, in the order in which they were run.

    Raises:
        ValueError: no variant, or no block would be kept.
        Exception: what a variant raises.

    Example:
        >>> samples = compare({"a": lambda: None}, num_blocks=4, block_seconds=0.001)
        >>> len(samples["a"])
        2
    """
    if not variants or num_blocks <= num_dropped:
        raise ValueError(
            f"nothing would be measured (variants: {len(variants)}, num_blocks={num_blocks}, "
            f"num_dropped={num_dropped}); name a variant, and more blocks than are dropped"
        )
    names = list(variants)
    samples: Samples = {name: [] for name in names}
    start = time.perf_counter()
    for block in range(num_blocks):
        is_late = max_seconds is not None and time.perf_counter() - start > max_seconds
        if is_late and block >= num_dropped + MIN_KEPT:
            break
        for name in names if block % 2 == 0 else reversed(names):
            samples[name].append(_time_block(variants[name], block_seconds))
    return {name: times[num_dropped:] for name, times in samples.items()}


def ratio(samples: Mapping[str, Sequence[float]], candidate: str, baseline: str) -> Ratio:
    """Return how many times as fast the candidate is as the baseline.

    Args:
        samples: as :func:`compare` returns them: equally many of each, run in turn.

    Example:
        >>> print(ratio({"ours": [1.0, 1.1, 0.9], "plain": [2.0, 2.2, 1.8]}, "ours", "plain"))
        2.00 [2.00, 2.00]
    """
    pairs = zip(samples[baseline], samples[candidate], strict=True)
    return median_ratio([theirs / own for theirs, own in pairs])


def median_ratio(pairs: Sequence[float]) -> Ratio:
    """The median of ratios and its 95 % bootstrap interval."""
    import statistics  # what it loads, `import samestep` need not wait for

    draw = random.Random(0)  # its own: the caller's random numbers are not touched
    medians = sorted(
        statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLES)
    )
    low, high = medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES)]
    return Ratio(statistics.median(pairs), low, high)


# ---------------------------------------------------------------------------
# A variant in other processes
# ---------------------------------------------------------------------------


class Processes:
    """A variant whose step runs in processes of its own, which live and wait between blocks.

    Args:
        make: ``make(rank, count, *args)`` returns the step; called once in each process, so it must
            be a function of a module that can be imported.
        args: what can be pickled.
        count: how many processes; a step is one step of each.

    Raises:
        RuntimeError: in :meth:`run`: what a process raised, as text.
    """

    def __init__(self, make: Callable[..., Step], *args: Any, count: int = 1) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._ms = math.inf
        self._pipes, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, make, rank, count, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.run(0)  # until all are ready

    def run(self, num_steps: int) -> list[tuple[float, Any]]:
        """Run so many steps in each; return per process the seconds and what the last returned."""
        for pipe in self._pipes:
            pipe.send(num_steps)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise RuntimeError(f"process {rank} gave no answer in {TIMEOUT_S:g} s")
            try:
                seconds, value = pipe.recv()
            except (EOFError, OSError):
                process = self._processes[rank]
                process.join(10)  # its end of the pipe closes before it is gone
                code = process.exitcode
                raise RuntimeError(f"process {rank} ended (exit status {code})") from None
            if seconds is None:
                raise RuntimeError(f"process {rank} failed:\n{value}")
            answers.append((seconds, value))
        return answers

    def time_block(self, seconds: float) -> float:
        """Milliseconds per step of the slowest process, over about so many seconds."""
        count = max(1, math.ceil(seconds * 1e3 / self._ms))
        self._ms = max(taken for taken, _ in self.run(count)) / count * 1e3
        return self._ms

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _serve(pipe: Any, make: Callable[..., Step], rank: int, count: int, args: Any) -> None:
    """In a process of :class:`Processes`: steps on demand, until it is told to end."""
    try:
        step = make(rank, count, *args)
        while (num_steps := pipe.recv()) is not None:
            value: object = None
            start = time.perf_counter()
            for _ in range(num_steps):
                value = step()
            seconds = time.perf_counter() - start
            pipe.send((seconds, value if isinstance(value, float | int | str) else None))
    except EOFError:  # the one who asks is gone
        return
    except Exception:
        pipe.send((None, traceback.format_exc()))


# ---------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------


def describe_machine(ticks: Sequence[int] | None = None) -> dict[str, object]:
    """Versions, cores, load and thread settings: what a reader must know of a figure.

    Args:
        ticks: what :func:`read_ticks` returned when the measurement began; None: since boot.
    """
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return {
        "date": date.today().isoformat(),
        "python": sys.version.split()[0] + ("" if gil else " free-threaded"),
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": count_cores(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "steal_frac": _steal_frac(ticks),
        "intra_op_threads": torch.get_num_threads(),
        "environment": {
            key: value
            for key, value in os.environ.items()
            if key.startswith(("OMP_", "GOMP_", "MKL_", "MALLOC_", "SAMESTEP_"))
        },
    }


def read_ticks() -> list[int]:
    """The processor's times since boot, as Linux counts them; empty elsewhere."""
    try:
        return list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]))
    except OSError:
        return []


def _steal_frac(since: Sequence[int] | None) -> float | None:
    """The share of time that the host took away."""
    now = read_ticks()
    if not now:
        return None
    spent = [new - old for new, old in zip(now, since or [0] * len(now), strict=True)]
    return spent[7] / max(1, sum(spent))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _time_block(variant: Step | OwnClock, seconds: float) -> float:
    if isinstance(variant, OwnClock):
        return variant.time_block(seconds)
    count, start = 0, time.perf_counter()
    while True:
        variant()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / count * 1e3
