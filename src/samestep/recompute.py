"""A shard's forward that keeps no activations and runs again in backward.

What it holds: :class:`Recomputation`, which adds to a second run (``rerun.py``) what is about the
module. Why: with more shards than workers the shards take turns, and what fills the memory is the
activations of all of them until backward. Run again, only those of the shards that run at one time
exist.

Guarantees: the second run sees what the first saw: the same rows, the same random numbers, the
buffers as they were; so it gives the same bits. What it writes is dropped: the first run's state
was merged already.
Must not: be used without a graph: there would be nothing to run it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from samestep.links import Link
from samestep.replica import Replica
from samestep.rerun import Rerun

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
        self._versions: list[int] | None = None
        self._is_training = replica.module.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward for the first time."""
        return Rerun(self._run, self._replica.slot.device)(*args, **kwargs)

    def keep(self) -> None:
        """Keep what the first run changed: call after it, before the source module is written."""
        written = self._replica.find_written()
        self._buffers = [(link, link.view().clone()) for link in written]
        self._versions = self._replica.parameter_versions()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._versions is None:
            return self._function(*args, **kwargs)
        with _unseen():
            self._check_unchanged()
        with self._buffers_as_they_were():
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
    def _buffers_as_they_were(self) -> Iterator[None]:
        copies = [link.copy for link, _ in self._buffers]
        norms = self._replica.norms
        with _unseen(), torch.no_grad():
            now = [copy.clone() for copy in copies]
            _write(copies, [before for _, before in self._buffers])
        for norm in norms:
            norm.is_paused = True
        try:
            yield
        finally:
            for norm in norms:
                norm.is_paused = False
            with _unseen(), torch.no_grad():
                _write(copies, now)


_unseen = torch._C.DisableTorchFunction  # each call would go through the shard's own mode


def _write(targets: list[Tensor], values: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, values)
