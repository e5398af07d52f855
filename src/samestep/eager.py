"""A shard's backward right after its forward: ``eager_backward=True``.

What it holds: :class:`EagerBackward`, one call's. Why: a module that returns its own loss needs
nothing from outside to be differentiated. If each shard's backward follows its forward in the same
job, one shard's activations exist per worker instead of all shards', and the shards are waited for
once per step instead of twice.

A shard's loss enters its backward with the weight that it has in the batch's: B_k/B for a mean, 1
for a sum. The parameter gradients are added in the canonical tree at once, and one node in the
caller's graph keeps the sums: when a gradient arrives there, they are multiplied by it.

    user's p ---R---> node that keeps the sums ---> loss of the batch ---> user's graph

Guarantees: where the gradient that arrives is 1 or another power of two, the bits of a step with
two passes; else each sum is rounded once more. An attempt of a call that does not stand leaves
nothing.
Must not: know how a call is run, or decide whether an attempt stands.

[Note: several losses] They went into one backward, as a sum. So what arrives for them later must be
one and the same number; anything else is refused, as it would need a backward per loss.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.backward import MSG_FREED
from samestep.changes import Changes
from samestep.devices import move_in_place
from samestep.dims import Inherited, child_out_dims
from samestep.errors import RankError
from samestep.graphs import Edge, accumulate, apply_node, differentiate, make_edge, survey
from samestep.reduce import TreeSum, absorb, is_large, sum_lists
from samestep.replica import Replica
from samestep.rows import has_item_per_row
from samestep.runner import Runner
from samestep.snapshot import WHOLE
from samestep.spread import Spread
from samestep.tie import find_tensors, map_tensors
from samestep.tree import find_batch_type, open_container

__all__ = ["EagerBackward"]

MaybeTensors = list[Tensor | None]
# By id: a tensor of the user's own, and its gradient.
Foreign = dict[int, tuple[Tensor, Tensor | None]]


class EagerBackward:
    """The backwards of one call's shards, and the node that stands for them.

    Args:
        rows: B_k of each shard of the call.
        out_dims, reduction: as in ``DataParallel``: what a loss weighs.
        dim: the dim that counts rows.

    Raises:
        ValueError: float16 autocast is on.
    """

    def __init__(self, rows: Sequence[int], *, out_dims: Any, reduction: str, dim: int) -> None:
        _refuse_float16()
        self._rows, self._dim = rows, dim
        self._out_dims, self._reduction = out_dims, reduction
        self._local_found: dict[int, MaybeTensors] = {}
        self._foreign: dict[int, Foreign] = {}
        self._like_rows: set[int] = set()

    def begin(
        self,
        model: Replica,
        leaves: Sequence[Sequence[Tensor | None]],
        local: Sequence[Sequence[Tensor]],
        runner: Runner,
    ) -> None:
        """Prepare for the forwards.

        Args:
            model: any replica.
            leaves, local: per shard of the call, its L leaves and the caller's tensors for them.
            runner: how the call is run.
        """
        self._model, self._leaves, self._local = model, leaves, local
        self._runner = runner
        links = list(model.links.items())
        if not runner.spread.is_alone:
            links.sort(key=lambda pair: pair[1].path)  # an order that is every rank's
        self._keys = [key for key, ln in links if ln.source.requires_grad and ln.rows is None]
        sources = [model.links[key].source for key in self._keys]
        devices = [runner.home, *map(_get_device, sources)]
        num_shards = runner.spread.num_shards
        by_thread = runner.may_share_work(devices) and is_large(sources)
        self._sums: TreeSum[MaybeTensors] = TreeSum(num_shards, absorb, by_thread=by_thread)

    def run(
        self, k: int, replica: Replica, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run shard k's forward, and then its backward.

        Returns:
            What forward returned, with leaves in the place of its losses: joining them is recorded
            as ever, but the shard's graph is gone.

        Raises:
            ValueError: something else than a loss needs a gradient.
        """
        output = function(*args, **kwargs)
        # Our own few operations need not pass the function mode that rules random numbers.
        with torch._C.DisableTorchFunction():
            losses, weights = self._find_losses(k, replica, output)
            edges = list(map(make_edge, losses))
            gradients = [x.new_full((), w) for x, w in zip(losses, weights, strict=True)]
            leaves = {id(loss): loss.detach().requires_grad_() for loss in losses}
            output = map_tensors(lambda tensor: leaves.get(id(tensor), tensor), output)
            del losses  # what is not held here is free as soon as the backward has passed it
        counts = [len(norm.calls) for norm in replica.norms]
        self._differentiate(k, replica, edges, gradients)
        for norm, count in zip(replica.norms, counts, strict=True):
            del norm.calls[count:]  # of what a checkpoint ran again; the first run counts
        return output

    def tie(self, output: Any, changes: Changes) -> Any:
        """Put losses of the caller's graph in the place of the joined ones.

        Args:
            output: what the caller will get.
            changes: what the forwards wrote.

        Raises:
            ValueError: forward left a tensor on the module that needs a gradient, or returned a
                loss per row.
        """
        own = self._model.links
        self._check_left(changes)
        if len(self._like_rows) == self._runner.spread.num_shards > 1:
            raise ValueError(_MSG_ROWS)
        spread, engine = self._runner.spread, self._runner.engine
        totals, _ = spread.reduce(
            "eager backward", self._sums.parts(), engine.num_workers, engine.share_work
        )
        found = list(zip([own[key].source for key in self._keys], totals, strict=True))
        for tensors, gradients in zip(self._local, self._share_local(), strict=True):
            found += zip(tensors, gradients, strict=False)  # other ranks' rows have none
        if self._foreign:
            found += self._sum_foreign()
        pairs = [(tensor, gradient) for tensor, gradient in found if gradient is not None]
        losses = {id(t): t for t in find_tensors(output) if t.requires_grad and id(t) not in own}
        if not losses or not pairs:
            return output
        inputs, kept = map(list, zip(*pairs, strict=True))
        tied = apply_node(_Kept, kept, spread, list(losses.values()), inputs=inputs)
        table = dict(zip(losses, tied, strict=True))
        return map_tensors(lambda tensor: table.get(id(tensor), tensor), output)

    # -- One shard ---------------------------------------------------------------------------

    def _find_losses(
        self, k: int, replica: Replica, output: Any
    ) -> tuple[list[Tensor], list[float]]:
        """The losses in shard k's output, and what each weighs in the batch's."""
        losses: list[Tensor] = []
        weights: list[float] = []
        seen: set[int] = set()
        for tensor, word in self._walk(output, self._out_dims, k):
            if not tensor.requires_grad or replica.original(tensor) is not tensor:
                continue
            if tensor.dim() or not tensor.is_floating_point():
                raise ValueError(
                    f"eager_backward=True is for modules that return losses only, but an output of "
                    f"shape {tuple(tensor.shape)} and dtype {tensor.dtype} needs a gradient; "
                    f"return it detached, or use eager_backward=False (recompute=True saves "
                    f"memory for any output)"
                )
            if word == "list":
                raise ValueError(
                    "eager_backward=True needs one loss of the batch, but out_dims='list' makes "
                    "one per shard; use 'mean' or 'sum', or return it detached"
                )
            if word is None and id(tensor) in seen:
                continue  # returned twice, it is joined once
            seen.add(id(tensor))
            if word == "first" and k:
                continue
            losses.append(tensor)
            weights.append(self._weigh(k, word))
        return losses, weights

    def _walk(self, value: Any, spec: Any, k: int) -> Iterator[tuple[Tensor, Any]]:
        """The tensors of an output and what ``out_dims`` says of each, as merging reads it."""
        word = spec.spec if isinstance(spec, Inherited) else spec
        if isinstance(value, Tensor):
            yield value, word
            return
        tensors = find_tensors(value)
        if not any(tensor.requires_grad for tensor in tensors):
            return
        opened = open_container(value)
        if word in ("first", "list") or opened is None:
            yield from ((tensor, word) for tensor in tensors)
            return
        if find_batch_type(value) is not None:
            raise ValueError(
                f"eager_backward=True cannot know what a loss in a {type(value).__name__} weighs: "
                f"its class was registered with a merge of its own; return the loss beside it"
            )
        size = self._rows[k]
        may_be_rows = isinstance(value, list) and not isinstance(spec, (Mapping, list, tuple))
        if may_be_rows and len(value) == size and has_item_per_row(value, size, self._dim):
            self._like_rows.add(k)  # by chance, unless it is so in every shard
            if not self._runner.spread.is_alone:
                raise ValueError(_MSG_ROWS)
        specs = [None] * len(opened.children)
        if spec is not None:
            specs = child_out_dims(spec, opened.keys, opened.style, "output", opened.keys)
        for child, below in zip(opened.children, specs, strict=True):
            yield from self._walk(child, below, k)

    def _weigh(self, k: int, word: Any) -> float:
        reduction = word if word in ("mean", "sum", "first") else self._reduction
        if reduction != "mean" or len(self._rows) == 1:
            return 1.0
        total = sum(self._rows)
        return self._rows[k] / total if total else 1 / len(self._rows)

    def _differentiate(
        self, k: int, replica: Replica, edges: list[Edge], gradients: list[Tensor]
    ) -> None:
        """Run shard k's backward, and bring what it finds to the sums."""
        own = [replica.links[key].copy for key in self._keys]
        rows = [leaf for leaf in self._leaves[k] if leaf is not None]
        ids = {*map(id, rows)}
        seen = survey(edges, ids)
        foreign: dict[int, Tensor] = {}
        for found in seen.leaves:
            for key in found.keys() - replica.paths.keys() - ids:
                if found[key].requires_grad:
                    foreign[key] = found[key]
        if foreign:
            self._check_foreign(foreign.values())
        leaves = [*own, *rows]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if seen.is_reentrant and self._runner.together:
            raise ValueError(_MSG_REENTRANT)
        # Re-entrant checkpointing refuses to run inside autograd.grad; and accumulating is for one
        # at a time, since leaves may be common to the shards.
        run = accumulate if seen.is_reentrant else differentiate
        lock = self._runner.lock if seen.is_reentrant else contextlib.nullcontext()
        with lock, _without_autocast(replica.slot.device):
            # Behind a foreign leaf there may be a graph of the caller's: not ours to free.
            derived = run(edges, gradients, [*wanted, *foreign.values()], bool(foreign))
        with torch._C.DisableTorchFunction():
            rest = iter(derived)
            each = [next(rest) if leaf.requires_grad else None for leaf in leaves]
            self._local_found[k] = each[len(own) :]
            if foreign:
                pairs = zip(foreign.values(), rest, strict=True)
                self._foreign[k] = dict(zip(foreign, pairs, strict=True))
            # One list holds each gradient: then they are added in place.
            derived.clear()
            del each[len(own) :]
            move_in_place(each, [self._runner.home] * len(each))
            self._sums.add(k, each)

    def _check_foreign(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if not self._runner.spread.is_alone:
                raise RankError(
                    f"forward uses a tensor of shape {tuple(leaf.shape)} that needs a gradient and "
                    f"is not part of the module; with several ranks, give it to the module "
                    f"(register_parameter) or pass it as an argument"
                )
            if leaf._backward_hooks:
                raise ValueError(
                    f"forward uses a tensor of shape {tuple(leaf.shape)} that has a gradient hook "
                    f"and is not part of the module; with eager_backward=True the hook would see "
                    f"each shard's part: give the tensor to the module (register_parameter), or "
                    f"use eager_backward=False"
                )

    # -- All shards --------------------------------------------------------------------------

    def _check_left(self, changes: Changes) -> None:
        own = self._model.links
        for entry in changes.entries:
            if any(t.requires_grad and id(t) not in own for t in find_tensors(entry.values)):
                where = "" if entry.key is WHOLE else f" ({entry.key!r})"
                raise ValueError(
                    f"forward left a tensor that needs a gradient in {entry.path.lstrip('.')}"
                    f"{where}, but with eager_backward=True the backward is over when "
                    f"forward returns; store it detached, or return it as a loss"
                )

    def _sum_foreign(self) -> list[tuple[Tensor, Tensor | None]]:
        """The user's own tensors that shards reached, and their gradients."""
        leaves = {key: leaf for row in self._foreign.values() for key, (leaf, _) in row.items()}
        sums: TreeSum[MaybeTensors] = TreeSum(self._runner.spread.num_shards, sum_lists)
        for k in self._runner.spread.mine:
            row = self._foreign.get(k, {})
            sums.add(k, [row[key][1] if key in row else None for key in leaves])
        return list(zip(leaves.values(), sums.result(), strict=True))

    def _share_local(self) -> list[MaybeTensors]:
        """Per shard of the call, the gradients of its L leaves."""
        spread = self._runner.spread
        if spread.is_alone or spread.is_local or not any(self._local):
            return [self._local_found.get(k, []) for k in range(spread.num_shards)]
        mine = [self._local_found[k] for k in spread.mine]
        return spread.share("eager gradients of inputs", mine, {}, {})[0]


class _Kept(torch.autograd.Function):
    """The node: it keeps the gradients of its inputs, for a gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any, kept: list[Tensor], spread: Spread, values: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.kept, ctx.spread = kept, spread
        ctx.devices = list(map(_get_device, inputs))
        ctx.set_materialize_grads(False)
        return tuple([value.detach() for value in values])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(gradient is None for gradient in gradients):
            return (None,) * (3 + len(ctx.devices))
        if torch.is_grad_enabled():
            raise RuntimeError(_MSG_CREATE_GRAPH)
        if ctx.kept is None:
            raise RuntimeError(MSG_FREED)
        scale = _find_scale(gradients, ctx.spread)
        kept, is_kept = ctx.kept, torch._C._autograd._get_current_graph_task_keep_graph()
        if not is_kept:
            ctx.kept = None
        if isinstance(scale, Tensor):
            kept = [gradient * scale.to(gradient.device) for gradient in kept]
        elif is_kept or scale != 1:  # kept ones must not be what others may write
            kept = [gradient * scale for gradient in kept]
        moved = list(kept)
        move_in_place(moved, ctx.devices)
        return (None, None, None, *moved)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_get_device = operator.attrgetter("device")
_MSG_ROWS = (
    "eager_backward=True needs losses of the batch, but forward returned a list of as many losses "
    "as the shard has rows, which is one per row; add them up in forward (several losses of the "
    "batch go into a tuple or a dict)"
)
_MSG_REENTRANT = (
    "with eager_backward=True a re-entrant checkpoint takes turns with those of other shards, but "
    "these wait for each other (sync_batch_norm=True, all_reduce, all_gather); use "
    "checkpoint(..., use_reentrant=False)"
)
_MSG_CREATE_GRAPH = (
    "create_graph=True is not there for eager_backward=True: the shards' graphs were gone when "
    "forward returned; use eager_backward=False (with recompute=True, if memory is short)"
)


def _refuse_float16() -> None:
    kinds = ["cpu"]
    if torch.accelerator.is_available():
        kinds.append(str(torch.accelerator.current_accelerator()))
    for kind in kinds:
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise ValueError(
                f"eager_backward=True under {kind} autocast to float16: small gradients would be "
                f"lost, since the loss scale arrives after the shards' backward; use bfloat16, or "
                f"eager_backward=False"
            )


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Run a backward as outside of autocast, where the user's own would be."""
    on = [kind for kind in {"cpu", device.type} - {"meta"} if torch.is_autocast_enabled(kind)]
    if not on:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for kind in on:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _find_scale(gradients: Sequence[Tensor | None], spread: Spread) -> float | Tensor:
    """The one number that arrives at every loss. See [Note: several losses].

    On an accelerator one gradient stays where it is: to look at it would be to wait for the device.
    """
    first = gradients[0]
    if len(gradients) == 1 and first is not None and first.device.type != "cpu" and spread.is_alone:
        return first
    found = [None if gradient is None else float(gradient) for gradient in gradients]
    if any(value != found[0] for value in found) or found[0] is None:
        shown = ", ".join("none" if value is None else f"{value:g}" for value in found)
        raise RuntimeError(
            f"the gradients that arrive at the {len(found)} losses differ ({shown}), but with "
            f"eager_backward=True the backward of their sum was over before; let forward return "
            f"the weighted sum as its only loss and the others detached, or use "
            f"eager_backward=False"
        )
    return found[0] if spread.is_alone else _agree(spread, found[0])


def _agree(spread: Spread, scale: float) -> float:
    """The same number in every rank, to the bit; where they differ, so do the ranks' losses."""
    first, *others = spread.agree("scale of the eager backward", scale)
    for rank, other in enumerate(others, 1):
        # Not bit for bit: another processor may round a loss in another way.
        if abs(other - first) > 1e-3 * max(abs(first), abs(other)):
            raise RankError(
                f"rank {rank} computes another loss than rank 0 (the gradients that arrive in "
                f"{spread.title} differ: {other:g} and {first:g}): with eager_backward=True every "
                f"rank must do the same with what the module returned"
            )
    return first
