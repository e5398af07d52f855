"""As several processes: our ranks over gloo against DDP over gloo, with as many processes.

Usage: python benchmarks/ranks/run.py [--models mlp ...] [--ranks 2] [--kept] [--save NAME]
"""

import math
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, Processes, compare, make_parser, ratio
from _models import MODELS, make_ddp, make_meeting_place, make_rank

from samestep.tune import ENVIRONMENT

TRAFFIC_BOUND = ("wide",)


def measure(name, count, options, findings):
    with (
        Processes(make_rank, name, make_meeting_place(), count=count) as ours,
        Processes(make_ddp, name, make_meeting_place(), count=count) as ddp,
    ):
        losses = [statistics.mean(loss for _, loss in one.run(1)) for one in (ours, ddp)]
        # float32; ours is a mean over rows and theirs of means, of equally many rows
        if not math.isclose(*losses, rel_tol=1e-3):
            raise AssertionError(f"{name}: our loss is {losses[0]}, DDP's {losses[1]}")
        variants = {"ours": ours, "DDP": ddp}
        samples = compare(variants, num_blocks=options.blocks, max_seconds=options.seconds)
    title = f"{name}, {count} ranks" + ", memory kept" * options.kept
    findings.samples[title] = samples
    goal = ">= 2.0" if name in TRAFFIC_BOUND else ">= 1.0"
    value = ratio(samples, "ours", "DDP")
    findings.add(f"{title}: times DDP", value, target=12, goal=goal)


def main():
    parser = make_parser(__doc__, seconds=10)
    names = ["mlp", "lenet", "res20", "lstm", "gpt", "wide"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=names)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument(
        "--kept", action="store_true", help="malloc as `samestep run` sets it, for both"
    )
    options = parser.parse_args()
    if options.kept:
        os.environ.update(ENVIRONMENT)  # of the processes that are to start
    findings = Findings()
    for count in options.ranks:
        for name in options.models:
            measure(name, count, options, findings)
            findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
