"""How much of the machine does ``map_batches`` use, with equal slots and with a slow one?

Usage: python benchmarks/inference/run.py [--models conv ...] [--blocks 14] [--tuned] [--save NAME]
"""

import argparse
import copy
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, Processes, compare, describe_machine, differences, ratio

from samestep import DataParallel, map_batches, tune_cpu
from samestep.devices import count_cores
from samestep.timing import NUM_DROPPED

SLOWER = 4  # how many times the work of the others a slow slot does


class Last(nn.Module):
    """The last output of an LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(128, 128, 2, batch_first=True)

    def forward(self, rows):
        return self.lstm(rows)[0][:, -1]


class Asleep(nn.Module):
    """Takes its time without a core: what remains is how batches are handed out."""

    def forward(self, rows):
        time.sleep(0.005)
        return rows.sum()


def make_mlp():
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)]
    return nn.Sequential(*layers), (128, 256)


def make_conv():
    layers = []
    for num_in in (3, 16, 16, 16):
        layers += [nn.Conv2d(num_in, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), (8, 3, 32, 32)


def make_transformer():
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(net, nn.AdaptiveAvgPool2d((1, 128)), nn.Flatten()), (8, 32, 128)


MODELS = {
    "asleep": lambda: (Asleep(), (1, 1)),
    "mlp": make_mlp,
    "conv": make_conv,
    "lstm": lambda: (Last(), (8, 32, 128)),
    "transformer": make_transformer,
}


def make(name, num_batches):
    torch.manual_seed(0)
    net, shape = MODELS[name]()
    return net.eval(), [torch.randn(shape) for _ in range(num_batches)]


def make_process(rank, count, name, num_batches, is_tuned):
    """What the machine gives to those who share nothing: a share of the batches, plainly."""
    if is_tuned:
        tune_cpu()
    net, batches = make(name, num_batches)
    return lambda: run_plainly(net, batches[rank::count])


def run_plainly(net, batches):
    torch.set_num_threads(1)
    with torch.inference_mode():
        for batch in batches:
            net(batch)


def run_threads(nets, batches):
    """What Python threads without order, bounds and replicas reach: each its share, plainly."""
    shares = [batches[k :: len(nets)] for k in range(len(nets))]
    threads = [
        threading.Thread(target=run_plainly, args=pair) for pair in zip(nets, shares, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_slots(model, batches, slow=0):
    """``map_batches`` with some slots, the last ones, that do the work several times over."""
    numbers = {}

    def call(replica, batch):
        number = numbers.setdefault(id(replica), len(numbers))
        for _ in range(SLOWER - 1 if number >= model.num_replicas - slow else 0):
            replica(batch)
        return replica(batch)

    for output in map_batches(model, batches, call=call if slow else None):
        assert output is not None


class Clocked:
    """A step whose processor time is noted beside the time that it takes.

    Other work on the machine takes cores away, and with them the times of all variants; what a
    batch costs the processor it changes little.
    """

    def __init__(self, step):
        self.step, self.processor_ms = step, []

    def time_block(self, seconds):
        count, start, busy = 0, time.perf_counter(), time.process_time()
        while count == 0 or time.perf_counter() - start < seconds:
            self.step()
            count += 1
        self.processor_ms.append((time.process_time() - busy) / count * 1e3)
        return (time.perf_counter() - start) / count * 1e3


def measure(name, options):
    cores = count_cores()
    net, batches = make(name, options.batches)
    model = DataParallel(net, replicas=cores)
    nets = [copy.deepcopy(net) for _ in range(cores)]
    with Processes(make_process, name, options.batches, options.tuned, count=cores) as processes:
        variants = {
            "plain": Clocked(lambda: run_plainly(net, batches)),
            "processes": processes,
            "threads": Clocked(lambda: run_threads(nets, batches)),
            "slots": Clocked(lambda: run_slots(model, batches)),
            "one slow": lambda: run_slots(model, batches, slow=1),
        }
        samples = compare(variants, num_blocks=options.blocks)
    for variant in ("plain", "threads", "slots"):
        samples[f"{variant}, processor"] = variants[variant].processor_ms[NUM_DROPPED:]
    return samples, cores


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=14)
    parser.add_argument("--tuned", action="store_true", help="after tune_cpu(), on all sides")
    parser.add_argument("--save", metavar="NAME", help="keep the raw samples under this name")
    options = parser.parse_args()
    print(describe_machine())
    if options.tuned:
        print(tune_cpu())
    findings = Findings()
    for name in options.models:
        samples, cores = measure(name, options)
        findings.samples[name] = samples
        ms = min(samples["plain"]) / options.batches
        print(f"{name}: {ms:.2f} ms a batch on one thread")
        speeds = dict.fromkeys(("processes", "threads", "slots"), cores)
        speeds["one slow"] = cores - 1 + 1 / SLOWER
        targets = {} if options.tuned else {"slots": 13, "one slow": 14}
        for candidate, full in speeds.items():
            value = [part / full for part in ratio(samples, candidate, "plain")]
            goal = ">= 0.97" if candidate in targets and ms >= 1 else None
            what = f"{name}, {candidate}: of the sum"
            findings.add(what, value, target=targets.get(candidate), goal=goal)
        for candidate in ("threads", "slots"):
            added = differences(samples, f"{candidate}, processor", "plain, processor")
            value = [us / options.batches for us in added]
            findings.add(f"{name}, {candidate}: processor time added to a batch", value, unit="us")
        for rival in ("processes", "threads"):
            print(f"  slots are {ratio(samples, 'slots', rival)} times as fast as {rival}")
        findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
