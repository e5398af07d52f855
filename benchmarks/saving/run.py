"""How long does a checkpoint hold the script up: in the background, in full, and torch.save alone?

Usage: python benchmarks/saving/run.py [--layers 24] [--rounds 9]

The three take turns in one run. Prints medians and ranges; a folder on the disk to be measured is
the working directory.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import describe_machine

import samestep


def time_ms(function, *args, **kwargs):
    """What the function returns, and how long it took."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return result, (time.perf_counter() - start) * 1e3


def measure(folder, num_layers, num_rounds):
    """Milliseconds per way to save, round by round."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(num_layers)])
    times = {"background": [], "full": [], "torch.save": []}
    for step in range(num_rounds):
        state = {"model": model, "step": step}
        pending, held = time_ms(samestep.save, folder / "a.pt", **state, background=True)
        pending.wait()
        times["background"].append(held)
        _, full = time_ms(samestep.save, folder / "a.pt", **state)
        times["full"].append(full)
        _, plain = time_ms(torch.save, model.state_dict(), folder / "b.pt")
        times["torch.save"].append(plain)
    num_bytes = sum(value.nbytes for value in model.state_dict().values())
    return num_bytes, times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        num_bytes, times = measure(Path(folder), options.layers, options.rounds)
    print(describe_machine())
    print(f"{num_bytes / 1e6:.0f} MB of parameters, {options.rounds} rounds")
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"{name:<12} {middle:7.1f} ms   {min(found):.1f} to {max(found):.1f}")


if __name__ == "__main__":
    main()
