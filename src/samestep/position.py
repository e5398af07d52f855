"""Where a loader is in its epoch, and how to come back there.

What it holds: :class:`Tape`, which notes what the random generators were when the epoch's order was
drawn. Why: the order of a shuffled epoch is not kept anywhere, it is drawn as the epoch goes; to
continue in its middle it must be drawn again, without a trace in generators that have long moved
on.

Guarantees: drawing again gives what was drawn, for everything that draws from torch's CPU
generator, a ``torch.Generator`` of the loader's, Python's ``random`` or numpy; afterwards these are
as they were before.
Must not: know what is drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from samestep.randomness import State, find_moved, read_state, write_state
from samestep.segments import open_bytes

__all__ = ["Tape", "check_position", "start_of_epoch"]

_T = TypeVar("_T")
_KEYS = {"batches", "drawn", "draws", "seed", "own"}


def start_of_epoch() -> dict[str, Any]:
    """The position before the first batch of an epoch that nothing was drawn for yet."""
    return {"batches": 0, "drawn": 0, "draws": {}, "seed": None, "own": {}}


def check_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a position that was read from somewhere.

    Raises:
        ValueError: it is none.
    """
    if set(state) != _KEYS:
        raise ValueError(
            f"this is no position of split_loader: it has {sorted(map(str, state))}, "
            f"not {sorted(_KEYS)}"
        )
    return dict(state)


class Tape:
    """What the generators were at each draw of one epoch.

    Args:
        generators: those of the loader's own; the process's are known.
        position: where to continue; the draws before that are made again.
    """

    def __init__(self, generators: Sequence[torch.Generator], position: Mapping[str, Any]) -> None:
        self._generators = generators
        self._again = position
        self.num_batches: int = position["batches"]  # delivered
        self._num_drawn = 0
        # Nearly always one entry: the epoch's shuffle. By the number of the draw.
        self._draws: dict[int, State] = {}
        seed = position["seed"]
        self.seed: int = self._make_seed() if seed is None else seed

    def _make_seed(self) -> int:
        """A number that depends on the generator that rules the epoch, without drawing from it."""
        state = read_state(self._generators[:1])
        ruling: Tensor = state["own 0"] if self._generators else state["torch"]
        return zlib.crc32(open_bytes(ruling))

    def open(self, make: Callable[[], _T]) -> _T:
        """Call what opens the epoch; when it is done again, the generators stay as they are."""
        before = self._read()
        try:
            return make()
        finally:
            if self._again["drawn"]:
                write_state(before, self._generators)

    def begin(self, make: Callable[[], _T]) -> _T:
        """Make the iterator that :meth:`draw` draws from; a second one takes the first's place."""
        self._num_drawn = 0
        return self.draw(make)

    def draw(self, function: Callable[[], _T]) -> _T:
        """Call what may draw: note what the generators were, or let them be that once more."""
        number = self._num_drawn
        self._num_drawn += 1
        before = self._read()
        if number >= self._again["drawn"]:
            value = function()
            moved = find_moved(before, self._read())
        else:
            moved = self._again["draws"].get(number, {})
            write_state(moved, self._generators)
            try:
                value = function()
            finally:
                write_state(before, self._generators)
        if moved:
            self._draws[number] = moved
        return value

    def position(self) -> dict[str, Any]:
        """Return where the epoch is; "own" is left to whoever has the generators."""
        return {
            "batches": self.num_batches,
            "drawn": max(self._num_drawn, self._again["drawn"]),
            "draws": {**self._again["draws"], **self._draws},
            "seed": self.seed,
            "own": {},
        }

    def _read(self) -> State:
        return read_state(self._generators)
