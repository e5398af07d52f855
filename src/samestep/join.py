"""Joining K values of one kind by their shapes: what every shard's tensor says about its rows.

Holds the rules for single values (tensors, arrays, packed sequences, registered batches) and the
text of every refusal, beside :class:`Joining`, what one merge knows. It exists apart from the walk
through containers because these rules look at shapes only, and that walk at types only.

[Note: which dim has the rows]
Let r_k be the rows of shard k. In this order:

1. ``dim`` has size r_k in every shard: join there.
2. Exactly one other dim has size r_k in every shard and all dims beside it agree: join there.
   With several such dims nothing decides between them.
3. All dims beside ``dim`` agree: join there; rows made another number of things each.

Guarantees: rows stay in order; only differentiable torch operations; no guess between two dims.

Must not: walk containers.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from samestep.devices import move_tensor
from samestep.dims import is_dim
from samestep.errors import MergeError
from samestep.rows import describe_value, has_shape, is_array, join_rows
from samestep.tree import find_batch_type, map_leaves

__all__ = [
    "Joining",
    "Path",
    "Total",
    "Whole",
    "join_leaves",
    "move_tree",
    "reduce_numbers",
    "refuse",
    "show_path",
]

Total = Callable[[list[Tensor]], Tensor]  # adds one tensor per shard, in a fixed order
Whole = Callable[[list[Any]], Any]  # the one value that all shards' values stand for, or None
Path = tuple[tuple[str, Any], ...]  # from the root: (what a path shows, what out_dims calls it)

NUMBERS = (int, float, complex)
_get_layout = operator.attrgetter("layout")
_get_ndim = operator.attrgetter("ndim")
_get_shape = operator.attrgetter("shape")


@dataclass(frozen=True, eq=False, repr=False)
class Joining:
    """What one merge knows about its shards, and how it was told to treat them."""

    rows: tuple[int, ...]
    weights: tuple[float, ...]  # B_k / B
    dim: int
    reduction: str
    device: torch.device | None
    total: Total
    whole: Whole | None
    strict: bool
    done: dict[tuple[int, ...], Any] = field(default_factory=dict)  # by ids of the shards' values


def join_leaves(joining: Joining, values: list[Any], spec: Any, word: Any, path: Path) -> Any:
    """Join one value per shard, all of the same kind.

    Args:
        joining: what is known about the shards.
        values: the shards' values, at least two.
        spec: what ``out_dims`` says here; ``word`` the same, also if it was said further up.
        path: where the values are.

    Raises:
        MergeError: they do not fit together, or nothing says how.
    """
    first = values[0]
    if word is None and joining.whole is not None and isinstance(first, Tensor):
        found = joining.whole(values)
        if found is not None:
            return found
    values = _bring_together(values, joining.device)
    if not has_shape(first):
        return _join_by_component(joining, values, word, path)
    if isinstance(first, Tensor) and len({*map(_get_layout, values)}) > 1:
        refuse(joining, values, path, "has different layouts")
    if not all(map(has_shape, values)) or len({*map(_get_ndim, values)}) > 1:
        hint = " (a squeeze() without a dim also drops the rows of a one-row shard)"
        is_hint_due = 1 in joining.rows and len({*joining.rows}) > 1
        refuse(joining, values, path, f"has different numbers of dims{hint * is_hint_due}")
    if word in ("mean", "sum"):
        return _reduce(joining, values, word, path)
    if is_dim(word) and (first.ndim > 0 or is_dim(spec)):
        return _join_on(joining, values, word, path)
    if first.ndim == 0:
        return _join_scalars(joining, values, path)
    return _join_by_shape(joining, values, path)


def reduce_numbers(joining: Joining, values: list[Any], word: str) -> Any:
    """Return the sum of Python numbers, or their mean weighted by rows."""
    if word == "mean":
        values = [value * weight for value, weight in zip(values, joining.weights, strict=True)]
    return sum(values[1:], start=values[0])


def move_tree(tree: Any, device: torch.device | None) -> Any:
    """Return ``tree`` with every tensor on ``device``; itself if they all are, or for None."""
    if device is None:
        return tree
    return map_leaves(
        lambda leaf: move_tensor(leaf, device) if isinstance(leaf, Tensor) else leaf, tree
    )


def refuse(joining: Joining, values: list[Any], path: Path, fact: str) -> NoReturn:
    """Raise a MergeError that shows where, why, what each shard returned, and what to pass."""
    shards = "; ".join(
        f"shard {shard} ({num_rows} rows): {_show_value(value)}"
        for shard, (value, num_rows) in enumerate(zip(values, joining.rows, strict=True))
    )
    name = "/".join(str(key) for _, key in path)

    def remedy(spec: str) -> str:
        return f"out_dims={{{name!r}: {spec}}}" if path else f"out_dims={spec}"

    first = values[0]
    is_shaped = isinstance(first, Tensor) or is_array(first)
    if isinstance(first, NUMBERS) or (is_shaped and has_shape(first) and first.ndim == 0):
        advice = f"pass {remedy(repr('mean'))} (weighted by rows), 'sum', 'first' or 'list'"
    elif is_shaped:
        advice = f"pass {remedy('<the dim that counts rows>')}, or 'mean', 'sum', 'first', 'list'"
    else:
        advice = f"pass {remedy(repr('list'))} for one value per shard, or 'first'"
    raise MergeError(f"{show_path(path)} {fact}: {shards}; {advice}")


def _show_value(value: Any) -> str:
    """A description; of a single number its value too."""
    text = describe_value(value)
    is_number = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    return f"{text} {value.item()}" if is_number and not value.dim() and not value.is_meta else text


def show_path(path: Path) -> str:
    """Return a path as text: ``output['boxes'][1]``."""
    return "output" + "".join(text for text, _ in path)


# --------------------------------------------------------------------------------------------------
# By kind
# --------------------------------------------------------------------------------------------------


def _join_by_component(joining: Joining, values: list[Any], word: Any, path: Path) -> Any:
    """Join values that have one length and no dims: packed, nested, registered."""
    if word in ("mean", "sum"):
        refuse(joining, values, path, f"cannot be merged by {word!r}")
    if any(has_shape(value) for value in values):
        refuse(joining, values, path, "is nested in some shards only")
    if find_batch_type(values[0]) is not None:
        return join_rows(values, 0)  # what the user's own function raises is the user's to read
    try:
        return join_rows(values, 0)
    except (ValueError, RuntimeError) as error:
        refuse(joining, values, path, f"cannot be joined ({error})")


def _join_scalars(joining: Joining, values: list[Any], path: Path) -> Any:
    first = values[0]
    is_exact = not _is_inexact(first)
    # A state that is in a graph is averaged even if equal: each shard has its part in the gradient.
    has_graph = True in [isinstance(value, Tensor) and value.requires_grad for value in values]
    # The mean of equal numbers is that number; their weighted sum may miss it by the last bit.
    is_mean = joining.strict or joining.reduction == "mean"
    has_values = not (isinstance(first, Tensor) and first.is_meta)
    if has_values and (is_exact or (is_mean and not has_graph)):
        if all(_is_equal(first, value) for value in values[1:]):
            return first
        if is_exact:
            refuse(joining, values, path, "differs between shards")
    return _reduce(joining, values, joining.reduction, path)


def _reduce(joining: Joining, values: list[Any], word: str, path: Path) -> Any:
    shapes = list(map(_get_shape, values))
    if shapes.count(shapes[0]) < len(shapes):
        refuse(joining, values, path, f"cannot be merged by {word!r}, its shapes differ")
    if not isinstance(values[0], Tensor):
        return reduce_numbers(joining, values, word)
    if word == "mean":
        values = [value * weight for value, weight in zip(values, joining.weights, strict=True)]
    return joining.total(values)


def _join_on(joining: Joining, values: list[Any], dim: int, path: Path) -> Any:
    """Join on the dim that ``out_dims`` names."""
    if not -values[0].ndim <= dim < values[0].ndim:
        refuse(joining, values, path, f"has no dim {dim}")
    if not _agree_beside(values, dim):
        refuse(joining, values, path, f"cannot be joined on dim {dim}, its other dims differ")
    return join_rows(values, dim)


def _join_by_shape(joining: Joining, values: list[Any], path: Path) -> Any:
    """Find the dim that has the rows. See [Note: which dim has the rows]."""
    num_dims = values[0].ndim
    has_dim = -num_dims <= joining.dim < num_dims
    dim = joining.dim % num_dims if has_dim else -1
    if has_dim and _has_rows(joining, values, dim):
        if not _agree_beside(values, dim):
            refuse(joining, values, path, f"has its rows on dim {dim}, but its other dims differ")
        return join_rows(values, dim)
    candidates = [
        other
        for other in range(num_dims)
        if other != dim and _has_rows(joining, values, other) and _agree_beside(values, other)
    ]
    if len(candidates) == 1:
        return join_rows(values, candidates[0])
    if candidates:
        refuse(joining, values, path, f"may have its rows on any of the dims {candidates}")
    if joining.strict:
        if all(_is_equal(values[0], value) for value in values[1:]):
            return values[0]
        refuse(joining, values, path, "has no dim that counts rows")
    if not has_dim:
        refuse(joining, values, path, f"has no dim {joining.dim}, and no other that counts rows")
    if not _agree_beside(values, dim):
        fact = f"has no dim that counts rows, and its dims beside dim {dim} differ"
        refuse(joining, values, path, fact)
    return join_rows(values, dim)


# --------------------------------------------------------------------------------------------------
# Small questions
# --------------------------------------------------------------------------------------------------


def _bring_together(values: list[Any], device: torch.device | None) -> list[Any]:
    """Bring the shards' values to one device: the one asked for, or shard 0's."""
    first = values[0]
    if find_batch_type(first) is not None:
        return [move_tree(value, device) for value in values]
    if isinstance(first, PackedSequence):
        return [value.to(device or first.data.device) for value in values]
    if isinstance(first, Tensor):
        target = device or first.device
    else:
        return values
    return [v if v.device == target else move_tensor(v, target) for v in values]


def _has_rows(joining: Joining, values: Sequence[Any], dim: int) -> bool:
    return all(value.shape[dim] == num for value, num in zip(values, joining.rows, strict=True))


def _agree_beside(values: Sequence[Any], dim: int) -> bool:
    """Do all dims but ``dim`` agree?"""
    dim %= values[0].ndim
    shape = list(values[0].shape)
    for value in values[1:]:
        shape[dim] = value.shape[dim]
        if list(value.shape) != shape:
            return False
    return True


def _is_inexact(value: Any) -> bool:
    """Is it a floating or complex tensor or array?"""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return bool(value.dtype.kind in "fc")


def _is_equal(one: Any, other: Any) -> bool:
    """Are two tensors or arrays of one layout equal bit for bit?"""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not isinstance(one, Tensor):
        return bool(one.tobytes() == other.tobytes())
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    pair = []
    for value in (one, other):
        value = value.detach().resolve_conj().resolve_neg().contiguous()
        pair.append(torch.view_as_real(value) if value.is_complex() else value)
    # Bytes, because NaN is not equal to itself.
    return torch.equal(*(value.reshape(-1).view(torch.uint8) for value in pair))
