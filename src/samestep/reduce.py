"""The order in which the shards' values are added.

What it holds: the one canonical binary tree over shard indices, in a plain form (:func:`tree_sum`),
in a form that many threads fill in any order (:class:`TreeSum`), and as a plan for finished
subtrees that lie with different workers or ranks (:func:`plan_tree`, :func:`sum_slices`); beside
them the naive loop (:func:`naive_sum`), for what has no order to keep and to compare with.

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

[Note: in place] A sum takes the memory of its left operand where nobody else has it (see
:mod:`samestep.holders`): new memory costs more than the addition, since the system gives it page
by page, and the peak of a step is lower by one set of gradients.

[Note: slices] Additions are entry by entry, so any part of a tensor may be added anywhere: where
large gradients lie with several workers (or ranks), each adds one slice of all of them.

Guarantees: the result depends on the values and K alone, never on who adds, when, or where.
Must not: know what a value means (a gradient, a statistic), or which shard ran where.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from samestep.devices import move_tensor
from samestep.holders import find_sole

__all__ = [
    "Node",
    "Recipe",
    "TreeSum",
    "absorb",
    "add",
    "add_into",
    "evaluate",
    "is_large",
    "limit_recipe",
    "naive_sum",
    "plan_tree",
    "sum_lists",
    "sum_slices",
    "tree_sum",
]

T = TypeVar("T")
Gradients = list[Tensor | None]  # one entry per differentiated tensor; None where nothing flowed
Node = tuple[int, int]  # level, position: as drawn above
Recipe = int | tuple["Recipe", "Recipe"]  # which values to add, and in which order


def add(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left + right`` on ``left``'s device; sparse operands stay sparse where both are.

    Exactness: the bits of ``torch.add``; a sparse and a dense operand give a dense result.
    """
    if right.device != left.device:
        right = move_tensor(right, left.device)
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
    try:
        if len(set(map(_get_index, itertools.chain(left, right)))) == 1:
            return list(torch._foreach_add(left, right))  # type: ignore[arg-type]  # as add does
    except (TypeError, RuntimeError):
        pass  # a gradient is missing, or a sparse one is on the left of a dense one
    return [
        b if a is None else a if b is None else add(a, b) for a, b in zip(left, right, strict=True)
    ]


def absorb(left: Gradients, right: Gradients) -> Gradients:
    """The same; lists that are worth it in the memory of ``left``'s entries that nobody else holds.

    Neither list may be used again. See :mod:`samestep.holders`.
    """
    sizes = [0 if value is None else value.numel() for value in left]
    large = [index for index, size in enumerate(sizes) if size >= _WORTH]
    given: list[int] = []
    if sum(sizes) >= _WORTH_ALL and large:
        given = [i for i in find_sole(left, large) if _are_alike((left[i], right[i]))]
    if not given:
        return sum_lists(left, right)
    torch._foreach_add_(_pick(left, given), _pick(right, given))  # type: ignore[arg-type]
    if len(given) < len(left):
        rest = [index for index in range(len(left)) if index not in {*given}]
        sums = sum_lists(_pick(left, rest), _pick(right, rest))
        for index, total in zip(rest, sums, strict=True):
            left[index] = total
    return left


def is_large(values: Iterable[Tensor]) -> bool:
    """Whether adding such lists takes so long that several workers should share the work."""
    sizes = list(map(Tensor.numel, values))
    return sum(sizes) >= max(_LARGE, _LARGE_EACH * len(sizes))


class TreeSum(Generic[T]):
    """Adds K values that arrive in any order, from any thread, in the canonical tree.

    Whoever brings the second child of a node adds it and goes on upwards, so a worker that runs
    several shards in turn holds finished subtrees only: at most log2(K) + 1 partial sums each.

    Args:
        num_values: K, the number of values that will arrive.
        combine: adds a left and a right value (the left one has the lower shard indices).
        by_thread: each thread adds only what it brought itself; what is left then is found in
            :meth:`parts`.
    """

    def __init__(
        self,
        num_values: int,
        combine: Callable[[T, T], T],
        *,
        by_thread: bool = False,
    ) -> None:
        self._num_values = num_values
        self._widths = _widths(num_values)
        self._combine = combine
        self._by_thread = by_thread
        self._waiting: dict[Node, tuple[int, T]] = {}  # with the thread that brought it
        self._lock = threading.Lock()
        self._root: list[T] = []

    def add(self, index: int, value: T) -> None:
        """Bring shard ``index``'s value. Each index comes exactly once."""
        thread = threading.get_ident() if self._by_thread else 0
        level = 0
        while self._widths[level] > 1:
            if index ^ 1 < self._widths[level]:  # else: no sibling, pass up as it is
                with self._lock:
                    sibling = self._waiting.get((level, index ^ 1))
                    if sibling is None or (thread and sibling[0] and sibling[0] != thread):
                        self._waiting[level, index] = (thread, value)
                        return
                    del self._waiting[level, index ^ 1]
                # The addition itself is outside the lock: other subtrees go on meanwhile.
                other = sibling[1]
                pair = (other, value) if index & 1 else (value, other)
                value = self._combine(*pair)
                del other, pair, sibling  # a finished subtree must not keep its parts alive
            level, index = level + 1, index >> 1
        self._root.append(value)

    @property
    def num_waiting(self) -> int:
        """How many partial sums are held now."""
        return len(self._waiting)

    def parts(self) -> dict[Node, T]:
        """The finished subtrees that are here, in the order of the shards."""
        if self._root:  # and then nothing waits
            return {(len(self._widths) - 1, 0): self._root[0]}
        found = {node: value for node, (_, value) in self._waiting.items()}
        return dict(sorted(found.items(), key=lambda item: item[0][1] << item[0][0]))

    def result(self) -> T:
        """The sum. Raises IndexError while values are missing."""
        return self._root[0]


def plan_tree(num_values: int, nodes: Iterable[Node]) -> dict[Node, Recipe]:
    """Say how finished subtrees are added further.

    Args:
        num_values: K.
        nodes: the subtrees that are there; the recipes count them in this order.

    Returns:
        The subtrees that can be made of them, each with its recipe. Of all shards' there is one.

    Example:
        >>> plan_tree(7, [(1, 0), (1, 1), (1, 2), (1, 3)])
        {(3, 0): ((0, 1), (2, 3))}
    """
    widths = _widths(num_values)
    levels: list[dict[int, Recipe]] = [{} for _ in widths]
    for number, (level, index) in enumerate(nodes):
        levels[level][index] = number
    stuck: dict[Node, Recipe] = {}
    for level, found in enumerate(levels[:-1]):
        for index, recipe in sorted(found.items()):
            if index ^ 1 >= widths[level]:
                levels[level + 1][index >> 1] = recipe
            elif index ^ 1 not in found:
                stuck[level, index] = recipe
            elif not index & 1:
                levels[level + 1][index >> 1] = (recipe, found[index ^ 1])
    return stuck | {(len(widths) - 1, index): recipe for index, recipe in levels[-1].items()}


def limit_recipe(recipe: Recipe, present: Sequence[int]) -> Recipe | None:
    """The recipe for those values that are there, counted anew; the order stays.

    Example:
        >>> limit_recipe(((0, 1), (2, 3)), [0, 2, 3])
        (0, (1, 2))
    """
    if isinstance(recipe, int):
        return present.index(recipe) if recipe in present else None
    left, right = (limit_recipe(part, present) for part in recipe)
    return right if left is None else left if right is None else (left, right)


def evaluate(recipe: Recipe, values: Sequence[Tensor | None]) -> Tensor | None:
    """Add ``values`` by a recipe; None means "nothing here" and is not the same as zeros."""
    if isinstance(recipe, int):
        return values[recipe]
    left, right = (evaluate(part, values) for part in recipe)
    return right if left is None else left if right is None else add(left, right)


def sum_slices(
    num_values: int,
    parts: Mapping[Node, Gradients],
    num_workers: int,
    run: Callable[[list[Callable[[], None]]], object],
) -> dict[Node, Gradients]:
    """Add what subtrees there are, each worker one slice of all of them.

    Args:
        num_values: K.
        parts: from :meth:`TreeSum.parts`; not to be used again, see :func:`absorb`.
        num_workers: how many jobs to make.
        run: runs jobs at the same time and waits for them.

    Exactness: the same bits as adding them one after another. See [Note: slices].
    """
    found: dict[Node, Gradients] = {}
    pieces: list[_Piece] = []
    lists = list(parts.values())
    for node, recipe in plan_tree(num_values, parts).items():
        if isinstance(recipe, int):
            found[node] = lists[recipe]
            continue
        needed = _numbers(recipe)
        rows = [lists[number] for number in needed]
        renumbered = limit_recipe(recipe, needed)
        assert renumbered is not None
        made = _lay_out(renumbered, rows)
        found[node] = [one.total if isinstance(one, _Piece) else one for one in made]
        pieces += [one for one in made if isinstance(one, _Piece)]
    if pieces:
        size = sum([piece.total.numel() for piece in pieces])
        cuts = [size * worker // num_workers for worker in range(num_workers + 1)]
        run([functools.partial(_add_slice, pieces, a, b) for a, b in itertools.pairwise(cuts)])
    return found


def add_into(total: Tensor, recipe: Recipe, values: Sequence[Tensor]) -> None:
    """Write the sum of one-dimensional ``values`` to ``total``, block by block.

    With more than two values a block is added as a whole while it is in the processor's cache.
    """
    with torch.no_grad():
        if isinstance(recipe, int):
            total.copy_(values[recipe])
            return
        left, right = recipe
        if len(values) == 2:
            torch.add(values[0], values[1], out=total)
            return
        for start in range(0, total.numel(), _BLOCK):
            block = [value[start : start + _BLOCK] for value in values]
            one, other = evaluate(left, block), evaluate(right, block)
            assert one is not None
            assert other is not None
            torch.add(one, other, out=total[start : start + _BLOCK])


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

# -1 on the CPU; in a C loop, a third of what asking for ``device`` takes.
_get_index: Callable[[Tensor | None], int] = Tensor.get_device  # type: ignore[assignment]
_LARGE = 1 << 19  # entries; below, handing the work to others takes longer than the work
_LARGE_EACH = 1 << 14  # entries of one tensor, on average: each has to be looked at before
_BLOCK = 1 << 15  # entries: a few blocks of floats fit into a core's own cache
# Entries of one tensor, and of a list: memory for less is at hand sooner than the answer to who
# holds it.
_WORTH = 1 << 11
_WORTH_ALL = 1 << 16


@functools.cache
def _widths(num_values: int) -> tuple[int, ...]:
    """How many nodes each level has."""
    widths = [num_values]
    while widths[-1] > 1:
        widths.append((widths[-1] + 1) // 2)
    return tuple(widths)


class _Piece(NamedTuple):
    """A sum that is added entry by entry, and so by slices."""

    recipe: Recipe
    values: tuple[Tensor, ...]
    total: Tensor  # the first value itself, where nobody else holds it


def _lay_out(recipe: Recipe, rows: Sequence[Gradients]) -> list[_Piece | Tensor | None]:
    """Say of each sum where it will be; those that are no matter of single entries are added."""
    free = {*find_sole(rows[0], range(len(rows[0])))}
    made: list[_Piece | Tensor | None] = []
    for index, values in enumerate(zip(*rows, strict=True)):
        # Accelerators are added on here, in the caller's streams: workers would not wait for them.
        if not _are_alike(values) or values[0].device.type != "cpu":
            made.append(evaluate(recipe, values))
            continue
        # The first in the order of additions: its entries are read before they are written.
        total = values[0] if index in free else torch.empty_like(values[0])
        made.append(_Piece(recipe, values, total))
    return made


def _add_slice(pieces: Sequence[_Piece], first: int, last: int) -> None:
    """Add the entries from ``first`` to ``last``, counted over all pieces."""
    totals: list[Tensor] = []
    others: list[Tensor] = []
    at = 0
    for recipe, values, total in pieces:
        begin, end = first - at, last - at
        size = total.numel()
        at += size
        if begin >= size or end <= 0:
            continue
        is_free = total is values[0]
        parts = [total, *values]
        if begin > 0 or end < size:
            begin, end = max(begin, 0), min(end, size)
            parts = [part.view(-1)[begin:end] for part in parts]
        if is_free and len(values) == 2:  # most of them; where there are many, in one call
            totals.append(parts[0])
            others.append(parts[2])
        else:
            flat = [part.view(-1) for part in parts]
            add_into(flat[0], recipe, flat[1:])
    if totals:
        with torch.no_grad():
            torch._foreach_add_(totals, others)


def _are_alike(values: Sequence[Tensor | None]) -> bool:
    """Whether these are dense tensors of one form, which can be added entry by entry."""
    form = None
    for value in values:
        if value is None or value.layout is not torch.strided or value.requires_grad:
            return False
        own = value.shape, value.dtype, value.device
        if (form or own) != own or not value.is_contiguous():
            return False
        form = own
    return True


def _pick(values: Gradients, indices: Sequence[int]) -> Gradients:
    return [values[index] for index in indices]


def _numbers(recipe: Recipe) -> list[int]:
    if isinstance(recipe, int):
        return [recipe]
    return [number for part in recipe for number in _numbers(part)]
