"""Containers: how to open one, and how to rebuild it with other children and the same type.

Holds :func:`open_container`, the one place that knows what a container is, the walks built on it,
and the registry of users' own batch types. It exists because torch's pytree opens only types that
were registered with it: subclasses of dict, dataclasses and dict-dataclasses are leaves there.

Guarantees: a rebuilt container has exactly the type of the opened one, with its other attributes,
default factory and maximal length; a mapping whose children all come back as they were returns the
container itself, the identical object; a container that holds itself is an error, not a hang.

Must not: know what a tensor's dims mean. This is the only door to ``torch.utils._pytree``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from samestep.adapters import (
    find_graph_functions,
    is_opened_by_attributes,
    rebuild_graphs,
    split_graphs,
)

__all__ = [
    "MAX_DEPTH",
    "BatchType",
    "Opened",
    "check_depth",
    "find_batch_type",
    "is_atom",
    "iter_leaves",
    "map_leaves",
    "open_container",
    "register_batch_type",
    "slice_rows",
]

MAX_DEPTH = 100  # levels of nesting; what goes deeper is taken for a container that holds itself

_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.device, torch.dtype})


# --------------------------------------------------------------------------------------------------
# Registered batch types
# --------------------------------------------------------------------------------------------------


class BatchType(NamedTuple):
    """How one class of users' own batches is cut, merged and counted."""

    cls: type
    split: Callable[[Any, Sequence[int]], Sequence[Any]]
    merge: Callable[[list[Any]], Any]
    rows: Callable[[Any], int]


_batch_types: dict[type, BatchType] = {}


def register_batch_type(
    cls: type,
    *,
    split: Callable[[Any, Sequence[int]], Sequence[Any]],
    merge: Callable[[list[Any]], Any],
    rows: Callable[[Any], int] | None = None,
) -> None:
    """Teach the library to cut and merge objects of a class of your own.

    Objects of ``cls`` and of its subclasses are then cut by rows like a tensor; the nearest class
    in the method resolution order counts. Registering a class again replaces what was there.

    Args:
        cls: the class.
        split: ``split(obj, sizes)`` returns one object per size, in order.
        merge: ``merge(objects)`` returns one object with the rows of all, in order.
        rows: ``rows(obj)`` returns the number of rows. Default: ``len``.

    Raises:
        TypeError: ``cls`` is not a class, or one of the functions is not callable.

    Example:
        >>> class Bag(list): ...
        >>> def split(bag, sizes):
        ...     rows = iter(bag)
        ...     return [Bag(next(rows) for _ in range(size)) for size in sizes]
        >>> def merge(bags):
        ...     return Bag(row for bag in bags for row in bag)
        >>> register_batch_type(Bag, split=split, merge=merge)
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_batch_type needs a class (got {cls!r})")
    if cls in _ATOMS or cls in (object, torch.Tensor, list, tuple, dict):
        raise TypeError(f"{cls.__name__} has fixed rules; register a class of your own")
    for name, function in (("split", split), ("merge", merge), ("rows", rows or len)):
        if not callable(function):
            raise TypeError(f"{name} must be a function (got {function!r})")
    _batch_types[cls] = BatchType(cls, split, merge, rows or len)


def find_batch_type(value: Any) -> BatchType | None:
    """Return what was registered for the class of ``value`` or its nearest base, or None."""
    own = type(value)
    if _batch_types:
        for cls in own.__mro__:
            if cls in _batch_types:
                return _batch_types[cls]
    # Only where it was imported; its classes of batches are made, and name another module.
    is_candidate = own.__module__ != "builtins" and "torch_geometric" in sys.modules
    functions = find_graph_functions(own) if is_candidate else None
    return None if functions is None else BatchType(own, *functions)


# --------------------------------------------------------------------------------------------------
# Opening
# --------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A container taken apart.

    ``keys`` are dict keys, attribute names or indices, ``children`` the values in the same order,
    ``style`` one of "key", "attribute" and "index". ``rebuild`` makes a container of the same type
    from as many children (lists and plain tuples take any number). ``context`` is what a
    pytree-registered type keeps beside its children.
    """

    keys: Sequence[Any]
    children: Sequence[Any]
    style: str
    rebuild: Callable[[Sequence[Any]], Any]
    context: Any = None

    @property
    def items(self) -> list[tuple[str, Any]]:
        """The children with the texts that a path appends for them: ``['a']``, ``.a``, ``[0]``."""
        return [
            (self.key_text(key), child) for key, child in zip(self.keys, self.children, strict=True)
        ]

    def key_text(self, key: Any) -> str:
        """Return what a path appends for the child at ``key``."""
        return f".{key}" if self.style == "attribute" else f"[{key!r}]"


def is_atom(value: Any) -> bool:
    """Is it a number, text, None, or another plain value that never holds anything?"""
    return type(value) in _ATOMS


def open_container(value: Any) -> Opened | None:
    """Take a container apart, or return None for anything that is not one.

    Containers are dict, list, tuple and deque with their subclasses (named tuples, defaultdict,
    OrderedDict among them), UserDict, dataclasses (frozen ones, and those that are dicts as well),
    types registered with torch's pytree (torch's own return types are), and objects of registered
    batch types, by their attributes. Tensors, modules and classes are never containers.
    """
    cls = type(value)
    if cls is torch.Tensor or cls in _ATOMS:
        return None
    if cls is dict:
        return _open_dict(value)
    if cls is list or cls is tuple:
        return Opened(range(len(value)), value, "index", cls)
    if isinstance(value, (torch.Tensor, nn.Module, type)):
        return None
    return _open_other(value, cls)


def _open_other(value: Any, cls: type) -> Opened | None:
    if isinstance(value, deque):
        return _open_deque(value)
    if cls in (OrderedDict, defaultdict):
        return _open_dict(value)
    if isinstance(value, tuple) and _pytree.is_structseq(value):
        # torch.return_types: fields with names, built from one sequence
        return Opened(value.__match_args__, tuple(value), "attribute", cls)  # type: ignore[attr-defined]
    if isinstance(value, torch.Size):
        return Opened(range(len(value)), value, "index", torch.Size)
    is_dataclass = hasattr(cls, "__dataclass_fields__") and not isinstance(value, (list, tuple))
    if is_dataclass and isinstance(value, dict):
        # Before torch's pytree, where such classes may be registered without names for their keys.
        return _open_dataclass(value)
    if cls in _pytree.SUPPORTED_NODES:
        return _open_registered(value, cls)
    if is_dataclass:
        return _open_dataclass(value)
    if isinstance(value, dict):
        return _open_dict(value)
    if isinstance(value, UserDict):
        return _open_user_dict(value)
    if isinstance(value, (list, tuple)):
        return _open_sequence(value, cls)
    found = find_batch_type(value)
    if found is not None and found.split is split_graphs:
        return Opened(
            list(value.keys()),
            list(value.to_dict().values()),
            "key",
            partial(rebuild_graphs, value),
        )
    if (found is not None or is_opened_by_attributes(cls)) and hasattr(value, "__dict__"):
        return _open_attributes(value)
    return None


def _open_dict(value: dict[Any, Any]) -> Opened:
    keys = list(value)
    children = list(dict.values(value))

    def rebuild(new: Sequence[Any]) -> dict[Any, Any]:
        cls = type(value)
        if cls is dict:
            return dict(zip(keys, new, strict=True))
        return _copy_dict(value, keys, children, new)

    return Opened(keys, children, "key", rebuild)


def _copy_dict(
    value: dict[Any, Any], keys: list[Any], old: list[Any], new: Sequence[Any]
) -> dict[Any, Any]:
    """Copy a dict of any class without running its own methods, which may do more than store."""
    # An OrderedDict keeps its order outside of dict's own storage.
    base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    if isinstance(value, defaultdict):
        copied: Any = defaultdict.__new__(type(value))
        defaultdict.__init__(copied, value.default_factory)
    else:
        copied = base.__new__(type(value))
    for key, child in zip(keys, new, strict=True):
        base.__setitem__(copied, key, child)
    if hasattr(value, "__dict__"):
        state = dict(value.__dict__)
        for key, before, child in zip(keys, old, new, strict=True):
            # Classes with attribute access mirror their items in attributes: both must agree.
            if isinstance(key, str) and key in state and state[key] is before:
                state[key] = child
        copied.__dict__.update(state)
    return copied  # type: ignore[no-any-return]


def _open_user_dict(value: UserDict[Any, Any]) -> Opened:
    inner = _open_dict(value.data)

    def rebuild(new: Sequence[Any]) -> Any:
        copied = _copy_shell(value)
        copied.__dict__["data"] = inner.rebuild(new)
        return copied

    return inner._replace(rebuild=rebuild)


def _open_deque(value: deque[Any]) -> Opened:
    def rebuild(new: Sequence[Any]) -> Any:
        copied = _copy_shell(value, deque)
        deque.__init__(copied, new, value.maxlen)
        return copied

    return Opened(range(len(value)), list(value), "index", rebuild)


def _open_sequence(value: Sequence[Any], cls: type) -> Opened:
    """Open a subclass of list or tuple; a named tuple has names."""

    def rebuild(new: Sequence[Any]) -> Any:
        if isinstance(value, list):
            copied = _copy_shell(value, list)
            list.extend(copied, new)
            return copied
        # Not cls(...) and not cls._make: either may have been given another signature.
        copied = tuple.__new__(cls, new)
        if hasattr(value, "__dict__"):
            copied.__dict__.update(value.__dict__)
        return copied

    names = getattr(cls, "_fields", None)
    if isinstance(value, tuple) and isinstance(names, tuple) and len(names) == len(value):
        return Opened(names, tuple(value), "attribute", rebuild)
    return Opened(range(len(value)), list(value), "index", rebuild)


def _open_dataclass(value: Any) -> Opened:
    """Open a dataclass by its fields; one that is a dict as well by its keys, then its fields."""
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    keys += [name for name in names if name not in keys]
    is_dict = isinstance(value, dict)
    items = dict(dict.items(value)) if is_dict else {}
    children = [items[key] if key in items else getattr(value, key) for key in keys]

    def rebuild(new: Sequence[Any]) -> Any:
        if is_dict:
            num_items = len(items)
            copied: Any = _copy_dict(value, keys[:num_items], children[:num_items], new[:num_items])
        else:
            copied = _copy_shell(value)
        for key, child in zip(keys, new, strict=True):
            if key in names:
                object.__setattr__(copied, key, child)  # also where the class is frozen
        return copied

    return Opened(keys, children, "key" if is_dict else "attribute", rebuild)


def _open_registered(value: Any, cls: type) -> Opened | None:
    """Open a type that was registered with torch's pytree."""
    node = _pytree.SUPPORTED_NODES[cls]
    if node.flatten_with_keys_fn is None:
        children, context = node.flatten_fn(value)
        keys: Sequence[Any] = range(len(children))
        style = "index"
    else:
        pairs, context = node.flatten_with_keys_fn(value)
        children = [child for _, child in pairs]
        keys, style = _pytree_keys([key for key, _ in pairs])
    if not children:
        return None

    def rebuild(new: Sequence[Any]) -> Any:
        return node.unflatten_fn(list(new), context)

    return Opened(keys, children, style, rebuild, context)


def _pytree_keys(entries: list[Any]) -> tuple[Sequence[Any], str]:
    if all(isinstance(entry, _pytree.GetAttrKey) for entry in entries):
        return [entry.name for entry in entries], "attribute"
    if all(isinstance(entry, _pytree.MappingKey) for entry in entries):
        return [entry.key for entry in entries], "key"
    return range(len(entries)), "index"


def _open_attributes(value: Any) -> Opened:
    names = list(value.__dict__)

    def rebuild(new: Sequence[Any]) -> Any:
        copied = _copy_shell(value)
        copied.__dict__.update(zip(names, new, strict=True))
        return copied

    return Opened(names, list(value.__dict__.values()), "attribute", rebuild)


def _copy_shell(value: Any, base: Any = object) -> Any:
    """Return an object of the same class with the same attributes.

    Made by the built-in base: neither ``__init__`` nor a ``__new__`` of the class itself is run.
    """
    copied = base.__new__(type(value))
    if hasattr(value, "__dict__"):
        copied.__dict__.update(value.__dict__)
    return copied


# --------------------------------------------------------------------------------------------------
# Walks
# --------------------------------------------------------------------------------------------------


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """Return items ``start`` to ``stop`` of a list, tuple or deque, in a container of its type."""
    if type(value) in (list, tuple):
        return value[start:stop]
    opened = open_container(value)
    assert opened is not None
    return opened.rebuild(list(opened.children)[start:stop])


def iter_leaves(
    tree: Any, path: str = "", *, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for everything in ``tree`` that is not a container, in order.

    Args:
        tree: any value.
        path: what the paths begin with.
        is_leaf: says of a container that it counts as a leaf and is not opened.

    Raises:
        ValueError: the tree is nested deeper than :data:`MAX_DEPTH`, or holds itself.
    """
    yield from _iter_leaves(tree, path, is_leaf, 0)


def _iter_leaves(
    tree: Any, path: str, is_leaf: Callable[[Any], bool] | None, depth: int
) -> Iterator[tuple[str, Any]]:
    opened = None if is_leaf is not None and is_leaf(tree) else open_container(tree)
    if opened is None:
        yield path, tree
        return
    check_depth(depth, path)
    for text, child in opened.items:
        yield from _iter_leaves(child, path + text, is_leaf, depth + 1)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to every leaf.

    A container in which nothing changed (every result is the very leaf it came from) is returned
    itself, not a copy of it.

    Raises:
        ValueError: the tree is nested deeper than :data:`MAX_DEPTH`, or holds itself.
    """
    return _map_leaves(function, tree, 0)


def _map_leaves(function: Callable[[Any], Any], tree: Any, depth: int) -> Any:
    opened = open_container(tree)
    if opened is None:
        return function(tree)
    check_depth(depth, type(tree).__name__)
    children = [_map_leaves(function, child, depth + 1) for child in opened.children]
    if all(new is old for new, old in zip(children, opened.children, strict=True)):
        return tree
    return opened.rebuild(children)


def check_depth(depth: int, path: str) -> None:
    """Raise ValueError where a walk has gone deeper than any sensible container."""
    if depth > MAX_DEPTH:
        shown = path if len(path) <= 60 else path[:57] + "..."
        raise ValueError(
            f"{shown} is nested more than {MAX_DEPTH} levels deep: does it hold itself?"
        )
