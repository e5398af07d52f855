"""How an object graph is copied once more, when it has been walked through already.

What it holds: :class:`Pattern`, made of what a walk found: which new objects there are, and what
each container holds. Why: to find out how each of a module tree's thousands of entries is copied
takes ten times as long as copying them, and all replicas of a module need the same answers.

Guarantees: the copy is what another walk would make, in the same order.
Must not: outlive the state of the graph in which it was made; be asked about graphs that hold
functions or objects with a way of their own to be copied (nobody makes a pattern of those).
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from samestep.snapshot import BUILT_IN, Cell

__all__ = ["Pattern"]

# What can be filled in one go. A subclass of the user's is filled entry by entry.
_DICTS = (dict, OrderedDict)
_LISTS = (list, deque)
_get_dict = operator.attrgetter("__dict__")


class Pattern:
    """One walk through an object graph, as a list of things to do.

    Args:
        originals: the objects that have copies, without the leaves, which are tensors.
        makers: for each a function that makes an empty copy.
        cells: the containers that are filled.
        owners: for each the id of the object whose ``__dict__`` it is, or of the cell itself.
        is_shared: says of a value that is not one of the originals whether every copy of the graph
            holds this very object.
    """

    def __init__(
        self,
        originals: Sequence[Any],
        makers: Sequence[Callable[[], Any]],
        cells: Sequence[Cell],
        owners: Sequence[int],
        is_shared: Callable[[Any], bool],
    ) -> None:
        self._makers = makers
        self._ids = [id(original) for original in originals]
        # All that a cell can hold, by place: the copies of the originals and of the leaves, and
        # what every copy of the graph holds itself.
        self._places = {key: place for place, key in enumerate(self._ids)}
        self._leaves: list[int] = []
        self._shared: list[Any] = []
        self._is_shared = is_shared
        #: Indices of the cells that have to be looked through again.
        self.others: list[int] = []
        # What goes into the other cells, one after another, and who takes how much of it.
        self._contents: list[int] = []
        self._dicts: list[tuple[int, list[Any], slice]] = []
        self._lists: list[tuple[int, slice]] = []
        # Whose ``__dict__`` is a cell; and for every cell which of these it is, or which copy.
        self._inner: list[int] = []
        #: The index of each such cell, and its id.
        self.dicts: list[tuple[int, int]] = []
        self._order: list[int] = []
        for index, (cell, owner) in enumerate(zip(cells, owners, strict=True)):
            if cell or type(cell) not in BUILT_IN:
                self._add_contents(index, cell)
            if owner == id(cell):
                self._order.append(self._places[owner])
            else:
                self._order.append(len(self._ids) + len(self._inner))
                self._inner.append(owner)
                self.dicts.append((index, id(cell)))

    def _add_contents(self, index: int, cell: Cell) -> None:
        kind, start = type(cell), len(self._contents)
        values = list(cell.values() if kind in _DICTS else cell)
        places = list(map(self._places.get, map(id, values)))
        if None in places:  # something that no cell before this one holds
            places = list(map(self._find_place, values))
        known = [place for place in places if place is not None]
        if len(known) == len(values) and kind in _LISTS:
            self._lists.append((index, slice(start, start + len(known))))
        elif len(known) == len(values) and kind in _DICTS and {str}.issuperset(map(type, cell)):
            self._dicts.append((index, list(cell), slice(start, start + len(known))))
        else:
            self.others.append(index)
            return
        self._contents += known

    def _find_place(self, value: Any) -> int | None:
        place = self._places.get(id(value))
        if place is None:
            if self._is_shared(value):
                # Behind all others; how many there are is not known yet.
                self._shared.append(value)
                place = -len(self._shared)
            elif isinstance(value, Tensor):
                self._leaves.append(id(value))
                place = len(self._ids) + len(self._leaves) - 1
            else:
                return None
            self._places[id(value)] = place
        return place

    def make(self, leaves: Mapping[int, Any]) -> tuple[dict[int, Any], list[Cell]]:
        """Copy the graph, but for what the cells :attr:`others` hold.

        Args:
            leaves: the leaves' copies, by id of the original.

        Returns:
            The copies of the originals, by id, and those of the cells.
        """
        copies = [make() for make in self._makers]
        table = dict(zip(self._ids, copies, strict=True))
        owners = {**table, **leaves}
        holders = [*copies, *map(_get_dict, map(owners.__getitem__, self._inner))]
        targets = [holders[i] for i in self._order]
        pool = [*copies, *map(leaves.__getitem__, self._leaves), *reversed(self._shared)]
        contents = [pool[i] for i in self._contents]
        for index, keys, part in self._dicts:
            targets[index].update(zip(keys, contents[part], strict=True))
        for index, part in self._lists:
            targets[index].extend(contents[part])
        return table, targets
