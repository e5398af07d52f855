"""One step over shards: leaves in, forwards run, outputs tied to the caller's graph.

What it holds: :func:`run_shards`. Why: it is the one place where replicas, the engine and the stitch
meet; everything around it (splitting before, merging after) is ordinary torch.

Guarantees: outside of grad mode nothing is stitched; an output that is the replica's own parameter or
buffer comes back as the source module's.
Must not: cut or merge batches, or write to the source module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from samestep.replicas import Replica
from samestep.state import Changes, collect
from samestep.stitch import Runner, ShardGraphs, stitch
from samestep.tree import map_leaves

__all__ = ["map_tensors", "run_shards"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def run_shards(
    replicas: Sequence[Replica],
    arguments: Sequence[Arguments],
    runner: Runner,
    *,
    method: str | None = None,
) -> tuple[list[Any], Changes]:
    """Run every replica on its shard.

    Args:
        replicas: one per shard.
        arguments: (args, kwargs) per shard; part of the caller's graph where they require grad.
        runner: how to run.
        method: the method to call; None: the module itself, hooks and all.

    Returns:
        Per shard its output, part of the caller's graph; and what the forwards wrote.

    Raises:
        BaseException: what the lowest failing shard raised.
    """
    is_recorded = torch.is_grad_enabled()
    local: list[list[Tensor]] = [[] for _ in replicas]
    leaves: list[list[Tensor]] = [[] for _ in replicas]
    if is_recorded:
        arguments = [
            map_tensors(_replace_by_leaf(local[k], leaves[k]), pair)
            for k, pair in enumerate(arguments)
        ]
    for replica in replicas:
        for record in replica.norms:
            record.calls.clear()
    outputs = runner.run(
        [
            _call(replica, method, *pair)
            for replica, pair in zip(replicas, arguments, strict=True)
        ]
    )
    outputs = [
        map_tensors(replica.original, output)
        for replica, output in zip(replicas, outputs, strict=True)
    ]
    changes = collect(replicas)
    if is_recorded:
        values = changes.values()
        trees = [(out, values[k] if values else None) for k, out in enumerate(outputs)]
        tied = _tie(replicas, leaves, local, trees, runner)
        outputs = [out for out, _ in tied]
        if values:
            changes.replace([row for _, row in tied])
    return outputs, changes


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply ``function`` to every tensor of a tree, those inside a PackedSequence included."""
    if type(tree) is Tensor:
        return function(tree)

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, PackedSequence):
            data = function(leaf.data)
            return leaf if data is leaf.data else leaf._replace(data=data)
        return leaf

    return map_leaves(visit, tree)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _call(
    replica: Replica, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    function = replica.module if method is None else getattr(replica.module, method)
    return lambda: function(*args, **kwargs)


def _replace_by_leaf(sources: list[Tensor], leaves: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Note every tensor that requires grad, and put a leaf over the same memory in its place."""

    def replace(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_()
        sources.append(tensor)
        leaves.append(leaf)
        base = tensor if tensor._base is None else tensor._base
        # A forward may work in place on an input that is no leaf of the user's, as it may without
        # us; a leaf would forbid it. (On the user's own leaf torch forbids it anyway.)
        return leaf if base.is_leaf else leaf.clone()

    return replace


def _tie(
    replicas: Sequence[Replica],
    leaves: list[list[Tensor]],
    local: list[list[Tensor]],
    trees: list[Any],
    runner: Runner,
) -> list[Any]:
    """Put tensors of the caller's graph in the place of the shards' outputs."""
    found: list[dict[int, Tensor]] = [{} for _ in trees]
    own = {id(link.source) for link in replicas[0].links.values()}
    for tree, outputs in zip(trees, found, strict=True):
        map_tensors(_note(outputs, own), tree)
    if not any(found):
        return trees
    sources = [link.source for link in replicas[0].links.values() if link.source.requires_grad]
    graphs = ShardGraphs(
        runner=runner,
        replicated=[[replica.links[id(s)].copy for s in sources] for replica in replicas],
        local=leaves,
        outputs=[list(outputs.values()) for outputs in found],
    )
    if not sources and not any(local):
        return trees  # whatever requires grad was made inside: its graph ends there
    tied = stitch(graphs, sources, local)
    result = []
    for tree, outputs, row in zip(trees, found, tied, strict=True):
        table = dict(zip(outputs, row, strict=True))
        result.append(map_tensors(lambda t, table=table: table.get(id(t), t), tree))
    return result


def _note(outputs: dict[int, Tensor], own: set[int]) -> Callable[[Tensor], Tensor]:
    def note(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and id(tensor) not in own:
            outputs[id(tensor)] = tensor
        return tensor

    return note
