"""Joining the outputs of K shards into the output that one call would have returned.

Holds :func:`merge`, the walk through the output trees, and the rules for containers and plain
objects. It exists because torch's own gather joins tensors on one fixed dim, mistakes a loss for a
row, and loses containers and their types.

Guarantees: rows come back in the order of the shards; every container keeps its type and the order
of the first shard; whatever cannot be joined without a guess is an error that shows the path, what
each shard returned and the ``out_dims`` that would settle it; only differentiable torch operations
are used; one shard's output, and what is the identical object in all shards, is returned itself.

Must not: know what a module is, or own the order of additions (the caller passes ``total``).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.dims import Inherited, check_out_dims, child_out_dims
from samestep.join import (
    Joining,
    Path,
    Total,
    Whole,
    join_leaves,
    move_tree,
    reduce_numbers,
    refuse,
    show_path,
)
from samestep.reduce import naive_sum
from samestep.rows import count_rows_inside, has_item_per_row, holds_rows
from samestep.tree import Opened, check_depth, open_container

__all__ = ["Total", "Whole", "check_out_dims", "merge"]


def merge(
    outputs: Sequence[Any],
    rows: Sequence[int],
    *,
    weights: Sequence[int] | None = None,
    dim: int = 0,
    out_dims: Any = None,
    reduction: str = "mean",
    device: torch.device | str | None = None,
    total: Total | None = None,
    whole: Whole | None = None,
    strict: bool = False,
) -> Any:
    """Join the outputs of all shards into one.

    Shapes:
        a tensor that is (..., r_k, ...) in shard k, r_k on ``dim`` or on the one other dim that can
        be it, becomes (..., B, ...). Other dims must agree. A tensor without rows is put end to end
        along ``dim`` if its other dims agree. A 0-dim floating tensor stays 0-dim.

    Args:
        outputs: one output tree per shard.
        rows: r_k, the rows of each shard.
        weights: what means are weighted by; ``rows`` if None.
        dim: the dim that counts rows where ``out_dims`` is silent.
        out_dims: a dim, or ``"mean"`` (weighted by rows), ``"sum"``, ``"first"``, ``"list"``, as a
            prefix of the output tree or by path: ``{"aux/loss": "sum"}``. A dim, ``"mean"`` and
            ``"sum"`` said of a container mean the tensors in it; ``"first"`` and ``"list"`` mean
            the container. Checked by :func:`check_out_dims`.
        reduction: what becomes of 0-dim floating tensors: ``"mean"`` weighted by rows, ``"sum"``.
        device: where tensors land. None: with one shard they stay, else all go to shard 0's.
        total: how tensors are added; left to right by default.
        whole: asked for each tensor leaf that ``out_dims`` is silent about, with the shards'
            values; what it returns, unless None, is the result.
        strict: for state, not outputs: tensors without rows are never put end to end; those that
            agree bit for bit are merged to shard 0's.

    Returns:
        one tree of the same types as each output. With one shard, that output itself.

    Raises:
        MergeError: the outputs do not fit together; path, every shard's value and the remedy.
        ValueError: ``out_dims`` names what the output does not have; ``outputs`` and ``rows`` do
            not match; a container holds itself.

    Exactness:
        of tensors with rows, bit for bit what the shards returned; of reduced ones, a float sum in
        the order of ``total``.

    Example:
        >>> halves = [{"loss": torch.tensor(1.0), "name": ["a", "b"]},
        ...           {"loss": torch.tensor(4.0), "name": ["c"]}]
        >>> merge(halves, [2, 1])
        {'loss': tensor(2.), 'name': ['a', 'b', 'c']}
    """
    if len(outputs) != len(rows) or not outputs:
        raise ValueError(f"one output per shard (outputs: {len(outputs)}, shards: {len(rows)})")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    target = None if device is None else torch.device(device)
    if out_dims is None:
        if len(outputs) == 1:
            return move_tree(outputs[0], target)
        if whole is None and _are_plain(outputs, rows, dim, target):
            if sum(map(bool, rows)) == 1:  # of a rank's own rows all others' shards have none
                return next(itertools.compress(outputs, rows))
            return torch.cat(tuple(outputs), dim)
    counts = rows if weights is None else weights
    num_rows = sum(counts)
    shares = tuple([r / num_rows if num_rows else 1 / len(rows) for r in counts])
    adder = naive_sum if total is None else total
    joining = Joining(tuple(rows), shares, dim, reduction, target, adder, whole, strict)
    return _merge_node(joining, list(outputs), out_dims, ())


def _are_plain(
    outputs: Sequence[Any], rows: Sequence[int], dim: int, device: torch.device | None
) -> bool:
    """Are all outputs dense tensors that have their rows on ``dim``, where they are wanted?

    The common case, decided without building anything.
    """
    first = outputs[0]
    if type(first) is not Tensor or first.is_nested or first.layout is not torch.strided:
        return False
    if outputs[1] is first:
        return False
    shape = list(first.shape)
    if not -len(shape) <= dim < len(shape):
        return False
    if device is None:
        device = first.device
    for output, num_rows in zip(outputs, rows, strict=True):
        if type(output) is not Tensor or output.is_nested or output.layout is not torch.strided:
            return False
        shape[dim] = num_rows
        if list(output.shape) != shape or output.device != device:
            return False
    return True


def _merge_node(joining: Joining, values: list[Any], spec: Any, path: Path) -> Any:
    """Merge what the shards have at one place of the tree."""
    word = spec.spec if isinstance(spec, Inherited) else spec
    if word == "list":
        return [move_tree(value, joining.device) for value in values]
    mirrors = isinstance(spec, (Mapping, list, tuple))
    if word == "first" or (len(values) == 1 and not mirrors):
        return move_tree(values[0], joining.device)
    first = values[0]
    if word is None and not mirrors and len({*map(id, values)}) == 1:
        return move_tree(first, joining.device)  # no shard's own: what one call would return
    if not _are_one_type(values):
        some_none = any(value is None for value in values)
        fact = "is None in some shards only" if some_none else "is of different types"
        refuse(joining, values, path, fact)
    if first is None and not mirrors:
        return None
    if holds_rows(first) and not mirrors:
        if word is not None:
            return join_leaves(joining, values, spec, word, path)
        key = tuple(map(id, values))  # an output that is there twice stays one object
        if key not in joining.done:
            joining.done[key] = join_leaves(joining, values, spec, word, path)
        return joining.done[key]
    if isinstance(first, (int, float, complex)) and word in ("mean", "sum"):
        return reduce_numbers(joining, values, word)
    opened = open_container(first)
    if opened is None or (mirrors and holds_rows(first)):
        return _merge_objects(joining, values, spec, path)
    if not mirrors and _are_rows(joining, values, word):
        items = [item for value in values for item in value]
        return move_tree(opened.rebuild(items), joining.device)
    return _merge_container(joining, values, opened, spec, path)


def _are_one_type(values: list[Any]) -> bool:
    """Do all shards have the same type here? All tensors are one type, parameters included."""
    if len({*map(type, values)}) == 1:
        return True
    return all(isinstance(value, Tensor) for value in values)


def _are_rows(joining: Joining, values: list[Any], word: Any) -> bool:
    """Are these sequences of one item per row, to be put end to end?"""
    first = values[0]
    is_list = isinstance(first, list)
    if not is_list and type(first) is not tuple:
        return False
    if any(len(value) != num for value, num in zip(values, joining.rows, strict=True)):
        return False
    if not is_list:
        return all(isinstance(item, str) for value in values for item in value)
    if word is not None:
        return not any(count_rows_inside(value, joining.dim) for value in values)
    return any(
        has_item_per_row(value, num_rows, joining.dim)
        for value, num_rows in zip(values, joining.rows, strict=True)
    )


# --------------------------------------------------------------------------------------------------
# Containers
# --------------------------------------------------------------------------------------------------


def _merge_container(
    joining: Joining, values: list[Any], first: Opened, spec: Any, path: Path
) -> Any:
    check_depth(len(path), show_path(path))
    columns = _match_children(joining, values, first, path)
    if spec is None:
        specs: list[Any] = [None] * len(columns)
    else:
        paths = _SlashPaths(values[0])
        specs = child_out_dims(spec, first.keys, first.style, show_path(path), paths)
    merged = [
        _merge_node(joining, column, child_spec, (*path, (first.key_text(key), key)))
        for key, column, child_spec in zip(first.keys, columns, specs, strict=True)
    ]
    is_same = all(new is old for new, old in zip(merged, first.children, strict=True))
    return values[0] if is_same else first.rebuild(merged)


def _match_children(
    joining: Joining, values: list[Any], first: Opened, path: Path
) -> list[list[Any]]:
    """Return, for every key of the first shard, the children of all shards."""
    opened = [first]
    for value in values[1:]:
        other = open_container(value)
        assert other is not None  # of the same type as the first
        opened.append(other)
        if first.style == "index":
            if len(other.children) != len(first.children):
                refuse(joining, values, path, "has different lengths")
        elif list(other.keys) != list(first.keys):
            _check_keys(joining, values, [list(o.keys) for o in opened], path)
        if first.context is not None and not _is_same(first.context, other.context):
            refuse(joining, values, path, f"was built with {first.context!r} and {other.context!r}")
    if first.style == "index":
        return [list(column) for column in zip(*(o.children for o in opened), strict=True)]
    by_key = [dict(zip(o.keys, o.children, strict=True)) for o in opened]
    return [[children[key] for children in by_key] for key in first.keys]


def _check_keys(joining: Joining, values: list[Any], keys: list[list[Any]], path: Path) -> None:
    """Refuse a dict whose last shard has other keys than the first; their order may differ."""
    shard = len(keys) - 1
    for lacking, having in ((shard, 0), (0, shard)):
        missing = [key for key in keys[having] if key not in keys[lacking]]
        if missing:
            fact = f"has {missing[0]!r} in shard {having} but not in shard {lacking}"
            refuse(joining, values, path, fact)


def _merge_objects(joining: Joining, values: list[Any], spec: Any, path: Path) -> Any:
    """Numbers, strings and everything else that is no container: the same in all shards."""
    first = values[0]
    if isinstance(spec, (Mapping, list, tuple)):
        raise ValueError(
            f"out_dims mirrors a container at {show_path(path)}, "
            f"where the output has a value of type {type(first).__name__}"
        )
    if spec is not None and not isinstance(spec, Inherited):
        refuse(joining, values, path, f"is a {type(first).__name__}, which {spec!r} cannot merge")
    if not all(_is_same(first, value) for value in values[1:]):
        refuse(joining, values, path, "differs between shards")
    return first


def _is_same(one: Any, other: Any) -> bool:
    """Do two objects stand for the same value? NaN is the same as NaN."""
    if one is other:
        return True
    try:
        return bool(one == other) or bool(one != one and other != other)
    except Exception:  # whatever a stranger's __eq__ does, it has not said yes
        return False


class _SlashPaths:
    """The paths that ``out_dims`` may name within an output; walked only for an error's text."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def __iter__(self) -> Iterator[str]:
        return _iter_slash_paths(self.output, "")


def _iter_slash_paths(value: Any, prefix: str) -> Iterator[str]:
    opened = None if holds_rows(value) else open_container(value)
    if opened is None or not opened.children:
        yield prefix.removesuffix("/")
        return
    for key, child in zip(opened.keys, opened.children, strict=True):
        yield from _iter_slash_paths(child, f"{prefix}{key}/")
