"""A contrastive loss over a batch that is 32 times too large for the memory.

    python examples/large_batch.py --steps 4

Every image must find its other view among all others, so the loss needs the whole batch, but the
memory holds the activations of a 32nd of it. With ``recompute=True`` the shards take turns and keep
nothing: backward runs each shard's forward again. The loss stays outside and sees all rows. The
memory is emulated: a budget, and a count of the bytes of all tensors.
"""

import argparse
import weakref

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep import DataParallel

TIMES = 32  # the batch is this many times what fits
FITTING = 4  # rows that fit
PAIRS = TIMES * FITTING // 2  # two views of each image are two rows


def make_model():
    torch.manual_seed(0)
    layers = []
    for num_in in (3, 16, 16, 16):
        layers += [nn.Conv2d(num_in, 16, 3, padding=1), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 16))


def make_views(source):
    """Two noisy views of each image, one after the other: (2 * PAIRS, 3, 24, 24)."""
    images = nn.functional.interpolate(torch.rand(PAIRS, 3, 2, 2, generator=source), size=24)
    return images.repeat(2, 1, 1, 1) + 0.1 * torch.randn(2 * PAIRS, 3, 24, 24, generator=source)


def contrastive_loss(rows):
    """InfoNCE: each row must find its other view among all rows, in both directions."""
    first, second = normalize(rows).chunk(2)
    similarity, target = first @ second.T / 0.2, torch.arange(len(first))
    return (cross_entropy(similarity, target) + cross_entropy(similarity.T, target)) / 2


def run_step(model, views):
    torch.manual_seed(1)  # the same dropout in every run
    loss = contrastive_loss(model(views))
    loss.backward()
    return loss


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that exist at a time."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(outputs)):
            memory = tensor.untyped_storage()
            if memory._cdata not in self.sizes:
                self.sizes[memory._cdata] = memory.nbytes()
                weakref.finalize(memory, self.sizes.pop, memory._cdata)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return outputs


def measure_peak(model, views):
    """The most bytes that a step makes and holds at a time; its gradients are among them."""
    model.zero_grad()
    held = Held()
    for tensor in (views, *model.parameters()):  # there before
        held.sizes[tensor.untyped_storage()._cdata] = 0
    with held:
        run_step(model, views)
    return held.peak


def main():
    parser = argparse.ArgumentParser(description="a batch that is too large")
    parser.add_argument("--steps", type=int, default=4, help="training steps (default: 4)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")

    source = torch.Generator().manual_seed(2)
    views = make_views(source)
    budget = 1.2 * measure_peak(make_model(), views[:FITTING])
    print(f"memory: {budget / 1e6:.1f} MB, for a step on {FITTING} rows; batch: {len(views)}")

    kept = DataParallel(make_model(), replicas=TIMES, workers=1)
    needed = measure_peak(kept, views)
    print(f"activations kept: {needed / 1e6:.1f} MB, {needed / budget:.1f} times the memory")

    model = make_model()
    model = DataParallel(model, replicas=TIMES, workers=1, recompute=True)  # <- the one line
    run_step(model, views)  # the first call of a wrapper copies parameters, to see what it writes
    needed = measure_peak(model, views)
    print(f"run again in backward: {needed / 1e6:.1f} MB, {needed / budget:.1f} times the memory")

    pairs = zip(kept.parameters(), model.parameters(), strict=True)
    answer = "yes" if all(torch.equal(one.grad, other.grad) for one, other in pairs) else "no"
    print(f"gradients of both equal to the last bit: {answer}")

    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = run_step(model, make_views(source))
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
