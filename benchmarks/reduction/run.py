"""Adding gradients: how near to the bandwidth of a copy, and what does the fixed order cost?

Usage: python benchmarks/reduction/run.py [--blocks 40] [--save NAME]
"""

import sys
import threading
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, compare, make_parser, median_ratio, single
from _models import make, make_step

from samestep import DataParallel, backward
from samestep.devices import count_cores
from samestep.engine import ThreadEngine
from samestep.reduce import TreeSum, sum_lists, sum_slices

NUM_SHARDS = 8


def measure_bandwidth(options, findings):
    """100 MB from each of two shards, all workers at it; a copy with as many threads."""
    cores = count_cores()
    left, right = torch.randn(2, 25_000_000)
    engine = ThreadEngine(1, num_workers=cores)

    def add():
        sum_slices(2, {(0, 0): [left], (0, 1): [right]}, cores, engine.share_work)

    def copy():
        torch.set_num_threads(cores)
        left.clone()  # into new memory, as the sum is
        torch.set_num_threads(1)

    samples = compare(
        {"sum": add, "copy": copy}, num_blocks=options.blocks, max_seconds=options.seconds
    )
    findings.samples["100 MB"] = samples
    # A sum reads two and writes one, a copy reads one and writes one.
    pairs = zip(samples["sum"], samples["copy"], strict=True)
    value = median_ratio([(3 / own) / (2 / theirs) for own, theirs in pairs])
    what = "100 MB from each of 2 shards, share of the copy bandwidth"
    findings.add(what, value, target=6, goal=">= 0.9")


def measure_small(options, findings):
    """64 KB in ten tensors from each of two shards."""
    shards = [[torch.randn(1638) for _ in range(10)] for _ in range(2)]

    def add():
        total = TreeSum(2, sum_lists)
        for index, gradients in enumerate(shards):
            total.add(index, gradients)
        return total.result()

    samples = compare({"sum": add}, num_blocks=options.blocks, max_seconds=options.seconds)
    findings.samples["64 KB"] = samples
    value = single(samples, "sum", 1e3)
    findings.add("64 KB in 10 tensors from each of 2 shards", value, target=6, goal="<= 15",
                 unit="us")  # fmt: skip


class Arrival:
    """What a step could do instead of the canonical tree: add as the shards come."""

    def __init__(self, num_values, combine, *, by_thread=False):
        self._combine, self._lock, self._total = combine, threading.Lock(), None

    def add(self, index, value):
        with self._lock:
            self._total = value if self._total is None else self._combine(self._total, value)

    def parts(self):
        return {(0, 0): self._total}


def measure_order(name, options, findings):
    """A training step of eight shards on all cores, its gradients added in one order or another."""
    cores = count_cores()
    net, x = make(name)
    model = DataParallel(net, replicas=NUM_SHARDS, workers=cores)
    step = make_step(name, model, x, 1)

    def use(kind):
        def run():
            backward.TreeSum = kind
            return step()

        return run

    samples = compare(
        {"canonical": use(TreeSum), "arrival": use(Arrival)},
        num_blocks=10 * options.blocks,
        max_seconds=2 * options.seconds,
        block_seconds=0.02,
    )
    backward.TreeSum = TreeSum
    findings.samples[f"order, {name}"] = samples
    pairs = zip(samples["canonical"], samples["arrival"], strict=True)
    value = median_ratio([(own / theirs - 1) * 100 for own, theirs in pairs])
    what = f"{name}, a step of {NUM_SHARDS} shards, canonical tree over order of arrival"
    findings.add(what, value, target=11, goal="<= 3", unit="%")


def main():
    options = make_parser(__doc__, seconds=10).parse_args()
    torch.set_num_threads(1)
    findings = Findings()
    measure_bandwidth(options, findings)
    measure_small(options, findings)
    for name in ("mlp", "lstm"):
        measure_order(name, options, findings)
        findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
