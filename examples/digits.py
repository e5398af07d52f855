"""A convolutional network on handwritten digits, on several replicas and plain, side by side.

    python examples/digits.py --replicas 2 --steps 300

1. Check: both take the same steps in float64, and every loss and gradient is compared. The two must
   be the same computation for this: dropout is off (a shard draws its own random numbers, so other
   cells are dropped than in the plain run) and BatchNorm is synchronised.
2. Train: float32, dropout on, BatchNorm by shard; accuracy on rows that were held out.
3. Speed: blocks of steps of both in turn, and the median of the blocks.
"""

import argparse
import statistics
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

from samestep import DataParallel

BATCH = 128  # images per step
HELD_OUT = 360  # of 1797 images
TOLERANCE = 1e-10  # float64: the two runs may differ in the order of additions only
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def make_model(dropout):
    """Images (B, 1, 8, 8) to scores (B, 10)."""
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    last = [nn.Dropout(dropout), nn.Flatten(), nn.Linear(64 * 4 * 4, 10)]
    return nn.Sequential(*first, *second, *last).to(DEVICE)


def load_data():
    """Images and labels to train on, and those held out."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(data.images).float().unsqueeze(1)[order].to(DEVICE) / 16
    labels = torch.from_numpy(data.target)[order].to(DEVICE)
    return (images[:-HELD_OUT], labels[:-HELD_OUT]), (images[-HELD_OUT:], labels[-HELD_OUT:])


def train(model, data, steps, title=None):
    """The ordinary loop; yields the loss after each step, with the gradients still in place."""
    images, labels = data
    generator = torch.Generator().manual_seed(1)  # the same batches for every model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    # disable=None: tqdm shows itself in a terminal only
    progress = tqdm(range(steps), title, disable=title is None or None, ncols=88)
    for _ in progress:
        rows = torch.randint(len(images), (BATCH,), generator=generator)
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress.set_postfix_str(f"loss {loss.item():.4f}", refresh=False)
        yield loss.item()


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    return (model(images).argmax(1) == labels).double().mean().item()


def compare(data, replicas, steps):
    """Print how far losses and gradients of the wrapped and the plain module are apart."""
    data = (data[0].double(), data[1])
    plain, model = make_model(dropout=0).double(), make_model(dropout=0).double()
    model = DataParallel(model, replicas=replicas, sync_batch_norm=True)
    pairs = zip(train(plain, data, steps), train(model, data, steps), strict=True)
    print("step   plain loss   parallel loss   loss apart by   gradients apart by")
    largest = 0.0
    for step, (loss, loss_k) in enumerate(pairs):
        loss_apart = abs(loss - loss_k)
        weights = zip(plain.parameters(), model.parameters(), strict=True)
        apart = max((p.grad - q.grad).abs().max().item() for p, q in weights)
        largest = max(largest, loss_apart, apart)
        print(f"{step:4d}   {loss:10.6f}   {loss_k:13.6f}   {loss_apart:13.1e}   {apart:18.1e}")
    print(f"largest deviation from the plain module: {largest:.1e} (tolerance {TOLERANCE:.0e})")


def measure(models, data, blocks=9, steps=10):
    """Milliseconds per step for each model, the median over interleaved blocks; one to warm up."""
    times = [[] for _ in models]
    for _ in range(blocks + 1):
        for model, samples in zip(models, times, strict=True):
            start = time.perf_counter()
            list(train(model, data, steps))
            samples.append((time.perf_counter() - start) / steps * 1e3)
    return [statistics.median(samples[1:]) for samples in times]


def main():
    parser = argparse.ArgumentParser(description="digits, on several replicas and plain")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model")
    parser.add_argument("--replicas", type=int, default=2, help="replicas that share each batch")
    args = parser.parse_args()
    if min(args.steps, args.replicas) < 1:
        parser.error("--steps and --replicas must be at least 1")
    rows, held_out = load_data()
    print("1. The same step? (float64, dropout off, BatchNorm synchronised)")
    compare(rows, args.replicas, min(args.steps, 10))
    plain, model = make_model(dropout=0.25), make_model(dropout=0.25)
    model = DataParallel(model, replicas=args.replicas)  # <- the one line
    print(f"2. Training on {model.num_replicas} replicas (float32, dropout on)")
    losses = list(train(model, rows, args.steps, "in parallel"))
    plain_losses = list(train(plain, rows, args.steps, "plain"))
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}   (plain: {plain_losses[-1]:.4f})")
    ours, theirs = accuracy(model, *held_out), accuracy(plain, *held_out)
    print(f"accuracy on {HELD_OUT} held-out rows: {ours:.1%}   (plain: {theirs:.1%})")
    print("they may differ: dropout draws other cells, and BatchNorm normalises shard by shard")
    ours, theirs = measure([model, plain], rows)
    print(f"3. Speed: {theirs / ours:.2f} times that of the plain module ", end="")
    print(f"({ours:.1f} and {theirs:.1f} ms per step; plain: {torch.get_num_threads()} threads)")


if __name__ == "__main__":
    main()
