"""One autograd node over the graphs of all shards.

What it holds: :class:`ShardGraphs` and :func:`stitch`. Why: torch's engine runs a CPU graph in the
one thread that called ``backward``; if the shards' operations were part of the caller's graph, their
backwards would run one after another. Here each shard has a graph of its own, from leaves to
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
parameters as in any graph, so hooks, accumulation, ``autograd.grad``, GradScaler and clipping see what
they always see. A tensor that no shard used gets no gradient (None), not zeros.
Must not: know modules or batches.

[Note: who keeps a graph]
Inside backward, torch tells whether the caller keeps the graph (``retain_graph``). If not, the
shards' graphs are freed as torch frees its own. A graph that was differentiated with
``create_graph`` is shared by two nodes: freeing it through one would break the other, so such a graph
is never freed piecemeal; each node drops its references and memory follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from samestep.context import CallerContext, Shard
from samestep.engine import Engine, Job
from samestep.reduce import TreeSum, sum_lists
from samestep.rng import Stream

__all__ = ["Runner", "ShardGraphs", "stitch"]

Tensors = list[Tensor]
MaybeTensors = list[Tensor | None]


@dataclass(frozen=True)
class Runner:
    """How to run something on every shard of a call, in forward and again in backward.

    Attributes:
        engine: runs the jobs.
        shards: the shards of the call.
        streams: their random numbers.
        drawing: how those are ruled, see :mod:`samestep.rng`.
        together: whether the shards exchange values.
        home: the device of the source module.
    """

    engine: Engine
    shards: Sequence[Shard]
    streams: Sequence[Stream]
    drawing: Any
    together: bool
    home: torch.device

    def run(
        self, functions: Sequence[Callable[[], Any]], inline: torch.device | None = None
    ) -> list[Any]:
        """Run one function per shard, in the caller's context; return the values in order."""
        jobs = [
            Job(shard, function, stream, self.drawing)
            for shard, function, stream in zip(self.shards, functions, self.streams, strict=True)
        ]
        context = CallerContext(self.home)
        return self.engine.run(jobs, context, together=self.together, inline=inline)


@dataclass
class ShardGraphs:
    """The K graphs of one step: their leaves and their outputs, by placement.

    Attributes:
        runner: how to run their backwards.
        replicated: per shard, the leaves that stand for R inputs (same length in every shard).
        local: per shard, the leaves that stand for L inputs.
        outputs: per shard, the L outputs.
        partials: per shard, the parts of P outputs (same length; None where a shard has no part).
        is_shared: see [Note: who keeps a graph].
    """

    runner: Runner
    replicated: list[Tensors]
    local: list[Tensors]
    outputs: list[Tensors]
    partials: list[MaybeTensors] = field(default_factory=list)
    is_shared: bool = False


def stitch(graphs: ShardGraphs, replicated: Tensors, local: list[Tensors]) -> list[Tensors]:
    """Tie the shards' graphs into the caller's graph.

    Args:
        graphs: what the shards computed.
        replicated: the caller's tensors that ``graphs.replicated`` stands for.
        local: per shard, the caller's tensors that ``graphs.local`` stands for.

    Returns:
        Per shard, tensors equal to ``graphs.outputs`` that are part of the caller's graph.
    """
    flat = _apply(graphs, replicated, local)
    return _unflatten(flat, [len(outputs) for outputs in graphs.outputs])


def _apply(graphs: ShardGraphs, replicated: Tensors, local: list[Tensors]) -> MaybeTensors:
    """Outputs of all shards in a row, then the sums of the partials."""
    return list(_Stitch.apply(graphs, *replicated, *chain.from_iterable(local)))


class _Stitch(torch.autograd.Function):
    """The node. Its inputs are the R inputs, then the L inputs shard by shard."""

    @staticmethod
    def forward(ctx: Any, graphs: ShardGraphs, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.graphs = graphs
        # Plain attributes, not save_for_backward: nothing is saved for its value here (each shard's
        # graph checks the versions of what it saved), and the user's saved-tensor hooks must
        # not see, say, every parameter go by.
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        outputs = [output.detach() for output in chain.from_iterable(graphs.outputs)]
        return (*outputs, *_sum_partials(graphs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        num_inputs = len(ctx.needs_input_grad)
        if all(gradient is None for gradient in gradients):
            return (None,) * num_inputs
        graphs: ShardGraphs | None = ctx.graphs
        if graphs is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time, but the shards' graphs have "
                "been freed already; pass retain_graph=True to the first backward"
            )
        step = _Backward(graphs, ctx.inputs, gradients, ctx.needs_input_grad[1:])
        if torch.is_grad_enabled():
            return (None, *step.run_differentiable())
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if not is_kept:
            ctx.graphs = ctx.inputs = None
        return (None, *step.run(is_kept=is_kept))


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
        self.needed_local = _unflatten(
            needed[self.num_replicated :], list(map(len, graphs.local))
        )
        device = next(g.device for g in gradients if g is not None)
        # On an accelerator this runs in the device's own autograd thread, and a nested backward for
        # the same device waits for that very thread: its shards must run here, inline.
        self.inline = None if device.type == "cpu" else device

    def run(self, *, is_kept: bool) -> MaybeTensors:
        """Gradients of the node's inputs, not differentiable."""
        keep = is_kept or self.graphs.is_shared
        sums = TreeSum(self.num_shards, sum_lists)

        def backward(k: int) -> Callable[[], MaybeTensors]:
            def work() -> MaybeTensors:
                leaves = self._wanted(k)
                found = self._differentiate(
                    k, leaves, self.local_gradients[k], self.sum_gradients, retain_graph=keep
                )
                cut = sum(self.needed_replicated)
                sums.add(k, self._to_home(found[:cut]))
                return found[cut:]

            return work

        local = self.graphs.runner.run([backward(k) for k in range(self.num_shards)], self.inline)
        return self._spread(sums.result(), local)

    def run_differentiable(self) -> MaybeTensors:
        """Gradients of the node's inputs, themselves outputs of a stitch."""
        graphs = self.graphs
        gradient_leaves = [
            [_leaf(g, graphs.runner.shards[k].device) for g in self.local_gradients[k]]
            for k in range(self.num_shards)
        ]
        sum_leaves = [
            [_leaf(g, shard.device) for g in self.sum_gradients] for shard in graphs.runner.shards
        ]

        def backward(k: int) -> Callable[[], MaybeTensors]:
            return lambda: self._differentiate(
                k, self._wanted(k), gradient_leaves[k], sum_leaves[k], create_graph=True
            )

        found = graphs.runner.run([backward(k) for k in range(self.num_shards)], self.inline)
        cut = sum(self.needed_replicated)
        present = [[g is not None and g.requires_grad for g in row[cut:]] for row in found]
        derived = ShardGraphs(
            runner=graphs.runner,
            replicated=[r + _present(s) for r, s in zip(graphs.replicated, sum_leaves, strict=True)],
            local=[x + _present(g) for x, g in zip(graphs.local, gradient_leaves, strict=True)],
            outputs=[
                [g for g, there in zip(row[cut:], mask, strict=True) if g is not None and there]
                for row, mask in zip(found, present, strict=True)
            ],
            partials=[self._to_home(row[:cut]) for row in found],
            is_shared=True,
        )
        graphs.is_shared = True
        inputs = _unflatten(self.inputs[self.num_replicated :], list(map(len, graphs.local)))
        flat = iter(
            _apply(
                derived,
                [*self.inputs[: self.num_replicated], *_present(self.sum_gradients)],
                [
                    [*x, *_present(g)]
                    for x, g in zip(inputs, self.local_gradients, strict=True)
                ],
            )
        )
        local = [
            [next(flat) if there else g for g, there in zip(row[cut:], mask, strict=True)]
            for row, mask in zip(found, present, strict=True)
        ]
        return self._spread(list(flat), local)

    # -- One shard ---------------------------------------------------------------------------

    def _wanted(self, k: int) -> Tensors:
        """Leaves of shard k whose gradients are wanted: R first, then L."""
        pairs = chain(
            zip(self.graphs.replicated[k], self.needed_replicated, strict=True),
            zip(self.graphs.local[k], self.needed_local[k], strict=True),
        )
        return [leaf for leaf, is_needed in pairs if is_needed]

    def _differentiate(
        self,
        k: int,
        leaves: Tensors,
        local: Sequence[Tensor | None],
        sums: Sequence[Tensor | None],
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> MaybeTensors:
        partials = self.graphs.partials[k] if self.graphs.partials else []
        outputs: Tensors = []
        gradients: Tensors = []
        for output, gradient in chain(
            zip(self.graphs.outputs[k], local, strict=True), zip(partials, sums, strict=True)
        ):
            if output is not None and gradient is not None and output.requires_grad:
                outputs.append(output)
                gradients.append(gradient.to(output.device))
        if not outputs or not leaves:
            return [None] * len(leaves)
        keep = create_graph if retain_graph is None else retain_graph
        return list(_run_backward(outputs, gradients, leaves, keep, create_graph))

    # -- All shards --------------------------------------------------------------------------

    def _to_home(self, gradients: MaybeTensors) -> MaybeTensors:
        """Move R gradients to the device of the caller's tensor, so that any shard can add them."""
        sources = (t for t, is_needed in zip(self.inputs, self.needed_replicated, strict=False)
                   if is_needed)
        return [
            g if g is None else g.to(source.device)
            for g, source in zip(gradients, sources, strict=True)
        ]

    def _spread(self, replicated: MaybeTensors, local: list[MaybeTensors]) -> MaybeTensors:
        """Put the gradients that were wanted in the places of all inputs."""
        found = iter(replicated)
        result = [next(found) if is_needed else None for is_needed in self.needed_replicated]
        at = self.num_replicated
        for needed, row in zip(self.needed_local, local, strict=True):
            mine = iter(row)
            for is_needed in needed:
                gradient = next(mine) if is_needed else None
                if gradient is not None:
                    gradient = gradient.to(self.inputs[at].device)
                result.append(gradient)
                at += 1
        return result


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _run_backward(
    outputs: Tensors, gradients: Tensors, leaves: Tensors, keep_graph: bool, create_graph: bool
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, past its check for function modes.

    ``torch.autograd.grad`` hands itself to an active function mode, which then is off for as long as
    it runs; but activation checkpointing runs forwards inside, and their random functions must
    still find the shard's stream.
    """
    found: tuple[Tensor | None, ...] = torch.autograd.graph._engine_run_backward(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        create_graph,
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def _sum_partials(graphs: ShardGraphs) -> MaybeTensors:
    """The values of the P outputs, outside of any graph."""
    if not graphs.partials:
        return []
    sums = TreeSum(len(graphs.partials), sum_lists)
    for k, parts in enumerate(graphs.partials):
        sums.add(k, [None if part is None else part.detach() for part in parts])
    return sums.result()


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
