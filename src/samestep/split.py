"""Cutting the arguments of a call into shards.

Holds the decision, leaf by leaf (:func:`plan_split`), and its execution (:func:`cut`), apart from
each other. It exists because torch's own scatter cuts tensors only, by a fixed rule, and loses the
type of most containers.

Guarantees: the rows of all shards, put end to end, are the rows of the batch; dense tensors are cut
into views, with their strides; every container keeps its type, and one in which nothing is cut is
handed over as the identical object.

Must not: move anything to a device, merge, or know what a module is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from samestep.dims import Inherited, check_in_dims, child_in_dims, is_dim, plan_argument_specs
from samestep.errors import SplitError
from samestep.plan import (
    Argument,
    LeafPlan,
    SplitPlan,
    explain_plan,
    find_first,
    is_sliceable,
    plan_sizes,
)
from samestep.rows import (
    count_rows,
    count_rows_inside,
    cut_rows,
    describe_value,
    has_item_per_row,
    has_shape,
    holds_rows,
    is_array,
)
from samestep.tree import check_depth, open_container, slice_rows

__all__ = [
    "LeafPlan",
    "SplitPlan",
    "check_in_dims",
    "cut",
    "explain_plan",
    "plan_sizes",
    "plan_split",
]

# [Note: plan cache]
# Most calls have a few plain tensors, bare or in small containers, of the same shapes as the call
# before. Their plan depends on types, names, shapes, dtypes and numbers only. These make the key,
# without brackets, since every container's type and length precede its children. What such a key
# cannot describe is planned anew.
_PLAN_CACHE_SIZE = 256
_PLAIN_ATOMS = frozenset({bool, int, float, type(None)})
_plan_cache: dict[tuple[Any, ...], SplitPlan] = {}


def plan_split(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    num_slots: int,
    dim: int = 0,
    in_dims: Any = None,
    split: str | Sequence[float] = "chunk",
    parameter_names: Sequence[str] = (),
) -> SplitPlan:
    """Decide how the arguments of one call are cut; nothing is cut yet.

    Shapes:
        B is the size along ``dim`` of the first tensor leaf that has that dim and is not excluded
        by ``in_dims``; numpy arrays count if there is no such tensor. Every tensor of size B along
        ``dim`` is cut, any other given whole.

    Args:
        args, kwargs: the arguments of the call.
        num_slots: the most shards there can be.
        dim: the dim that counts rows where ``in_dims`` is silent; may be negative.
        in_dims: a spec for everything, or specs by parameter name or position, or one per
            positional argument. A spec is a dim, None (whole), ``"rows"`` (cut by length), or a
            dict, list or tuple that mirrors the argument. Checked by :func:`check_in_dims`.
        split: as in :func:`plan_sizes`.
        parameter_names: names of the positional parameters, in order.

    Raises:
        SplitError: an argument cannot be cut as ``in_dims`` says, or has a layout without a cut.
        ValueError: ``in_dims`` names what the call does not have; ``split`` does not fit; a
            container holds itself.
    """
    if not isinstance(split, str):
        split = tuple(split)
    key = _plan_key(args, kwargs) if in_dims is None else None
    if key is None:
        return _plan_call(args, kwargs, num_slots, dim, in_dims, split, parameter_names)
    key = (num_slots, dim, split, key)
    plan = _plan_cache.get(key)
    if plan is None:
        plan = _plan_call(args, kwargs, num_slots, dim, in_dims, split, parameter_names)
        if len(_plan_cache) >= _PLAN_CACHE_SIZE:
            _plan_cache.clear()
        _plan_cache[key] = plan
    return plan


def _plan_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return all that a plan of these arguments depends on, or None. See [Note: plan cache]."""
    key: list[Any] = []
    for value in args:
        if not _describe_for_key(value, key, 0):
            return None
    for name, value in kwargs.items():
        key.append(name)
        if not _describe_for_key(value, key, 0):
            return None
    return tuple(key)


def _describe_for_key(value: Any, key: list[Any], depth: int) -> bool:
    """Append what a plan depends on; return whether that is all there is to it."""
    cls = type(value)
    if cls is Tensor or cls is nn.Parameter:
        if value.layout is not torch.strided or value.is_nested:
            return False
        key += (value.shape, value.dtype)
        return True
    if cls in _PLAIN_ATOMS:
        key += (cls, value)
        return True
    if cls not in (dict, list, tuple) or len(value) > 16 or depth > 4:
        return False
    key += (cls, len(value))
    if cls is dict:
        for name in value:
            if type(name) is not str:
                return False
        key += value
        value = value.values()
    return all(_describe_for_key(child, key, depth + 1) for child in value)


def _plan_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_slots: int,
    dim: int,
    in_dims: Any,
    split: str | Sequence[float],
    parameter_names: Sequence[str],
) -> SplitPlan:
    specs, keyword_specs = plan_argument_specs(in_dims, len(args), kwargs, parameter_names)
    arguments = [
        Argument(
            f"args[{index}]",
            parameter_names[index] if index < len(parameter_names) else index,
            value,
            specs[index],
        )
        for index, value in enumerate(args)
    ]
    arguments += [
        Argument(f"kwargs[{name!r}]", name, value, keyword_specs[name])
        for name, value in kwargs.items()
    ]
    first = find_first(arguments, dim)
    num_rows = None if first is None else first.size
    sizes = plan_sizes(num_rows or 0, num_slots, split)
    planner = _Planner(num_rows, dim, "" if first is None else _name(first.path, first.value))
    leaves: list[LeafPlan] = []
    for argument in arguments:
        planner.plan_value(argument.value, argument.spec, argument.path, (argument.key,), leaves)
    slots = tuple(slot for slot, size in enumerate(sizes) if size)
    return SplitPlan(num_rows, tuple(filter(None, sizes)), slots or (0,), tuple(leaves))


def _name(path: str, value: Any) -> str:
    return f"{path} {describe_value(value)}"


# --------------------------------------------------------------------------------------------------
# Deciding leaf by leaf
# --------------------------------------------------------------------------------------------------


class _Planner:
    """Decides what happens to each leaf, once B is known."""

    def __init__(self, num_rows: int | None, dim: int, counted_on: str) -> None:
        self.num_rows = num_rows
        self.dim = dim
        self.counted_on = counted_on

    def plan_value(
        self, value: Any, spec: Any, path: str, keys: tuple[Any, ...], leaves: list[LeafPlan]
    ) -> bool:
        """Append the plan of ``value``; return whether it is worth more than one "whole"."""
        word = spec.spec if isinstance(spec, Inherited) else spec
        if spec is None or self.num_rows == 0:
            return self._whole(value, path, leaves)
        if holds_rows(value):
            if isinstance(word, (Mapping, list, tuple)):
                raise ValueError(f"in_dims mirrors a container at {_name(path, value)}, a leaf")
            return self._plan_rows_leaf(value, spec, word, path, keys, leaves)
        if self._is_rows(value, spec, word, path, keys):
            leaves.append(LeafPlan(path, describe_value(value), "rows"))
            return True
        opened = open_container(value)
        if opened is None or not opened.children:
            if isinstance(spec, (Mapping, list, tuple)) and opened is None and value is not None:
                raise ValueError(f"in_dims mirrors a container at {_name(path, value)}, a leaf")
            if is_dim(spec) and opened is None and value is not None:
                self._refuse(value, path, keys, f"has no dim {spec}")
            return self._whole(value, path, leaves)
        check_depth(len(keys), path)
        child_specs = child_in_dims(spec, opened.keys, opened.style, path)
        inside: list[LeafPlan] = []
        notable = False
        for key, child, child_spec in zip(opened.keys, opened.children, child_specs, strict=True):
            text = opened.key_text(key)
            notable |= self.plan_value(child, child_spec, path + text, (*keys, key), inside)
        if is_dim(spec) and all(leaf.action == "whole" for leaf in inside):
            self._refuse(value, path, keys, f"holds nothing with dim {spec}")
        if not notable:
            return self._whole(value, path, leaves)
        leaves += inside
        return True

    def _whole(self, value: Any, path: str, leaves: list[LeafPlan]) -> bool:
        leaves.append(LeafPlan(path, describe_value(value), "whole"))
        return holds_rows(value)

    def _plan_rows_leaf(
        self,
        value: Any,
        spec: Any,
        word: Any,
        path: str,
        keys: tuple[Any, ...],
        leaves: list[LeafPlan],
    ) -> bool:
        """Plan a tensor, array, packed sequence or registered batch."""
        dim = word if is_dim(word) else self.dim
        if spec == "rows" and isinstance(value, Tensor) and has_shape(value):
            self._refuse(
                value, path, keys, "is a tensor, whose rows are counted by a dim, not 'rows'"
            )
        if word == "rows" and is_array(value):
            dim = 0
        size = count_rows(value, dim)
        if size is None and not has_shape(value):
            self._refuse(value, path, keys, f"can be cut on dim 0 only, not on dim {dim}")
        if size is None and is_dim(word) and (is_dim(spec) or value.ndim > 0):
            self._refuse(value, path, keys, f"has no dim {dim}")
        said = is_dim(word) or (spec == "rows")
        if said and size is not None and size != self.num_rows:
            self._refuse(value, path, keys, f"has {size} rows on dim {dim}")
        if size is None or size != self.num_rows:
            return self._whole(value, path, leaves)
        if not has_shape(value):
            leaves.append(LeafPlan(path, describe_value(value), "rows"))
            return True
        if isinstance(value, Tensor) and value.layout not in (torch.strided, torch.sparse_coo):
            self._refuse(value, path, keys, f"has layout {value.layout}, which cannot be cut")
        leaves.append(LeafPlan(path, describe_value(value), "cut", dim % value.ndim))
        return True

    def _is_rows(self, value: Any, spec: Any, word: Any, path: str, keys: tuple[Any, ...]) -> bool:
        """Is this sequence cut by rows, its items being the rows?"""
        if spec == "rows" and value is not None:
            if not is_sliceable(value):
                self._refuse(value, path, keys, "cannot be cut by 'rows'")
            if len(value) != self.num_rows:
                self._refuse(value, path, keys, f"has {len(value)} rows")
            return True
        if isinstance(spec, (Mapping, list, tuple)):
            return False
        if not is_sliceable(value) or len(value) != self.num_rows:
            return False
        if word == "rows":
            return True
        if type(value) is tuple:
            return all(isinstance(item, str) for item in value)
        if not isinstance(value, list):
            return False
        if is_dim(word):
            return not count_rows_inside(value, self.dim)
        return has_item_per_row(value, len(value), self.dim)

    def _refuse(self, value: Any, path: str, keys: tuple[Any, ...], fact: str) -> NoReturn:
        batch = f"the batch has {self.num_rows} rows (counted on {self.counted_on})"
        if self.num_rows is None:
            batch = "nothing else has rows"
        raise SplitError(
            f"{_name(path, value)} {fact}, but {batch}; "
            f"pass in_dims={_nest(keys, '<the dim that counts rows>')}, or "
            f"in_dims={_nest(keys, 'None')} to give it whole to every shard"
        )


def _nest(keys: tuple[Any, ...], text: str) -> str:
    """Write the ``in_dims`` that says ``text`` at the place of ``keys``."""
    for key in reversed(keys):
        text = f"{{{key!r}: {text}}}"
    return text


# --------------------------------------------------------------------------------------------------
# Cutting
# --------------------------------------------------------------------------------------------------


def cut(
    plan: SplitPlan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cut the arguments that ``plan`` was made for.

    Returns:
        (args, kwargs) of each of the K shards. Dense tensors and arrays are views. With one shard
        every argument is the identical object.

    Raises:
        SplitError: the plan was made for other arguments, or a registered batch type's own
            ``split`` does not return one object per shard.

    Exactness:
        :func:`samestep.merge.merge` of the shards is the argument bit for bit; the gradient is the
        same rows, put end to end.
    """
    num_shards = plan.num_shards
    if num_shards == 1:
        return [(tuple(args), dict(kwargs))]
    cutter = _Cutter(plan)
    columns = [cutter.cut_argument(value, f"args[{i}]") for i, value in enumerate(args)]
    keyword_columns = [cutter.cut_argument(kwargs[name], f"kwargs[{name!r}]") for name in kwargs]
    shard_args = list(zip(*columns, strict=True)) if columns else [()] * num_shards
    if not kwargs:
        return [(shard, {}) for shard in shard_args]
    shard_kwargs = [
        dict(zip(kwargs, row, strict=True)) for row in zip(*keyword_columns, strict=True)
    ]
    return list(zip(shard_args, shard_kwargs, strict=True))


class _Cutter:
    """Walks the arguments beside the plan's leaves, which come in the same order."""

    def __init__(self, plan: SplitPlan) -> None:
        self.leaves = iter(plan.leaves)
        self.next = next(self.leaves, None)
        self.sizes = plan.sizes
        self.num_rows = plan.num_rows
        self.pieces: dict[tuple[int, int], Sequence[Any]] = {}  # by id of the value and dim

    def cut_argument(self, value: Any, path: str) -> Sequence[Any]:
        pieces = self._cut(value, path)
        return (value,) * len(self.sizes) if pieces is None else pieces

    def _cut(self, value: Any, path: str) -> Sequence[Any] | None:
        """Return one piece per shard, None where every shard gets ``value`` itself."""
        leaf = self.next
        if leaf is not None and leaf.path == path:
            self.next = next(self.leaves, None)
            return None if leaf.action == "whole" else self._cut_leaf(value, leaf)
        opened = open_container(value)
        if opened is None:
            raise SplitError(f"the plan was made for other arguments: it has no {path}")
        columns = [self._cut(child, path + text) for text, child in opened.items]
        if all(column is None for column in columns):
            return None
        filled = [
            (child,) * len(self.sizes) if column is None else column
            for child, column in zip(opened.children, columns, strict=True)
        ]
        return [opened.rebuild(list(row)) for row in zip(*filled, strict=True)]

    def _cut_leaf(self, value: Any, leaf: LeafPlan) -> Sequence[Any]:
        if leaf.action == "rows" and not holds_rows(value):
            return self._slice(value, leaf)
        dim = leaf.dim or 0
        if count_rows(value, dim) != self.num_rows:
            raise SplitError(
                f"the plan was made for other arguments: {leaf.path} was {leaf.description} "
                f"and is {describe_value(value)}"
            )
        if (id(value), dim) in self.pieces:
            return self.pieces[id(value), dim]  # given twice, it is one object in forward too
        try:
            self.pieces[id(value), dim] = cut_rows(value, dim, self.sizes)
            return self.pieces[id(value), dim]
        except ValueError as error:
            raise SplitError(f"{_name(leaf.path, value)} cannot be cut: {error}") from error

    def _slice(self, value: Any, leaf: LeafPlan) -> list[Any]:
        if len(value) != self.num_rows:
            raise SplitError(
                f"the plan was made for other arguments: {leaf.path} was {leaf.description} "
                f"and is {describe_value(value)}"
            )
        pieces = []
        start = 0
        for size in self.sizes:
            pieces.append(slice_rows(value, start, start + size))
            start += size
        return pieces
