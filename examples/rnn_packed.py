"""An LSTM on sequences of different lengths, packed; the wrapper cuts the pack by sequences.

    python examples/rnn_packed.py --replicas 2 --steps 40

The task: the mean of a sequence of random numbers. The same training runs on the plain module and
on the wrapped one, and the losses are printed side by side.
"""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from samestep import DataParallel

BATCH = 48  # sequences per step
SHORTEST, LONGEST = 3, 20  # values per sequence
HIDDEN = 24  # features of the LSTM's state
TOLERANCE = 1e-10  # float64: the two runs may differ in the order of additions only
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


class MeanReader(nn.Module):
    """Reads a packed batch of sequences; one number per sequence."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(input_size=1, hidden_size=HIDDEN)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, packed):
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1]).squeeze(-1)


def make_batch(generator):
    """A list of sequences (length, 1) and their means, shape (BATCH,)."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (BATCH,), generator=generator)
    sequences = [torch.randn(n, 1, generator=generator, dtype=torch.float64) for n in lengths]
    sequences = [sequence.to(DEVICE) for sequence in sequences]
    return sequences, torch.stack([sequence.mean() for sequence in sequences])


def train(model, steps):
    """The ordinary loop; returns the loss of each step."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        sequences, target = make_batch(generator)
        packed = pack_sequence(sequences, enforce_sorted=False)
        loss = nn.functional.mse_loss(model(packed), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_model():
    torch.manual_seed(0)
    return MeanReader().double().to(DEVICE)


def main():
    parser = argparse.ArgumentParser(description="an LSTM on packed sequences")
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
    print("step   plain loss   parallel loss")
    for step in range(0, args.steps, max(1, args.steps // 8)):
        print(f"{step:4d}   {plain[step]:10.6f}   {parallel[step]:13.6f}")
    print(f"loss: {parallel[0]:.6f} -> {parallel[-1]:.6f}")
    deviation = max(abs(a - b) for a, b in zip(plain, parallel, strict=True))
    print(f"largest deviation from the plain module: {deviation:.1e} (tolerance {TOLERANCE:.0e})")


if __name__ == "__main__":
    main()
