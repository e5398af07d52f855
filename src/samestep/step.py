"""One step over shards: leaves in, forwards run, outputs tied to the caller's graph.

What it holds: :func:`run_shards`. Why: it is the one place where replicas, the engine and the
stitch meet; everything around it (splitting before, merging after) is ordinary torch.

Guarantees: outside of grad mode nothing is stitched; an output that is the replica's own parameter
or buffer comes back as the source module's.
Must not: cut or merge batches, or write to the source module.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from samestep.changes import Changes
from samestep.errors import StateWarning
from samestep.graphs import scale_gradient
from samestep.homing import BringHome
from samestep.links import Rows
from samestep.reduce import TreeSum, sum_lists
from samestep.replica import Replica
from samestep.runner import Runner
from samestep.sharing import share_forward
from samestep.spread import Spread
from samestep.tie import map_tensors, tie
from samestep.tree import map_leaves

if TYPE_CHECKING:
    from samestep.capture import Captures
    from samestep.eager import EagerBackward
    from samestep.recompute import Recomputation

__all__ = ["renew_lock", "run_shards"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def run_shards(
    replicas: Sequence[Replica],
    arguments: Sequence[Arguments | None],
    runner: Runner,
    *,
    model: Replica | None = None,
    method: str | None = None,
    recompute: bool = False,
    eager: EagerBackward | None = None,
    carried: Sequence[Mapping[int, Rows]] = (),
    captures: Captures | None = None,
    note: Callable[[], Any] = lambda: None,
) -> tuple[list[Any], Changes, list[Any]]:
    """Run every replica on its shard.

    Args:
        replicas: one per shard that is here (``runner.spread`` says which).
        arguments: (args, kwargs) per shard of the call; part of the caller's graph where they
            require grad. None where another rank has the shard and its rows.
        runner: how to run.
        model: any replica, for a rank without shards; the first one if None.
        method: the method to call; None: the module itself, hooks and all.
        recompute: keep no activations; each forward runs again in its backward.
        eager: lets each backward follow its forward at once; only in grad mode.
        carried: per shard of the call, which rows it has of tensors on the module (by id).
        captures: the captured calls of these replicas, to use and to add to.
        note: anything that every rank is to know after the forwards.

    Returns:
        Per shard of the call its output, part of the caller's graph; what the forwards wrote; and
        what each rank noted.

    Raises:
        BaseException: what the lowest failing shard raised.
        RankError: another rank failed, or the ranks are not in step.
    """
    spread, model = runner.spread, model or replicas[0]
    local: list[list[Tensor]] = [[] for _ in arguments]
    leaves: list[list[Tensor | None]] = [[] for _ in arguments]
    inputs = _watch_inputs(arguments, leaves, local, spread.mine)
    here = [pair for k in spread.mine if (pair := arguments[k]) is not None]
    if inputs:
        here = [
            map_tensors(inputs[k].replace, pair) for k, pair in zip(spread.mine, here, strict=True)
        ]
    if eager is not None:
        _add_carried(replicas, model, leaves, local, spread, carried)
        eager.begin(model, leaves, local, runner)
    try:
        outputs = _run(replicas, here, runner, method, recompute, eager, captures)
    except BaseException as error:  # Ctrl-C too: the others wait
        spread.fail("forward", error)
        raise
    for given in inputs.values():
        given.check()
    is_tied = torch.is_grad_enabled() and eager is None  # else there is no graph to tie
    if is_tied:
        _add_carried(replicas, model, leaves, local, spread, carried)
    with torch.set_grad_enabled(is_tied):
        told = share_forward(outputs, replicas, model, leaves, runner, note)
    if captures is not None:
        captures.note(told.changes, told.has_gradients)
    if told.has_gradients:
        told.changes.gradients = _collect_gradients(replicas, model, runner)
    if not is_tied:
        return told.outputs, told.changes, told.notes
    num_shards, changes = spread.num_shards, told.changes
    trees: list[Any] = told.outputs
    if changes.entries:
        trees = list(zip(told.outputs, changes.values(num_shards), strict=True))
    tied = tie(trees, told.looks, told.graphs, replicas, model, leaves, local, runner)
    if not changes.entries:
        return tied, changes, told.notes
    changes.replace([row for _, row in tied])
    return [output for output, _ in tied], changes, told.notes


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _run(
    replicas: Sequence[Replica],
    arguments: Sequence[Arguments],
    runner: Runner,
    method: str | None,
    recompute: bool,
    eager: EagerBackward | None,
    captures: Captures | None,
) -> list[Any]:
    """Run the forwards of the shards that are here."""
    for replica in replicas:
        replica.begin()
    for replica in replicas[:1]:  # what shards share it sees for all; a rank may have none
        replica.watch()
    functions: list[Callable[..., Any]] = [
        replica.module if method is None else getattr(replica.module, method)
        for replica in replicas
    ]
    again: list[Recomputation] = []
    if recompute and torch.is_grad_enabled():
        from samestep.recompute import Recomputation  # for few wrappers

        again = list(map(Recomputation, replicas, functions))
    called: Sequence[Callable[..., Any]] = again or functions
    if eager is not None:
        called = [
            partial(eager.run, k, replica, function)
            for k, replica, function in zip(runner.spread.mine, replicas, functions, strict=True)
        ]
    with _no_parametrization_cache():
        if captures is not None and method is None and not runner.together:
            rows = zip(replicas, runner.shards, called, arguments, strict=True)
            called = captures.choose(list(rows))
        outputs = runner.run(
            [
                partial(function, *args, **kwargs)
                for function, (args, kwargs) in zip(called, arguments, strict=True)
            ]
        )
    common: dict[Any, Tensor] = {}
    for one in again:
        one.keep(common)
    return [
        _in_terms_of_source(replica, output)
        for replica, output in zip(replicas, outputs, strict=True)
    ]


def _collect_gradients(
    replicas: Sequence[Replica], model: Replica, runner: Runner
) -> list[tuple[Tensor, Tensor]]:
    """What forwards accumulated by calling ``backward()`` themselves, per source tensor.

    It is written with the other state, if the attempt stands.
    """
    links = sorted(model.links.values(), key=lambda link: link.path)
    spread = runner.spread
    sums: TreeSum[list[Tensor | None]] = TreeSum(spread.num_shards, sum_lists)
    for k, replica in zip(spread.mine, replicas, strict=True):
        copies = [replica.links[id(link.source)].copy for link in links]
        found = [copy.grad for copy in copies]
        for copy in copies:
            copy.grad = None
        homes = [link.source.device for link in links]
        sums.add(k, [g if g is None else g.to(h) for g, h in zip(found, homes, strict=True)])
    engine = runner.engine
    with torch.no_grad():
        totals, _ = spread.reduce(
            "gradients in forward", sums.parts(), engine.num_workers, engine.share_work
        )
    pairs = zip(links, totals, strict=True)
    return [(link.source, total) for link, total in pairs if total is not None]


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


class _no_parametrization_cache:
    """Switch ``parametrize.cached()`` off while replicas run.

    Its cache is one dictionary whose keys name the module that was parametrized first, so every
    replica would get the tensor of whichever came first, graph included. Off, each computes its
    own. Threads are noted by name, not counted: what Ctrl-C left behind is mended by the next run.
    """

    def __enter__(self) -> None:
        with _uncached_lock:
            if not _uncached:
                _NEVER.before = parametrize._cache_enabled
                parametrize._cache_enabled = _NEVER  # type: ignore[assignment]  # like an int
            _uncached.add(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        with _uncached_lock:
            _uncached.discard(threading.get_ident())
            if not _uncached and isinstance(parametrize._cache_enabled, _Never):
                parametrize._cache_enabled = _NEVER.before


def _in_terms_of_source(replica: Replica, output: Any) -> Any:
    """Put the source's parameters, buffers and modules in the place of the replica's."""
    if type(output) is Tensor:
        return replica.original(output)
    kinds = (Tensor, nn.Module)
    return map_leaves(lambda v: replica.original(v) if isinstance(v, kinds) else v, output)


def _watch_inputs(
    arguments: Sequence[Arguments | None],
    leaves: list[list[Tensor | None]],
    local: list[list[Tensor]],
    mine: Container[int],
) -> dict[int, _Inputs]:
    """Per shard that has inputs which may require grad, what stands between it and them."""
    found: dict[int, _Inputs] = {}
    if not torch.is_grad_enabled():
        return found
    for k, pair in enumerate(arguments):
        if pair is None:
            continue
        if not found and not _need_gradient(pair):
            return found  # what the first does not have, the others do not
        found[k] = _Inputs(leaves[k], local[k], is_here=k in mine)
        if k not in mine:
            map_tensors(found[k].replace, pair)
    return found


def _need_gradient(arguments: Arguments) -> bool:
    """Whether a tensor might require grad; cheap for arguments that are plain tensors."""
    args, kwargs = arguments
    for value in (*args, *kwargs.values()):
        if type(value) is not Tensor or value.requires_grad:
            return True
    return False


class _Inputs:
    """One shard's inputs that require grad, and the leaves over the same memory in their place.

    Args:
        leaves, local: filled with the leaves, and with the tensors that they stand for.
    """

    def __init__(self, leaves: list[Tensor | None], local: list[Tensor], *, is_here: bool) -> None:
        self._leaves, self._local = leaves, local
        self._is_here = is_here
        self._made: dict[int, Tensor] = {}  # a tensor that is given twice stays one object
        self._copies: list[Tensor] = []

    def replace(self, tensor: Tensor) -> Tensor:
        """Return what forward gets for ``tensor``."""
        if not tensor.requires_grad:
            return tensor
        if not self._is_here:
            if id(tensor) not in self._made:
                self._made[id(tensor)] = tensor
                self._local.append(tensor)
                self._leaves.append(None)
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


def _add_carried(
    replicas: Sequence[Replica],
    model: Replica,
    leaves: list[list[Tensor | None]],
    local: list[list[Tensor]],
    spread: Spread,
    carried: Sequence[Mapping[int, Rows]],
) -> None:
    """Add tensors on the module of which each shard has its own rows, where they need gradients."""
    here = dict(zip(spread.mine, replicas, strict=True))
    inverse = 1 / (spread.weight or 1)
    for k, plan in enumerate(carried):
        for link in sorted(model.links.values(), key=lambda link: link.path) if plan else ():
            rows = plan.get(id(link.source))
            if rows is None or not link.copy.requires_grad:
                continue
            own = here[k].links[id(link.source)].copy if k in here else None
            if own is None or own.requires_grad:
                leaves[k].append(own)
                # As for other inputs, where a rank's gradients are those of its own loss.
                local[k].append(scale_gradient(link.source.narrow(*rows), inverse))
