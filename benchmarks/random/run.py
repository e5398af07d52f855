"""What do the shards' own random streams cost per operation that draws, and where none does?

Usage: python benchmarks/random/run.py [--blocks 40] [--save NAME]
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, compare, differences, make_parser

from samestep import DataParallel
from samestep.rng import Draws, Stream, use_stream

NUM_OPS = 200


class Watched(nn.Module):
    """Draws nothing, and notes how many function modes are active while it runs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows):
        modes.append(len(_get_current_function_mode_stack()))
        return self.layer(rows)


modes = []  # by all replicas


def measure_drawing(what, draw, options, findings):
    def run():
        for _ in range(NUM_OPS):
            draw()

    def run_in_stream():
        with use_stream(Stream(Draws(), 0), intercept=True):
            run()

    variants = {"plain": run, "stream": run_in_stream}
    samples = compare(variants, num_blocks=options.blocks, max_seconds=options.seconds)
    findings.samples[what] = samples
    value = differences(samples, "stream", "plain", 1e3 / NUM_OPS)
    findings.add(f"{what}, an operation", value, target=15, goal="<= 2", unit="us")


def measure_no_drawing(findings):
    model = DataParallel(Watched(), replicas=2)
    for _ in range(3):  # the first call is watched
        model(torch.ones(8, 4))
    seen = max(modes[-2:])
    value = (float(seen),) * 3
    what = "a model that draws nothing, modes active in forward"
    findings.add(what, value, target=15, goal="<= 0", unit="modes")


def main():
    options = make_parser(__doc__, seconds=10).parse_args()
    torch.set_num_threads(1)
    findings = Findings()
    rows = torch.ones(64)
    measure_drawing("rand", lambda: torch.rand(64), options, findings)
    measure_drawing("dropout", lambda: F.dropout(rows, 0.5, training=True), options, findings)
    measure_no_drawing(findings)
    findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
