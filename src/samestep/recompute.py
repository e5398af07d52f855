"""A shard's forward that keeps no activations and runs again in backward.

What it holds: :class:`Recomputation`, which adds to a second run (``rerun.py``) what is about the
module. Why: with more shards than workers the shards take turns, and what fills the memory is the
activations of all of them until backward. Run again, only those of the shards that run at one time
exist.

Guarantees: the second run sees what the first saw: the same rows, the same random numbers, buffers,
attributes and mode of the module as they were, whatever other calls or the user made of them since;
so it gives the same bits. What it writes is dropped, and so are gradients that it adds itself: the
first run's were merged already.
Must not: be used without a graph: there would be nothing to run it again.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.intercept import unseen
from samestep.links import Link, get_version
from samestep.replica import Replica
from samestep.rerun import Rerun
from samestep.snapshot import Snapshot, refill

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
        # What forwards may write: each link, its values before, and the version by which it shows
        # that they are there still; None: it does not show.
        self._private: list[tuple[Link, Tensor, int | None]] = []
        self._restored: list[tuple[Tensor, Tensor]] = []  # in a second run, with the values
        self._snapshot: Snapshot | None = None  # of the replica's cells before the first run
        self._read: list[tuple[Tensor, int]] = []  # parameters, with their versions
        self._has_begun = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward for the first time."""
        return Rerun(self._run, self._replica.slot.device, self._written)(*args, **kwargs)

    def keep(self, common: dict[Any, Tensor] | None = None) -> None:
        """Keep how the module was: call after the first run, before the source module is written.

        Args:
            common: what the shards of the call keep alike, to use and to add to.
        """
        replica = self._replica
        common = {} if common is None else common
        self._snapshot = copy.copy(replica.snapshot)  # which goes on with others
        self._read = [(tensor, tensor._version) for tensor in replica.find_read()]
        written = {id(link): link for link in replica.find_written()}
        self._private = []
        may_be_written = {id(link): link for link in replica.copies if link.is_private}
        for link in (may_be_written | written).values():
            key = (id(link.source), link.rows)
            if key not in common:
                common[key] = link.view().clone()
            is_shown = not (id(link) in written or link.is_unversioned or link.is_suspect)
            version = get_version(link.copy) if is_shown else -1
            self._private.append((link, common[key], None if version < 0 else version))

    def _written(self) -> list[Tensor]:
        return [tensor for tensor, _ in self._restored]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_begun:
            self._has_begun = True
            return self._function(*args, **kwargs)
        with unseen():
            if self._snapshot is None:
                self.keep()  # a backward inside forward: the first run is not over
            self._check_unchanged()
        with _gradients_aside(self._replica.graded), self._state_as_it_was():
            return self._function(*args, **kwargs)

    def _check_unchanged(self) -> None:
        if any(tensor._version != version for tensor, version in self._read):
            raise RuntimeError(
                "a parameter was modified by an inplace operation (an optimizer's step?) between "
                "the forward and its backward; with recompute=True the forward runs again in "
                "backward and needs the parameters as they were"
            )

    @contextlib.contextmanager
    def _state_as_it_was(self) -> Iterator[None]:
        assert self._snapshot is not None
        with unseen(), torch.no_grad():
            held = self._snapshot.put_back()
            self._restored = [
                (link.copy, before)
                for link, before, version in self._private
                if version is None or version != get_version(link.copy)
            ]
            copies = self._written()
            now = [tensor.clone() for tensor in copies]
            _write(copies, [before for _, before in self._restored])
        norms = self._replica.norms
        for norm in norms:
            norm.is_paused = True
        try:
            yield
        finally:
            for norm in norms:
                norm.is_paused = False
            with unseen(), torch.no_grad():
                for cell, entries in held:  # what else it wrote, the next call finds and repairs
                    refill(cell, entries)
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


def _write(targets: list[Tensor], values: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, values)
