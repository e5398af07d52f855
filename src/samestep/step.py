"""One step over shards: leaves in, forwards run, outputs tied to the caller's graph.

What it holds: :func:`run_shards`. Why: it is the one place where replicas, the engine and the
stitch meet; everything around it (splitting before, merging after) is ordinary torch.

Guarantees: outside of grad mode nothing is stitched; an output that is the replica's own parameter
or buffer comes back as the source module's.
Must not: cut or merge batches, or write to the source module.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from samestep.errors import MergeError, StateWarning
from samestep.graphs import Edge, Survey, group_outputs, make_edge, survey
from samestep.recompute import Recomputation
from samestep.reduce import tree_sum
from samestep.replica import BringHome, Replica
from samestep.runner import Runner
from samestep.state import Changes, collect
from samestep.stitch import ShardGraphs, stitch
from samestep.tree import map_leaves

__all__ = ["find_tensors", "map_tensors", "renew_lock", "run_shards"]

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def run_shards(
    replicas: Sequence[Replica],
    arguments: Sequence[Arguments],
    runner: Runner,
    *,
    method: str | None = None,
    recompute: bool = False,
) -> tuple[list[Any], Changes]:
    """Run every replica on its shard.

    Args:
        replicas: one per shard.
        arguments: (args, kwargs) per shard; part of the caller's graph where they require grad.
        runner: how to run.
        method: the method to call; None: the module itself, hooks and all.
        recompute: keep no activations; each forward runs again in its backward.

    Returns:
        Per shard its output, part of the caller's graph; and what the forwards wrote.

    Raises:
        BaseException: what the lowest failing shard raised.
    """
    is_recorded = torch.is_grad_enabled()
    local: list[list[Tensor]] = [[] for _ in replicas]
    leaves: list[list[Tensor]] = [[] for _ in replicas]
    inputs: list[_Inputs] = []
    if is_recorded and _need_gradient(arguments[0]):
        inputs = [_Inputs(mine, given) for mine, given in zip(leaves, local, strict=True)]
        arguments = [
            map_tensors(one.replace, pair) for one, pair in zip(inputs, arguments, strict=True)
        ]
    for replica in replicas:
        replica.begin()
    functions: list[Callable[..., Any]] = [_function(replica, method) for replica in replicas]
    again = [
        Recomputation(replica, function)
        for replica, function in zip(replicas, functions, strict=True)
        if recompute and is_recorded
    ]
    called: Sequence[Callable[..., Any]] = again or functions
    with _no_parametrization_cache():
        outputs = runner.run(
            [
                partial(function, *args, **kwargs)
                for function, (args, kwargs) in zip(called, arguments, strict=True)
            ]
        )
    for one in again:
        one.keep()
    outputs = [
        _in_terms_of_source(replica, output)
        for replica, output in zip(replicas, outputs, strict=True)
    ]
    for given in inputs:
        given.check()
    changes = collect(replicas, [shard.stop - shard.start for shard in runner.shards])
    if any(replica.has_gradients() for replica in replicas):
        _collect_gradients(replicas)
    values = changes.values()
    if is_recorded and values:
        tied = _tie(replicas, leaves, local, list(zip(outputs, values, strict=True)), runner)
        changes.replace([row for _, row in tied])
        outputs = [out for out, _ in tied]
    elif is_recorded:
        outputs = _tie(replicas, leaves, local, outputs, runner)
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


def find_tensors(tree: Any) -> list[Tensor]:
    """Return every tensor of a tree."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _collect_gradients(replicas: Sequence[Replica]) -> None:
    """Bring home what a forward accumulated by calling ``backward()`` itself."""
    for key, link in replicas[0].links.items():
        copies = [replica.links[key].copy for replica in replicas]
        parts = [copy.grad for copy in copies if copy.grad is not None]
        if not parts:
            continue
        for copy in copies:
            copy.grad = None
        with torch.no_grad():
            total = tree_sum([part.to(link.source.device) for part in parts])
            before = link.source.grad
            link.source.grad = total if before is None else before + total


class _Never:
    """A count that stays zero, whatever ``parametrize.cached()`` adds to it."""

    before: Any = 0

    def __bool__(self) -> bool:
        return False

    def __iadd__(self, other: int) -> _Never:
        return self

    __isub__ = __iadd__


def renew_lock() -> None:
    """Make a new lock, and let the cache be: for a forked child."""
    global _uncached_lock
    _uncached_lock = threading.Lock()
    if _uncached:
        _uncached.clear()
        parametrize._cache_enabled = _NEVER.before


_NEVER = _Never()
_uncached: set[int] = set()  # the threads that run replicas now
_uncached_lock = threading.Lock()


@contextlib.contextmanager
def _no_parametrization_cache() -> Iterator[None]:
    """Switch ``parametrize.cached()`` off while replicas run.

    Its cache is one dictionary whose keys name the module that was parametrized first, so every
    replica would get the tensor of whichever came first, graph included. Off, each computes its
    own. Threads are noted by name, not counted: what Ctrl-C left behind is mended by the next run.
    """
    thread = threading.get_ident()
    try:
        with _uncached_lock:
            if not _uncached:
                _NEVER.before = parametrize._cache_enabled
                parametrize._cache_enabled = _NEVER  # type: ignore[assignment]  # like an int
            _uncached.add(thread)
        yield
    finally:
        with _uncached_lock:
            _uncached.discard(thread)
            if not _uncached and isinstance(parametrize._cache_enabled, _Never):
                parametrize._cache_enabled = _NEVER.before


def _in_terms_of_source(replica: Replica, output: Any) -> Any:
    """Put the source's parameters, buffers and modules in the place of the replica's."""
    if type(output) is Tensor:
        return replica.original(output)
    kinds = (Tensor, nn.Module)
    return map_leaves(lambda v: replica.original(v) if isinstance(v, kinds) else v, output)


def _need_gradient(arguments: Arguments) -> bool:
    """Whether a tensor might require grad; cheap for arguments that are plain tensors."""
    args, kwargs = arguments
    return any(
        value.requires_grad if type(value) is Tensor else True
        for value in (*args, *kwargs.values())
    )


def _function(replica: Replica, method: str | None) -> Callable[..., Any]:
    return replica.module if method is None else getattr(replica.module, method)


class _Inputs:
    """One shard's inputs that require grad, and the leaves over the same memory in their place.

    Args:
        leaves, local: filled with the leaves, and with the tensors that they stand for.
    """

    def __init__(self, leaves: list[Tensor], local: list[Tensor]) -> None:
        self._leaves, self._local = leaves, local
        self._made: dict[int, Tensor] = {}  # a tensor that is given twice stays one object
        self._copies: list[Tensor] = []

    def replace(self, tensor: Tensor) -> Tensor:
        """Return what forward gets for ``tensor``."""
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._made:
            leaf = tensor.detach().requires_grad_()
            BringHome(tensor).watch(leaf)
            self._local.append(tensor)
            self._leaves.append(leaf)
            base = tensor if tensor._base is None else tensor._base
            if not base.is_leaf:
                # A forward may work in place on an input that is no leaf of the user's; our leaf
                # would forbid it. (On the user's own leaf torch forbids it anyway.)
                leaf = leaf.clone()
                self._copies.append(leaf)
            self._made[id(tensor)] = leaf
        return self._made[id(tensor)]

    def check(self) -> None:
        """Say so where forward worked in place on an input, which the caller will not see."""
        if any(copy._version for copy in self._copies):
            warnings.warn(
                "forward changed an input in place that has a graph; the caller's tensor keeps its "
                "old values (only what forward returns is new). Clone it in forward to say that "
                "this is meant",
                StateWarning,
                stacklevel=2,
            )


def _tie(
    replicas: Sequence[Replica],
    leaves: list[list[Tensor]],
    local: list[list[Tensor]],
    trees: list[Any],
    runner: Runner,
) -> list[Any]:
    """Put tensors of the caller's graph in the place of the shards' outputs."""
    found: list[dict[int, Tensor]] = [{} for _ in trees]
    own = replicas[0].links
    for tree, outputs in zip(trees, found, strict=True):
        map_tensors(_note(outputs, own), tree)
    if not any(found):
        return trees
    _add_carried(replicas, leaves, local)
    edges = [[make_edge(tensor) for tensor in row.values()] for row in found]
    surveys = [
        survey(row, {id(leaf) for leaf in mine}) for row, mine in zip(edges, leaves, strict=True)
    ]
    tables: list[dict[int, Tensor]] = [{} for _ in trees]
    for group in group_outputs(surveys):
        part = _Part(replicas, surveys, group, leaves, local)
        values = [_pick(list(row.values()), group) for row in found]
        tied = part.tie(runner, [_pick(row, group) for row in edges], values)
        for table, row, old in zip(tables, tied, values, strict=True):
            table.update((id(one), other) for one, other in zip(old, row, strict=True))
    return [map_tensors(_look_up(table), tree) for tree, table in zip(trees, tables, strict=True)]


class _Part:
    """A group of outputs that become one stitch, and what their graphs end in.

    What no output of the group uses is no input of the stitch: torch walks on behind an input even
    when no gradient comes, calling hooks and freeing what others may still need.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        surveys: Sequence[Survey],
        group: list[int],
        leaves: list[list[Tensor]],
        local: list[list[Tensor]],
    ) -> None:
        self._used = [
            {key: leaf for output in _pick(one.leaves, group) for key, leaf in output.items()}
            for one in surveys
        ]
        self._is_reentrant = any(one.is_reentrant for one in surveys)
        self._is_shared = replicas[0].has_hooks()
        kept = [
            [i for i, leaf in enumerate(row) if id(leaf) in used]
            for row, used in zip(leaves, self._used, strict=True)
        ]
        self._leaves = [_pick(row, places) for row, places in zip(leaves, kept, strict=True)]
        self._local = [_pick(row, places) for row, places in zip(local, kept, strict=True)]
        self._sources = self._find_sources(replicas)
        self._replicated = [[r.links[id(s)].copy for s in self._sources] for r in replicas]

    def tie(
        self, runner: Runner, edges: list[list[Edge]], values: list[list[Tensor]]
    ) -> list[list[Tensor]]:
        """Return tensors equal to ``values`` that are part of the caller's graph."""
        # Parameters from outside of the module, which forward reached by a global variable or a
        # closure: the shards' graphs end in the user's own tensors.
        foreign = self._find_foreign()
        sources = self._sources + foreign
        if not sources and not any(self._local):
            return values  # whatever requires grad was made inside: its graph ends there
        graphs = ShardGraphs(
            runner=runner,
            replicated=[[*row, *foreign] for row in self._replicated],
            local=self._leaves,
            outputs=[list(row) for row in edges],
            partials=[[] for _ in edges],
            # Between the shards' graphs and a foreign leaf there may be a graph of the caller's,
            # which each shard walks and none may free.
            is_shared=self._is_shared or bool(foreign),
            is_reentrant=self._is_reentrant,
            turns=threading.Lock() if foreign else contextlib.nullcontext(),
            foreign=foreign,
        )
        return stitch(graphs, values, sources, self._local)

    def _find_sources(self, replicas: Sequence[Replica]) -> list[Tensor]:
        """The source's tensors that a gradient may reach, in the order of the first replica."""
        sources = []
        for key, link in replicas[0].links.items():
            if not link.source.requires_grad or link.rows is not None:
                continue
            copies = [replica.links[key].copy for replica in replicas]
            # What re-entrant checkpointing will reach cannot be seen in the graph beforehand.
            is_hidden = self._is_reentrant and link.source.grad_fn is None
            is_used = is_hidden or any(
                id(copy) in used for copy, used in zip(copies, self._used, strict=True)
            )
            if is_used and all(copy.requires_grad for copy in copies):
                sources.append(link.source)
        return sources

    def _find_foreign(self) -> list[Tensor]:
        """Leaves of the shards' graphs that are not the replicas' and not the batch's."""
        found = {key: leaf for used in self._used for key, leaf in used.items()}
        for row in (*self._replicated, *self._leaves):
            for leaf in row:
                found.pop(id(leaf), None)
        return [leaf for leaf in found.values() if leaf.requires_grad]


def _add_carried(
    replicas: Sequence[Replica], leaves: list[list[Tensor]], local: list[list[Tensor]]
) -> None:
    """Add tensors on the module of which each shard has its own rows, where they need gradients."""
    for replica, mine, given in zip(replicas, leaves, local, strict=True):
        for link in replica.links.values():
            if link.rows is not None and link.copy.requires_grad:
                mine.append(link.copy)
                given.append(link.source.narrow(*link.rows))


def _pick(row: list[T], places: list[int]) -> list[T]:
    """What lies at these places; a shard may have fewer outputs than another."""
    return [row[i] for i in places if i < len(row)]


def _look_up(table: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: table.get(id(tensor), tensor)


def _note(outputs: dict[int, Tensor], own: Container[int]) -> Callable[[Tensor], Tensor]:
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

    return note
