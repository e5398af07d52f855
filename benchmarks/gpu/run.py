"""One accelerator, two replicas on it: against the plain module and torch.nn.DataParallel.

Usage: python benchmarks/gpu/run.py [--models lenet ...] [--blocks 20] [--save NAME]
"""

import copy
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, compare, make_parser, ratio
from _models import make

import samestep


def make_step(model, x):
    """A training step that ends when the accelerator has done it."""
    parameters = list(model.parameters())

    def step():
        for parameter in parameters:
            parameter.grad = None
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        loss = out.float().square().mean()
        loss.backward()
        torch.accelerator.synchronize()
        return loss.detach()

    return step


def measure(name, options, findings):
    device = torch.accelerator.current_accelerator()
    net, x = make(name)
    net, x = net.to(device), x.to(device)
    pair = [0, 0]
    variants = {
        "plain": make_step(net, x),
        "ours, two on one": make_step(
            samestep.DataParallel(copy.deepcopy(net), device_ids=pair), x
        ),
        "ours, one": make_step(samestep.DataParallel(copy.deepcopy(net), device_ids=[0]), x),
    }
    if device.type == "cuda":
        for key, slots in {"ours, two on one, graphs": pair, "ours, one, graphs": [0]}.items():
            captured = samestep.DataParallel(copy.deepcopy(net), device_ids=slots, cuda_graphs=True)
            variants[key] = make_step(captured, x)
            for _ in range(5):  # captured at the fourth call
                variants[key]()
            print(f"{name}, {key}: {captured.stats().uncaptured or 'captured'}")
        theirs = nn.DataParallel(copy.deepcopy(net), device_ids=pair)
        variants["nn.DataParallel, two on one"] = make_step(theirs, x)
    losses = {key: float(step()) for key, step in variants.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-2 * abs(losses["plain"]), losses
    samples = compare(variants, num_blocks=options.blocks, max_seconds=options.seconds)
    findings.samples[name] = samples
    for other in variants:
        if other != "ours, two on one":
            value = ratio(samples, "ours, two on one", other)
            findings.add(f"{name}: two replicas on one device, times {other}", value)


def main():
    parser = make_parser(__doc__, seconds=15)
    parser.add_argument("--models", nargs="+", default=["lenet", "mlp", "wide"])
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        print("torch sees no accelerator on this machine: nothing to measure")
        return
    findings = Findings()
    for name in options.models:
        measure(name, options, findings)
        findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
