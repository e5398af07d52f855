"""The rows of a batch as a loader yields it: found, cut, joined again, or left out altogether.

What it holds: :class:`Form` (what is known of a loader's batches), :func:`plan_batch`,
:func:`join_batches` and :func:`empty_batch`. Why: a call has arguments, a loader's batch is one
value, and its outermost container is either those arguments or rows. ``split_loader`` and
``map_batches(batch_size=)`` must answer that in the same way.

Guarantees: what the wrapper's ``in_dims`` says holds by position and by name; where nothing says
whether a list holds rows or columns, it is an error and no guess.
Must not: read loaders, or know ranks and models.

[Note: a list of tensors] Items of a tuple, and of a list that torch's default collate made or that
is handed to the model as positional arguments, are columns. Of any other list, and of lists and
tuples inside of the batch, nobody can tell if all that they hold is alike: ten images of three
channels, or ten columns of three rows. Another tensor of the batch decides, or ``in_dims``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from samestep.dims import DEFAULT, Inherited, child_in_dims, is_dim, plan_argument_specs
from samestep.errors import SplitError
from samestep.plan import LeafPlan, SplitPlan, is_sliceable
from samestep.rows import count_rows, cut_rows, describe_value, holds_rows, join_rows
from samestep.split import cut, plan_split
from samestep.tree import open_container

__all__ = ["BatchPlan", "Form", "empty_batch", "is_collated", "join_batches", "plan_batch"]


class Form(NamedTuple):
    """What is known of a loader's batches.

    Attributes:
        dim: the tensor dim that counts rows where ``in_dims`` is silent.
        in_dims: the wrapper's. A position is that of the batch's items.
        names: forward's positional parameters.
        is_collated: torch's default collate makes them, which puts columns into lists.
        is_unpacked: a list is handed to the model as positional arguments.
    """

    dim: int = 0
    in_dims: Any = None
    names: tuple[str, ...] = ()
    is_collated: bool = False
    is_unpacked: bool = False


def is_collated(loader: Any) -> bool:
    """Are the loader's batches made by torch's default collate?"""
    has_batches = getattr(loader, "batch_sampler", None) is not None
    return has_batches and getattr(loader, "collate_fn", None) is default_collate


class BatchPlan(NamedTuple):
    """How a batch is cut; ``plan.num_rows`` is None if nothing counts rows."""

    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: SplitPlan

    def cut(self, sizes: Sequence[int]) -> list[Any]:
        """Return pieces of so many rows; the batch itself if it is one piece."""
        if len(sizes) == 1:
            return [self.batch]
        plan = self.plan._replace(sizes=tuple(sizes), slots=tuple(range(len(sizes))))
        pieces = cut(plan, self.args, self.kwargs)
        if self.kwargs or self._is_opened:
            opened = open_container(self.batch)
            assert opened is not None
            return [opened.rebuild([*args, *kwargs.values()]) for args, kwargs in pieces]
        return [args[0] for args, _ in pieces]

    @property
    def _is_opened(self) -> bool:
        return not (len(self.args) == 1 and self.args[0] is self.batch)

    def join(self, pieces: Sequence[Any], leaves: Mapping[str, LeafPlan]) -> Any:
        """Put pieces that :meth:`cut` made end to end."""
        if not (self.kwargs or self._is_opened):
            return _join(pieces, "args[0]", leaves)
        parts = [open_container(piece) for piece in pieces]
        names = [f"args[{i}]" for i in range(len(self.args))]
        names += [f"kwargs[{name!r}]" for name in self.kwargs]
        columns = zip(*(part.children for part in parts if part is not None), strict=True)
        assert parts[0] is not None
        return parts[0].rebuild(
            [_join(c, name, leaves) for c, name in zip(columns, names, strict=True)]
        )


def plan_batch(batch: Any, form: Form) -> BatchPlan:
    """Find the rows of a batch.

    Raises:
        SplitError: ``in_dims`` does not suit the batch, or a list may hold rows or columns.
    """
    in_dims = _suit_in_dims(batch, form)
    args: tuple[Any, ...] = (batch,)
    kwargs: dict[str, Any] = {}
    if not _is_argument(batch, form):
        args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    plan = plan_split(
        args, kwargs, num_slots=1, dim=form.dim, in_dims=in_dims, parameter_names=form.names
    )
    found = BatchPlan(batch, args, kwargs, plan)
    if plan.num_rows is None:
        return _plan_lists(found, in_dims, form)
    _check_doubt(found, in_dims, form)
    return found


def join_batches(pieces: Sequence[tuple[Any, BatchPlan]]) -> Any:
    """Put pieces of one or several batches end to end.

    Args:
        pieces: each with the plan of the batch that it was cut from.

    Raises:
        SplitError: the batches differ in what has rows, or in what has none.

    Example:
        >>> plan = plan_batch(["a", "b"], Form())
        >>> join_batches([(["a", "b"], plan), (["b"], plan)])
        ['a', 'b', 'b']
    """
    first, plan = pieces[0]
    if len(pieces) == 1:
        return first
    leaves = {leaf.path: leaf for leaf in plan.plan.leaves}
    for _, other in pieces[1:]:
        if other.plan is plan.plan:
            continue
        for leaf in other.plan.leaves:
            own = leaves.get(leaf.path)
            if own is None or (own.action, own.dim) != (leaf.action, leaf.dim):
                raise SplitError(
                    f"batches differ in what has rows: {leaf.path} ({leaf.description}) does not "
                    f"count as before; say what does by in_dims= of the DataParallel"
                )
    return plan.join([piece for piece, _ in pieces], leaves)


# --------------------------------------------------------------------------------------------------
# Rows or arguments
# --------------------------------------------------------------------------------------------------


def _suit_in_dims(batch: Any, form: Form) -> Any:
    """Return ``in_dims`` without what this batch has no place for: it may be said of a call."""
    in_dims = form.in_dims
    if isinstance(in_dims, (list, tuple)):
        in_dims = dict(enumerate(in_dims))
    if not isinstance(in_dims, Mapping):
        return in_dims
    known = batch if isinstance(batch, Mapping) else ()
    count = max(1, len(form.names), len(batch) if type(batch) in (tuple, list) else 1)
    return {
        key: spec
        for key, spec in in_dims.items()
        if (key < count if is_dim(key) else key in form.names or key in known)
    }


def _is_argument(batch: Any, form: Form) -> bool:
    """Is the batch one argument, and not a container of them? See [Note: a list of tensors]."""
    if isinstance(batch, Mapping):
        opened = open_container(batch)
        return opened is None or not batch or not all(isinstance(key, str) for key in batch)
    if type(batch) not in (tuple, list) or not batch:
        return True
    if _first_spec(form) == "rows":
        lists = [len(item) for item in batch if is_sliceable(item)]
        return not is_sliceable(batch[0]) or len(set(lists)) > 1
    if type(batch) is tuple or form.is_collated or form.is_unpacked or form.in_dims is not None:
        return False
    return len(batch) > 1 and _are_alike(batch)


def _first_spec(form: Form) -> Any:
    in_dims = form.in_dims
    if isinstance(in_dims, (list, tuple)):
        in_dims = dict(enumerate(in_dims))
    if not isinstance(in_dims, Mapping):
        return in_dims
    return in_dims.get(0, in_dims.get(form.names[0]) if form.names else None)


def _are_alike(items: Sequence[Any]) -> bool:
    """May these be rows of one batch? Columns mostly differ in kind, dtype or number of dims."""
    return len({_kind(item) for item in items}) == 1


def _kind(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.dtype, item.dim()
    return (type(item), *map(str, item)) if isinstance(item, Mapping) else type(item)


def _plan_lists(found: BatchPlan, in_dims: Any, form: Form) -> BatchPlan:
    """No tensor has rows: lists of texts, of numbers, of objects."""
    values: dict[Any, Any] = {**dict(enumerate(found.args)), **found.kwargs}
    specs, keyword_specs = plan_argument_specs(
        in_dims, len(found.args), found.kwargs, () if in_dims is None else form.names
    )
    specs_of: dict[Any, Any] = {**dict(enumerate(specs)), **keyword_specs}
    lists = {
        key: value
        for key, value in values.items()
        if is_sliceable(value) and specs_of[key] in (DEFAULT, Inherited("rows"))
    }
    args, kwargs = found.args, found.kwargs
    rows: Any = dict.fromkeys(lists, "rows")
    if not lists and type(found.batch) in (tuple, list):
        args, kwargs, rows = (found.batch,), {}, {0: "rows"}
    elif not lists or len({len(value) for value in lists.values()}) > 1:
        return found
    plan = plan_split(args, kwargs, num_slots=1, dim=form.dim, in_dims=rows)
    return BatchPlan(found.batch, args, kwargs, plan)


def _check_doubt(found: BatchPlan, in_dims: Any, form: Form) -> None:
    """Refuse what may be a list of rows as well as one of columns."""
    if form.is_collated:
        return
    specs, keyword_specs = plan_argument_specs(in_dims, len(found.args), found.kwargs, form.names)
    parts: list[tuple[Any, str, Any]] = [
        (i, f"args[{i}]", value) for i, value in enumerate(found.args) if specs[i] is DEFAULT
    ]
    parts += [
        (name, f"kwargs[{name!r}]", value)
        for name, value in found.kwargs.items()
        if keyword_specs[name] is DEFAULT
    ]
    if len(parts) < sum(spec is not None for spec in [*specs, *keyword_specs.values()]):
        return  # what in_dims speaks about counts the rows
    settled = {leaf.path for leaf in found.plan.leaves if leaf.action == "rows"}
    doubtful: list[tuple[Any, Any]] = []
    for key, path, value in parts:
        for inner, item in _survey(value, path, form.dim):
            if holds_rows(item) or inner in settled:
                return
            doubtful.append((key, item))
    for key, value in doubtful:
        raise SplitError(
            f"a {describe_value(value)} in a batch may hold {len(value)} rows, or columns of "
            f"{found.plan.num_rows} rows each; say which: in_dims={{{key!r}: 'rows'}} of the "
            f"DataParallel means rows, in_dims={form.dim} means columns"
        )


def _survey(value: Any, path: str, dim: int) -> Iterator[tuple[str, Any]]:
    """Yield what counts rows, and lists of things that are alike and have tensors in them."""
    if holds_rows(value):
        if count_rows(value, dim) is not None:
            yield path, value
        return
    opened = open_container(value)
    if opened is None:
        return
    inside = [pair for text, child in opened.items for pair in _survey(child, path + text, dim)]
    if inside and type(value) in (tuple, list) and _are_alike(value):
        yield path, value
    else:
        yield from inside


# --------------------------------------------------------------------------------------------------
# Joining
# --------------------------------------------------------------------------------------------------


def _join(values: Sequence[Any], path: str, leaves: Mapping[str, LeafPlan]) -> Any:
    leaf = leaves.get(path)
    if leaf is None:
        parts = [part for part in map(open_container, values) if part is not None]
        texts = [text for text, _ in parts[0].items]
        columns = zip(*(part.children for part in parts), strict=True)
        joined = [_join(c, path + t, leaves) for c, t in zip(columns, texts, strict=True)]
        return parts[0].rebuild(joined)
    first = values[0]
    if leaf.action == "whole":
        if not all(_is_same(first, other) for other in values):
            raise SplitError(
                f"{path} ({leaf.description}) has no rows and is not the same in all batches, so "
                "their rows cannot be cut anew; leave batch_size out"
            )
        return first
    if holds_rows(first):
        return join_rows(values, leaf.dim or 0)
    items = chain.from_iterable(values)
    if isinstance(first, deque):
        return deque(items, first.maxlen)
    return tuple(items) if type(first) is tuple else list(items)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    opened, second = open_container(one), open_container(other)
    if opened is not None and second is not None:
        alike = list(opened.keys) == list(second.keys)
        return alike and all(map(_is_same, opened.children, second.children))
    same = one == other
    return bool(same.all()) if holds_rows(one) else bool(same)


# --------------------------------------------------------------------------------------------------
# No rows
# --------------------------------------------------------------------------------------------------


def empty_batch(batch: Any, form: Form) -> Any:
    """Return a batch that was made of one row, with no row in it.

    That there is one row is known, so nothing need be found out: what has one item is cut to none.

    Example:
        >>> empty_batch({"x": torch.ones(1, 3), "name": ["a"], "box": [torch.ones(4)]}, Form())
        {'x': tensor([], size=(0, 3)), 'name': [], 'box': []}
    """
    in_dims = _suit_in_dims(batch, form)
    if type(batch) in (tuple, list) and not _holds_items(batch, form):
        specs, _ = plan_argument_specs(in_dims, len(batch), (), form.names)
        return type(batch)(map(_emptier(form), batch, specs))
    if isinstance(batch, Mapping) and (opened := open_container(batch)) is not None:
        _, named = plan_argument_specs(in_dims, 0, batch, form.names)
        return opened.rebuild(
            list(map(_emptier(form), opened.children, (named[key] for key in opened.keys)))
        )
    (spec,), _ = plan_argument_specs(in_dims, 1, (), form.names)
    return _empty(batch, spec, form)


def _holds_items(batch: Any, form: Form) -> bool:
    """Is this outermost sequence one of rows?"""
    if len(batch) != 1:
        return False
    if _first_spec(form) == "rows":
        return not is_sliceable(batch[0])
    is_column = form.is_collated or type(batch) is tuple or form.in_dims is not None
    return not (is_column and _has_single(batch[0], form))


def _emptier(form: Form) -> Callable[[Any, Any], Any]:
    return lambda value, spec: _empty(value, spec, form)


def _empty(value: Any, spec: Any, form: Form) -> Any:
    word = spec.spec if isinstance(spec, Inherited) else spec
    if spec is None:
        return value
    if holds_rows(value):
        dim = word if is_dim(word) else form.dim
        return cut_rows(value, dim, (0, 1))[0] if count_rows(value, dim) == 1 else value
    if is_sliceable(value) and len(value) == 1 and (word is DEFAULT or word == "rows"):
        # In what torch's default collate makes, tensors that have the row are columns.
        is_column = word is DEFAULT and form.is_collated and _has_single(value[0], form)
        if not is_column:
            return type(value)()
    opened = open_container(value)
    if opened is None:
        return value
    specs = child_in_dims(spec, opened.keys, opened.style, "the batch")
    return opened.rebuild(list(map(_emptier(form), opened.children, specs)))


def _has_single(value: Any, form: Form) -> bool:
    """Is there a tensor, or a list, with one row in it?"""
    if holds_rows(value):
        return count_rows(value, form.dim) == 1
    if is_sliceable(value) and len(value) == 1:
        return True
    opened = open_container(value)
    return opened is not None and any(_has_single(v, form) for v in opened.children)
