"""How fast is a training step on CPU slots, against the plain module and against DDP over gloo?

Usage: python benchmarks/training/run.py [--models mlp ...] [--blocks 40] [--save NAME]
"""

import copy
import math
import os
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, Processes, compare, geometric_mean, make_parser, ratio
from _models import MODELS, make, make_apart, make_ddp, make_meeting_place, make_step

import samestep
from samestep.devices import count_cores
from samestep.tune import ENVIRONMENT

COMPUTE_BOUND = ("res20", "lstm", "gpt", "caps")
MIXES_ROWS = ("res20",)  # BatchNorm sees the shard's rows, ours as DDP's: not the plain loss
PLAIN = "plain, 1 thread"


def measure(name, options, findings):
    """Compare on one model; returns the ratios to plain and to DDP, block by block."""
    net, x = make(name)
    cores, count = count_cores(), options.replicas
    wrapped = samestep.DataParallel(copy.deepcopy(net), replicas=count)
    with (
        Processes(make_ddp, name, make_meeting_place(), count=count) as ddp,
        Processes(make_apart, name, count=count) as apart,
    ):
        variants = {PLAIN: make_step(name, net, x, 1), "ours": make_step(name, wrapped, x, 1)}
        chosen = samestep.DataParallel(copy.deepcopy(net), replicas="auto")
        if cores > 1:
            variants[f"plain, {cores} threads"] = make_step(name, net, x, cores)
        # It chooses at its first step, which is dropped, for the threads that the caller has.
        variants["auto"] = make_step(name, chosen, x, cores)
        check_losses(name, variants, ddp)
        samples = compare(
            variants | {"DDP": ddp, "apart": apart},
            num_blocks=options.blocks,
            max_seconds=options.seconds,
        )
    torch.set_num_threads(1)
    findings.samples[name] = samples
    plain = min(
        (one for one in samples if one.startswith("plain")),
        key=lambda one: statistics.median(samples[one]),
    )
    ms = statistics.median(samples[PLAIN])
    print(f"{name}: {ms:.2f} ms a step on one thread; the better plain is {plain}")
    if name in COMPUTE_BOUND:
        value = ratio(samples, "ours", PLAIN)
        findings.add(f"{name}: times one thread", value, target=2, goal=">= 1.9")
    is_long = ms >= 10
    value = ratio(samples, "ours", plain)
    findings.add(f"{name}: times plain", value, target=2, goal=">= 1.0" if is_long else None)
    what = f"{name}: what {count} processes give that exchange nothing, times plain"
    findings.add(what, ratio(samples, "apart", plain), target=2)
    print(f"{name}: replicas='auto' chose {chosen.choice}")
    like = PLAIN if cores == 1 else f"plain, {cores} threads"
    what = f"{name}: replicas='auto', times plain on {cores} threads"
    findings.add(what, ratio(samples, "auto", like), target=2, goal=">= 0.98")
    goal = ">= 1.0" if ms > 5 else ">= 1.5"
    findings.add(f"{name}: times DDP", ratio(samples, "ours", "DDP"), target=3, goal=goal)
    pairs = {
        base: [b / own for b, own in zip(samples[base], samples["ours"], strict=True)]
        for base in (plain, "DDP")
    }
    return pairs[plain] if is_long else None, pairs["DDP"]


def check_losses(name, variants, ddp):
    """All do the same step; the loss of the ranks is the mean of theirs (they have equal rows)."""
    plain, ours = variants[PLAIN](), variants["ours"]()
    theirs = statistics.mean(loss for _, loss in ddp.run(1))
    # float32, and sums of some thousand terms in another order
    if not math.isclose(ours, theirs, rel_tol=1e-3):
        raise AssertionError(f"{name}: our loss is {ours}, DDP's {theirs}")
    if name not in MIXES_ROWS and not math.isclose(ours, plain, rel_tol=1e-3):
        raise AssertionError(f"{name}: our loss is {ours}, the plain one {plain}")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--replicas", type=int, default=max(2, count_cores()))
    parser.add_argument("--tuned", action="store_true", help="freed memory stays, on all sides")
    options = parser.parse_args()
    if options.tuned:
        print(samestep.tune_cpu())
        os.environ.update(ENVIRONMENT)  # the same for the other processes
    findings = Findings()
    found = []
    for name in options.models:
        found.append(measure(name, options, findings))
        findings.save(Path(__file__).parent, options.save)
    to_plain = [pairs for pairs, _ in found if pairs is not None]
    if len(to_plain) > 1:
        findings.add(
            "geometric mean: times plain", geometric_mean(to_plain), target=2, goal=">= 1.15"
        )
    if len(found) > 1:
        value = geometric_mean([pairs for _, pairs in found])
        findings.add("geometric mean: times DDP", value, target=3, goal=">= 1.25")
    findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
