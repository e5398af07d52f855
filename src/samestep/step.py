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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from samestep.errors import MergeError
from samestep.graphs import Survey, make_edge, survey
from samestep.recompute import Recomputation
from samestep.reduce import tree_sum
from samestep.replica import BringHome, Replica
from samestep.runner import Runner
from samestep.state import Changes, collect
from samestep.stitch import ShardGraphs, stitch
from samestep.tree import map_leaves

__all__ = ["map_tensors", "run_shards"]

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
    if is_recorded and _need_gradient(arguments[0]):
        arguments = [
            map_tensors(_replace_by_leaf(local[k], leaves[k]), pair)
            for k, pair in enumerate(arguments)
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


_NEVER = _Never()
_num_uncached = 0
_uncached_lock = threading.Lock()


@contextlib.contextmanager
def _no_parametrization_cache() -> Iterator[None]:
    """Switch ``parametrize.cached()`` off while replicas run.

    Its cache is one dictionary whose keys name the module that was parametrized first, so every
    replica would get the tensor of whichever came first, graph included. Off, each computes its
    own.
    """
    global _num_uncached
    with _uncached_lock:
        if not _num_uncached:
            _NEVER.before = parametrize._cache_enabled
            parametrize._cache_enabled = _NEVER  # type: ignore[assignment]  # counts like an int
        _num_uncached += 1
    try:
        yield
    finally:
        with _uncached_lock:
            _num_uncached -= 1
            if not _num_uncached:
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


def _replace_by_leaf(sources: list[Tensor], leaves: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Note every tensor that requires grad, and put a leaf over the same memory in its place."""
    made: dict[int, Tensor] = {}  # a tensor that is given twice stays one object

    def replace(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in made:
            leaf = tensor.detach().requires_grad_()
            BringHome(tensor).watch(leaf)
            sources.append(tensor)
            leaves.append(leaf)
            base = tensor if tensor._base is None else tensor._base
            # A forward may work in place on an input that is no leaf of the user's, as it may
            # without us; a leaf would forbid it. (On the user's own leaf torch forbids it anyway.)
            made[id(tensor)] = leaf if base.is_leaf else leaf.clone()
        return made[id(tensor)]

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
    own = replicas[0].links
    for tree, outputs in zip(trees, found, strict=True):
        map_tensors(_note(outputs, own), tree)
    if not any(found):
        return trees
    edges = [[make_edge(tensor) for tensor in row.values()] for row in found]
    surveys = [survey(row) for row in edges]
    sources = _find_sources(replicas, surveys, leaves, local)
    replicated = [[replica.links[id(s)].copy for s in sources] for replica in replicas]
    # Parameters from outside of the module, which forward reached by a global variable or a
    # closure: the shards' graphs end in the user's own tensors.
    foreign = _find_foreign(surveys, [*replicated, *leaves])
    graphs = ShardGraphs(
        runner=runner,
        replicated=[[*row, *foreign] for row in replicated],
        local=leaves,
        outputs=[list(row) for row in edges],
        partials=[[] for _ in found],
        is_shared=replicas[0].has_hooks(),
        is_reentrant=any(one.is_reentrant for one in surveys),
        turns=threading.Lock() if foreign else contextlib.nullcontext(),
    )
    sources += foreign
    if not sources and not any(local):
        return trees  # whatever requires grad was made inside: its graph ends there
    tied = stitch(graphs, [list(row.values()) for row in found], sources, local)
    result = []
    for tree, outputs, row in zip(trees, found, tied, strict=True):
        result.append(map_tensors(_look_up(dict(zip(outputs, row, strict=True))), tree))
    return result


def _look_up(table: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: table.get(id(tensor), tensor)


def _find_sources(
    replicas: Sequence[Replica],
    surveys: Sequence[Survey],
    leaves: list[list[Tensor]],
    local: list[list[Tensor]],
) -> list[Tensor]:
    """The source's tensors that a gradient may reach, in the order of the first replica.

    Those of which each shard has its own rows are added to ``leaves`` and ``local`` instead.
    """
    links = [
        link
        for key, link in replicas[0].links.items()
        if link.source.requires_grad and all(r.links[key].copy.requires_grad for r in replicas)
    ]
    if all(link.source.grad_fn is None and link.rows is None for link in links):
        return [link.source for link in links]
    sources = []
    for key in [id(link.source) for link in links]:
        parts = [replica.links[key] for replica in replicas]
        source = parts[0].source
        # A tensor attribute with a history of its own, such as the weight that an old-style weight
        # norm leaves behind. If no shard used it, it must stay out: torch would walk through that
        # history, perhaps freed long ago, even with no gradient to bring.
        is_used = any(id(p.copy) in one.leaves for p, one in zip(parts, surveys, strict=True))
        if source.grad_fn is not None and not is_used:
            continue
        if parts[0].rows is None:
            sources.append(source)
            continue
        for part, mine, given in zip(parts, leaves, local, strict=True):
            assert part.rows is not None
            mine.append(part.copy)
            given.append(source.narrow(*part.rows))
    return sources


def _find_foreign(surveys: Sequence[Survey], known: Iterable[Iterable[Tensor]]) -> list[Tensor]:
    """Leaves of the shards' graphs that are not the replicas' and not the batch's."""
    found: dict[int, Tensor] = {}
    for one in surveys:
        found.update(one.leaves)
    for row in known:
        for leaf in row:
            found.pop(id(leaf), None)
    return list(found.values())


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
