"""Tying what the shards returned to the caller's graph.

What it holds: :func:`look_at`, which finds in one shard's output the tensors that are part of its
graph and what that graph ends in, and :func:`tie`, which puts the outputs of stitches in their
places. Why apart: looking is done where the graph is, tying everywhere: a rank ties the outputs of
other ranks' shards by what those ranks saw.

Guarantees: outputs that share parameters only become nodes of their own, so a backward from one
leaves what lies before the other alone.
Must not: run anything, or know who has which shard beyond ``runner.spread``.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Container, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from samestep.backward import ShardGraphs
from samestep.errors import MergeError, RankError
from samestep.graphs import ELSEWHERE, Edge, group_outputs, make_edge, survey
from samestep.links import Link
from samestep.replica import Replica
from samestep.runner import Runner
from samestep.stitch import stitch
from samestep.tree import map_leaves

__all__ = ["Graph", "Look", "find_tensors", "look_at", "map_tensors", "tie"]

T = TypeVar("T")
MaybeTensors = list[Tensor | None]


class Uses(NamedTuple):
    """What the graph of one output of one shard ends in.

    Attributes:
        local: positions among the shard's L leaves.
        paths: of the source's tensors.
        foreign: shapes of leaves that are neither: the user's own tensors.
    """

    local: frozenset[int]
    paths: frozenset[str]
    foreign: tuple[tuple[int, ...], ...]


class Look(NamedTuple):
    """What was seen in one shard's outputs, in words that other ranks understand.

    Attributes:
        uses: one per output that is part of a graph.
        pairs: outputs (by position) whose graphs share more than parameters.
        is_reentrant: re-entrant checkpointing left a node in one.
        is_shared: a hook of the user's saw what the forward computed, and may have kept it.
    """

    uses: list[Uses]
    pairs: list[tuple[int, int]]
    is_reentrant: bool
    is_shared: bool


class Graph(NamedTuple):
    """One shard's graph, where it is: its outputs' edges, and the foreign leaves of each."""

    look: Look
    edges: list[Edge]
    foreign: list[dict[int, Tensor]]


def look_at(tree: Any, replica: Replica, leaves: Sequence[Tensor | None]) -> Graph:
    """Look at one shard's graph.

    Args:
        tree: what the shard returned and wrote.
        replica: the shard's.
        leaves: its L leaves.
    """
    outputs = list(_find_recorded(tree, replica.links).values())
    edges = [make_edge(tensor) for tensor in outputs]
    positions = {id(leaf): i for i, leaf in enumerate(leaves) if leaf is not None}
    seen = survey(edges, positions)
    uses, foreign = [], []
    for found in seen.leaves:
        paths = frozenset(map(replica.paths.__getitem__, replica.paths.keys() & found.keys()))
        rows = frozenset(map(positions.__getitem__, positions.keys() & found.keys()))
        others: dict[int, Tensor] = {}
        if len(paths) + len(rows) < len(found):
            others = {
                key: leaf
                for key, leaf in found.items()
                if key not in positions and key not in replica.paths and leaf.requires_grad
            }
        shapes = [tuple(leaf.shape) for leaf in others.values()] if others else ()
        uses.append(Uses(rows, paths, tuple(shapes)))
        foreign.append(others)
    look = Look(uses, seen.pairs, seen.is_reentrant, replica.has_hooks())
    return Graph(look, edges, foreign)


def tie(
    trees: list[Any],
    looks: Sequence[Look],
    graphs: Sequence[Graph],
    replicas: Sequence[Replica],
    model: Replica,
    leaves: list[MaybeTensors],
    local: list[list[Tensor]],
    runner: Runner,
) -> list[Any]:
    """Put tensors of the caller's graph in the place of the shards' outputs.

    Args:
        trees: per shard of the call, what it returned and wrote.
        looks: per shard of the call.
        graphs, replicas: of the shards that are here.
        model: any replica.
        leaves, local: per shard of the call, its L leaves and the caller's tensors for them.
        runner: how to run.
    """
    found = [list(_find_recorded(tree, model.links).values()) for tree in trees]
    if not any(found):
        return trees
    tables: list[dict[int, Tensor]] = [{} for _ in trees]
    pairs = list(chain(*map(_get_pairs, looks)))
    groups = group_outputs(list(map(len, found)), pairs)
    for group in groups:
        pick = list if len(groups) == 1 else partial(_pick, group)
        part = _Part(pick, looks, graphs, replicas, model, leaves, local, runner)
        values = list(map(pick, found))
        for table, row, old in zip(tables, part.tie(values), values, strict=True):
            table.update(zip(map(id, old), row, strict=True))
    return [map_tensors(_look_up(table), tree) for tree, table in zip(trees, tables, strict=True)]


class _Part:
    """A group of outputs that become one stitch, and what their graphs end in.

    What no output of the group uses is no input of the stitch: torch walks on behind an input even
    when no gradient comes, calling hooks and freeing what others may still need.
    """

    def __init__(
        self,
        pick: Callable[[list[Any]], list[Any]],
        looks: Sequence[Look],
        graphs: Sequence[Graph],
        replicas: Sequence[Replica],
        model: Replica,
        leaves: list[MaybeTensors],
        local: list[list[Tensor]],
        runner: Runner,
    ) -> None:
        self._runner = runner
        self._uses: list[list[Uses]] = list(map(pick, map(_get_uses, looks)))
        self._is_reentrant = True in map(_is_reentrant, looks)
        self._is_shared = True in map(_is_shared, looks)
        self._leaves, self._local = list(leaves), list(local)
        if any(local):
            kept = [sorted({i for one in row for i in one.local}) for row in self._uses]
            self._leaves = list(map(_pick, kept, leaves))
            self._local = list(map(_pick, kept, local))
        found, copies = self._find_sources(replicas, model)
        self._sources = list(map(_get_source, found))
        self._names = list(map(_get_path, found))
        self._replicated: list[list[Tensor]] = [[] for _ in looks]
        self._edges: list[list[Edge | None]] = [[ELSEWHERE] * len(row) for row in self._uses]
        # Parameters from outside of the module, which forward reached by a global variable or a
        # closure: the shards' graphs end in the user's own tensors.
        foreign: dict[int, Tensor] = {}
        for k, own, graph in zip(runner.spread.mine, copies, graphs, strict=True):
            self._replicated[k] = own
            self._edges[k] = pick(graph.edges)
            for reached in pick(graph.foreign):
                foreign.update(reached)
        self._foreign = list(foreign.values())
        if not runner.spread.is_alone:
            self._check_foreign()

    def tie(self, values: list[list[Tensor]]) -> list[list[Tensor]]:
        """Return tensors equal to ``values`` that are part of the caller's graph."""
        foreign = self._foreign
        sources = self._sources + foreign
        if not sources and not any(self._local):
            return values  # whatever requires grad was made inside: its graph ends there
        graphs = ShardGraphs(
            runner=self._runner,
            replicated=[[*row, *foreign] for row in self._replicated],
            local=self._leaves,
            outputs=self._edges,
            partials=[[] for _ in values],
            # Between the shards' graphs and a foreign leaf there may be a graph of the caller's,
            # which each shard walks and none may free.
            is_shared=self._is_shared or bool(foreign),
            is_reentrant=self._is_reentrant,
            turns=threading.Lock() if foreign else contextlib.nullcontext(),
            foreign=foreign,
            names=self._names,
        )
        return stitch(graphs, values, sources, self._local)

    def _find_sources(
        self, replicas: Sequence[Replica], model: Replica
    ) -> tuple[list[Link], list[list[Tensor]]]:
        """The source's tensors that a gradient may reach, in an order that is every rank's; and
        per shard that is here the tensors that stand for them."""
        used = frozenset[str]().union(*map(_get_paths, chain(*self._uses)))
        if self._is_reentrant:
            # What re-entrant checkpointing will reach cannot be seen in the graph beforehand.
            used |= {link.path for link in model.links.values() if link.source.grad_fn is None}
        found = model.pick(used)
        if not self._runner.spread.is_alone:
            found = sorted(found, key=_get_path)
        keys = list(map(id, map(_get_source, found)))
        copies = [
            list(map(_get_copy, map(replica.links.__getitem__, keys))) for replica in replicas
        ]
        needed = [list(map(_needs_gradient, row)) for row in copies]
        if not all(map(all, needed)):
            kept = list(map(all, zip(*needed, strict=True)))
            return list(compress(found, kept)), [list(compress(row, kept)) for row in copies]
        return found, copies

    def _check_foreign(self) -> None:
        """Ranks know each other's parameters by where they are in the module."""
        shapes = {shape for row in self._uses for one in row for shape in one.foreign}
        if shapes:
            raise RankError(
                f"forward uses a tensor of shape {min(shapes)} that needs a gradient and is not "
                f"part of the module; with several ranks, give it to the module "
                f"(register_parameter) or pass it as an argument"
            )


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


def find_tensors(tree: Any) -> list[Tensor]:
    """Return every tensor of a tree."""
    if type(tree) is Tensor:
        return [tree]
    if type(tree) is tuple and {Tensor}.issuperset(map(type, tree)):
        return list(tree)
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


_needs_gradient = operator.attrgetter("requires_grad")
_get_source = operator.attrgetter("source")
_get_copy = operator.attrgetter("copy")
_get_path = operator.attrgetter("path")
_get_uses = operator.attrgetter("uses")
_get_pairs = operator.attrgetter("pairs")
_get_paths = operator.attrgetter("paths")
_is_reentrant = operator.attrgetter("is_reentrant")
_is_shared = operator.attrgetter("is_shared")


def _pick(places: list[int], row: Sequence[T]) -> list[T]:
    """What lies at these places, in order; a shard may have fewer outputs than another."""
    return [row[i] for i in places if i < len(row)]


def _look_up(table: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: table.get(id(tensor), tensor)


def _find_recorded(tree: Any, own: Container[int]) -> dict[int, Tensor]:
    """The tensors of a tree that are part of a graph, by id; not the source module's ``own``."""
    if type(tree) is Tensor and not tree.is_nested:
        return {id(tree): tree} if tree.requires_grad and id(tree) not in own else {}
    outputs: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and id(tensor) not in own:
            if tensor.is_nested and tensor.layout == torch.strided:
                raise MergeError(
                    "an output is a strided nested tensor that needs a gradient, which torch "
                    "cannot pass through a node of its own; build the batch with "
                    "torch.nested.nested_tensor(..., layout=torch.jagged)"
                )
            outputs[id(tensor)] = tensor
        return tensor

    map_tensors(note, tree)
    return outputs
