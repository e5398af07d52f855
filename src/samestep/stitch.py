"""One autograd node over the graphs of all shards.

What it holds: :class:`ShardGraphs` and :func:`stitch`. Why: torch's engine runs a CPU graph in the
one thread that called ``backward``; if the shards' operations were part of the caller's graph,
their backwards would run one after another. Here each shard has a graph of its own, from leaves to
outputs, and one node in the caller's graph stands for all of them; its backward runs the shards'
backwards in parallel.

Placements of what crosses the node (K shards)::

    L  local        belongs to one shard: a shard's rows, a shard's outputs
    R  replicated   the same in every shard: parameters
    P  partial      each shard has a part, the value is their sum: gradients of R

                 inputs of the node        outputs of the node
    forward      R parameters, L rows      L outputs
    backward     L output gradients    ->  P parameter gradients (summed), L row gradients
    again        R parameters + the gradients of P; L rows + output gradients
                                       ->  P, L: the same picture, so any order of derivative works

    user's p ---R---> alias_0 ---[graph of shard 0]---> out_0 ---L---> user's graph
             \\--R---> alias_1 ---[graph of shard 1]---> out_1 ---L---/

Guarantees: parameter gradients are added in the canonical tree, once, and flow on to the user's own
parameters as in any graph, so hooks, accumulation, ``autograd.grad``, GradScaler and clipping see
what they always see. A tensor that no shard used gets no gradient (None), not zeros.
Must not: know modules or batches.

[Note: who keeps a graph]
What is kept of a shard's graph are edges into it (a node and an output number), not output tensors:
those would hold memory that the user has let go. Inside backward, torch tells whether the caller
keeps the graph (``retain_graph``). If not, the shards' backwards free what they walk, as torch
does, and walking it again is torch's own error. A graph may be shared: by two stitches, once it was
differentiated with ``create_graph``; with the caller's own graph, where a hook may have let a
tensor out. Freeing it through one would break the other, so a shared graph is never freed
piecemeal; a stitch drops the edges that it has used, and memory follows.

[Note: two ways to differentiate]
Each shard computes just the gradients that were asked for, as ``autograd.grad`` does. Re-entrant
checkpointing refuses to run inside that: graphs with such a node accumulate into their leaves, as
``backward()`` does, and the leaves' ``.grad`` is taken and put back at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from samestep.context import current_shard
from samestep.errors import note_shard
from samestep.graphs import (
    Edge,
    accumulate,
    differentiate,
    find_needed,
    is_plain_backward,
    make_edge,
    nodes_of,
    put_after,
    without_hooks,
)
from samestep.reduce import TreeSum, sum_lists
from samestep.runner import Runner

__all__ = ["ShardGraphs", "stitch"]

Tensors = list[Tensor]
MaybeTensors = list[Tensor | None]


@dataclass
class ShardGraphs:
    """The K graphs of one step: their leaves and the edges of their outputs, by placement.

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
        lock: held by a backward through them: several threads take turns, as at any node of
            torch's.
        turns: held while a shard's graph accumulates into leaves that other shards have too.
    """

    runner: Runner
    replicated: list[Tensors]
    local: list[Tensors]
    outputs: list[list[Edge | None]]
    partials: list[list[Edge | None]]
    is_shared: bool = False
    is_reentrant: bool = False
    turns: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    foreign: list[Tensor] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)


def stitch(
    graphs: ShardGraphs, values: list[Tensors], replicated: Tensors, local: list[Tensors]
) -> list[Tensors]:
    """Tie the shards' graphs into the caller's graph.

    Args:
        graphs: what the shards computed.
        values: per shard, the outputs that ``graphs.outputs`` are the edges of.
        replicated: the caller's tensors that ``graphs.replicated`` stands for.
        local: per shard, the caller's tensors that ``graphs.local`` stands for.

    Returns:
        Per shard, tensors equal to ``values`` that are part of the caller's graph.
    """
    flat = _apply(graphs, list(chain.from_iterable(values)), [*replicated, *chain(*local)])
    if graphs.is_shared and flat[0] is not None:
        # Where the caller's own graph reaches into the shards', the engine frees what it walks, and
        # the stitch would come too late.
        put_after(nodes_of(chain(*graphs.outputs)), flat[0].grad_fn)
    return _unflatten(flat, [len(row) for row in values])


def _apply(graphs: ShardGraphs, values: MaybeTensors, inputs: Tensors) -> MaybeTensors:
    return list(_Stitch.apply(graphs, values, *inputs))  # type: ignore[no-untyped-call]  # torch's


class _Stitch(torch.autograd.Function):
    """The node. Its inputs are the R inputs, then the L inputs shard by shard."""

    @staticmethod
    def forward(
        ctx: Any, graphs: ShardGraphs, values: MaybeTensors, *inputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.graphs = graphs
        # Plain attributes, not save_for_backward: nothing is saved for its value here (each shard's
        # graph checks the versions of what it saved), and the user's saved-tensor hooks must
        # not see, say, every parameter go by.
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        return tuple(value if value is None else value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * len(ctx.needs_input_grad)
        if all(gradient is None for gradient in gradients):
            return nothing
        graphs: ShardGraphs | None = ctx.graphs
        if graphs is None:
            raise RuntimeError(_MSG_FREED)
        step = _Backward(graphs, ctx.inputs, gradients, find_needed(ctx.next_functions))
        # Inside a shard (forward used an earlier output) whoever runs that shard may hold the lock.
        lock = graphs.lock if current_shard() is None else contextlib.nullcontext()
        with lock, without_hooks(graphs.foreign):
            return (None, None, *_Stitch._differentiate(ctx, graphs, step))

    @staticmethod
    def _differentiate(ctx: Any, graphs: ShardGraphs, step: _Backward) -> MaybeTensors:
        if torch.is_grad_enabled():
            return step.run_differentiable()
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        found = step.run(is_kept=is_kept or graphs.is_shared)
        if graphs.is_shared and not is_kept and step.drop_used():
            ctx.graphs = ctx.inputs = None
        return found


class _Backward:
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
        self.num_replicated = len(graphs.replicated[0])
        num_local = sum(map(len, graphs.outputs))
        self.local_gradients = _unflatten(gradients[:num_local], list(map(len, graphs.outputs)))
        self.sum_gradients = list(gradients[num_local:])
        self.needed_replicated = list(needed[: self.num_replicated])
        self.needed_local = _unflatten(needed[self.num_replicated :], list(map(len, graphs.local)))
        device = next(g.device for g in gradients if g is not None)
        # On an accelerator this runs in the device's own autograd thread, and a nested backward for
        # the same device waits for that very thread: its shards must run here, inline.
        self.inline = None if device.type == "cpu" else device

    def run(self, *, is_kept: bool) -> MaybeTensors:
        """Gradients of the node's inputs, not differentiable."""
        sums: TreeSum[MaybeTensors] = TreeSum(self.num_shards, sum_lists)
        # Re-entrant checkpointing refuses to run inside autograd.grad (and for the user's own
        # autograd.grad it must refuse).
        is_plain = self.graphs.is_reentrant and is_plain_backward()
        run = accumulate if is_plain else differentiate
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
                with turns if is_plain else contextlib.nullcontext():
                    found = run(edges, gradients, wanted, is_kept)
                with torch._C.DisableTorchFunction():
                    sums.add(k, self._to_home(found[:cut]))
                return found[cut:]

            return work

        jobs = [backward(k) for k in range(self.num_shards)]
        try:
            # Only leaves that accumulate are state of the replicas. Inside a shard (forward used an
            # earlier output of the same wrapper) whoever runs that shard holds the lock.
            is_locked = is_plain and current_shard() is None
            with self.graphs.runner.lock if is_locked else contextlib.nullcontext():
                local = self.graphs.runner.run_backward(jobs, self.inline)
        except RuntimeError as error:
            if "a second time" in str(error):
                note_shard(error, _MSG_SIDE_DOOR)
            raise
        return self._spread(sums.result(), local)

    def run_differentiable(self) -> MaybeTensors:
        """Gradients of the node's inputs, themselves outputs of a stitch."""
        graphs = self.graphs
        devices = [shard.device for shard in graphs.runner.shards]
        gradient_leaves = [
            [_leaf(g, device) for g in row]
            for row, device in zip(self.local_gradients, devices, strict=True)
        ]
        sum_leaves = [[_leaf(g, device) for g in self.sum_gradients] for device in devices]
        cut = sum(self.needed_replicated)

        def backward(k: int) -> Callable[[], MaybeTensors]:
            def work() -> MaybeTensors:
                edges, gradients = self._arriving(k, gradient_leaves[k], sum_leaves[k])
                found = differentiate(edges, gradients, self._wanted(k), True, True)
                return self._to_home(found[:cut]) + found[cut:]

            return work

        jobs = [backward(k) for k in range(self.num_shards)]
        found = graphs.runner.run_backward(jobs, self.inline)
        derived = ShardGraphs(
            runner=graphs.runner,
            replicated=[
                leaves + _present(sums)
                for leaves, sums in zip(graphs.replicated, sum_leaves, strict=True)
            ],
            local=[
                leaves + _present(gradients)
                for leaves, gradients in zip(graphs.local, gradient_leaves, strict=True)
            ],
            outputs=[[make_edge(g) for g in row[cut:] if _is_recorded(g)] for row in found],
            partials=[
                [make_edge(g) if _is_recorded(g) else None for g in row[:cut]] for row in found
            ],
            is_shared=True,
        )
        graphs.is_shared = True
        return self._tie(derived, found, cut)

    def _tie(self, derived: ShardGraphs, found: list[MaybeTensors], cut: int) -> MaybeTensors:
        """Put the shards' gradients into the caller's graph, as outputs of a second stitch."""
        sums: TreeSum[MaybeTensors] = TreeSum(self.num_shards, sum_lists)
        for k, row in enumerate(found):
            sums.add(k, [None if g is None else g.detach() for g in row[:cut]])
        values: MaybeTensors = [g for row in found for g in row[cut:] if _is_recorded(g)]
        inputs = _unflatten(self.inputs[self.num_replicated :], list(map(len, self.graphs.local)))
        sources: Tensors = [*self.inputs[: self.num_replicated], *_present(self.sum_gradients)]
        for mine, gradients in zip(inputs, self.local_gradients, strict=True):
            sources += [*mine, *_present(gradients)]
        values += sums.result()
        flat = iter(_apply(derived, values, sources))
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
        pairs = chain(
            zip(self.graphs.replicated[k], self.needed_replicated, strict=True),
            zip(self.graphs.local[k], self.needed_local[k], strict=True),
        )
        return [leaf for leaf, is_needed in pairs if is_needed]

    def _arriving(
        self, k: int, local: Sequence[Tensor | None], sums: Sequence[Tensor | None]
    ) -> tuple[list[Edge], Tensors]:
        """Where gradients enter shard k's graph, and the gradients, on the shard's device."""
        outputs = self.graphs.outputs[k]
        if any(e is None and g is not None for e, g in zip(outputs, local, strict=True)):
            raise RuntimeError(_MSG_FREED)
        pairs = [
            (edge, gradient.to(edge.device))
            for edge, gradient in chain(
                zip(outputs, local, strict=True),
                zip(self.graphs.partials[k], sums, strict=True),
            )
            if edge is not None and gradient is not None
        ]
        return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]

    # -- All shards --------------------------------------------------------------------------

    def _to_home(self, gradients: MaybeTensors) -> MaybeTensors:
        """Move R gradients to the device of the caller's tensor, so that any shard can add them."""
        sources = [
            tensor
            for tensor, is_needed in zip(
                self.inputs[: self.num_replicated], self.needed_replicated, strict=True
            )
            if is_needed
        ]
        return [
            g if g is None else g.to(source.device)
            for g, source in zip(gradients, sources, strict=True)
        ]

    def _spread(self, replicated: MaybeTensors, local: list[MaybeTensors]) -> MaybeTensors:
        """Put the gradients that were wanted in the places of all inputs."""
        found = chain(replicated, *local)
        needed = chain(self.needed_replicated, *self.needed_local)
        return [
            _complete(next(found), tensor) if is_needed else None
            for tensor, is_needed in zip(self.inputs, needed, strict=True)
        ]


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_MSG_FREED = (
    "Trying to backward through the graph a second time, but the shards' graphs have been freed "
    "already; pass retain_graph=True to the first backward"
)
_MSG_SIDE_DOOR = """\
Did a tensor leave forward by another way than its output, such as a hook that appends to a list?
    hook: features.append(output)
    (model(x).sum() + features[0].sum()).backward()  # walks a shard's graph twice
Return it from forward, store it on the module, or keep the graph:
    (model(x).sum() + features[0].sum()).backward(retain_graph=True)"""


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
        return gradient.to(tensor.device)
    return torch.zeros_like(tensor) if tensor._backward_hooks else None


def _leaf(gradient: Tensor | None, device: torch.device) -> Tensor | None:
    return None if gradient is None else gradient.detach().to(device).requires_grad_()


def _present(tensors: Sequence[Tensor | None]) -> Tensors:
    return [tensor for tensor in tensors if tensor is not None]


def _unflatten(flat: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    result, at = [], 0
    for length in lengths:
        result.append(list(flat[at : at + length]))
        at += length
    return result
