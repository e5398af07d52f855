"""A shard's forward that keeps no activations and runs again in backward.

What it holds: :class:`Recomputation`, which adds to a second run (``rerun.py``) what is about the
module. Why: with more shards than workers the shards take turns, and what fills the memory is the
activations of all of them until backward. Run again, only those of the shards that run at one time
exist.

Guarantees: the second run sees what the first saw: the same rows, the same random numbers, buffers
and attributes of the module as they were; so it gives the same bits. What it writes is dropped, and
so are gradients that it adds itself: the first run's were merged already.
Must not: be used without a graph: there would be nothing to run it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.intercept import unseen
from samestep.links import Link
from samestep.replica import Replica
from samestep.rerun import Rerun
from samestep.snapshot import Cell, iter_items, refill

__all__ = ["Recomputation"]


class Recomputation:
    """One shard's forward, run now and once more in backward.

    Args:
        replica: the shard's replica.
        function: its forward.
    """

    def __init__(self, replica: Replica, function: Callable[..., Any]) -> None:
        self._replica = replica
        self._function = function
        self._buffers: list[tuple[Link, Tensor]] = []
        self._cells: list[tuple[Cell, list[Any]]] = []  # what they held before
        self._versions: list[int] | None = None
        self._has_begun = False
        self._is_training = replica.module.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward for the first time."""
        return Rerun(self._run, self._replica.slot.device, self._written)(*args, **kwargs)

    def keep(self, common: dict[Any, Tensor] | None = None) -> None:
        """Keep what the first run changed: call after it, before the source module is written.

        Args:
            common: what the shards of the call keep alike, to use and to add to.
        """
        replica = self._replica
        common = {} if common is None else common
        self._buffers = []
        for link in replica.find_written():
            key = (id(link.source), link.rows)
            if key not in common:
                common[key] = link.view().clone()
            self._buffers.append((link, common[key]))
        self._cells = []
        if not replica.snapshot.is_current():
            changed = replica.snapshot.changed()
            targets, content = replica.follower.targets, replica.snapshot.content
            self._cells = [(targets[index], _entries(content(index))) for index in changed]
        self._versions = replica.parameter_versions()

    def _written(self) -> list[Tensor]:
        return [link.copy for link, _ in self._buffers]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_begun:
            self._has_begun = True
            return self._function(*args, **kwargs)
        with unseen():
            if self._versions is None:
                self.keep()  # a backward inside forward: the first run is not over
            self._check_unchanged()
        with _gradients_aside(self._replica.graded), self._state_as_it_was():
            return self._function(*args, **kwargs)

    def _check_unchanged(self) -> None:
        if self._versions != self._replica.parameter_versions():
            raise RuntimeError(
                "a parameter was modified by an inplace operation (an optimizer's step?) between "
                "the forward and its backward; with recompute=True the forward runs again in "
                "backward and needs the parameters as they were"
            )
        if self._is_training != self._replica.module.training:
            raise RuntimeError(
                "train() or eval() was called, and the module used, between a forward and its "
                "backward; with recompute=True the forward runs again in backward: run the "
                "backward first"
            )

    @contextlib.contextmanager
    def _state_as_it_was(self) -> Iterator[None]:
        copies = self._written()
        held = [(cell, _entries(cell)) for cell, _ in self._cells]
        for cell, before in self._cells:
            refill(cell, before)
        norms = self._replica.norms
        with unseen(), torch.no_grad():
            now = [copy.clone() for copy in copies]
            _write(copies, [before for _, before in self._buffers])
        for norm in norms:
            norm.is_paused = True
        try:
            yield
        finally:
            for norm in norms:
                norm.is_paused = False
            for cell, entries in held:
                refill(cell, entries)
            with unseen(), torch.no_grad():
                _write(copies, now)


@contextlib.contextmanager
def _gradients_aside(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let nothing that is accumulated meanwhile stay, and nothing that was there be lost."""
    with unseen():
        before = [tensor.grad for tensor in tensors]
        for tensor in tensors:
            tensor.grad = None
    try:
        yield
    finally:
        with unseen():
            for tensor, gradient in zip(tensors, before, strict=True):
                tensor.grad = gradient


def _entries(cell: Cell) -> list[Any]:
    """What a cell holds, as :func:`refill` takes it."""
    return list(iter_items(cell)) if isinstance(cell, dict) else list(cell)


def _write(targets: list[Tensor], values: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, values)
