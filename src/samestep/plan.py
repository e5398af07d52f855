"""How many rows a call has, how they are shared out, and the records that say so.

Letters, here and everywhere: B rows of the batch, K shards, B_k rows of shard k.

Holds the plan of one call as plain data, its text, the rule of sizes (:func:`plan_sizes`) and the
search for the leaf that says what B is (:func:`find_first`). It exists apart from cutting because a
plan is also printed, compared in tests and sent elsewhere.

Guarantees: the same arguments give the same plan; the sizes add up to B.

Must not: cut anything, or decide what happens to a single leaf.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from samestep.dims import DEFAULT, Inherited, child_in_dims, is_dim
from samestep.rows import count_rows, holds_rows, is_tensor_like
from samestep.tree import check_depth, open_container

__all__ = [
    "Argument",
    "Carrier",
    "LeafPlan",
    "SplitPlan",
    "explain_plan",
    "find_first",
    "is_sliceable",
    "join_single_rows",
    "plan_sizes",
]


class LeafPlan(NamedTuple):
    """What happens to one leaf: ``cut`` on ``dim``, cut by ``rows``, or given ``whole``."""

    path: str  # "args[0]", "kwargs['mask']", "args[0]['x'][1]"
    description: str  # "float32 [30, 5]"
    action: Literal["cut", "rows", "whole"]
    dim: int | None = None  # only of "cut"; never negative


class SplitPlan(NamedTuple):
    """How one call is cut.

    ``num_rows`` is B, or None if nothing in the arguments counts rows. ``sizes`` are the B_k, none
    of them zero, and ``slots`` says where each shard runs. A call without rows is one shard with
    everything in it, on slot 0; its ``sizes`` are empty.
    """

    num_rows: int | None
    sizes: tuple[int, ...]
    slots: tuple[int, ...]
    leaves: tuple[LeafPlan, ...]

    @property
    def num_shards(self) -> int:
        """K; 1 for a call without rows."""
        return len(self.slots)

    def rows(self, shard: int) -> tuple[int, int]:
        """Return (start, stop): the rows of one shard within the batch."""
        if not self.sizes:
            return 0, self.num_rows or 0
        start = sum(self.sizes[:shard])
        return start, start + self.sizes[shard]


def explain_plan(plan: SplitPlan) -> str:
    """Return the plan as text, one line per leaf.

    Example:
        >>> leaves = (LeafPlan("args[0]", "float32 [10, 5]", "cut", 0),
        ...           LeafPlan("args[1]", "int 3", "whole"))
        >>> print(explain_plan(SplitPlan(10, (4, 4, 2), (0, 1, 2), leaves)))
        args[0] float32 [10, 5]: cut on dim 0 into 4 4 2
        args[1] int 3: whole
    """
    sizes = " ".join(map(str, plan.sizes))
    lines = []
    for leaf in plan.leaves:
        action = {
            "cut": f"cut on dim {leaf.dim} into {sizes}",
            "rows": f"cut by rows into {sizes}",
            "whole": "whole",
        }[leaf.action]
        lines.append(f"{leaf.path} {leaf.description}: {action}")
    if not plan.sizes:
        lines.append("no rows: one call, on the first slot, with everything")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Sizes
# --------------------------------------------------------------------------------------------------


def plan_sizes(
    num_rows: int, num_slots: int, split: str | Sequence[float] = "chunk"
) -> tuple[int, ...]:
    """Decide how many rows each shard gets.

    Args:
        num_rows: B.
        num_slots: the most shards there can be.
        split: ``"chunk"``: torch.chunk's sizes. ``"balanced"``: sizes that differ by at most one,
            the larger first. Or one weight per slot: rows in proportion to the weights, by largest
            remainders, ties to the lower slot.

    Returns:
        the sizes; they add up to B. For ``"chunk"`` and ``"balanced"`` none is zero, so there may
        be fewer than slots. For weights there is one per slot, and a slot with zero is not called.
        () for B = 0.

    Raises:
        ValueError: ``num_slots`` is below 1, the word is unknown, or the weights are not one per
            slot, finite, non-negative and not all zero.

    Example:
        >>> plan_sizes(10, 8), plan_sizes(10, 8, "balanced"), plan_sizes(10, 3, [2, 0, 3])
        ((2, 2, 2, 2, 2), (2, 2, 1, 1, 1, 1, 1, 1), (4, 0, 6))
    """
    if num_slots < 1:
        raise ValueError(f"a batch needs at least one slot (slots: {num_slots})")
    if not isinstance(split, str):
        return _weighted_sizes(num_rows, num_slots, split)
    if split not in ("chunk", "balanced"):
        raise ValueError(
            f"split is {split!r}; it must be 'chunk', 'balanced' or one weight per slot"
        )
    if num_rows == 0:
        return ()
    if split == "chunk":
        size = -(-num_rows // num_slots)
        full, rest = divmod(num_rows, size)
        return (size,) * full + ((rest,) if rest else ())
    num_shards = min(num_slots, num_rows)
    size, larger = divmod(num_rows, num_shards)
    return (size + 1,) * larger + (size,) * (num_shards - larger)


def _weighted_sizes(num_rows: int, num_slots: int, split: Sequence[float]) -> tuple[int, ...]:
    try:
        weights = [float(weight) for weight in split]
    except (TypeError, ValueError):
        raise TypeError(
            f"split must be 'chunk', 'balanced' or one weight per slot, got {split!r}"
        ) from None
    if len(weights) != num_slots:
        raise ValueError(
            f"split must have one weight per slot (weights: {len(weights)}, slots: {num_slots})"
        )
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise ValueError(
            f"weights must be finite, not negative and not all zero (split: {weights})"
        )
    if num_rows == 0:
        return ()
    from fractions import Fraction  # the import alone takes longer than most of ours

    total = sum(map(Fraction, weights))  # exact, so that equal weights are equal shares
    shares = [num_rows * Fraction(weight) / total for weight in weights]
    sizes = [math.floor(share) for share in shares]
    missing = num_rows - sum(sizes)
    by_remainder = sorted(range(num_slots), key=lambda slot: (sizes[slot] - shares[slot], slot))
    for slot in by_remainder[:missing]:
        sizes[slot] += 1
    return tuple(sizes)


# --------------------------------------------------------------------------------------------------
# Finding B
# --------------------------------------------------------------------------------------------------


class Argument(NamedTuple):
    """One argument of a call, and what was said about its rows."""

    path: str
    key: Any  # how in_dims names it
    value: Any
    spec: Any


class Carrier(NamedTuple):
    """A leaf that has rows, and the outermost list around it that no spec explains."""

    path: str
    value: Any
    size: int
    outer: list[Any] | None
    outer_path: str


def find_first(arguments: Sequence[Argument], dim: int) -> Carrier | None:
    """Return the leaf that says how many rows the batch has, None if nothing has rows."""
    tensors: list[Carrier] = []
    arrays: list[Carrier] = []
    for argument in arguments:
        _survey(argument.value, argument.spec, argument.path, dim, (None, ""), tensors, arrays, 0)
    carriers = tensors or arrays
    if not carriers:
        return None
    first = carriers[0]
    if first.outer is not None and _is_row_list(first.outer, carriers):
        return first._replace(path=first.outer_path, value=first.outer, size=len(first.outer))
    return first


def _survey(
    value: Any,
    spec: Any,
    path: str,
    dim: int,
    outer: tuple[list[Any] | None, str],
    tensors: list[Carrier],
    arrays: list[Carrier],
    depth: int,
) -> None:
    """Collect every leaf that has rows, in order."""
    if spec is None:
        return
    word = spec.spec if isinstance(spec, Inherited) else spec
    if holds_rows(value):
        size = count_rows(value, word if is_dim(word) else 0 if word == "rows" else dim)
        if size is not None:
            kind = tensors if is_tensor_like(value) else arrays
            kind.append(Carrier(path, value, size, *outer))
    elif word == "rows" and is_sliceable(value):
        tensors.append(Carrier(path, value, len(value), *outer))
    else:
        opened = open_container(value)
        if opened is None:
            return
        check_depth(depth, path)
        if outer[0] is None and isinstance(value, list) and word is DEFAULT:
            outer = (value, path)
        child_specs = child_in_dims(spec, opened.keys, opened.style, path)
        for (text, child), child_spec in zip(opened.items, child_specs, strict=True):
            _survey(child, child_spec, path + text, dim, outer, tensors, arrays, depth + 1)


def _is_row_list(rows: list[Any], carriers: list[Carrier]) -> bool:
    """Is the list that holds the first leaf a list of rows (B = its length), not a container?

    Its tensors say so where they differ in size. Where they agree, another argument decides: one
    outside of lists by its size, or another list of the same length by differing inside.
    """
    sizes = {carrier.size for carrier in carriers if carrier.outer is rows}
    if len(sizes) > 1:
        return True
    plain = {carrier.size for carrier in carriers if carrier.outer is None}
    if sizes <= plain or len(rows) in sizes:
        return False
    if len(rows) in plain:
        return True
    inside: dict[int, set[int]] = {}
    for carrier in carriers:
        if carrier.outer is not None and len(carrier.outer) == len(rows):
            inside.setdefault(id(carrier.outer), set()).add(carrier.size)
    return any(len(sizes) > 1 for sizes in inside.values())


def is_sliceable(value: Any) -> bool:
    """Can rows be taken out of it by position and its type kept?"""
    return isinstance(value, (list, deque)) or type(value) is tuple


def join_single_rows(plan: SplitPlan) -> SplitPlan | None:
    """Return a plan without shards of one row, or None if ``plan`` has none that could be joined.

    A single row joins the shard after it; the last one, the shard before.
    """
    if 1 not in plan.sizes or plan.num_shards < 2:
        return None
    sizes: list[int] = []
    slots: list[int] = []
    for size, slot in zip(plan.sizes, plan.slots, strict=True):
        if sizes and sizes[-1] == 1:
            sizes[-1] += size
        else:
            sizes.append(size)
            slots.append(slot)
    if sizes[-1] == 1 and len(sizes) > 1:
        slots.pop()
        sizes[-2:] = [sizes[-2] + 1]
    return plan._replace(sizes=tuple(sizes), slots=tuple(slots))
