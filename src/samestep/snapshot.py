"""The mutable containers of an object graph, and what they held at one moment.

What it holds: :class:`Snapshot`, which sees by identity what has changed, and the few operations on
a cell. A cell is one mutable container: a dict (a module's or an object's ``__dict__`` included), a
list, a set, a deque. Why: a module tree has thousands of entries, and whether any was exchanged is
asked at every call. Guarantees: comparing runs in C loops and calls no method of the user's
classes (but of a key put in the place of a text). Must not: know why anybody wants to know.
"""

from __future__ import annotations

import enum
import operator
import sys
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import accumulate, chain, compress
from typing import Any

from torch import Tensor

__all__ = [
    "BUILT_IN",
    "WHOLE",
    "Cell",
    "Snapshot",
    "Whole",
    "entries_of",
    "iter_items",
    "key_text",
    "refill",
    "set_entry",
    "show_path",
]

Cell = Any


class Whole(enum.Enum):
    """In the place of a key: not one entry of a cell, but all of it. (None is a key.)"""

    CELL = enum.auto()


WHOLE = Whole.CELL
#: Kinds of cells that are Python's own.
BUILT_IN = {dict, OrderedDict, list, set, deque}

try:
    from torch._C._dynamo.guards import dict_version as _read_count
except ImportError:  # a torch that names it otherwise
    _is_counting = False
    _read_count = len  # type: ignore[assignment]  # nobody is asked
else:
    _is_counting = sys.version_info < (3, 12)


class Snapshot:
    """What a fixed list of cells held at one moment, compared by identity in C loops.

    Most cells of a module tree are empty dictionaries (hooks); those are tested together. For the
    other dictionaries there is a shorter way, see the note.

    [Note: dictionaries that count]
    CPython 3.11 gives a dictionary another number at every write (PEP 509), and no two states of
    any dictionaries have one number. So an equal number says that nothing was written; another one
    says nothing, since an entry may have been put back, and then the entries are compared. Later
    Pythons have torch watch each dictionary instead: its owner would pay at every write.
    """

    def __init__(self, cells: list[Cell]) -> None:
        self._cells = [*cells]
        self.take()

    def take(self) -> None:
        """Remember what the cells hold now."""
        cells = self._cells
        # Of the user's own classes, only what they hold is asked, never whether they say they do.
        is_empty = [type(cell) in BUILT_IN and not cell for cell in cells]
        full = [i for i, found in enumerate(is_empty) if not found]
        self._empty_at = list(compress(range(len(cells)), is_empty))
        self._empty = [cells[i] for i in self._empty_at]
        counting = [i for i in full if type(cells[i]) is dict] if _is_counting else []
        others = [i for i in full if type(cells[i]) is not dict] if _is_counting else full
        # Before their entries: what another thread writes meanwhile is seen later.
        self._counts = [_read_count(cells[i]) for i in counting]
        self._counting = _Part(cells, counting, are_dicts=True)
        self._others = [
            part
            for part in (
                _Part(cells, [i for i in others if isinstance(cells[i], dict)], are_dicts=True),
                _Part(cells, [i for i in others if not isinstance(cells[i], dict)]),
            )
            if part.cells
        ]

    def is_current(self) -> bool:
        """Whether every cell holds the very objects that it held, in the same order."""
        if any(self._empty):
            return False
        counts = list(map(_read_count, self._counting.cells))
        if counts != self._counts:
            if not self._counting.is_current():
                return False
            self._counts = counts
        return all(map(_Part.is_current, self._others))

    def changed(self) -> list[int]:
        """Return the indices of the cells that changed."""
        counts = list(map(_read_count, self._counting.cells))
        suspects = [
            *compress(self._empty_at, self._empty),
            *compress(self._counting.places, map(operator.ne, counts, self._counts)),
        ]
        for part in self._others:
            suspects += part.places
        return [i for i in sorted(suspects) if not _same_content(self._cells[i], self.content(i))]

    def content(self, index: int) -> Any:
        """What cell ``index`` held: a dict for dicts, a list for everything else."""
        for part in (self._counting, *self._others):
            place = bisect_left(part.places, index)
            if part.places[place : place + 1] == [index]:
                return part.content(place)
        return {} if isinstance(self._cells[index], dict) else []

    def put_back(self) -> list[tuple[Cell, list[Any]]]:
        """Let every cell hold what it held then.

        Returns:
            The cells that held something else, and what: for :func:`refill`.
        """
        if self.is_current():
            return []
        changed = [(self._cells[index], self.content(index)) for index in self.changed()]
        now = [(cell, entries_of(cell)) for cell, _ in changed]
        for cell, before in changed:
            refill(cell, entries_of(before))
        return now

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor held directly by a cell, possibly several times."""
        return _tensors(chain.from_iterable(p.values for p in (self._counting, *self._others)))


class _Part:
    """What some cells held, that are compared as one: dictionaries, or anything else.

    Args:
        cells: all there are.
        places: indices of the ones meant, in order.
        are_dicts: whether they are dictionaries.
    """

    def __init__(self, cells: list[Cell], places: list[int], are_dicts: bool = False) -> None:
        self.places = places
        self.cells = [cells[i] for i in places]
        self._value_views: list[Any] = self.cells
        self._key_views: list[Any] = []
        if are_dicts:
            # Views are live: they show what a dictionary holds whenever they are read.
            bases = [dict if type(cell) is dict else _base(cell) for cell in self.cells]
            self._key_views = [b.keys(cell) for b, cell in zip(bases, self.cells, strict=True)]
            self._value_views = [b.values(cell) for b, cell in zip(bases, self.cells, strict=True)]
        self._are_dicts = are_dicts
        self._keys = list(chain.from_iterable(self._key_views))
        self.values = list(chain.from_iterable(self._value_views))
        self._has_texts = {str}.issuperset(map(type, self._keys))
        self._sized = self._key_views or self.cells
        self._sizes = list(map(len, self._sized))
        self._stops: list[int] = []

    def is_current(self) -> bool:
        values, keys = map(chain.from_iterable, (self._value_views, self._key_views))
        if list(map(len, self._sized)) != self._sizes:
            return False
        if not all(map(operator.is_, values, self.values)):
            return False
        if self._has_texts:  # equal ones are the same to any dictionary, and lists compare fast
            return list(keys) == self._keys
        return all(map(operator.is_, keys, self._keys))

    def content(self, place: int) -> Any:
        """What the cell at ``place`` held."""
        if not self._stops:  # summed up only when something changed
            self._stops = list(accumulate(self._sizes))
        part = slice(self._stops[place] - self._sizes[place], self._stops[place])
        if self._are_dicts:
            return dict(zip(self._keys[part], self.values[part], strict=True))
        return self.values[part]


def iter_items(cell: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """The entries of a dictionary, past any method of the user's class."""
    return _base(cell).items(cell)


def entries_of(cell: Cell) -> list[Any]:
    """What a cell holds, as :func:`refill` takes it."""
    return list(iter_items(cell)) if isinstance(cell, dict) else list(cell)


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
    size = _base(cell).__len__(cell) if isinstance(cell, dict) else len(cell)
    if size != len(before):
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
