"""One training step as data, and the comparison of two of them."""

import copy
import dataclasses
from collections import UserDict, deque

import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from samestep import tree
from samestep.engine import ThreadEngine

ATOL = 1e-10  # float64; another order of additions changes such sums by some 1e-15


@dataclasses.dataclass
class Step:
    """What one forward and backward left behind."""

    output: object
    loss: torch.Tensor
    input_gradients: list
    gradients: dict  # by the parameter's name; None where no gradient arrived


def tensors_of(value):
    """Every tensor in an output; a packed sequence as the padded tensor that it stands for."""
    found = []
    for _, leaf in tree.iter_leaves(value, is_leaf=lambda leaf: isinstance(leaf, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            leaf = pad_packed_sequence(leaf, batch_first=True)[0]
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            found.append(leaf)
    return found


def score(output):
    """A loss in which every number of the output has a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in tensors_of(output):
        weights = torch.arange(leaf.numel(), dtype=torch.float64).cos().view(leaf.shape)
        total = total + (weights * leaf).sum() + (leaf * leaf).sum()
    return total


def train_step(model, args, kwargs, leaves=()):
    """Run forward and backward once; ``leaves`` are the inputs that want a gradient."""
    model.zero_grad()
    output = model(*args, **kwargs)
    loss = score(output)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Step(output, loss.detach(), *copy.deepcopy(([leaf.grad for leaf in leaves], gradients)))


def use_workers(model, num_workers):
    """Give the wrapper's shards this many threads, whatever the machine has."""
    model._samestep_runtime.threads = ThreadEngine(1, num_workers=num_workers)
    return model


def assert_alike(one, other, atol=ATOL):
    """Equal structure and types all the way down; numbers within ``atol`` (0: bit for bit)."""
    assert type(one) is type(other)
    if isinstance(one, PackedSequence):
        assert_alike(pad_packed_sequence(one), pad_packed_sequence(other), atol)
    elif isinstance(one, torch.Tensor):
        assert one.requires_grad == other.requires_grad
        torch.testing.assert_close(one, other, rtol=0, atol=atol, equal_nan=True)
    elif dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        assert_alike([getattr(one, n) for n in names], [getattr(other, n) for n in names], atol)
    elif isinstance(one, dict | UserDict):
        assert_alike(list(one.items()), list(other.items()), atol)
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_alike(left, right, atol)
    else:
        assert one == other
