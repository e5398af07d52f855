"""A stream of batches, cut anew into batches of another size.

What it holds: :func:`regroup`. Why: the batch size that a loader was made for is seldom the one
that suits inference, and cutting nested batches is what this library does anyway.
Guarantees: no row is padded, repeated or left out; at most one batch of the loader and one new
batch are held.
Must not: know models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestep.batches import Form, join_batches, plan_batch
from samestep.errors import SplitError

__all__ = ["regroup"]


_PLAIN = Form()


def regroup(batches: Iterator[Any], size: int, form: Form = _PLAIN) -> Iterator[Any]:
    """Cut a stream of batches anew into batches of ``size`` rows; the last one may be smaller.

    Args:
        batches: any nested values, all of one kind.
        size: rows.
        form: what is known of the batches.

    Raises:
        SplitError: a batch has no rows to count, or a list may hold rows or columns.

    Exactness:
        The rows are those of ``batches``, bit for bit, in the same order. What has no rows and is
        the same in all batches (a mask, a table) stays as it is.

    Example:
        >>> import torch
        >>> [len(batch) for batch in regroup(iter([torch.ones(3), torch.ones(4)]), 2)]
        [2, 2, 2, 1]
    """
    held: list[Any] = []
    count = 0
    for batch in batches:
        plan = plan_batch(batch, form)
        num_rows = plan.plan.num_rows
        if num_rows is None:
            raise SplitError(
                f"batch_size={size} cuts the rows of the batches anew, but a batch "
                f"({type(batch).__name__}) holds nothing that counts rows; leave batch_size out, "
                f"or let the loader yield tensors or lists"
            )
        sizes = _plan_pieces(num_rows, size - count, size)
        pieces = plan.cut(sizes) if sizes else []
        del batch
        for piece, rows in zip(pieces, sizes, strict=True):
            held.append((piece, plan))
            count += rows
            if count == size:
                yield join_batches(held)
                held, count = [], 0
        del pieces, plan
    if held:
        yield join_batches(held)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _plan_pieces(num_rows: int, first: int, size: int) -> list[int]:
    """The rows of a batch as pieces: one that fills up what is held, whole ones, the rest."""
    sizes = [min(first, num_rows)]
    while sum(sizes) < num_rows:
        sizes.append(min(size, num_rows - sum(sizes)))
    return [size for size in sizes if size]
