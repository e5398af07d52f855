"""How an object graph is copied once more, when it has been walked through already.

What it holds: :class:`Pattern`, made of what a walk found: which new objects there are, and what
each container holds. Why: to find out how each of a module tree's thousands of entries is copied
takes ten times as long as copying them, and all replicas of a module need the same answers.

Guarantees: the copy is what another walk would make, in the same order.
Must not: outlive the state of the graph in which it was made; be asked about graphs that hold
functions or objects with a way of their own to be copied (nobody makes a pattern of those).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from samestep.snapshot import Cell

__all__ = ["Pattern"]

# What can be filled in one go. A subclass of the user's is filled entry by entry.
_DICTS = (dict, OrderedDict)
_LISTS = (list, deque)


class Pattern:
    """One walk through an object graph, as a list of things to do.

    Args:
        originals: the objects that have copies, without the leaves, which are tensors.
        makers: for each a function that makes an empty copy.
        cells: the containers that are filled.
        owners: for each the object whose ``__dict__`` it is, or the cell itself.
        is_shared: says of a value that is neither one of the originals nor a leaf whether every
            copy of the graph holds this very object.
    """

    def __init__(
        self,
        originals: Sequence[Any],
        makers: Sequence[Callable[[], Any]],
        cells: Sequence[Cell],
        owners: Sequence[Any],
        is_shared: Callable[[Any], bool],
    ) -> None:
        self._makers = makers
        self._ids = [id(original) for original in originals]
        self._places = [
            (id(owner), owner is not cell) for owner, cell in zip(owners, cells, strict=True)
        ]
        known = {*self._ids}

        def is_simple(value: Any) -> bool:
            return id(value) in known or isinstance(value, Tensor) or is_shared(value)

        self._dicts: list[tuple[int, list[Any], list[int], list[Any]]] = []
        self._lists: list[tuple[int, list[int], list[Any]]] = []
        #: Indices of the cells that have to be looked through again.
        self.others: list[int] = []
        for index, cell in enumerate(cells):
            if not cell:
                continue
            kind = type(cell)
            values = list(cell.values() if kind in _DICTS else cell)
            ids = list(map(id, values))
            if not all(map(is_simple, values)):
                self.others.append(index)
            elif kind in _DICTS and {str}.issuperset(map(type, cell)):
                self._dicts.append((index, list(cell), ids, values))
            elif kind in _LISTS:
                self._lists.append((index, ids, values))
            else:
                self.others.append(index)

    def make(self, leaves: Mapping[int, Any]) -> tuple[dict[int, Any], list[Cell]]:
        """Copy the graph, but for what the cells :attr:`others` hold.

        Args:
            leaves: the leaves' copies, by id of the original.

        Returns:
            The copies of the originals, by id, and those of the cells.
        """
        copies = dict(zip(self._ids, [make() for make in self._makers], strict=True))
        table = {**copies, **leaves}
        targets = [table[i].__dict__ if is_inner else table[i] for i, is_inner in self._places]
        find = table.get
        for index, keys, ids, values in self._dicts:
            targets[index].update(zip(keys, map(find, ids, values), strict=True))
        for index, ids, values in self._lists:
            targets[index].extend(map(find, ids, values))
        return copies, targets
