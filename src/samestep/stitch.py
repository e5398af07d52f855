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

[Note: ranks]
Where several ranks have the shards, each has the whole node: the same outputs, with the values that
the others told, and the same inputs. What is missing are the other ranks' graphs; so each
differentiates its own, and they tell each other the results. The callers' graphs are the same, so
their backwards come to this node in the same order.

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
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from samestep.backward import MSG_FREED, Backward, ShardGraphs, unflatten
from samestep.context import current_shard
from samestep.graphs import apply_node, find_needed, nodes_of, put_after, without_hooks

__all__ = ["ShardGraphs", "stitch"]

Tensors = list[Tensor]
MaybeTensors = list[Tensor | None]


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
    return unflatten(flat, map(len, values))


def _apply(graphs: ShardGraphs, values: MaybeTensors, inputs: Tensors) -> MaybeTensors:
    return list(apply_node(_Stitch, graphs, values, inputs=inputs))


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
        return tuple([value if value is None else value.detach() for value in values])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * len(ctx.needs_input_grad)
        if all(gradient is None for gradient in gradients):
            return nothing
        graphs: ShardGraphs | None = ctx.graphs
        if graphs is None:
            raise RuntimeError(MSG_FREED)
        step = Backward(graphs, ctx.inputs, gradients, find_needed(ctx.next_functions))
        # Inside a shard (forward used an earlier output) whoever runs that shard may hold the lock.
        lock = graphs.lock if current_shard() is None else contextlib.nullcontext()
        with lock, without_hooks(graphs.foreign):
            return (None, None, *_Stitch._differentiate(ctx, graphs, step))

    @staticmethod
    def _differentiate(ctx: Any, graphs: ShardGraphs, step: Backward) -> MaybeTensors:
        if torch.is_grad_enabled():
            return step.run_differentiable(_apply)
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        found = step.run(is_kept=is_kept or graphs.is_shared)
        if graphs.is_shared and not is_kept and step.drop_used():
            ctx.graphs = ctx.inputs = None
        return found
