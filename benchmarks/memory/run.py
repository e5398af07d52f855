"""How much memory does a step take, and what does saving it cost in time?

Usage: python benchmarks/memory/run.py [--only step time replica flat] [--blocks 14] [--save NAME]
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

os.environ["KINETO_LOG_LEVEL"] = "9"  # torch's profiler prints its own life otherwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, compare, describe_machine, ratio

from samestep import DataParallel

SHARDS, ROWS = 32, 4  # rows of one shard
MORE_ROWS = 16  # of a larger one, where what surrounds a shard's work is less of it
CALLS = 1000
MB = 1e6


class Conv(nn.Module):
    """Dropout, BatchNorm and its own loss; some 3 MB of activations a row, 0.15 of parameters."""

    def __init__(self):
        super().__init__()
        layers = []
        for num_in in (3, 32, 32, 32, 32):
            layers += [nn.Conv2d(num_in, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
            layers += [nn.Dropout2d(0.1)]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(32, 10)

    def forward(self, rows, labels):
        return cross_entropy(self.head(self.layers(rows)), labels)


class Perceptron(nn.Module):
    """A small model with its own loss: what surrounds it is a large part of a step."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(256, 10))

    def forward(self, rows, labels):
        return cross_entropy(self.layers(rows), labels)


class Wide(nn.Module):
    """8 MB of parameters, and next to no activations."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024))

    def forward(self, rows):
        return self.layers(rows).square().mean()


def make_step(kind, shape, classes=None, **options):
    """A step of a model on random rows; wrapped if there are options."""
    torch.manual_seed(0)
    model = kind()
    if options:
        model = DataParallel(model, **options)
    batch = [torch.randn(shape)]
    if classes:
        batch.append(torch.randint(classes, shape[:1]))

    def step():
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        return loss

    return model, step


def conv_step(name, size=32, rows=ROWS):
    shape = (rows if name == "one shard" else SHARDS * rows, 3, size, size)
    options = {
        "one shard": {},
        "plain": {},
        "kept": {"replicas": SHARDS, "workers": 1},
        "recompute": {"replicas": SHARDS, "workers": 1, "recompute": True},
        "eager": {"replicas": SHARDS, "workers": 1, "eager_backward": True},
    }
    return make_step(Conv, shape, 10, **options[name])


# -- Measures --------------------------------------------------------------------------------------


def peak_of(step):
    """The most bytes that torch has allocated at a time during a step, over what there was."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return peak


def unique_bytes():
    """Memory that this process alone has (USS)."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(r"^Private_(?:Clean|Dirty): +(\d+)", text, re.M)))


def resident_peak_of(step):
    """The same as the system sees it: sampled, and with what malloc keeps."""
    before, found, is_over = unique_bytes(), [], threading.Event()

    def sample():
        while not is_over.wait(0.002):
            found.append(unique_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    step()
    is_over.set()
    thread.join()
    return max(found, default=before) - before


def measure_conv(name):
    """Peaks of one step, and a fingerprint of what it leaves."""
    model, step = conv_step(name)
    conv_step(name, size=4)[1]()  # imports what is imported on demand: 100 MB for a checkpoint
    # The first step of a wrapper is watched; what malloc keeps of it is part of what is resident.
    resident = resident_peak_of(lambda: (step(), step()))
    model.zero_grad()
    peak = peak_of(step)
    torch.manual_seed(1)
    step()
    left = [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]
    return {"peak": peak, "resident": resident, "left": [t.double().sum().item() for t in left]}


def measure_replica(number):
    """The peak of a step with so many replicas."""
    model, step = make_step(Wide, (int(number), 1024), replicas=int(number), workers=2)
    step()
    return {"peak": peak_of(step), "parameters": 4 * sum(p.numel() for p in model.parameters())}


def measure_rest(number):
    """What making the replicas of a wrapper allocates."""
    model = DataParallel(Wide(), replicas=int(number), workers=2)
    return {"peak": peak_of(model.refresh)}


def measure_flat(name):
    """Growth over 1,000 calls with changing shapes, garbage collector off."""
    options = {"kept": {}, "eager": {"eager_backward": True}, "recompute": {"recompute": True}}
    torch.manual_seed(0)
    model = DataParallel(Perceptron(), replicas=4, **options[name])

    def run(count):
        for i in range(count):
            num_rows = 2 + i % 97
            model.zero_grad()
            model(torch.randn(num_rows, 64), torch.randint(10, (num_rows,))).backward()

    gc.collect()
    gc.disable()
    run(300)
    bytes_before, objects_before = unique_bytes(), len(gc.get_objects())
    run(CALLS)
    return {
        "bytes": unique_bytes() - bytes_before,
        "objects": len(gc.get_objects()) - objects_before,
    }


MEASURES = {
    "conv": measure_conv,
    "replica": measure_replica,
    "rest": measure_rest,
    "flat": measure_flat,
}


def ask(measure, name):
    """Run one measure in a process of its own."""
    words = [sys.executable, __file__, "--one", measure, str(name)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# -- Parts -----------------------------------------------------------------------------------------


def part_step(args, findings):
    found = {name: ask("conv", name) for name in ("one shard", "kept", "recompute", "eager")}
    one = found["one shard"]
    print(
        f"one shard of {ROWS} rows: {one['peak'] / MB:.1f} MB, resident {one['resident'] / MB:.1f}"
    )
    for name in ("kept", "recompute", "eager"):
        this = found[name]
        is_equal = this["left"] == found["kept"]["left"]
        print(
            f"{name}, {SHARDS} shards: {this['peak'] / MB:.1f} MB, "
            f"{this['peak'] / one['peak']:.2f} of one shard's; resident "
            f"{this['resident'] / MB:.1f} MB, {this['resident'] / one['resident']:.2f}; "
            f"leaves what 'kept' leaves: {is_equal}"
        )
        if name != "kept":
            assert is_equal, "the gradients differ"
            what = f"{name}: peak of {SHARDS} shards on one slot, of one shard's step"
            findings.add(what, exactly(this["peak"] / one["peak"]), goal="<= 1.2")
    findings.samples["step"] = found


def part_time(args, findings):
    variants = {name: conv_step(name)[1] for name in ("kept", "recompute", "eager")}
    samples = compare(variants, num_blocks=args.blocks)
    value = ratio(samples, "kept", "recompute")
    findings.add(f"recompute, {ROWS} rows a shard: time of keeping", value, goal="<= 1.4")
    findings.add("eager: time of keeping", ratio(samples, "kept", "eager"))
    variants = {name: conv_step(name, rows=MORE_ROWS)[1] for name in ("kept", "recompute")}
    larger = compare(variants, num_blocks=max(4, args.blocks // 2))
    value = ratio(larger, "kept", "recompute")
    findings.add(f"recompute, {MORE_ROWS} rows a shard: time of keeping", value, goal="<= 1.4")
    del variants
    small = {
        name: make_step(Perceptron, (256, 64), 10, replicas=2, **options)[1]
        for name, options in (("two passes", {}), ("eager", {"eager_backward": True}))
    }
    quick = compare(small, num_blocks=3 * args.blocks)
    value = ratio(quick, "two passes", "eager")
    findings.add("perceptron, eager: time of two passes", value, goal="<= 0.85")
    findings.samples |= {"conv": samples, "larger conv": larger, "perceptron": quick}


def part_replica(args, findings):
    rest = {number: ask("rest", number)["peak"] for number in (2, 8)}
    asked = {number: ask("replica", number) for number in (2, 3, 8)}
    step = {number: found["peak"] for number, found in asked.items()}
    parameters = asked[2]["parameters"]
    value = exactly((rest[8] - rest[2]) / 6)
    findings.add("one more replica at rest", value, target=9, goal="<= 0", unit="bytes")
    goal = f"<= {parameters / MB + 1:.2f}"  # as many bytes of gradients, and 1 MB
    for few, many in ((2, 3), (2, 8)):
        what = f"one more replica in a step, of {few} to {many}; gradients {parameters / MB:.1f} MB"
        value = exactly((step[many] - step[few]) / (many - few) / MB)
        findings.add(what, value, target=9, goal=goal, unit="MB")
    findings.samples["replica"] = {"parameters": parameters, "rest": rest, "step": step}


def part_flat(args, findings):
    found = findings.samples["flat"] = {}
    for name in ("kept", "eager", "recompute"):
        found[name] = this = ask("flat", name)
        what = f"{name}, growth over {CALLS} calls"
        # A quarter of the smallest activation that could stay, at each call.
        value = exactly(this["bytes"] / MB)
        findings.add(what, value, target=10, goal="<= 5", unit="MB")
        print(f"  objects that wait for the garbage collector: {this['objects']}")


def exactly(value):
    """A count: no interval."""
    return (value,) * 3


PARTS = {"step": part_step, "time": part_time, "replica": part_replica, "flat": part_flat}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--blocks", type=int, default=14)
    parser.add_argument("--save", metavar="NAME")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(json.dumps(MEASURES[args.one[0]](args.one[1])))
        return
    print({key: value for key, value in describe_machine().items() if key != "environment"})
    findings = Findings()
    for name in args.only:
        PARTS[name](args, findings)
        findings.save(Path(__file__).parent, args.save)


if __name__ == "__main__":
    main()
