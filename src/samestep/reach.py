"""Of what kind an object is, and what a function or an object holds, one level down.

What it holds: the kinds of objects that are never copied, and a few questions to functions, closure
cells and plain objects. Why: a replica's hooks
and lambdas must not go on pointing at the source module, so somebody has to see whether they do.
Must not: know modules, or go further than one level.
"""

from __future__ import annotations

import enum
import functools
import logging
import types
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

__all__ = [
    "ATOMS",
    "CONTAINERS",
    "EMPTY",
    "SHARED",
    "SHARED_NAMES",
    "cell_content",
    "global_names",
    "referents",
    "set_state",
]

ATOMS: frozenset[type] = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, slice, type, type(...),
        type(NotImplemented), types.BuiltinFunctionType, types.ModuleType, types.CodeType,
        types.MethodDescriptorType, types.WrapperDescriptorType, types.GenericAlias, property,
        torch.dtype, torch.layout, torch.memory_format, torch.Size,
    }
)  # fmt: skip
# Never copied: they hold the training's state or data, or are identities of their own.
SHARED = (
    enum.Enum, type, logging.Logger, torch.optim.Optimizer, torch.utils.data.DataLoader,
    torch.utils.data.Dataset, torch._C.Generator, types.GeneratorType,
)  # fmt: skip
# The same, by name: importing them would cost time, or they are private.
SHARED_NAMES = {"torch.fx.graph.Graph", "torch._subclasses.fake_tensor.FakeTensor"}
CONTAINERS = (dict, list, set, deque)

EMPTY = object()  # the content of a closure cell without one


def cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return EMPTY


def referents(value: Any) -> Iterable[Any]:
    """What ``value`` holds, one level down; only kinds through which a user would hold a module."""
    if isinstance(value, types.CellType):
        return (cell_content(value),)
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return tuple(value)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, weakref.ref):
        return (value(),)
    return tuple(getattr(value, "__dict__", {}).values())


def global_names(code: types.CodeType) -> Iterable[str]:
    """Names that ``code`` and the functions nested in it may look up as globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def set_state(copied: Any, state: Any) -> None:
    """Give an object the state that ``__reduce_ex__`` told of another."""
    if hasattr(copied, "__setstate__"):
        copied.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        copied.__dict__.update(attributes)
    for name, entry in (slots or {}).items():
        object.__setattr__(copied, name, entry)
