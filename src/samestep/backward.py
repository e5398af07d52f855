"""One pass through a stitch, backwards: every shard's gradients, and their sums.

What it holds: :class:`ShardGraphs`, what a stitch knows of the shards' graphs, and
:class:`Backward`. Guarantees and placements: see :mod:`samestep.stitch`.
Must not: know modules or batches.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, count, islice
from typing import Any

import torch
from torch import Tensor

from samestep.context import current_shard
from samestep.devices import move_in_place, move_tensor
from samestep.errors import RankError, note_shard
from samestep.graphs import (
    ELSEWHERE,
    Edge,
    accumulate,
    differentiate,
    is_plain_backward,
    make_edge,
)
from samestep.reduce import TreeSum, absorb, is_large, sum_lists
from samestep.rng import Draws
from samestep.runner import Runner
from samestep.spread import pick_entries

__all__ = ["MSG_FREED", "Backward", "ShardGraphs", "unflatten"]

Tensors = list[Tensor]
MaybeTensors = list[Tensor | None]


@dataclass(eq=False, repr=False)
class ShardGraphs:
    """The K graphs of one step: their leaves and the edges of their outputs, by placement.

    Lists "per shard" have an entry for every shard of the call; for those of other ranks the
    entries stand for as many leaves and edges as there are, and lead nowhere (``ELSEWHERE``, None).

    Attributes:
        runner: how to run their backwards.
        replicated: per shard, the leaves that stand for R inputs (same length in every shard).
        local: per shard, the leaves that stand for L inputs.
        outputs: per shard, the L outputs.
        partials: per shard, the parts of P outputs (same length; None where a shard has no part).
            An edge, here and there, is None once it was used and the graph was not kept.
        is_shared: another stitch, or the caller's own graph, may walk these graphs too: see
            [Note: who keeps a graph].
        is_reentrant: see [Note: two ways to differentiate].
        foreign: leaves among the replicated ones that are the user's own tensors.
        names: of the R inputs, the same in every rank; empty if they have none.
        lock: held by a backward through them: several threads take turns, as at any node of
            torch's.
        turns: held while a shard's graph accumulates into leaves that other shards have too.
    """

    runner: Runner
    replicated: list[Tensors]
    local: list[MaybeTensors]
    outputs: list[list[Edge | None]]
    partials: list[list[Edge | None]]
    is_shared: bool = False
    is_reentrant: bool = False
    turns: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    foreign: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def mine(self) -> range:
        """The shards whose graphs are here."""
        return self.runner.spread.mine


# Makes a stitch: graphs, values of its outputs, its inputs -> its outputs.
Apply = Callable[[ShardGraphs, MaybeTensors, Tensors], MaybeTensors]


class Backward:
    """One pass through the node, backwards.

    Args:
        graphs: the shards' graphs.
        inputs: the node's inputs in the caller's graph.
        gradients: one per output of the node; None where nothing arrives.
        needed: per input, whether anybody wants its gradient.
    """

    def __init__(
        self,
        graphs: ShardGraphs,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> None:
        self.graphs = graphs
        self.inputs = inputs
        self.num_shards = len(graphs.outputs)
        num_outputs, num_local = list(map(len, graphs.outputs)), list(map(len, graphs.local))
        self.num_replicated = len(inputs) - sum(num_local)
        self.local_gradients = unflatten(gradients, num_outputs)
        self.sum_gradients = list(gradients[sum(num_outputs) :])
        self.needed_replicated = list(needed[: self.num_replicated])
        self.needed_local = unflatten(needed[self.num_replicated :], num_local)
        #: Of the R inputs that want a gradient.
        self.homes = list(map(_get_device, compress(inputs, self.needed_replicated)))
        runner = graphs.runner
        places = {*self.homes, *map(_get_device, runner.shards)}
        #: Whether gradients are where they are wanted: everything is on one device.
        self.is_at_home = runner.spread.is_alone and places == {runner.home}
        device = next(g.device for g in gradients if g is not None)
        # On an accelerator this runs in the device's own autograd thread, and a nested backward for
        # the same device waits for that very thread: its shards must run here, inline.
        self.inline = None if device.type == "cpu" else device

    def run(self, *, is_kept: bool) -> MaybeTensors:
        """Gradients of the node's inputs, not differentiable."""
        runner = self.graphs.runner
        by_thread = self._may_share_work() and is_large(
            compress(self.inputs, self.needed_replicated)
        )
        sums: TreeSum[MaybeTensors] = TreeSum(self.num_shards, absorb, by_thread=by_thread)
        # Re-entrant checkpointing refuses to run inside autograd.grad (and for the user's own
        # autograd.grad it must refuse).
        is_plain = self.graphs.is_reentrant and is_plain_backward()
        cut = sum(self.needed_replicated)
        turns = self.graphs.turns

        def backward(k: int) -> Callable[[], MaybeTensors]:
            def work() -> MaybeTensors:
                # Our own few operations need not pass the function mode that rules random numbers.
                with torch._C.DisableTorchFunction():
                    edges, gradients = self._arriving(
                        k, self.local_gradients[k], self.sum_gradients
                    )
                    wanted = self._wanted(k)
                if is_plain:
                    with turns:
                        found = accumulate(edges, gradients, wanted, is_kept)
                else:
                    found = differentiate(edges, gradients, wanted, is_kept)
                local = found[cut:]
                del found[cut:]  # one list holds each gradient: then they are added in place
                with torch._C.DisableTorchFunction():
                    self._move_home(found)
                    sums.add(k, found)
                return local

            return work

        draws = runner.backward_draws()
        # Only leaves that accumulate are state of the replicas. Inside a shard (forward used an
        # earlier output of the same wrapper) whoever runs that shard holds the lock.
        is_locked = is_plain and current_shard() is None
        with runner.lock if is_locked else contextlib.nullcontext():
            local = self._run_mine(backward, draws)
        engine, spread = runner.engine, runner.spread
        told: Any = None if spread.is_alone else (draws.drawn, self._fingerprint())
        replicated, notes = spread.reduce(
            "backward",
            sums.parts(),
            engine.num_workers,
            engine.share_work,
            told,
            labels=() if spread.is_alone else self._labels(),
        )
        if not spread.is_alone:
            self._check(draws, notes)
            local = self._share_local(local)
        return self._spread(replicated, local)

    def run_differentiable(self, apply: Apply) -> MaybeTensors:
        """Gradients of the node's inputs, themselves outputs of a stitch."""
        graphs, runner = self.graphs, self.graphs.runner
        if runner.spread.is_local:
            raise RuntimeError(_MSG_LOCAL)
        devices = dict(zip(graphs.mine, (shard.device for shard in runner.shards), strict=True))
        gradient_leaves = [
            [_leaf(g, devices[k]) for g in row] if k in devices else row
            for k, row in enumerate(self.local_gradients)
        ]
        sum_leaves = {
            k: [_leaf(g, device) for g in self.sum_gradients] for k, device in devices.items()
        }
        cut = sum(self.needed_replicated)

        def backward(k: int) -> Callable[[], MaybeTensors]:
            def work() -> MaybeTensors:
                edges, gradients = self._arriving(k, gradient_leaves[k], sum_leaves[k])
                found = differentiate(edges, gradients, self._wanted(k), True, True)
                self._move_home(found)
                return found

            return work

        draws = runner.backward_draws()
        mine = self._run_mine(backward, draws)
        found, notes = runner.spread.share("second derivative", mine, {}, {}, note=draws.drawn)
        self._check(draws, [(drawn, None) for drawn in notes])
        derived = ShardGraphs(
            runner=runner,
            replicated=[
                graphs.replicated[k] + _present(sum_leaves.get(k, [])) for k in range(len(found))
            ],
            local=[
                leaves + [g for g in gradients if g is not None]
                for leaves, gradients in zip(graphs.local, gradient_leaves, strict=True)
            ],
            outputs=[
                [_edge(g, k in devices) for g in row[cut:] if _is_recorded(g)]
                for k, row in enumerate(found)
            ],
            partials=[
                [_edge(g, k in devices) if _is_recorded(g) else None for g in row[:cut]]
                for k, row in enumerate(found)
            ],
            is_shared=True,
        )
        graphs.is_shared = True
        return self._tie(apply, derived, found, cut)

    def _tie(
        self, apply: Apply, derived: ShardGraphs, found: list[MaybeTensors], cut: int
    ) -> MaybeTensors:
        """Put the shards' gradients into the caller's graph, as outputs of a second stitch."""
        sums: TreeSum[MaybeTensors] = TreeSum(self.num_shards, sum_lists)
        for k, row in enumerate(found):
            sums.add(k, [None if g is None else g.detach() for g in row[:cut]])
        values: MaybeTensors = [g for row in found for g in row[cut:] if _is_recorded(g)]
        inputs = unflatten(self.inputs[self.num_replicated :], list(map(len, self.graphs.local)))
        sources: Tensors = [*self.inputs[: self.num_replicated], *_present(self.sum_gradients)]
        for mine, gradients in zip(inputs, self.local_gradients, strict=True):
            sources += [*mine, *_present(gradients)]
        values += sums.result()
        flat = iter(apply(derived, values, sources))
        local = [[next(flat) if _is_recorded(g) else g for g in row[cut:]] for row in found]
        return self._spread(list(flat), local)

    def drop_used(self) -> bool:
        """Let go of the edges that a gradient came by; whether none are left."""
        for row, gradients in zip(self.graphs.outputs, self.local_gradients, strict=True):
            used = zip(row, gradients, strict=True)
            row[:] = [edge if gradient is None else None for edge, gradient in used]
        for row in self.graphs.partials:
            row[:] = [
                e if g is None else None for e, g in zip(row, self.sum_gradients, strict=True)
            ]
        rows = chain(self.graphs.outputs, self.graphs.partials)
        return not any(edge for row in rows for edge in row)

    # -- One shard ---------------------------------------------------------------------------

    def _wanted(self, k: int) -> Tensors:
        """Leaves of shard k whose gradients are wanted: R first, then L."""
        wanted = list(compress(self.graphs.replicated[k], self.needed_replicated))
        for leaf, is_needed in zip(self.graphs.local[k], self.needed_local[k], strict=True):
            if is_needed and leaf is not None:
                wanted.append(leaf)
        return wanted

    def _arriving(
        self, k: int, local: Sequence[Tensor | None], sums: Sequence[Tensor | None]
    ) -> tuple[list[Edge], Tensors]:
        """Where gradients enter shard k's graph, and the gradients, on the shard's device."""
        edges: list[Edge] = []
        gradients: Tensors = []
        for edge, gradient in zip(self.graphs.outputs[k], local, strict=True):
            if gradient is not None:
                if edge is None:
                    raise RuntimeError(MSG_FREED)
                edges.append(edge)
                gradients.append(gradient)
        for edge, gradient in zip(self.graphs.partials[k], sums, strict=True):
            if edge is not None and gradient is not None:
                edges.append(edge)
                gradients.append(gradient)
        for index, (_, device) in enumerate(edges):
            if gradients[index].device != device:
                gradients[index] = move_tensor(gradients[index], device)
        return edges, gradients

    # -- All shards --------------------------------------------------------------------------

    def _run_mine(
        self, backward: Callable[[int], Callable[[], MaybeTensors]], draws: Draws
    ) -> list[MaybeTensors]:
        """Run the backwards of the shards that are here; if one fails, the other ranks hear it."""
        runner = self.graphs.runner
        what = "second derivative" if torch.is_grad_enabled() else "backward"
        try:
            return runner.run_backward([backward(k) for k in self.graphs.mine], self.inline, draws)
        except BaseException as error:  # Ctrl-C too: the others wait
            if "a second time" in str(error) and isinstance(error, RuntimeError):
                note_shard(error, _MSG_SIDE_DOOR)
            runner.spread.fail(what, error)
            raise

    def _may_share_work(self) -> bool:
        """Whether several workers are there to add large gradients by slices."""
        return self.inline is None and self.graphs.runner.may_share_work(self.homes)

    def _share_local(self, local: list[MaybeTensors]) -> list[MaybeTensors]:
        """The L gradients of all shards: the caller's graph goes on with those of the whole batch,
        or of this rank's rows."""
        spread = self.graphs.runner.spread
        if spread.is_local:
            rows = iter(local)
            return [next(rows) if k in spread.mine else [] for k in range(self.num_shards)]
        if not any(map(any, self.needed_local)):
            return [[] for _ in range(self.num_shards)]
        return spread.share("gradients of inputs", local, {}, {})[0]

    def _labels(self) -> list[str]:
        """What the sums are of: the same in every rank, or other gradients are asked for there."""
        if self.graphs.runner.spread.is_alone:
            return []
        return list(compress(self.graphs.names or map(str, count()), self.needed_replicated))

    def _fingerprint(self) -> tuple[bool, list[float]] | None:
        """Some of the numbers that arrive: in every rank the same, or their losses differ."""
        if self.graphs.runner.spread.is_alone or self.graphs.runner.spread.is_local:
            return None
        arriving = [g.detach() for row in self.local_gradients for g in row if g is not None]
        plain = [g for g in arriving if g.layout == torch.strided and g.numel()]
        found: list[Tensor] = []
        for gradient in plain[:_NUM_TENSORS]:
            flat = gradient.reshape(-1)
            if flat.numel() > _NUM_PICKED:
                flat = flat[pick_entries(flat.numel(), _NUM_PICKED, 0).to(flat.device)]
            found.append(torch.view_as_real(flat).sum(1) if flat.is_complex() else flat)
        if not found:
            return False, []
        values = torch.cat([value.double().cpu() for value in found])
        return bool(values.isnan().any()), values.nan_to_num().tolist()

    def _check(self, draws: Draws, notes: Sequence[Any]) -> None:
        """Keep the ranks' random numbers in step, and see that their losses are."""
        spread = self.graphs.runner.spread
        if spread.is_alone:
            return
        spread.draw_alike(draws, [drawn for drawn, _ in notes])
        first = notes[0][1]
        for rank, (_, found) in enumerate(notes):
            if found is not None and not _are_alike(found, first):
                raise RankError(
                    f"rank {rank} computes another loss than rank 0 (the gradients that arrive in "
                    f"{spread.title} differ): with batch='global' every rank must compute the loss "
                    f"of the whole batch, with the same targets and the same random numbers"
                )

    def _move_home(self, gradients: MaybeTensors) -> None:
        """Move R gradients to the device of the caller's tensor, so that any shard can add them."""
        if not self.is_at_home:
            move_in_place(gradients, self.homes)

    def _spread(self, replicated: MaybeTensors, local: list[MaybeTensors]) -> MaybeTensors:
        """Put the gradients that were wanted in the places of all inputs."""
        found = chain(replicated, *local)
        needed = chain(self.needed_replicated, *self.needed_local)
        complete: MaybeTensors = []
        for tensor, is_needed in zip(self.inputs, needed, strict=True):
            gradient = next(found) if is_needed else None
            if is_needed and (gradient is None or not self.is_at_home):
                gradient = _complete(gradient, tensor)
            complete.append(gradient)
        return complete


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

MSG_FREED = (
    "Trying to backward through the graph a second time, but the shards' graphs have been freed "
    "already; pass retain_graph=True to the first backward"
)
_MSG_SIDE_DOOR = """\
Did a tensor leave forward by another way than its output, such as a hook that appends to a list?
    hook: features.append(output)
    (model(x).sum() + features[0].sum()).backward()  # walks a shard's graph twice
Return it from forward, store it on the module, or keep the graph:
    (model(x).sum() + features[0].sum()).backward(retain_graph=True)"""


_MSG_LOCAL = (
    "create_graph=True is not there for batch='local', where the ranks' losses differ; use "
    "batch='global'"
)
# To compare ranks by: entries of a gradient, and of how many gradients.
_NUM_PICKED = 256
_NUM_TENSORS = 16
_get_device = operator.attrgetter("device")


def _are_alike(found: tuple[bool, list[float]], first: tuple[bool, list[float]]) -> bool:
    """Not bit for bit: another processor may round a loss in another way."""
    size = 1e-3 * max((abs(value) for value in first[1]), default=0.0)
    return (found[0], len(found[1])) == (first[0], len(first[1])) and all(
        abs(one - other) <= size for one, other in zip(found[1], first[1], strict=True)
    )


def _edge(tensor: Tensor | None, is_here: bool) -> Edge:
    assert tensor is not None
    return make_edge(tensor) if is_here else ELSEWHERE


def _is_recorded(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _complete(gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    """The gradient as the caller's graph takes it: on the tensor's device, and for a tensor with
    hooks never None.

    torch runs the hooks behind an input of a node even if no gradient comes, and a hook such as
    ``lambda g: g.clamp(-1, 1)`` does not expect None: where an output is unused, its gradient is
    zero.
    """
    if gradient is not None:
        return move_tensor(gradient, tensor.device)
    return torch.zeros_like(tensor) if tensor._backward_hooks else None


def _leaf(gradient: Tensor | None, device: torch.device) -> Tensor | None:
    return None if gradient is None else move_tensor(gradient.detach(), device).requires_grad_()


def _present(tensors: Sequence[Tensor | None]) -> Tensors:
    return [tensor for tensor in tensors if tensor is not None]


def unflatten(flat: Iterable[Any], lengths: Iterable[int]) -> list[list[Any]]:
    """Cut into lists of these lengths; what is left over is left out."""
    rest = iter(flat)
    return [list(islice(rest, length)) for length in lengths]
