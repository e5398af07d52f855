"""How fast is a training step on CPU slots, against the plain module at its better setting?

Usage: python benchmarks/training/run.py [--models mlp ...] [--blocks 40] [--save NAME]
"""

import argparse
import copy
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import compare, describe_machine, ratio, save

from samestep import DataParallel


class Block(nn.Module):
    """A residual block of two 3x3 convolutions."""

    def __init__(self, num_in, num_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        same = stride == 1 and num_in == num_out
        self.skip = nn.Identity() if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class Recurrent(nn.Module):
    """A word-level language model: two LSTM layers of 200."""

    def __init__(self, vocabulary=10_000, width=200):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0]).flatten(1)


class SmallGPT(nn.Module):
    """A character-level transformer: 4 layers, 4 heads, width 128, context 64."""

    def __init__(self, vocabulary=65, width=128, context=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens) + self.place, mask=mask)).flatten(1)


def make_mlp():
    sizes = [64, 256, 256]
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(256, 64)


def make_lenet():
    net = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    return net, torch.randn(128, 1, 28, 28)


def make_res20():
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(a, b, 2 if b > a else 1) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*stem, *blocks, *head), torch.randn(64, 3, 32, 32)


MODELS = {
    "mlp": make_mlp,
    "lenet": make_lenet,
    "res20": make_res20,
    "lstm": lambda: (Recurrent(), torch.randint(10_000, (20, 35))),
    "gpt": lambda: (SmallGPT(), torch.randint(65, (12, 64))),
}


def make_step(model, x, num_threads):
    def step():
        torch.set_num_threads(num_threads)
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def measure(name, num_replicas, num_blocks):
    torch.manual_seed(0)
    net, x = MODELS[name]()
    cores = torch.get_num_threads()
    wrapped = DataParallel(copy.deepcopy(net), replicas=num_replicas)
    variants = {
        "plain, 1 thread": make_step(net, x, 1),
        f"plain, {cores} threads": make_step(net, x, cores),
        f"{num_replicas} replicas": make_step(wrapped, x, cores),
    }
    samples = compare(variants, num_blocks=num_blocks)
    torch.set_num_threads(cores)
    return samples


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--save", metavar="NAME", help="keep the raw samples under this name")
    options = parser.parse_args()
    print(describe_machine())
    record = {}
    for name in options.models:
        samples = record[name] = measure(name, options.replicas, options.blocks)
        *baselines, candidate = samples
        for baseline in baselines:
            middle, low, high = ratio(samples, candidate, baseline)
            print(f"{name:6} {middle:5.2f} times {baseline} [{low:.2f}, {high:.2f}]")
    if options.save:
        print(save(Path(__file__).parent, options.save, {"ms_per_step": record}))


if __name__ == "__main__":
    main()
