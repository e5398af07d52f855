"""Plain values: what ``torch.load(weights_only=True)`` reads without being told of any class.

What it holds: :func:`to_plain`, which walks a value, copies what must be copied and refuses the
rest by name. Why: a checkpoint that only its own script can open, or that is found unreadable on
the day it is needed, is none.

Guarantees: what comes back can be read by ``torch.load(weights_only=True)``; a refusal names the
place and the class. A small view of a large tensor is only its own values. With ``copy=True`` no
tensor shares memory with the original, and tensors that shared memory exactly (tied weights) still
do.
Must not: know what the values are for.
"""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["to_plain"]

_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.device, torch.dtype})
_MAX_DEPTH = 100


def to_plain(value: Any, path: str, *, copy: bool = False) -> Any:
    """Return ``value`` made of plain containers, numbers, text and tensors on the CPU.

    Args:
        value: anything; a parameter comes back as a tensor.
        path: how an error calls it.
        copy: take a snapshot: what happens to the original later does not matter.

    Raises:
        TypeError: something in it could not be read back, or has no values (the meta device); the
            message says where it is.
        ValueError: it is nested deeper than 100 levels, or holds itself.

    Example:
        >>> to_plain({"step": 3, "rows": [torch.zeros(2)]}, "values")
        {'step': 3, 'rows': [tensor([0., 0.])]}
        >>> to_plain({"names": [int]}, "values")
        Traceback (most recent call last):
        TypeError: values['names'][0] is of class type, which torch.load(weights_only=True) ...
    """
    return _Walk(copy).walk(value, path, 0)


class _Walk:
    def __init__(self, copy: bool) -> None:
        self._copy = copy
        self._copies: dict[Any, Tensor] = {}

    def walk(self, value: Any, path: str, depth: int) -> Any:
        cls = type(value)
        if cls in _ATOMS:
            return value
        if cls is Tensor or cls is nn.Parameter:
            return self._tensor(value, path)
        if _is_scalar(value):
            return value.item()
        if depth > _MAX_DEPTH:
            raise ValueError(f"{path[:80]}... is nested deeper than {_MAX_DEPTH} levels")
        if cls is dict or cls is OrderedDict:
            plain = cls()
            for key, child in value.items():
                plain[_to_key(key, path)] = self.walk(child, f"{path}[{key!r}]", depth + 1)
            if cls is OrderedDict:  # a module's state_dict keeps the versions of its parts there
                for name, extra in vars(value).items():
                    setattr(plain, name, self.walk(extra, f"{path}.{name}", depth + 1))
            return plain
        if cls is list or cls is tuple:
            return cls(self.walk(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value))
        return _probe(value, path)

    def _tensor(self, value: Tensor, path: str) -> Tensor:
        plain = value.detach()
        if plain.is_meta:
            raise TypeError(
                f"{path} is on the meta device and has no values to save; give the module its "
                "memory and values first: module.to_empty(device=...), then load or initialise them"
            )
        if not (self._copy or plain.device.type != "cpu" or _is_part(plain)):
            return plain
        if plain.layout is not torch.strided:
            return plain.cpu().clone()
        where = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
        if where not in self._copies:
            self._copies[where] = plain.clone() if plain.device.type == "cpu" else plain.cpu()
        return self._copies[where]


def _is_part(tensor: Tensor) -> bool:
    """Is its memory more than its own? torch.save would write all of it."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _is_scalar(value: Any) -> bool:
    """Is it one of numpy's numbers or texts, of which Python has the same?"""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return False
    return type(value.item()) in _ATOMS


def _to_key(key: Any, path: str) -> Any:
    if _is_scalar(key):
        return key.item()
    if type(key) not in _ATOMS:
        _probe(key, f"the key {key!r} of {path}")
    return key


def _probe(value: Any, path: str) -> Any:
    """Return what torch reads back of a value of any other class, refuse what it does not read."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        cls = type(value)
        name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}."
        name += "" if cls.__module__ == "builtins" else cls.__qualname__
        raise TypeError(
            f"{path} is of class {name}, which torch.load(weights_only=True) does not read back; "
            "pass numbers, text, tensors and lists or dicts of them, or an object with state_dict()"
        ) from error
