"""The mutable containers of an object graph, and what they held at one moment.

What it holds: :class:`Snapshot`, which sees by identity what has changed, and the few operations on
a cell. A cell is one mutable container: a dict (a module's or an object's ``__dict__`` included), a
list, a set, a deque. Why: a module tree has thousands of entries, and whether any was exchanged is
asked at every call. Guarantees: comparing runs in C loops and calls no method of the user's
classes (but of a key put in the place of a text). Must not: know why anybody wants to know.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain, filterfalse
from typing import Any

from torch import Tensor

__all__ = ["Cell", "Snapshot", "iter_items", "key_text", "refill", "set_entry", "show_path"]

Cell = Any


class Snapshot:
    """What a fixed list of cells held at one moment, compared by identity in C loops.

    Most cells of a module tree are empty dictionaries (hooks); those are tested together.
    """

    def __init__(self, cells: list[Cell]) -> None:
        self._cells = [*cells]
        self.take()

    def take(self) -> None:
        """Remember what the cells hold now."""
        full = list(filter(None, self._cells))
        self._empty = list(filterfalse(None, self._cells))
        self._dicts = [cell for cell in full if isinstance(cell, dict)]
        self._others = [cell for cell in full if not isinstance(cell, dict)]
        # Views are live: they show what a dictionary holds whenever they are read.
        bases = [dict if type(cell) is dict else _base(cell) for cell in self._dicts]
        self._key_views = [base.keys(cell) for base, cell in zip(bases, self._dicts, strict=True)]
        self._value_views = [b.values(cell) for b, cell in zip(bases, self._dicts, strict=True)]
        self._keys = list(chain.from_iterable(self._key_views))
        self._values = list(chain.from_iterable(self._value_views))
        self._has_texts = {str}.issuperset(map(type, self._keys))
        self._items = list(chain.from_iterable(self._others))
        self._sizes = list(map(len, full))
        self._full = full
        self._contents: dict[int, Any] | None = None

    def is_current(self) -> bool:
        """Whether every cell holds the very objects that it held, in the same order."""
        return (
            not any(self._empty)
            and list(map(len, self._full)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(self._value_views), self._values))
            and self._has_its_keys()
            and all(map(operator.is_, chain.from_iterable(self._others), self._items))
        )

    def _has_its_keys(self) -> bool:
        keys = chain.from_iterable(self._key_views)
        if self._has_texts:  # equal ones are the same to any dictionary, and lists compare fast
            return list(keys) == self._keys
        return all(map(operator.is_, keys, self._keys))

    def changed(self) -> list[int]:
        """Return the indices of the cells that changed."""
        return [
            index
            for index, cell in enumerate(self._cells)
            if not _same_content(cell, self.content(index))
        ]

    def content(self, index: int) -> Any:
        """What cell ``index`` held: a dict for dicts, a list for everything else."""
        if self._contents is None:  # sliced out of the flat lists only when something changed
            self._contents = self._slice()
        cell = self._cells[index]
        return self._contents.get(id(cell), {} if isinstance(cell, dict) else [])

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor held directly by a cell, possibly several times."""
        return _tensors(chain(self._values, self._items))

    def _slice(self) -> dict[int, Any]:
        contents: dict[int, Any] = {}
        at_dict = at_other = 0
        for cell, size in zip(self._full, self._sizes, strict=True):
            if isinstance(cell, dict):
                stop = at_dict + size
                contents[id(cell)] = dict(
                    zip(self._keys[at_dict:stop], self._values[at_dict:stop], strict=True)
                )
                at_dict = stop
            else:
                contents[id(cell)] = self._items[at_other : at_other + size]
                at_other += size
        return contents


def iter_items(cell: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """The entries of a dictionary, past any method of the user's class."""
    return _base(cell).items(cell)


def refill(cell: Cell, values: Iterable[Any]) -> None:
    """Replace what a cell holds; ``values`` are pairs where it is a dictionary."""
    if isinstance(cell, dict):
        _base(cell).clear(cell)
        if type(cell) in (dict, OrderedDict):
            cell.update(values)
        else:
            for key, value in values:
                set_entry(cell, key, value)
        return
    cell.clear()
    cell.update(values) if isinstance(cell, set) else cell.extend(values)


def key_text(key: Any) -> str:
    """How a path shows an entry."""
    return f".{key}" if isinstance(key, str) else f"[{key!r}]"


def show_path(path: str) -> str:
    """Return the user's name of what lies at ``path``, without torch's inner dictionaries."""
    for inner in ("._modules", "._buffers", "._parameters"):
        path = path.replace(inner + ".", ".")
        path = path.removesuffix(inner)
    return path.lstrip(".")


def set_entry(cell: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry past any ``__setitem__`` of the user's class, which may do more than that."""
    _base(cell).__setitem__(cell, key, value)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _base(cell: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class whose methods keep ``cell`` consistent: an OrderedDict has an order of its own."""
    return OrderedDict if isinstance(cell, OrderedDict) else dict


def _same(values: Iterable[Any], before: list[Any]) -> bool:
    return all(map(operator.is_, values, before))


def _same_content(cell: Cell, before: Any) -> bool:
    if len(cell) != len(before):
        return False
    if isinstance(cell, dict):
        return _same(_base(cell).values(cell), list(before.values())) and _same(cell, list(before))
    return _same(cell, before)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):  # tuples are no cells: what they hold is held by their cell
            yield from _tensors(value)
