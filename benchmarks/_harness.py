"""Compare variants of the same work, interleaved in one run, as ratios with their intervals.

Blocks of at least 50 ms alternate (A B B A ...), the first two of each variant are dropped, and a
ratio is the median over pairs of neighbouring blocks with a bootstrap interval: what disturbs the
machine disturbs both. Absolute times mean little on a shared machine; the raw samples keep them.
"""

import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

BLOCK_S = 0.05
NUM_DROPPED = 2
NUM_RESAMPLES = 2000


def compare(
    variants: dict[str, Callable[[], object]], *, num_blocks: int = 40
) -> dict[str, list[float]]:
    """Time each variant in interleaved blocks.

    Args:
        variants: name -> one step; each sets what it needs (thread counts) by itself.
        num_blocks: blocks per variant, the dropped ones included.

    Returns:
        name -> milliseconds per step, block by block, in the order they were run.
    """
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for block in range(num_blocks):
        for name in names if block % 2 == 0 else reversed(names):
            samples[name].append(_time_block(variants[name]))
    return {name: times[NUM_DROPPED:] for name, times in samples.items()}


def ratio(
    samples: dict[str, list[float]], candidate: str, baseline: str
) -> tuple[float, float, float]:
    """Return how many times as fast the candidate is: median and its 95 % bootstrap interval."""
    pairs = [b / c for b, c in zip(samples[baseline], samples[candidate], strict=True)]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLES)
    )
    low, high = medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES)]
    return statistics.median(pairs), low, high


def describe_machine() -> dict[str, object]:
    """Versions, cores, load and thread settings: what a reader must know of a figure."""
    return {
        "date": date.today().isoformat(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "steal_frac": _steal_frac(),
        "intra_op_threads": torch.get_num_threads(),
        "environment": {
            key: value for key, value in os.environ.items() if key.startswith(("OMP_", "GOMP_"))
        },
    }


def save(folder: Path, name: str, record: dict[str, object]) -> Path:
    """Write raw samples and the machine to ``results/<date>_<name>.json``."""
    path = folder / "results" / f"{date.today().isoformat()}_{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": describe_machine(), **record}, indent=1) + "\n")
    return path


def _time_block(step: Callable[[], object]) -> float:
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < BLOCK_S:
        step()
        count += 1
    return elapsed / count * 1e3


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _steal_frac() -> float | None:
    """The share of time that the host took away, since the machine started."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]))
    except OSError:
        return None
    return ticks[7] / sum(ticks)
