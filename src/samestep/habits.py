"""What is learnt of a module by watching its forwards, and whether an attempt may stand.

What it holds: :class:`Habits` (per wrapper) and :class:`Trial` (per attempt of a call). Two things
cannot be known before a forward has run, and both would cost every model something:

- *Does it draw random numbers?* If it does, every operation is looked at (about 1.5 us each). A
  model that drew nothing is not looked at again until the module changes; but the default generator
  is watched, and if it moved, the attempt is repeated with interception on. If it moves even then
  (a C++ extension that draws), the shards run one at a time with the generator swapped.
- *Does it write its own parameters?* Some modules initialise themselves from the first batch
  (ActNorm), some move parameters in every forward (a momentum encoder). Replicas share the
  parameters' memory, so K shards would write it at once, each from its own rows. So the parameters
  are copied before the first call on several shards and compared after it. If one was written, the
  copies go back and the first call runs on the whole batch; from then on each replica has a copy of
  its own of those parameters.

Guarantees: an attempt that does not stand has left no trace in the source module or the generator.
Costs: one temporary copy of the parameters, in the first call in training and the first in
evaluation. Must not: run anything itself.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.changes import Changes
from samestep.errors import DrawWarning, StateWarning
from samestep.replicas import ReplicaSet
from samestep.rng import Draws, Watch
from samestep.snapshot import show_path

__all__ = ["Facts", "Habits", "Trial", "Verdict"]


class Verdict(enum.Enum):
    """What to do with an attempt."""

    STANDS = "its outputs and state are the call's"
    AGAIN = "run the shards again, now that more is known"
    WHOLE = "run the whole batch on the source module"


class Facts(NamedTuple):
    """What was seen of an attempt in one process.

    Attributes:
        written: names of parameters that the forward wrote.
        has_moved: whether the default generator moved other than by the call's own draw.
        drawn: the seed that was drawn; None if none was.
        has_drawn: whether any generator was drawn from, or may be.
    """

    written: list[str]
    has_moved: bool
    drawn: int | None
    has_drawn: bool


class Habits:
    """What was learnt of one source module, valid until its tree changes.

    Args:
        replicas: the wrapper's replicas; their generation says when the tree changed.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._probed_modes: set[bool] = set()
        self._drawing = "intercept"
        self._generation = -1
        self._is_compiled = False
        self.is_together = False  # whether the shards were seen to meet in forward
        self._compiled: set[Any] = set()  # what torch.compile has seen

    @property
    def drawing(self) -> Any:
        """How random numbers are ruled from now on: "watch", "intercept" or "swap"."""
        return self._drawing

    @property
    def is_compiled(self) -> bool:
        """Whether a part of the module is compiled, as far as is known."""
        return self._is_compiled

    def start(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        *,
        may_repeat: bool,
        can_watch: bool,
        watch_first: bool = False,
    ) -> Trial:
        """Begin an attempt: call after the replicas are fresh, before any forward.

        Args:
            module: the source module.
            inputs: the tensors of the call, which a forward may change in place.
            may_repeat: whether the attempt may well be repeated for reasons of the caller's.
            can_watch: whether every shard draws from the CPU's default generator.
            watch_first: whether nothing else draws from it meanwhile: then an unknown module need
                not be intercepted to see what it does.
        """
        if self._replicas.generation != self._generation:
            self._is_compiled = _has_compiled(module)
            watch_first = watch_first and not self._replicas.has_generator
            # Interception would be compiled into the code, and is no part of it afterwards.
            watches = can_watch and (self._is_compiled or watch_first)
            self._learn("watch" if watches else "intercept")
        probe = None if module.training in self._probed_modes else _Probe(module)
        guard = _InputGuard(inputs, can_restore=may_repeat or probe is not None)
        return Trial(self, module, self._drawing, probe, guard, can_watch=can_watch)

    def must_take_turns(self, signature: Any) -> bool:
        """Whether the shards must run one after the other: torch.compile is not thread-safe.

        Args:
            signature: what a compiled module would be compiled anew for (shapes, grad mode).
        """
        if not self._is_compiled or (signature, self._generation) in self._compiled:
            return False
        if len(self._compiled) >= _NUM_SIGNATURES:
            self._compiled.clear()
        self._compiled.add((signature, self._generation))
        return True

    def _learn(self, drawing: str) -> None:
        self._drawing, self._generation = drawing, self._replicas.generation

    def _probed(self, written: Sequence[Tensor], mode: bool) -> None:
        self._probed_modes.add(mode)
        if written:
            self._replicas.make_private(written)


class Trial:
    """One attempt of a call. Made by :meth:`Habits.start`.

    Attributes:
        draws: the call's source of seeds.
        drawing: how the shards' random numbers are ruled: "watch", "intercept" or "swap".
    """

    def __init__(
        self,
        habits: Habits,
        module: nn.Module,
        drawing: str,
        probe: _Probe | None,
        guard: _InputGuard,
        *,
        can_watch: bool,
    ) -> None:
        self._habits = habits
        self._module = module
        self._guard = guard
        self._probe = probe
        self._mode = module.training
        self._can_watch = can_watch
        self._watch = Watch()
        self.drawing: Any = drawing
        self.draws = Draws(peek=drawing == "watch")

    def draw_plainly(self) -> None:
        """Let the one shard of this call draw from the default generator, as one device would."""
        self.drawing, self._can_watch = "plain", False

    def look(self) -> Facts:
        """What was seen in this process; ask after the forwards."""
        # By value, as a write through .data has no version.
        return Facts(
            [] if self._probe is None else self._probe.written(),
            self._can_watch and self._watch.has_moved(self.draws),
            self.draws.drawn,
            self.draws.is_used or self._habits._replicas.has_generator,
        )

    def judge(
        self,
        changes: Changes,
        facts: Sequence[Facts],
        rows: Sequence[int],
        *,
        is_local: bool = False,
    ) -> Verdict:
        """Decide, after the forwards, whether the attempt stands; undo it if not.

        Args:
            changes: what the forwards wrote.
            facts: of every process.
            rows: B_k of each shard.
            is_local: whether no process has the whole batch: then an attribute that goes from None
                to a tensor is no sign, since nothing could be done about it.
        """
        written: list[Tensor] = []
        if self._probe is not None:
            # And by version, as a forward may write the very values that were there.
            own = dict(self._module.named_parameters())
            written = [own[name] for name in _unite(found.written for found in facts)]
            written += [link.source for link in changes.raced]
        is_first = self._probe is not None
        if (
            written
            or changes.is_structural
            or (is_first and changes.is_flagged(rows, with_tensors=not is_local))
        ):
            # It initialises itself from the batch it sees, or adds a part that all shards share.
            self.undo()
            self._habits._replicas.clear()  # the whole batch will write what no version tells of
            self._habits._probed(written, self._mode)
            self.restore_inputs()
            return Verdict.WHOLE
        if self.drawing != "swap" and any(found.has_moved for found in facts):
            self.undo()
            self._habits._learn(self._escalated())
            self.restore_inputs()
            return Verdict.AGAIN
        self._habits._probed(self._find_raced(changes) if changes.raced else [], self._mode)
        watched = self._can_watch and self.drawing == "intercept"
        if watched and not any(found.has_drawn for found in facts):
            self._habits._learn("watch")
        return Verdict.STANDS

    def _find_raced(self, changes: Changes) -> list[Tensor]:
        """Parameters that this forward began to write in a later call than the watched one."""
        raced = {id(link.source): link for link in changes.raced}
        names = ", ".join(sorted(show_path(link.path) for link in raced.values()))
        warnings.warn(
            f"forward wrote parameters in place ({names}) for the first time, in memory that "
            f"all shards share: in this call each shard wrote them. From now on each has a "
            f"copy of its own, merged like a buffer",
            StateWarning,
            stacklevel=2,
        )
        return [link.source for link in raced.values()]

    def restore_inputs(self) -> None:
        """Undo what the forwards did to the inputs, before the call is repeated.

        Raises:
            RuntimeError: an input was changed in place and no copy of it was kept.
        """
        self._guard.restore()

    def undo(self) -> None:
        """Leave no trace in the parameters and the default generator."""
        self._watch.restore()
        self._habits._replicas.recover()
        if self._probe is not None:
            self._probe.restore()

    def _escalated(self) -> str:
        if self.drawing == "watch" and not self._habits._is_compiled:
            return "intercept"
        warnings.warn(
            "the model draws random numbers by a function that takes no generator of a shard's; "
            "its shards run one at a time from now on, so that the numbers stay reproducible. Draw "
            "with torch's own functions to run in parallel",
            DrawWarning,
            stacklevel=2,
        )
        return "swap"


_NUM_SIGNATURES = 1024


def _has_compiled(module: nn.Module) -> bool:
    """Whether a part of the module is compiled: wrapped by torch.compile, or in place."""
    return any(
        hasattr(child, "_orig_mod") or getattr(child, "_compiled_call_impl", None) is not None
        for child in module.modules()
    )


class _InputGuard:
    """The inputs of a call that may be repeated: a forward may have changed them in place."""

    def __init__(self, inputs: Sequence[Tensor], *, can_restore: bool) -> None:
        self._inputs = [tensor for tensor in inputs if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._inputs]
        self._copies = [t.detach().clone() for t in self._inputs] if can_restore else None

    def restore(self) -> None:
        if self._versions == [tensor._version for tensor in self._inputs]:
            return
        if self._copies is None:
            raise RuntimeError(
                "forward changed its input in place, and the call had to be repeated, because the "
                "model began to draw random numbers in a way it had not before (a dropout whose p "
                "was 0?); call the model again with a fresh batch, or clone the input in forward"
            )
        with torch.no_grad():
            for tensor, copy in zip(self._inputs, self._copies, strict=True):
                tensor.detach().copy_(copy)


class _Probe:
    """Copies of a module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        with torch.no_grad(), torch.inference_mode(False):
            self._saved: list[tuple[str, nn.Parameter, Tensor]] = [
                (name, parameter, parameter.detach().clone())
                for name, parameter in module.named_parameters()
            ]

    def written(self) -> list[str]:
        """The parameters whose values are not what they were."""
        return [name for name, parameter, saved in self._saved if not _is_equal(parameter, saved)]

    def restore(self) -> None:
        """Put the old values back."""
        with torch.no_grad():
            for _, parameter, saved in self._saved:
                if not _is_equal(parameter, saved):
                    parameter.detach().copy_(saved)


def _unite(columns: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for column in columns for name in column))


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if one.is_meta:
        return True  # no values
    if one.layout != torch.strided:
        one, other = one.detach().to_dense(), other.to_dense()
    return one.shape == other.shape and torch.equal(one, other)
