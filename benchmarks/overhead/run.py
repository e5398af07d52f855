"""What does the wrapper itself cost: passing through, looking for changes, handing over, starting?

Usage: python benchmarks/overhead/run.py [--blocks 40] [--save NAME]
"""

import gc
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, Part, compare, differences, make_parser, median_ratio, single
from _models import make, make_step

from samestep import DataParallel
from samestep.engine import ThreadEngine

NUM_SUBMODULES = 1000
IMPORT = """if True:
    import time, torch
    start = time.perf_counter()
    import samestep
    print((time.perf_counter() - start) * 1e3)
"""


class Nothing(nn.Module):
    """Returns what it is given."""

    def forward(self, rows):
        return rows


def measure_passing_through(options, findings):
    net, rows = Nothing(), torch.ones(8, 4)
    model = DataParallel(net, replicas=1)
    bounds = {"num_blocks": options.blocks, "max_seconds": options.seconds}
    with torch.no_grad():
        samples = compare({"plain": lambda: net(rows), "one slot": lambda: model(rows)}, **bounds)
    findings.samples["passing through"] = samples
    value = differences(samples, "one slot", "plain")
    findings.add("one slot, a call", value, target=1, goal="<= 5", unit="us")

    net, x = make("mlp")
    # The same parameters both ways: two copies lie differently in the caches.
    steps = {
        "plain": make_step("mlp", net, x, 1),
        "one slot": make_step("mlp", DataParallel(net, replicas=1), x, 1),
    }
    # A block is one step: what is looked for is smaller than what drifts within a longer one.
    samples = compare(
        steps, num_blocks=200 * options.blocks, max_seconds=3 * options.seconds, block_seconds=0
    )
    findings.samples["mlp"] = samples
    pairs = zip(samples["one slot"], samples["plain"], strict=True)
    value = median_ratio([(own / theirs - 1) * 100 for own, theirs in pairs])
    findings.add("one slot, a step of mlp", value, target=1, goal="<= 0.5", unit="%")


def measure_looking(options, findings):
    """Nothing has changed since the last call."""
    many = DataParallel(make("many")[0], replicas=2)
    tree = DataParallel(nn.Sequential(*(Nothing() for _ in range(NUM_SUBMODULES))), replicas=2)
    for model in (many, tree):
        model.refresh()
    before = many.stats()
    variants = {"tensors": many.refresh, "submodules": tree.refresh}
    samples = compare(variants, num_blocks=options.blocks, max_seconds=options.seconds)
    assert many.stats() == before, "something was copied"
    findings.samples["looking"] = samples
    per_tensor = single(samples, "tensors", 1e6 / len(list(many.parameters())))
    findings.add("nothing changed, a tensor", per_tensor, target=4, goal="<= 100", unit="ns")
    per_module = single(samples, "submodules", 1e3 / NUM_SUBMODULES / 2)
    what = "nothing changed, a submodule and replica"
    findings.add(what, per_module, target=4, goal="<= 1", unit="us")


class Bare:
    """One thread and two queues: two wake-ups, and nothing else that could be left out."""

    def __init__(self):
        self.inbox, self.wake = SimpleQueue(), SimpleQueue()
        threading.Thread(target=self.loop, daemon=True).start()

    def loop(self):
        while (job := self.inbox.get()) is not None:
            job()
            self.wake.put(None)

    def run(self, mine, other):
        self.inbox.put(other)
        mine()
        self.wake.get()


def measure_handing_over(options, findings):
    rows = torch.ones(8, 4)
    model = DataParallel(Nothing(), replicas=2)
    engine = ThreadEngine(1, num_workers=2)
    jobs = [lambda: None] * 2
    bare = Bare()
    with torch.no_grad():
        variants = {
            "call": lambda: model(rows),
            "jobs": lambda: engine.share_work(jobs),
            "bare": lambda: bare.run(*jobs),
        }
        samples = compare(variants, num_blocks=options.blocks, max_seconds=options.seconds)
    findings.samples["handing over"] = samples
    value = single(samples, "jobs", 1e3)
    findings.add("two empty jobs, handed over", value, target=7, goal="<= 60", unit="us")
    value = single(samples, "bare", 1e3)
    findings.add("two empty jobs, one thread and two bare queues", value, unit="us")
    findings.add("what ours adds to that", differences(samples, "jobs", "bare"), unit="us")
    bare.inbox.put(None)
    value = single(samples, "call", 1e3)
    findings.add("a whole call of an empty forward, K=2", value, unit="us")


def measure_starting(options, findings):
    net, _ = make("res20")

    def prepare():
        gc.collect()  # what the repetition before left is no part of this one's time
        return DataParallel(net, replicas=8)

    variants = {"replicas": Part(prepare, lambda model: model.refresh())}
    samples = compare(variants, num_blocks=options.blocks, max_seconds=options.seconds)
    findings.samples["starting"] = samples
    value = single(samples, "replicas")
    findings.add("8 CPU replicas of res20", value, target=8, goal="<= 5", unit="ms")
    # With compiled files, as a package that was installed has them: the first run makes them.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    words = [sys.executable, "-c", IMPORT]
    with tempfile.TemporaryDirectory() as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        _, *times = [
            float(
                subprocess.run(
                    words, check=True, capture_output=True, text=True, env=environment
                ).stdout
            )
            for _ in range(max(4, options.blocks // 4))
        ]
    findings.samples["import"] = {"import": times}
    value = median_ratio(times)
    findings.add("import samestep, after torch", value, target=8, goal="<= 30", unit="ms")


def main():
    options = make_parser(__doc__, seconds=10).parse_args()
    findings = Findings()
    torch.set_num_threads(1)
    for measure in (
        measure_passing_through,
        measure_looking,
        measure_handing_over,
        measure_starting,
    ):
        measure(options, findings)
        findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
