"""A stream of batches, cut anew into batches of another size.

What it holds: :func:`regroup`. Why: the batch size that a loader was made for is seldom the one
that suits inference, and cutting nested batches is what this library does anyway.
Guarantees: no row is padded, repeated or left out; at most one batch of the loader and one new
batch are held.
Must not: know models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from samestep.errors import SplitError
from samestep.merge import merge
from samestep.split import cut, plan_split

__all__ = ["regroup"]


def regroup(batches: Iterator[Any], size: int, dim: int = 0) -> Iterator[Any]:
    """Cut a stream of batches anew into batches of ``size`` rows; the last one may be smaller.

    Args:
        batches: any nested values, all of one kind.
        size: rows.
        dim: the tensor dimension that counts rows.

    Raises:
        SplitError: a batch has no rows to count.

    Exactness:
        The rows are those of ``batches``, bit for bit, in the same order. What has no rows and is
        the same in all batches (a mask, a table) stays as it is.

    Example:
        >>> import torch
        >>> [len(batch) for batch in regroup(iter([torch.ones(3), torch.ones(4)]), 2)]
        [2, 2, 2, 1]
    """
    held: list[Any] = []
    counts: list[int] = []
    for batch in batches:
        plan = plan_split((batch,), {}, num_slots=1, dim=dim)
        if plan.num_rows is None and isinstance(batch, (list, tuple)):  # texts, for instance
            plan = plan_split((batch,), {}, num_slots=1, dim=dim, in_dims={0: "rows"})
        if plan.num_rows is None:
            raise SplitError(
                f"batch_size={size} cuts the rows of the batches anew, but a batch "
                f"({type(batch).__name__}) holds nothing that counts rows; leave batch_size out, "
                f"or let the loader yield tensors or lists"
            )
        sizes = _plan_pieces(plan.num_rows, size - sum(counts), size)
        plan = replace(plan, sizes=tuple(sizes), slots=tuple(range(len(sizes))))
        pieces = [args[0] for args, _ in cut(plan, (batch,), {})] if sizes else []
        del batch
        for piece, count in zip(pieces, sizes, strict=True):
            held.append(piece)
            counts.append(count)
            if sum(counts) == size:
                yield merge(held, counts, dim=dim, strict=True)
                held, counts = [], []
        del pieces
    if held:
        yield merge(held, counts, dim=dim, strict=True)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _plan_pieces(num_rows: int, first: int, size: int) -> list[int]:
    """The rows of a batch as pieces: one that fills up what is held, whole ones, the rest."""
    sizes = [min(first, num_rows)]
    while sum(sizes) < num_rows:
        sizes.append(min(size, num_rows - sum(sizes)))
    return [size for size in sizes if size]
