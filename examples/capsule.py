"""A capsule network with dynamic routing on handwritten digits of 8 x 8 pixels.

    python examples/capsule.py --replicas 2 --steps 40

Routing is a loop inside forward that makes its own tensors of one row per image; each replica makes
them for its shard. The same training runs on the plain module and on the wrapped one.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from samestep import DataParallel

BATCH = 64  # images per step
CLASSES = 10
TOLERANCE = 1e-10  # float64: the two runs may differ in the order of additions only
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def squash(vectors):
    """Scale each vector (last dim) to a length below one, keeping its direction."""
    square = vectors.square().sum(-1, keepdim=True)
    return vectors * square / (1 + square) / (square + 1e-9).sqrt()


class CapsuleNet(nn.Module):
    """Images (B, 1, 8, 8) to the length of each class's capsule (B, CLASSES)."""

    def __init__(self, primary_size=4, digit_size=8, routings=3):
        super().__init__()
        self.primary_size, self.routings = primary_size, routings
        self.conv = nn.Conv2d(1, 16, 3)
        self.primary = nn.Conv2d(16, 32, 3, stride=2)
        num_primary = 32 * 2 * 2 // primary_size
        shape = (num_primary, CLASSES, primary_size, digit_size)
        self.votes = nn.Parameter(0.2 * torch.randn(shape))

    def forward(self, images):
        features = self.primary(self.conv(images).relu())
        primary = squash(features.flatten(1).unflatten(1, (-1, self.primary_size)))
        votes = torch.einsum("bip,icpd->bicd", primary, self.votes)
        logits = votes.new_zeros(votes.shape[:3])  # how much capsule i votes for class c
        for _ in range(self.routings):
            shares = logits.softmax(2)
            digits = squash(torch.einsum("bic,bicd->bcd", shares, votes))
            logits = logits + torch.einsum("bicd,bcd->bic", votes, digits)
        return (digits.square().sum(-1) + 1e-9).sqrt()


def margin_loss(lengths, target):
    """Right class above 0.9, others below 0.1; outside the model, over the whole batch."""
    right = nn.functional.one_hot(target, CLASSES)
    missed = right * (0.9 - lengths).relu().square()
    false = 0.5 * (1 - right) * (lengths - 0.1).relu().square()
    return (missed + false).sum(1).mean()


def train(model, steps):
    """The ordinary loop; returns the loss and the accuracy of each step."""
    data = load_digits()
    images = torch.from_numpy(data.images).to(DEVICE).unsqueeze(1) / 16  # float64
    labels = torch.from_numpy(data.target).to(DEVICE)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history = []
    for _ in range(steps):
        rows = torch.randint(len(images), (BATCH,), generator=generator)
        lengths = model(images[rows])
        loss = margin_loss(lengths, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((loss.item(), (lengths.argmax(1) == labels[rows]).double().mean().item()))
    return history


def make_model():
    torch.manual_seed(0)
    return CapsuleNet().double().to(DEVICE)


def main():
    parser = argparse.ArgumentParser(description="a capsule network with dynamic routing")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--steps", type=int, default=40, help="training steps of each model")
    parser.add_argument("--replicas", type=int, default=2, help="replicas that share each batch")
    args = parser.parse_args()
    if min(args.steps, args.replicas) < 1:
        parser.error("--steps and --replicas must be at least 1")

    plain = train(make_model(), args.steps)

    model = make_model()
    model = DataParallel(model, replicas=args.replicas)  # <- the one line
    parallel = train(model, args.steps)

    print(f"replicas: {model.num_replicas}")
    print("step   plain loss   parallel loss   accuracy on the batch")
    for step in range(0, args.steps, max(1, args.steps // 8)):
        loss, accuracy = parallel[step]
        print(f"{step:4d}   {plain[step][0]:10.6f}   {loss:13.6f}   {accuracy:21.0%}")
    print(f"loss: {parallel[0][0]:.6f} -> {parallel[-1][0]:.6f}")
    deviation = max(abs(a[0] - b[0]) for a, b in zip(plain, parallel, strict=True))
    print(f"largest deviation from the plain module: {deviation:.1e} (tolerance {TOLERANCE:.0e})")


if __name__ == "__main__":
    main()
