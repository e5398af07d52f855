"""What does ``samestep.tune_cpu()`` give: the same step in two processes, one of which called it?

Usage: python benchmarks/tuning/run.py [--models lstm ...] [--blocks 14] [--save NAME]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, Processes, compare, make_parser, ratio
from _models import MODELS, make, make_step

import samestep


def make_tuned(rank, count, name, replicas, is_tuned):
    """In a process of its own: settings of malloc cannot be undone."""
    if is_tuned:
        samestep.tune_cpu()
    net, x = make(name)
    model = samestep.DataParallel(net, replicas=replicas) if replicas > 1 else net
    return make_step(name, model, x, 1)


def main():
    parser = make_parser(__doc__, blocks=14, seconds=10)
    names = ["lenet", "res20", "lstm", "gpt"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=names)
    options = parser.parse_args()
    findings = Findings()
    for name in options.models:
        for replicas in (1, 2):
            with (
                Processes(make_tuned, name, replicas, False) as before,
                Processes(make_tuned, name, replicas, True) as after,
            ):
                variants = {"before": before, "after": after}
                samples = compare(variants, num_blocks=options.blocks, max_seconds=options.seconds)
            what = f"{name}, " + ("plain" if replicas == 1 else f"{replicas} replicas")
            findings.samples[what] = samples
            findings.add(f"{what}: times as fast", ratio(samples, "after", "before"))
            findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
