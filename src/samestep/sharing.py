"""What the forwards of one call returned and wrote, brought together from all ranks.

What it holds: :func:`share_forward`. Why: every rank goes on with the whole output and leaves the
source module in the same state, so each must know of every shard what its own shards' rank saw.
With one rank it looks at what is here, and no more.

Guarantees: one message, unless the forwards of different ranks changed different attributes (then
two); the results are in shard order and the same in every rank.
Must not: tie anything, or write to the source module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.changes import Changes, Touched, collect, find_touched
from samestep.norm import NormRecord
from samestep.replica import Replica
from samestep.runner import Runner
from samestep.tie import Graph, Look, find_tensors, look_at, map_tensors
from samestep.tree import open_container

__all__ = ["Forward", "share_forward"]


@dataclass(eq=False, repr=False)
class Forward:
    """What is known of a call after its forwards.

    Attributes:
        outputs: per shard of the call.
        changes: what all shards wrote.
        looks: per shard of the call; empty outside of grad mode.
        graphs: of the shards that are here.
        notes: what each rank noted.
        has_gradients: whether a forward called ``backward()`` itself.
    """

    outputs: list[Any]
    changes: Changes
    looks: list[Look]
    graphs: list[Graph]
    notes: list[Any]
    has_gradients: bool


@dataclass(eq=False, repr=False)
class _Note:
    """What a rank says beside its shards' values."""

    touched: Touched
    looks: list[Look]
    has_gradients: bool
    more: Any


def share_forward(
    outputs: list[Any],
    replicas: Sequence[Replica],
    model: Replica,
    leaves: Sequence[Sequence[Tensor | None]],
    runner: Runner,
    note: Callable[[], Any],
) -> Forward:
    """Bring together what the shards returned and wrote.

    Args:
        outputs: of the shards that are here.
        replicas: theirs.
        model: any replica.
        leaves: per shard of the call, its L leaves.
        runner: how the call is run.
        note: anything that every rank is to know; asked once.
    """
    spread = runner.spread
    touched = find_touched(replicas)
    has_gradients = True in [replica.has_gradients() for replica in replicas]
    more = note()
    while True:
        changes = collect(replicas, touched, model)
        if spread.is_local and changes.entries:
            outputs = _part_from(outputs, changes.values(len(replicas)))
        graphs = []
        if torch.is_grad_enabled():
            # As run_shards ties them: with the entries that changed, if there are any.
            trees: Sequence[Any] = outputs
            if changes.entries:
                trees = list(zip(outputs, changes.values(len(replicas)), strict=True))
            graphs = [
                look_at(tree, replica, leaves[k])
                for k, tree, replica in zip(spread.mine, trees, replicas, strict=True)
            ]
        looks = [graph.look for graph in graphs]
        if spread.is_alone:
            return Forward(outputs, changes, looks, graphs, [more], has_gradients)
        values = changes.values(len(replicas))
        shared, notes = spread.share(
            "forward",
            _make_payloads(outputs, values, changes),
            model.source_names(),
            model.source_objects(),
            note=_Note(touched, looks, has_gradients, more),
            hollow=_find_hollow(outputs, values) if spread.is_local else (),
        )
        # A rank without shards has touched nothing, and takes what the others found.
        speaking = [found for rank, found in enumerate(notes) if rank in spread.owners]
        union = _unite([found.touched for found in speaking])
        if all(found.touched == union for found in speaking):
            break
        touched = union
    changes = collect(replicas, union, model)
    _fill(changes, shared, replicas, model)
    everyone = [output for output, _, _, _ in shared]
    if spread.is_local:
        everyone = [
            output if k in spread.mine else _drop_rows(output, size, spread.dim)
            for k, (output, size) in enumerate(zip(everyone, spread.sizes, strict=True))
        ]
    return Forward(
        everyone,
        changes,
        [look for found in speaking for look in found.looks],
        graphs,
        [found.more for found in notes],
        any(found.has_gradients for found in notes),
    )


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _make_payloads(
    outputs: Sequence[Any], values: Sequence[list[Any]], changes: Changes
) -> list[tuple[Any, list[Any], list[Tensor], list[Any]]]:
    """Per shard: output, entries, tensors written in place, what BatchNorm modules saw."""
    return [
        (
            output,
            row,
            [found.values[j] for found in changes.written],
            [record.calls for record in changes.norms[j]],
        )
        for j, (output, row) in enumerate(zip(outputs, values, strict=True))
    ]


def _fill(
    changes: Changes, shared: Sequence[Any], replicas: Sequence[Replica], model: Replica
) -> None:
    """Let ``changes`` be about all shards of the call."""
    changes.replace([row for _, row, _, _ in shared])
    for i, found in enumerate(changes.written):
        found.values = [written[i] for _, _, written, _ in shared]
    changes.norms = [
        [
            NormRecord(record.module, record.index, calls)
            for record, calls in zip(model.norms, row, strict=True)
        ]
        for _, _, _, row in shared
    ]


def _unite(found: Sequence[Touched]) -> Touched:
    """All that was touched by any, in one order."""
    columns = zip(*found, strict=True)
    return Touched(
        *(list(dict.fromkeys(name for row in column for name in row)) for column in columns)
    )


def _part_from(outputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Outputs with other objects for tensors that were also left on the module.

    Of an output its rows stay with their rank, what is on the module goes to all.
    """
    kept = {id(tensor) for tensor in find_tensors(values)}
    return [
        map_tensors(lambda t: t.view_as(t) if id(t) in kept else t, output) for output in outputs
    ]


def _find_hollow(outputs: Sequence[Any], values: Sequence[Any]) -> set[int]:
    """Tensors whose rows stay with their rank: ids."""
    kept = {id(tensor) for tensor in find_tensors(values)}
    return {id(t) for t in find_tensors(outputs) if t.dim() and id(t) not in kept}


def _drop_rows(output: Any, num_rows: int, dim: int) -> Any:
    """Another rank's output without its rows: what holds the place of a shard that is not here."""
    made: dict[int, Tensor] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_meta and id(value) not in made:
                made[id(value)] = _empty_like(value, num_rows, dim)
            return made.get(id(value), value)
        opened = open_container(value)
        if opened is None:
            return value
        if isinstance(value, list) and len(value) == num_rows and not find_tensors(value):
            return opened.rebuild([])
        return opened.rebuild([visit(child) for child in opened.children])

    return visit(output)


def _empty_like(tensor: Tensor, num_rows: int, dim: int) -> Tensor:
    shape = list(tensor.shape)
    has_dim = -len(shape) <= dim < len(shape)
    if not has_dim or (shape[dim] != num_rows and num_rows in shape):
        dim = shape.index(num_rows) if num_rows in shape else 0
    shape[dim] = 0
    # Of what another rank has, only the form is here, without a device.
    return torch.empty(shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)
