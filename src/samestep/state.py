"""What the shards' forwards wrote, brought back to the source module.

What it holds: :class:`StateWriter`, which decides one value for each change and writes it. Why:
replicas are copies, so without this ``self.counter += 1``, a running statistic or a stored hidden
state would be lost, silently.

The rules, for a value written by the shards:

- a buffer (in place or rebound): BatchNorm statistics are pooled; otherwise by ``buffers=``:
  "merge" (the row-weighted mean of floating values, integers and flags that agree), "mean", "sum"
  (of what each shard added), "first", "max", "min";
- any other attribute or container entry: tensors with a row per row are gathered like outputs,
  equal values are written as they are, and what differs is not written: one warning names it;
- a removed attribute is removed.

Guarantees: everything is decided before anything is written, so an error leaves the source module
as it was. A value that a replica shares with the source (a submodule, a parameter) is written back
as the source's own object.
Must not: run anything, or know where outputs go.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.changes import MISSING, Changes, Entry, find_row_dim
from samestep.errors import MergeError, StateWarning
from samestep.graphs import scale_gradient
from samestep.links import write
from samestep.norm import merge_statistics
from samestep.reduce import tree_sum
from samestep.snapshot import WHOLE, refill, set_entry, show_path
from samestep.tree import iter_leaves, map_leaves

__all__ = ["BUFFER_RULES", "StateWriter", "check_buffers", "find_carried"]

BUFFER_RULES = ("merge", "mean", "sum", "first", "max", "min")


class StateWriter:
    """Decides and writes. One per wrapper; remembers what it has warned of.

    Args:
        buffers: the rule for buffers, or a rule per buffer name (others: "merge").
        merge: joins values like outputs: ``merge(values, rows)``; raises MergeError.
    """

    def __init__(
        self,
        buffers: str | Mapping[str, str],
        merge: Callable[[Sequence[Any], Sequence[int]], Any],
    ) -> None:
        self._buffers = buffers
        self._merge = merge
        self._warned: set[str] = set()

    def write(
        self,
        changes: Changes,
        rows: Sequence[int],
        own: slice | None = None,
        weight: float = 1.0,
    ) -> list[tuple[Any, Any, list[tuple[Tensor, int]]]]:
        """Bring ``changes`` back to the source module.

        Args:
            changes: from :func:`collect`, of the shards with rows.
            rows: B_k of each shard.
            own: of the batch's rows, those that this process keeps in attributes; None: all.
            weight: then, what a gradient that comes back to them counts for.

        Returns:
            By cell and key, the tensors written that hold one entry per row, and on which dim.

        Raises:
            MergeError: an integer buffer differs between the shards and has no rule.
        """
        done: set[int] = set()
        decided: list[Callable[[], Any]] = []
        carried: list[tuple[Any, Any, list[tuple[Tensor, int]]]] = []
        for buffer, value in merge_statistics(zip(*changes.norms, strict=True)):
            done.add(id(buffer))
            keeps = buffer.is_floating_point()  # the counter's version tells of the others
            decided.append(partial(write, buffer, value, keep_version=keeps))
        for found in changes.written:
            link, source = found.link, found.link.source
            if id(source) not in done:
                if link.rows is not None:
                    parts = [value.to(source.device) for value in found.values]
                    value = torch.cat(parts, link.rows[0])
                else:
                    value = self._merge_buffer(
                        source,
                        found.values,
                        rows,
                        self._rule(link.path),
                        link.path,
                        by_entry=isinstance(source, nn.Parameter),
                    )
                keeps = link.is_unversioned
                decided.append(partial(write, source, value, keep_version=keeps))
        removed = []
        for entry in changes.entries:
            value = self._decide(entry, rows)
            if value is MISSING:
                removed.append(entry)
            elif value is not _KEEP:
                in_rows = _find_rows(value, entry.values, rows)
                if own is not None and in_rows:
                    value, in_rows = _keep_rows(value, in_rows, own, weight)
                decided.append(partial(_write, entry, value))
                carried.append((entry.cell, entry.key, in_rows))
        with torch.no_grad():
            for action in decided:
                action()
            for source, gradient in changes.gradients:
                # Not written: the user's hooks on the tensor see it pass, as in a plain backward.
                torch.autograd.backward([source], [gradient])
        for link in changes.switched:
            link.source.requires_grad_(not link.source.requires_grad)
        for entry in removed:
            entry.cell.pop(entry.key, None)
        return carried

    # -- Deciding ----------------------------------------------------------------------------

    def _rule(self, path: str) -> str:
        if isinstance(self._buffers, str):
            return self._buffers
        return self._buffers.get(show_path(path), "merge")

    def _decide(self, entry: Entry, rows: Sequence[int]) -> Any:
        first = entry.values[0]
        if all(value is MISSING for value in entry.values):
            return _KEEP if entry.key is WHOLE else MISSING
        if any(value is MISSING for value in entry.values):
            return self._warn(entry, "only some of the shards have it")
        old = entry.cell.get(entry.key) if entry.is_buffer else None
        is_buffer = entry.is_buffer and all(isinstance(value, Tensor) for value in entry.values)
        # A buffer that was given another shape, with an entry per row, is gathered like an
        # attribute.
        is_per_row = (
            is_buffer
            and _is_reshaped(old, entry.values)
            and find_row_dim(entry.values, rows) is not None
        )
        if is_buffer and not is_per_row:
            path = f"{entry.path}.{entry.key}"
            values = [value.detach() for value in entry.values]
            return self._merge_buffer(old, values, rows, self._rule(path), path)
        if all(value is first for value in entry.values):
            return first
        if _are_equal_values(entry.values):
            return first
        try:
            return self._merge(entry.values, rows)
        except MergeError as error:
            return self._warn(entry, str(error).splitlines()[0])

    def _merge_buffer(
        self,
        old: Tensor | None,
        values: list[Tensor],
        rows: Sequence[int],
        rule: str,
        path: str,
        *,
        by_entry: bool = False,
    ) -> Tensor:
        values = [value.to(values[0].device) for value in values]
        if rule == "sum":
            # What each shard added to the old value, summed: right for accumulators.
            base = torch.zeros_like(values[0]) if old is None else old.to(values[0].device)
            return base + tree_sum([value - base for value in values])
        if rule == "first" or all(torch.equal(value, values[0]) for value in values[1:]):
            return values[0]
        same_shape = all(value.shape == values[0].shape for value in values)
        if same_shape and rule in ("max", "min"):
            stacked = torch.stack(values)
            return stacked.amax(0) if rule == "max" else stacked.amin(0)
        if same_shape and (values[0].is_floating_point() or values[0].is_complex()):
            return _average(old if by_entry else None, values, rows)
        shown = ", ".join(_show(value) for value in values)
        raise MergeError(
            f"buffer {show_path(path)!r} differs between the shards and cannot be averaged "
            f"({shown}); say what it is: buffers={{{show_path(path)!r}: 'sum'}} for a count, or "
            f"'first', 'max', 'min'"
        )

    def _warn(self, entry: Entry, reason: str) -> Any:
        name = show_path(entry.path if entry.key is WHOLE else f"{entry.path}.{entry.key}")
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"forward wrote {name!r} and the shards disagree; the module keeps its old value "
                f"({reason}); return it from forward instead, or make it a buffer with a rule in "
                f"buffers=",
                StateWarning,
                stacklevel=2,
            )
        return _KEEP


def check_buffers(buffers: Any, module: nn.Module) -> None:
    """Raise ValueError or TypeError unless ``buffers`` is a rule, or rules by the module's
    names."""
    if isinstance(buffers, str):
        rules: list[Any] = [buffers]
    elif isinstance(buffers, Mapping):
        rules = list(buffers.values())
    else:
        raise TypeError(f"buffers must be a rule or a dict of rules by name, got {buffers!r}")
    for rule in rules:
        if rule not in BUFFER_RULES:
            raise ValueError(f"buffers holds {rule!r}; the rules are {', '.join(BUFFER_RULES)}")
    for name in buffers if isinstance(buffers, Mapping) else ():
        try:
            operator.attrgetter(name)(module)
        except AttributeError:
            known = ", ".join(name for name, _ in module.named_buffers()) or "none"
            raise ValueError(
                f"buffers speaks about {name!r}, which the module does not have (its buffers: "
                f"{known})"
            ) from None


def find_carried(
    changes: Changes, rows: Sequence[int]
) -> list[tuple[Any, Any, list[tuple[Tensor, int]]]]:
    """What a call of the whole batch on the source left with one entry per row.

    Args:
        changes: what an attempt on shards, of which nothing was kept, wrote to the same places.
        rows: B_k of its shards.

    Returns:
        As :meth:`StateWriter.write`.
    """
    return [
        (entry.cell, entry.key, _find_rows(entry.cell.get(entry.key), entry.values, rows))
        for entry in changes.entries
        if entry.key is not None
    ]


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_KEEP = object()  # leave the source module's value as it is


def _is_reshaped(old: Tensor | None, values: Sequence[Tensor]) -> bool:
    return old is None or any(value.shape != old.shape for value in values)


def _write(entry: Entry, value: Any) -> None:
    if entry.key is WHOLE:
        refill(entry.cell, value)
    else:
        set_entry(entry.cell, entry.key, value)


def _find_rows(merged: Any, values: Sequence[Any], rows: Sequence[int]) -> list[tuple[Tensor, int]]:
    """The tensors in ``merged`` that were joined from each shard's rows, with the dim of the
    rows."""
    found: list[tuple[Tensor, int]] = []
    parts = [[leaf for _, leaf in iter_leaves(value)] for value in values]
    for leaf, *shards in zip((leaf for _, leaf in iter_leaves(merged)), *parts, strict=False):
        if isinstance(leaf, Tensor) and all(isinstance(part, Tensor) for part in shards):
            dim = find_row_dim(shards, rows)
            if dim is not None and leaf.dim() > dim and leaf.size(dim) == sum(rows):
                found.append((leaf, dim))
    return found


def _keep_rows(
    value: Any, in_rows: Sequence[tuple[Tensor, int]], own: slice, weight: float
) -> tuple[Any, list[tuple[Tensor, int]]]:
    """``value`` with these rows of its tensors only."""
    dims = {id(tensor): dim for tensor, dim in in_rows}
    kept: list[tuple[Tensor, int]] = []

    def keep(leaf: Any) -> Any:
        dim = dims.get(id(leaf))
        if dim is None:
            return leaf
        rows = leaf.narrow(dim, own.start, own.stop - own.start)
        kept.append((scale_gradient(rows, weight), dim))
        return kept[-1][0]

    return map_leaves(keep, value), kept


def _are_equal_values(values: Sequence[Any]) -> bool:
    """Whether all shards wrote the same plain value, perhaps nested in containers."""
    leaves = [leaf for value in values for _, leaf in iter_leaves(value)]
    plain = (int, float, complex, str, bytes, bool, type(None))
    if not all(isinstance(leaf, plain) for leaf in leaves):
        return False
    return all(type(value) is type(values[0]) and value == values[0] for value in values)


def _average(old: Tensor | None, values: list[Tensor], rows: Sequence[int]) -> Tensor:
    """The mean weighted by rows; with ``old``, entry by entry, of the shards that changed it.

    A shard may write only what its rows are about (the embeddings that they look up): what it left
    as it was must not pull the others' entries back.
    """
    total = sum(rows)
    weights = [row / total for row in rows]
    masks = [torch.ones_like(v, dtype=torch.bool) for v in values]
    if old is not None and old.shape == values[0].shape:
        before = old.to(values[0].device)
        masks = [value != before for value in values]
    if all(bool(mask.all()) for mask in masks):
        return tree_sum([v * w for v, w in zip(values, weights, strict=True)])
    real = values[0].real.dtype if values[0].is_complex() else values[0].dtype
    changed = tree_sum([m.to(real) * w for m, w in zip(masks, weights, strict=True)])
    parts = [
        torch.where(mask, value * weight, 0)
        for mask, value, weight in zip(masks, values, weights, strict=True)
    ]
    mean = tree_sum(parts) / changed.clamp_min(torch.finfo(real).tiny)
    return torch.where(changed > 0, mean, before)


def _show(value: Tensor) -> str:
    return str(value.item()) if value.numel() == 1 else f"{tuple(value.shape)}"
