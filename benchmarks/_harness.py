"""What all benchmarks share beyond :mod:`samestep.timing`: findings, raw samples, arguments.

A finding is a median with its 95 % interval, and, if it bears on a target, the number of the target
in docs/performance.md and the goal. ``summary.py`` reads what is written here.
"""

import argparse
import json
import math
import os
import random
import statistics
import time
from datetime import date
from pathlib import Path

from samestep.timing import (
    Processes,
    Ratio,
    compare,
    describe_machine,
    median_ratio,
    ratio,
    read_ticks,
)

__all__ = [
    "Findings",
    "Part",
    "Processes",
    "Ratio",
    "compare",
    "describe_machine",
    "differences",
    "geometric_mean",
    "make_parser",
    "median_ratio",
    "ratio",
    "save",
    "single",
]

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine meet here
TICKS = read_ticks()


class Findings:
    """What a benchmark found, printed as it comes and written at the end."""

    def __init__(self):
        self.found, self.samples = [], {}

    def add(self, what, value, *, target=None, goal=None, unit="times"):
        """Note one figure; ``goal`` is such as ">= 1.0", or None for what is only told."""
        middle, low, high = value
        fields = {"middle": middle, "low": low, "high": high}
        self.found.append({"target": target, "what": what, "goal": goal, "unit": unit} | fields)
        print(f"  {what}: {middle:.3g} {unit} [{low:.3g}, {high:.3g}] (goal {goal})", flush=True)

    def save(self, folder, name):
        """Write everything so far, if a name is given: what is stopped midway is not lost."""
        if name:
            save(Path(folder), name, {"findings": self.found, "ms_per_step": self.samples})


class Part:
    """A variant of which only ``body`` is timed, not what ``prepare`` does before it."""

    def __init__(self, prepare, body):
        self.prepare, self.body = prepare, body

    def time_block(self, seconds):
        count, spent = 0, 0.0
        while count == 0 or spent < seconds:
            given = self.prepare()
            start = time.perf_counter()
            self.body(given)
            spent += time.perf_counter() - start
            count += 1
        return spent / count * 1e3


def differences(samples, candidate, baseline, scale=1e3):
    """How much longer the candidate takes, in microseconds (or scaled otherwise)."""
    pairs = zip(samples[candidate], samples[baseline], strict=True)
    return median_ratio([(own - theirs) * scale for own, theirs in pairs])


def single(samples, name, scale=1.0):
    """A time as it is, in milliseconds (or scaled otherwise)."""
    return median_ratio([value * scale for value in samples[name]])


def geometric_mean(pairs, resamples=1000):
    """The geometric mean of medians, with its interval; ``pairs`` has one list per model."""
    draw = random.Random(0)

    def mean(lists):
        return math.exp(statistics.mean(math.log(statistics.median(one)) for one in lists))

    drawn = sorted(mean([draw.choices(one, k=len(one)) for one in pairs]) for _ in range(resamples))
    return Ratio(mean(pairs), drawn[int(0.025 * resamples)], drawn[int(0.975 * resamples)])


def make_parser(doc, blocks=40, seconds=20.0):
    """The arguments that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=blocks, help="blocks per variant")
    parser.add_argument("--seconds", type=float, default=seconds, help="the most per comparison")
    parser.add_argument("--save", metavar="NAME", help="keep the raw samples under this name")
    return parser


def save(folder, name, record):
    """Write raw samples and the machine to ``results/<date>_<name>.json``."""
    path = folder / "results" / f"{date.today().isoformat()}_{name}.json"
    path.parent.mkdir(exist_ok=True)
    machine = describe_machine(TICKS)
    path.write_text(json.dumps({"machine": machine, **record}, indent=1) + "\n")
    return path
