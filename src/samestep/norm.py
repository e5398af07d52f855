"""BatchNorm over shards: statistics of the whole batch.

What it holds: two forwards that replicas of BatchNorm modules get instead of their own, and
:func:`merge_statistics`. Why: each shard sees its own rows only, so the running statistics that it
would leave are its own; and averaging variances forgets how far apart the shards' means lie.

- :func:`record`: the module's own forward, then a note of what this call did to the running
  statistics. After the step the notes are pooled: the source module ends up with the statistics of
  the whole batch, as if it had seen it.
- :func:`synchronise`: ``sync_batch_norm=True``. The shards exchange sums in forward and backward,
  so the normalisation itself uses the whole batch's statistics. Plain differentiable operations
  around one differentiable sum, hence any order of derivative.

Exactness: statistics equal the plain module's up to rounding (docs/numerics.md).
Must not: write to the source module before every shard has ended.
Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979 (pooling); Ioffe, Szegedy, "Batch normalization", 2015.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.errors import RankError, ReplicaError
from samestep.group import current_group, sum_shards
from samestep.intercept import unseen
from samestep.reduce import tree_sum

__all__ = [
    "CallStatistics",
    "NormRecord",
    "has_batch_norm",
    "install",
    "is_norm_refusal",
    "merge_statistics",
]


@dataclass(frozen=True, eq=False, repr=False)
class CallStatistics:
    """What one call of a BatchNorm module did to its running statistics.

    Attributes:
        count: values per channel.
        factor: the weight of this call in the running statistics; not 0.
        before, after: [2, C], running mean and running variance. What the call saw follows from
            them, and is worked out for many modules at one time.
    """

    count: int
    factor: float
    before: Tensor
    after: Tensor


@dataclass(eq=False, repr=False)
class NormRecord:
    """The calls of one BatchNorm replica in one step; ``index``: the how manieth it is.

    While ``is_paused``, calls are not noted: a forward that runs again was noted before.
    """

    module: nn.Module
    index: int
    calls: list[CallStatistics] = field(default_factory=list)
    is_paused: bool = False


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a submodule normalises with batch statistics."""
    return any(isinstance(child, _BatchNorm) for child in module.modules())


def is_norm_refusal(error: BaseException) -> bool:
    """Whether a BatchNorm refused a shard because a single row has no variance.

    The plain module runs on the whole batch, so a batch that happens to end in such a shard must
    not stop a training.
    """
    kinds = (ValueError, RankError)  # the second: in another rank
    return isinstance(error, kinds) and "more than 1 value per channel" in str(error)


def install(pairs: Sequence[tuple[nn.Module, nn.Module]], *, sync: bool) -> list[NormRecord]:
    """Give every BatchNorm replica its forward.

    Args:
        pairs: (source module, replica) of every submodule.
        sync: whether the shards normalise with common statistics.

    Returns:
        One record per BatchNorm replica, in the order of ``pairs``.
    """
    records: list[NormRecord] = []
    for source, replica in pairs:
        if isinstance(replica, _BatchNorm) and not isinstance(replica, torch.jit.ScriptModule):
            if "forward" in source.__dict__:
                continue  # somebody gave this one module another forward: it is theirs
            found = NormRecord(source, len(records))
            forward = type(replica).forward
            if sync and forward not in _KNOWN_FORWARDS:
                raise ReplicaError(
                    f"{type(replica).__name__} is a BatchNorm with a forward of its own, which "
                    f"sync_batch_norm=True cannot replace; let it hold a BatchNorm instead of "
                    f"being one, or use sync_batch_norm=False"
                )
            chosen = synchronise if sync else record
            replica.__dict__["forward"] = functools.partial(chosen, replica, forward, found)
            records.append(found)
    return records


def record(
    module: _BatchNorm, forward: Any, found: NormRecord, *args: Any, **kwargs: Any
) -> Tensor:
    """Run ``forward`` and note what the call did to the running statistics."""
    if (
        found.is_paused
        or not _tracks(module)
        or module.running_mean is None
        or module.running_var is None
    ):
        output: Tensor = forward(module, *args, **kwargs)
        return output
    with unseen(), torch.no_grad():
        before = torch.stack([module.running_mean, module.running_var])
    output = forward(module, *args, **kwargs)
    with unseen(), torch.no_grad():
        factor = _factor(module)
        if factor:
            batch = _find_batch(args, kwargs)
            count = batch.numel() // batch.size(1)
            after = torch.stack([module.running_mean, module.running_var])
            found.calls.append(CallStatistics(count, factor, before, after))
    return output


def synchronise(
    module: _BatchNorm, forward: Any, found: NormRecord, *args: Any, **kwargs: Any
) -> Tensor:
    """Normalise with the statistics of all shards' rows."""
    uses_batch = module.training or module.running_mean is None
    if not uses_batch or current_group() is None:
        return record(module, forward, found, *args, **kwargs)
    batch = _find_batch(args, kwargs)
    if isinstance(module, nn.SyncBatchNorm):
        if batch.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {batch.dim()}D input)")
    else:
        module._check_input_dim(batch)  # type: ignore[no-untyped-call]  # torch's own check
    dims = [d for d in range(batch.dim()) if d != 1]
    shape = [1, -1] + [1] * (batch.dim() - 2)
    wide = batch if batch.dtype in (torch.float32, torch.float64) else batch.float()
    rows = wide.new_full((1,), wide.numel() // wide.size(1))
    place = f"BatchNorm {found.index}"
    first = sum_shards(torch.cat([wide.sum(dims), rows]), tree_sum, place)
    count = first[-1].detach()
    if count <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {int(count)} in all shards"
        )
    mean = first[:-1] / count
    centred = wide - mean.view(shape)
    variance = sum_shards((centred * centred).sum(dims), tree_sum, place) / count
    output = centred * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        output = output * module.weight.view(shape)
    if module.bias is not None:
        output = output + module.bias.view(shape)
    if _tracks(module) and module.running_mean is not None and module.running_var is not None:
        _update_running(module, mean.detach(), variance.detach() * (count / (count - 1)))
    return output.to(batch.dtype)


def merge_statistics(modules: Iterable[Sequence[NormRecord]]) -> list[tuple[Tensor, Tensor]]:
    """Pool the shards' statistics of all BatchNorm modules.

    Modules with as many values per channel in each shard are pooled together: put end to end, they
    take as many operations as one.

    Args:
        modules: per module one record per shard. Where the shards called it unequally often, or not
            at all, nothing can be pooled.

    Returns:
        ``running_mean``, ``running_var`` and ``num_batches_tracked`` of the others, each with its
        new values. Nothing is written.
    """
    groups: dict[Any, list[Sequence[NormRecord]]] = {}
    for records in modules:
        if len({len(found.calls) for found in records}) == 1 and records[0].calls:
            groups.setdefault(_outline(records), []).append(records)
    return [pair for group in groups.values() for pair in _merge(group)]


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_KNOWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def _outline(records: Sequence[NormRecord]) -> Any:
    """What modules that are pooled together have in common."""
    home = records[0].module.running_mean
    calls = [[(call.count, call.factor, call.after.device) for call in r.calls] for r in records]
    return home.device, home.dtype, tuple(map(tuple, calls))


def _merge(group: Sequence[Sequence[NormRecord]]) -> Iterator[tuple[Tensor, Tensor]]:
    modules: list[Any] = [records[0].module for records in group]
    both = [torch.stack([module.running_mean, module.running_var]) for module in modules]
    running = torch.cat(both, 1).double()
    num_calls = len(group[0][0].calls)
    for i in range(num_calls):
        # Per shard, this call of all modules.
        calls = [[found.calls[i] for found in shard] for shard in zip(*group, strict=True)]
        factor = calls[0][0].factor
        pooled = _pool([shard[0].count for shard in calls], list(map(_find_seen, calls)))
        running = (1 - factor) * running + factor * pooled.to(running.device)
    parts = torch.split(running.to(both[0].dtype), [one.size(1) for one in both], 1)
    for module, (mean, variance) in zip(modules, parts, strict=True):
        yield module.running_mean, mean
        yield module.running_var, variance
        if module.num_batches_tracked is not None:
            yield module.num_batches_tracked, module.num_batches_tracked + num_calls


def _find_seen(calls: Sequence[CallStatistics]) -> Tensor:
    """[2, sum of C], mean and unbiased variance that one shard's modules saw."""
    before = torch.cat([call.before for call in calls], 1).double()
    after = torch.cat([call.after for call in calls], 1).double()
    # new = (1 - factor) * old + factor * batch, solved for the batch's value.
    return (after - before) / calls[0].factor + before


def _pool(counts: Sequence[int], seen: Sequence[Tensor]) -> Tensor:
    """Statistics of the union: means weighted by count; variance within plus variance between."""
    total = sum(counts)
    means, variances = [each[0] for each in seen], [each[1] for each in seen]
    mean = tree_sum([m * (count / total) for m, count in zip(means, counts, strict=True)])
    squares = tree_sum(
        [
            variance * (count - 1) + (m - mean.to(m.device)) ** 2 * count
            for m, variance, count in zip(means, variances, counts, strict=True)
        ]
    )
    return torch.stack([mean, squares / (total - 1)])


def _find_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that is normalised: the first one of the call."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _tracks(module: _BatchNorm) -> bool:
    """Whether a call updates the running statistics."""
    return module.training and module.track_running_stats


def _factor(module: _BatchNorm) -> float:
    """The weight of the last call in the running statistics, after the counter went up."""
    if module.momentum is not None:
        return module.momentum
    return (
        1.0 / float(module.num_batches_tracked) if module.num_batches_tracked is not None else 0.0
    )


def _update_running(module: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """As torch does it; every shard computes the same bits, so they agree afterwards."""
    assert module.running_mean is not None
    assert module.running_var is not None
    with torch.no_grad():
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        factor = _factor(module)
        # Like torch's own update, this is no change to a graph that saved the old statistics.
        with _unsafe_preserve_version_counter((module.running_mean, module.running_var)):
            module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
            module.running_var.lerp_(variance.to(module.running_var.dtype), factor)
