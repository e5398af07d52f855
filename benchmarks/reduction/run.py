"""Adding gradients: how near to the bandwidth of a copy, and what does the fixed order cost?

Usage: python benchmarks/reduction/run.py [--blocks 40] [--save NAME]
"""

import random
import sys
import threading
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, compare, make_parser, median_ratio, ratio, single

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


def measure_order(options, findings):
    """Eight shards arrive in any order; add in the canonical tree, or as they come."""
    shards = [[torch.randn(50_000) for _ in range(20)] for _ in range(NUM_SHARDS)]
    draw = random.Random(0)
    orders = [draw.sample(range(NUM_SHARDS), NUM_SHARDS) for _ in range(64)]
    turn = iter(range(1 << 60))

    def canonical():
        total = TreeSum(NUM_SHARDS, sum_lists)
        for index in orders[next(turn) % len(orders)]:
            total.add(index, shards[index])
        return total.result()

    def arrival():
        lock, total = threading.Lock(), None
        for index in orders[next(turn) % len(orders)]:
            with lock:
                total = shards[index] if total is None else sum_lists(total, shards[index])
        return total

    variants = {"canonical": canonical, "arrival": arrival}
    samples = compare(variants, num_blocks=options.blocks, max_seconds=options.seconds)
    findings.samples["order"] = samples
    middle, low, high = ratio(samples, "arrival", "canonical")
    value = tuple((part - 1) * 100 for part in (middle, low, high))
    what = f"{NUM_SHARDS} shards, canonical tree over order of arrival"
    findings.add(what, value, target=11, goal="<= 3", unit="%")


def main():
    options = make_parser(__doc__, seconds=10).parse_args()
    torch.set_num_threads(1)
    findings = Findings()
    for measure in (measure_bandwidth, measure_small, measure_order):
        measure(options, findings)
        findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
