"""How one call's shards are run, in forward and again in backward.

What it holds: :class:`Runner`, made anew for each call and kept by the graph of that call. Why:
backward comes later, perhaps from another thread, and must find the same shards, streams and
engine. Must not: know what the functions do that it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.context import CallerContext, Shard
from samestep.engine import Engine, Job
from samestep.rng import Draws, Stream
from samestep.spread import Spread

__all__ = ["Runner"]


@dataclass(slots=True, eq=False, repr=False)
class Runner:
    """How to run something on every shard of a call, in forward and again in backward.

    Attributes:
        engine: runs the jobs.
        shards: the shards of the call.
        streams: their random numbers, from ``draws``.
        drawing: how those are ruled, see :mod:`samestep.rng`.
        together: whether the shards exchange values.
        home: the device of the source module.
        lock: held while leaves of the replicas accumulate gradients.
        spread: which ranks have the call's shards; ``shards`` are this rank's.
        kind: what calls that take about as long have in common; None: nothing is known.
    """

    engine: Engine
    shards: Sequence[Shard]
    streams: Sequence[Stream]
    draws: Draws
    drawing: Any
    together: bool
    home: torch.device
    lock: threading.RLock
    spread: Spread
    kind: Hashable = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per shard, in the caller's context; return the values in order."""
        return self._run(functions, self.streams, self.drawing, None, "forward")

    def run_backward(
        self, functions: Sequence[Callable[[], Any]], inline: torch.device | None, draws: Draws
    ) -> list[Any]:
        """Run the shards' backwards; ``inline`` is a device whose shards must run in this
        thread, ``draws`` comes from :meth:`backward_draws`."""
        if draws is self.draws:
            return self._run(functions, self.streams, self.drawing, inline, "backward")
        streams = [Stream(draws, shard.index) for shard in self.shards]
        return self._run(functions, streams, "intercept", inline, "backward")

    def backward_draws(self) -> Draws:
        """The source of seeds for one backward."""
        if self.drawing != "watch":
            return self.draws
        # A model whose forward draws nothing may draw in backward (noise on gradients). Python code
        # is rare there, so looking at it costs nothing.
        return Draws()

    def may_share_work(self, devices: Iterable[torch.device]) -> bool:
        """Whether several workers are there to add large tensors on these devices by slices.

        Not on an accelerator: they would do it without the caller's streams.
        """
        if len(self.shards) < 2 or self.engine.num_workers < 2:
            return False
        return {device.type for device in devices} == {"cpu"}

    def _run(
        self,
        functions: Sequence[Callable[[], Any]],
        streams: Sequence[Stream],
        drawing: Any,
        inline: torch.device | None,
        phase: str,
    ) -> list[Any]:
        jobs = [
            Job(shard, function, stream, drawing)
            for shard, function, stream in zip(self.shards, functions, streams, strict=True)
        ]
        context = CallerContext(self.home)
        return self.engine.run(
            jobs,
            context,
            together=self.together,
            meet=None if self.spread.is_alone else self.spread.meet,
            inline=inline,
            kind=None if self.kind is None else (phase, self.kind),
        )
