"""What shards tell each other inside forward: the public functions.

What it holds: :func:`all_reduce` and :func:`all_gather`. Why: a forward sees the rows of its shard;
some models need a number, or the rows, of the whole batch in the middle of it (a normalisation, a
contrastive loss). The first call shows that the shards want to meet, and is repeated with a thread
for each; from then on all shards of a call run at the same time.

Guarantees: the same values, to the bit, whoever runs which shard: threads, processes, machines.
Outside of a shard, where the whole batch is there anyway, they return what they were given.
Must not: know what is exchanged.
"""

from __future__ import annotations

from torch import Tensor

from samestep.context import Shard, current_shard
from samestep.group import join_shards, sum_shards
from samestep.reduce import tree_sum

__all__ = ["all_gather", "all_reduce"]


def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Return the sum, or the mean, of all shards' tensors. For use inside forward.

    Shapes:
        the same in every shard; so is the result.

    Args:
        tensor: this shard's.
        op: ``"sum"``, or ``"mean"``: weighted by the shards' rows, so that it is the mean over the
            batch's rows of what is a mean over a shard's.

    Raises:
        ValueError: another ``op``.
        RuntimeError: the shards call this at different places, or unequally often.

    Exactness:
        Added in the canonical order: the same bits in every shard, on any number of workers or
        ranks. Differentiable, to any order: the gradient is the sum of what arrives in all shards.

    Example:
        >>> import torch, samestep
        >>> class Centre(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x - samestep.all_reduce(x.mean(0), "mean")
        >>> x = torch.arange(6.0).view(6, 1)
        >>> samestep.DataParallel(Centre(), replicas=3)(x).sum()
        tensor(0.)
    """
    if op not in ("sum", "mean"):
        raise ValueError(f"op is {op!r}; it must be 'sum' or 'mean'")
    shard = _current()
    if shard is None:
        return tensor
    if op == "mean":
        tensor = tensor * ((shard.stop - shard.start) / shard.num_rows)
    return sum_shards(tensor, tree_sum, f"all_reduce {op} {tuple(tensor.shape)}")


def all_gather(tensor: Tensor, dim: int = 0) -> Tensor:
    """Return all shards' tensors end to end: the whole batch's rows. For use inside forward.

    Shapes:
        (..., B_k, ...) with B_k on ``dim`` in shard k becomes (..., B, ...) in every shard. This
        shard's own rows are those from ``samestep.current_shard().start`` to ``.stop``.

    Args:
        tensor: this shard's.
        dim: along which they are put together.

    Raises:
        RuntimeError: the shards call this at different places, or unequally often.

    Exactness:
        The values' own bits. Differentiable, to any order: the gradient of this shard's rows is the
        sum of what arrives for them in all shards.

    Example:
        >>> import torch, samestep
        >>> class Similar(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x @ samestep.all_gather(x).T
        >>> x = torch.randn(6, 4)
        >>> samestep.DataParallel(Similar(), replicas=3)(x).shape
        torch.Size([6, 6])
    """
    if _current() is None:
        return tensor
    return join_shards(tensor, dim, tree_sum, f"all_gather {dim}")


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _current() -> Shard | None:
    """The shard that runs here; None if it is the whole batch."""
    shard = current_shard()
    return None if shard is None or shard.num_shards == 1 else shard
