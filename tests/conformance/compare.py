"""Comparing a wrapped module with the plain one: outputs, types, gradients, what is left behind."""

import copy
import dataclasses
from collections.abc import Mapping

import torch
from torch.nn.utils.rnn import PackedSequence

from samestep import DataParallel

# Differences that the order of floating-point additions can make; values here are of order one.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
}


def rows(*shape, grad=False):
    """Random float64 values."""
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


def assert_same(got, expected, path="output"):
    """The same types all the way down, the same values up to rounding."""
    assert type(got) is type(expected), f"{path}: {type(got)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert_close(got, expected, path)
    elif isinstance(expected, PackedSequence):
        for name in expected._fields:
            assert_same(getattr(got, name), getattr(expected, name), f"{path}.{name}")
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected), f"{path}: other keys"
        for key in expected:
            assert_same(got[key], expected[key], f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            one, other = getattr(got, field.name), getattr(expected, field.name)
            assert_same(one, other, f"{path}.{field.name}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), f"{path}: other length"
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    else:
        assert got == expected, path


def assert_close(got, expected, path=""):
    """One tensor: dtype, shape, layout, whether it needs a gradient, and values."""
    assert (got is None) == (expected is None), f"{path}: {got} instead of {expected}"
    if expected is None:
        return
    assert got.dtype == expected.dtype, path
    assert got.layout == expected.layout, path
    assert got.requires_grad == expected.requires_grad, path
    if expected.is_nested:
        assert len(got.unbind()) == len(expected.unbind()), path
        for one, other in zip(got.unbind(), expected.unbind(), strict=True):
            assert_close(one, other, path)
        return
    assert got.shape == expected.shape, f"{path}: {got.shape} is not {expected.shape}"
    got, expected = (x.detach().to_dense() for x in (got, expected))
    tolerance = TOLERANCE.get(expected.dtype, 0.0)
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{path}: {text}"
    )


def assert_same_state(got, expected):
    """Two modules: state_dict and gradients."""
    assert_same(dict(got.state_dict()), dict(expected.state_dict()), "state")
    for (name, one), (_, other) in zip(
        got.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert one.requires_grad == other.requires_grad, name
        assert_close(one.grad, other.grad, f"gradient of {name}")


def tensors_of(tree):
    """Every tensor of an output."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, PackedSequence):
        return [tree.data]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    elif dataclasses.is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    if isinstance(tree, list | tuple):
        return [tensor for entry in tree for tensor in tensors_of(entry)]
    return []


def backward(output):
    """Backward of a loss in which every element of every output has a weight of its own."""
    loss = 0.0
    for tensor in tensors_of(output):
        if tensor.requires_grad:
            tensor = tensor.to_dense() if tensor.is_sparse else tensor
            values = tensor.values() if tensor.is_nested else tensor
            weights = torch.linspace(0.5, 1.5, values.numel(), dtype=torch.float64)
            loss = loss + (values.reshape(-1) * weights.to(values.dtype)).sum()
    if isinstance(loss, torch.Tensor):
        (loss.real if loss.is_complex() else loss).backward()


def twin(module):
    """A copy of a module, what the user put on its parameters included (deepcopy forgets it)."""
    copied = copy.deepcopy(module)
    for one, other in zip(copied.parameters(), module.parameters(), strict=True):
        one.__dict__.update(other.__dict__)
    return copied


def pair(make):
    """Two modules made by ``make`` with the same parameters: for modules that hold closures."""
    one, other = make(), make()
    other.load_state_dict(one.state_dict())
    return one, other


def check_same(module, *args, replicas=3, num_calls=1, options=None, plain=None, **kwargs):
    """Run a module plain and wrapped, forward and backward, and compare everything.

    Args:
        module: is wrapped; ``plain`` is its twin, a copy if None.
        args, kwargs: of the calls.
        replicas, options: of the wrapper.
        num_calls: how many steps.

    Returns:
        the wrapper and its last output, for what else there is to be said.
    """
    plain = twin(module) if plain is None else plain
    model = DataParallel(module, replicas=replicas, **(options or {}))
    # Each side has its own leaves; whoever wants input gradients passes leaves.
    mine, theirs = copy_leaves((args, kwargs)), copy_leaves((args, kwargs))
    for _ in range(num_calls):
        expected = plain(*theirs[0], **theirs[1])
        output = model(*mine[0], **mine[1])
        assert_same(output, expected)
        backward(expected)
        backward(output)
        assert_same_state(module, plain)
    for one, other in zip(leaves_of(mine), leaves_of(theirs), strict=True):
        assert_close(one.grad, other.grad, "gradient of an input")
    return model, output


def copy_leaves(tree):
    """The same arguments, with a copy of each tensor that needs a gradient."""
    if isinstance(tree, torch.Tensor) and tree.requires_grad:
        return tree.detach().clone().requires_grad_()
    if type(tree) in (list, tuple):
        return type(tree)(copy_leaves(entry) for entry in tree)
    if type(tree) is dict:
        return {key: copy_leaves(entry) for key, entry in tree.items()}
    return tree


def leaves_of(tree):
    """Every tensor that needs a gradient, of plain containers."""
    return [tensor for tensor in tensors_of(tree) if tensor.requires_grad]
