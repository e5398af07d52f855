"""What a function or an object holds, one level down.

What it holds: a few questions to functions, closure cells and plain objects. Why: a replica's hooks
and lambdas must not go on pointing at the source module, so somebody has to see whether they do.
Must not: know modules, or go further than one level.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

__all__ = ["EMPTY", "cell_content", "global_names", "referents"]

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
