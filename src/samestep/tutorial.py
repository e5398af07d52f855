"""The data-parallel tutorial as a program: what splitting a batch looks like from both sides.

What it holds: the classic first program on data parallelism. A random dataset, a model of one
linear layer that prints what it sees, a loop that prints what the script sees.

Why it exists: those printed lines are the shortest proof that the whole batch goes in, that each
replica sees its own rows, and that the whole output comes out.

Guarantees:
    - every statement that it prints has been checked in this very run, on this very device;
    - a line is one write, so lines of replicas that run at the same time do not mix;
    - the order of the lines *inside* one batch is the order in which replicas finished.

It must not know how the wrapper works: it uses ``DataParallel`` as any script would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from samestep.module import DataParallel

__all__ = ["run"]

INPUT_SIZE = 5
OUTPUT_SIZE = 2

Echo = Callable[[str], object]  # takes one line without its line end


class RandomDataset(Dataset[Tensor]):
    """``rows`` samples of ``size`` random features each."""

    def __init__(self, size: int, rows: int) -> None:
        self.data = torch.randn(rows, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


def run(
    replicas: int | None = None, *, rows: int = 100, batch: int = 30, echo: Echo | None = None
) -> None:
    """Run the tutorial's program.

    Args:
        replicas: how many replicas; None lets the wrapper decide as in any script.
        rows: samples in the dataset, at least 1.
        batch: rows per batch, at least 1; the last batch may be smaller.
        echo: called with each line. It may be called from several threads at a time. Default:
            write the line to standard output.

    Raises:
        ValueError: the wrapper cannot have that many replicas, or a count is below 1.
    """
    for name, count in (("rows", rows), ("batch", batch)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1 ({name}: {count})")
    say = write_line if echo is None else echo
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    model = DataParallel(make_model(say), replicas=replicas)
    show_devices_in_use(model, say)
    show_moves(model, device, say)

    loader = DataLoader(RandomDataset(INPUT_SIZE, rows), batch_size=batch, shuffle=True)
    for data in loader:
        inputs = data.to(device)
        outputs = model(inputs)
        say(f"Outside: input size {inputs.size()} output_size {outputs.size()}")


def make_model(say: Echo) -> nn.Module:
    """A linear layer that says which part of the batch reaches it."""

    # The class closes over `say` instead of keeping it as an attribute: what a module holds belongs
    # to its replica, and all replicas must speak to the same listener.
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(INPUT_SIZE, OUTPUT_SIZE)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.fc(inputs)
            say(f"\tIn Model: input size {inputs.size()} output size {outputs.size()}")
            return outputs

    return Model()


def show_devices_in_use(model: DataParallel, say: Echo) -> None:
    """Name the replicas and where they are; one replica is nothing to speak of."""
    if model.num_replicas > 1:
        devices = ", ".join(dict.fromkeys(str(slot.device) for slot in model.slots))
        say(f"Let's use {model.num_replicas} replicas on {devices}!")


def show_moves(model: nn.Module, device: torch.device, say: Echo) -> None:
    """Show that ``.to`` moves a module in place, but returns another tensor."""
    moved = model.to(device)
    if moved is model and all(p.device.type == device.type for p in model.parameters()):
        say(f"model.to({str(device)!r}): the model itself is there now, nothing to assign")

    tensor = torch.zeros(1)
    there = tensor.to(device)
    if there is tensor:
        say(f"tensor.to({str(device)!r}): was there already, so this is the same tensor")
    else:
        say(f"tensor.to({str(device)!r}): a copy, the tensor itself stays on {tensor.device}")
    wider = tensor.to(torch.float64)
    if wider is not tensor and tensor.dtype != wider.dtype:
        say(f"tensor.to({wider.dtype}): a copy, the tensor itself stays {tensor.dtype}")
    say("so write: tensor = tensor.to(...)")


def write_line(line: str) -> None:
    """Print in one write; ``print`` makes two, between which another thread's line may come."""
    sys.stdout.write(line + "\n")
