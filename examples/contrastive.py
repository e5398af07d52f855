"""A contrastive loss: every row of the batch is compared with every other one.

    python examples/contrastive.py --replicas 2 --steps 30

The loss stands outside the wrapper and sees the embeddings of the whole batch, so each row has the
batch's other rows as negatives, whatever the number of replicas. The last lines show what the loss
would be with those of its own shard only; a shard of one row has none. The same training runs on
the plain module too.
"""

import argparse

import torch
from torch import nn

from samestep import DataParallel

BATCH = 64  # pairs per step
FEATURES = 16  # of a sample
HIDDEN_CAUSES = 4  # what the two views of a sample have in common
TEMPERATURE = 0.2
TOLERANCE = 1e-10  # float64: the two runs may differ in the order of additions only
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def make_model():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 8))
    return encoder.double().to(DEVICE)


def make_pairs(source, mixing):
    """Two noisy views (BATCH, FEATURES) of the same hidden causes."""
    causes = torch.randn(BATCH, HIDDEN_CAUSES, generator=source, dtype=torch.float64)
    clean = causes @ mixing
    noise = torch.randn(2, BATCH, FEATURES, generator=source, dtype=torch.float64)
    return (clean + noise[0]).to(DEVICE), (clean + noise[1]).to(DEVICE)


def contrastive_loss(first, second):
    """Each row must find its other view among all rows, in both directions."""
    first, second = (nn.functional.normalize(view, dim=1) for view in (first, second))
    similarity = first @ second.T / TEMPERATURE
    target = torch.arange(len(first), device=first.device)
    loss = nn.functional.cross_entropy(similarity, target)
    return (loss + nn.functional.cross_entropy(similarity.T, target)) / 2


def train(model, steps):
    """The ordinary loop; returns the loss of each step and the last embeddings."""
    source = torch.Generator().manual_seed(1)
    mixing = torch.randn(HIDDEN_CAUSES, FEATURES, generator=source, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    losses = []
    for _ in range(steps):
        first, second = make_pairs(source, mixing)
        first, second = model(first), model(second)  # two forwards before one backward
        loss = contrastive_loss(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, (first.detach(), second.detach())


def main():
    parser = argparse.ArgumentParser(description="a contrastive loss over the whole batch")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--steps", type=int, default=30, help="training steps of each model")
    parser.add_argument("--replicas", type=int, default=2, help="replicas that share each batch")
    args = parser.parse_args()
    if min(args.steps, args.replicas) < 1:
        parser.error("--steps and --replicas must be at least 1")

    plain, _ = train(make_model(), args.steps)

    model = make_model()
    model = DataParallel(model, replicas=args.replicas)  # <- the one line
    parallel, (first, second) = train(model, args.steps)

    print(f"replicas: {model.num_replicas}")
    print("step   plain loss   parallel loss")
    for step in range(0, args.steps, max(1, args.steps // 8)):
        print(f"{step:4d}   {plain[step]:10.6f}   {parallel[step]:13.6f}")
    print(f"loss: {parallel[0]:.6f} -> {parallel[-1]:.6f}")

    shards = zip(first.chunk(args.replicas), second.chunk(args.replicas), strict=True)
    alone = [contrastive_loss(*shard).item() for shard in shards]
    print(f"last loss with the negatives of all {BATCH} rows: {parallel[-1]:.4f}")
    print(f"with those of the own shard only: {sum(alone) / len(alone):.4f}")
    lonely = sum(len(shard) == 1 for shard in first.chunk(args.replicas))
    if lonely:
        print(f"(shards of one row: {lonely} of {len(alone)}; without negatives their loss is 0)")
    deviation = max(abs(a - b) for a, b in zip(plain, parallel, strict=True))
    print(f"largest deviation from the plain module: {deviation:.1e} (tolerance {TOLERANCE:.0e})")


if __name__ == "__main__":
    main()
