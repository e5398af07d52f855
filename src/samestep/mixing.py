"""Which submodules let rows see one another: found by watching.

What it holds: :func:`find_mixing`. Why: the type of a module does not tell. ``x - x.mean(0)`` is
code in somebody's forward, and a BatchNorm in evaluation mixes nothing.

[Note: how mixing is found] The plain module runs on the whole batch, and everything that crosses
the border of a submodule is kept. Then it runs on the first rows only, and what crosses is compared
with the first rows of what was kept. Where it differs, the code that ran since the last border has
mixed rows; and the kept rows are put in the place of the wrong ones, so that whatever comes later
is judged by its own doing.

Guarantees: a module is named if and only if rows that it handed on changed though the rows it was
handed did not. A value without rows (a mean, a loss) is not judged, only what is made of it.
Must not: run more than one replica. The modules given are copies and may be written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from samestep.observe import watch_borders
from samestep.tree import iter_leaves, map_leaves

__all__ = ["find_mixing"]

Forward = Callable[[nn.Module], Any]


def find_mixing(
    make: Callable[[], nn.Module],
    run_whole: Forward,
    run_part: Forward,
    num_part: int,
    allowed: float,
) -> list[str]:
    """Return the names of the modules whose own code mixes rows. See [Note: how mixing is found].

    Args:
        make: returns a fresh copy of the model; it must draw nothing.
        run_whole: runs forward with the whole batch.
        run_part: the same with the first ``num_part`` rows only.
        allowed: the largest relative deviation that counts as equal.

    Raises:
        Exception: whatever the module raises; on a part of the batch it may.
    """
    kept: dict[tuple[str, str, int], list[Any]] = {}
    counts: dict[tuple[str, str], int] = {}
    stack: list[str] = []
    found: dict[str, None] = {}

    def key(name: str, side: str) -> tuple[str, str, int]:
        counts[name, side] = counts.get((name, side), -1) + 1
        return name, side, counts[name, side]

    def keep(name: str, side: str, values: Any) -> Any:
        leaves = [leaf for _, leaf in iter_leaves(values)]
        kept[key(name, side)] = [_copy(leaf) for leaf in leaves]
        return values

    def heal(name: str, side: str, values: Any, blamed: str | None) -> Any:
        whole = kept.get(key(name, side), [])
        if len(whole) != len(list(iter_leaves(values))) or _has_packed(values):
            # Another path through the code, other containers, or rows that are not in order.
            return values
        expected = iter(whole)

        def heal_leaf(leaf: Any) -> Any:
            right = _expect(leaf, next(expected), num_part, allowed)
            if right is None:
                return leaf
            if blamed is not None:
                found[blamed] = None
            return right

        return map_leaves(heal_leaf, values)

    model = make()
    with watch_borders(model, lambda n, v: keep(n, "in", v), lambda n, v: keep(n, "out", v)):
        run_whole(model)
    counts.clear()

    def enter(name: str, values: Any) -> Any:
        values = heal(name, "in", values, stack[-1] if stack else None)
        stack.append(name)
        return values

    def leave(name: str, values: Any) -> Any:
        stack.pop()
        return heal(name, "out", values, name)

    model = make()
    with watch_borders(model, enter, leave):
        run_part(model)
    return list(found)


def _expect(part: Any, whole: Any, num_part: int, allowed: float) -> Tensor | None:
    """The rows of ``whole`` that ``part`` should be, or None if it is, or nothing can be said."""
    if not isinstance(part, Tensor) or not isinstance(whole, Tensor):
        return None
    if part.dim() != whole.dim() or part.shape == whole.shape or part.dtype != whole.dtype:
        return None
    if part.is_nested or whole.is_nested or part.layout is not torch.strided:
        return None
    if any(p > w for p, w in zip(part.shape, whole.shape, strict=True)):
        return None
    first = whole
    for dim, size in enumerate(part.shape):
        first = first.narrow(dim, 0, size)
    if _is_close(part, first, allowed):
        return None
    for dim, size in enumerate(part.shape):
        # Rows may be the inner index of a dim that is made of two: (time, rows) flattened.
        if size != whole.size(dim) and size % num_part == 0:
            times = size // num_part
            if whole.size(dim) % times == 0:
                shape = [*whole.shape[:dim], times, -1, *whole.shape[dim + 1 :]]
                inner = whole.reshape(shape).narrow(dim + 1, 0, num_part).flatten(dim, dim + 1)
                if inner.shape == part.shape and _is_close(part, inner, allowed):
                    return None
    return first.clone()


def _is_close(one: Tensor, two: Tensor, allowed: float) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, two)
    floor = 1e-5 if allowed < 1e-6 else 1e-3  # of what ought to be zero and holds rounding only
    scale = max(floor, float(two.abs().nan_to_num(0.0, 0.0, 0.0).max())) if two.numel() else 1.0
    return torch.allclose(one, two, rtol=0.0, atol=allowed * scale, equal_nan=True)


def _has_packed(values: Any) -> bool:
    found = iter_leaves(values, is_leaf=lambda value: isinstance(value, PackedSequence))
    return any(isinstance(leaf, PackedSequence) for _, leaf in found)


def _copy(leaf: Any) -> Any:
    """A later operation may write into the tensor itself."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
