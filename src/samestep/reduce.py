"""The order in which the shards' values are added.

What it holds: the one canonical binary tree over shard indices, in a plain form (:func:`tree_sum`)
and in a form that many threads fill in any order (:class:`TreeSum`); beside them the naive loop
(:func:`naive_sum`), for what has no order to keep and as the thing to compare with.

Why it exists: floating-point addition is not associative. If gradients were added in the order in
which shards finish, no run would equal the next. If each machine added its own shards first, the
bits would depend on the number of machines.

The tree, for K = 7 (leaves are shard indices; a node without a right child is passed up as it is)::

    level 0   0   1   2   3   4   5   6
               \\ /     \\ /     \\ /    |
    level 1    0+1     2+3     4+5    6
                  \\   /          \\  /
    level 2      0..3            4..6
                      \\        /
    level 3             0 .. 6

Guarantees: the result depends on the values and K alone, never on who adds, when, or where.
Must not: know what a value means (a gradient, a statistic), or which shard ran where.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["TreeSum", "add", "naive_sum", "sum_lists", "tree_sum"]

T = TypeVar("T")
Gradients = list[Tensor | None]  # one entry per differentiated tensor; None where nothing flowed


def add(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left + right`` on ``left``'s device; sparse operands stay sparse where both are.

    Exactness: the bits of ``torch.add``; a sparse and a dense operand give a dense result.
    """
    if right.device != left.device:
        right = right.to(left.device)
    if left.layout != torch.strided and right.layout == torch.strided:
        return torch.add(right, left)  # torch adds sparse to dense, not dense to sparse
    return torch.add(left, right)


def naive_sum(values: Sequence[Tensor]) -> Tensor:
    """Add from left to right; one value is returned itself. No step adds gradients so."""
    total = values[0]
    for value in values[1:]:
        total = add(total, value)
    return total


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    """Add ``values`` (one per shard, in shard order) in the canonical tree.

    Exactness: the same bits as :class:`TreeSum` fed in any order. Differentiable.
    """
    level = list(values)
    while len(level) > 1:
        pairs = [add(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def sum_lists(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists entry by entry; None means "no gradient" and is not the same as zeros."""
    return [
        b if a is None else a if b is None else add(a, b) for a, b in zip(left, right, strict=True)
    ]


class TreeSum(Generic[T]):
    """Adds K values that arrive in any order, from any thread, in the canonical tree.

    Whoever brings the second child of a node adds it and goes on upwards, so a worker that runs
    several shards in turn holds finished subtrees only: at most log2(K) + 1 partial sums each.

    Args:
        num_values: K, the number of values that will arrive.
        combine: adds a left and a right value (the left one has the lower shard indices).
    """

    def __init__(self, num_values: int, combine: Callable[[T, T], T]) -> None:
        self._widths = [num_values]
        while self._widths[-1] > 1:
            self._widths.append((self._widths[-1] + 1) // 2)
        self._combine = combine
        self._waiting: dict[tuple[int, int], T] = {}
        self._lock = threading.Lock()
        self._root: list[T] = []

    def add(self, index: int, value: T) -> None:
        """Bring shard ``index``'s value. Each index comes exactly once."""
        level = 0
        while self._widths[level] > 1:
            if index ^ 1 < self._widths[level]:  # else: no sibling, pass up as it is
                with self._lock:
                    if (level, index ^ 1) not in self._waiting:
                        self._waiting[level, index] = value
                        return
                    other = self._waiting.pop((level, index ^ 1))
                # The addition itself is outside the lock: other subtrees go on meanwhile.
                pair = (other, value) if index & 1 else (value, other)
                value = self._combine(*pair)
                del other, pair  # a finished subtree must not keep its parts alive
            level, index = level + 1, index >> 1
        self._root.append(value)

    @property
    def num_waiting(self) -> int:
        """How many partial sums are held now."""
        return len(self._waiting)

    def result(self) -> T:
        """The sum. Raises IndexError while values are missing."""
        return self._root[0]
