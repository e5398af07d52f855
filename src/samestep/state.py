"""What the shards' forwards wrote, brought back to the source module.

What it holds: :func:`find_touched` and :func:`collect` (what did each replica change?), and
:class:`StateWriter`, which decides one value for each change and writes it. Why: replicas are
copies, so without this ``self.counter += 1``, a running statistic or a stored hidden state would be
lost, silently.

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
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.errors import MergeError, StateWarning
from samestep.links import Link, write
from samestep.norm import NormRecord, merge_statistics
from samestep.reduce import tree_sum
from samestep.replica import Replica
from samestep.snapshot import refill, set_entry, show_path
from samestep.tree import iter_leaves, map_leaves

__all__ = [
    "BUFFER_RULES",
    "Changes",
    "StateWriter",
    "Touched",
    "Written",
    "check_buffers",
    "collect",
    "find_touched",
]

BUFFER_RULES = ("merge", "mean", "sum", "first", "max", "min")
MISSING = object()  # the shard has no such entry


@dataclass
class Entry:
    """One entry of one source cell that at least one shard changed."""

    cell: Any
    key: Any  # of a dict; None: a list, set or deque, changed as a whole
    path: str
    values: list[Any]  # one per shard, in terms of the source's objects
    is_buffer: bool


@dataclass
class Written:
    """A source tensor that forwards wrote in place: a link to it, and one value per shard."""

    link: Link
    values: list[Tensor]


class Touched(NamedTuple):
    """What forwards changed, by names that are the same in every process.

    Attributes:
        entries: path of a cell, which of the cells with that path, key.
        written: paths of source tensors written in place.
        raced: of those that all shards share the memory of.
        switched: of those whose ``requires_grad`` was switched.
    """

    entries: list[tuple[str, int, Any]]
    written: list[str]
    raced: list[str]
    switched: list[str]


@dataclass
class Changes:
    """What the forwards of one step wrote.

    Attributes:
        entries: attributes, container entries, rebound buffers.
        written: source tensors written in place.
        norms: per shard, what its BatchNorm modules saw.
        cells: source cells whose copies differ from them now.
        raced, switched: see :class:`Touched`.
    """

    entries: list[Entry]
    written: list[Written]
    norms: list[list[NormRecord]]
    cells: list[Any]
    raced: list[Link]
    switched: list[Link]

    @property
    def parted(self) -> list[Tensor]:
        """Source tensors whose aliases got other memory (``parameter.data = ...`` in forward)."""
        return [found.link.source for found in self.written if found.link.is_alias]

    @property
    def is_structural(self) -> bool:
        """Whether a module, parameter, buffer or hook was made: this forward initialises itself
        from the data it sees."""
        return any(map(_is_structural, self.entries))

    def is_flagged(self, rows: Sequence[int]) -> bool:
        """Whether a flag was set, another sign of that; ``rows`` are the shards' B_k."""
        return any(_is_flag(entry, rows) for entry in self.entries) or any(
            map(_is_flag_set, self.written)
        )

    def values(self, num_shards: int) -> list[list[Any]]:
        """Per shard, the values of all entries: they may be part of the shards' graphs."""
        return [[entry.values[k] for entry in self.entries] for k in range(num_shards)]

    def replace(self, values: Sequence[Sequence[Any]]) -> None:
        """Put other values (the same, tied to the caller's graph) in the place of these."""
        for i, entry in enumerate(self.entries):
            entry.values = [row[i] for row in values]


def find_touched(replicas: Sequence[Replica]) -> Touched:
    """See what the forwards changed in their replicas."""
    written = {link.path: None for replica in replicas for link in replica.find_written()}
    entries: dict[tuple[str, int, Any], None] = {}
    for replica in replicas:
        if replica.snapshot.is_current():
            continue
        for index in replica.snapshot.changed():
            target = replica.follower.cells[index][1]
            path, number = replica.name_cell(index)
            for key in _changed_keys(target, replica.snapshot.content(index)):
                entries[path, number, key] = None
    # The memory that is shared, and with it the version, is the same in all shards.
    first = replicas[:1]
    return Touched(
        list(entries),
        list(written),
        [link.path for replica in first for link in replica.find_raced()],
        [link.path for replica in first for link in replica.find_switched()],
    )


def collect(replicas: Sequence[Replica], touched: Touched, model: Replica) -> Changes:
    """Read what was touched: one value per replica.

    Args:
        replicas: one per shard.
        touched: what to read; other processes' replicas may have touched more than these.
        model: any replica, to find the source module's own objects by.
    """
    entries = []
    for path, number, key in touched.entries:
        cell = model.find_cell(path, number)
        values = [_read(replica, cell, key) for replica in replicas]
        entries.append(Entry(cell, key, path, values, path.endswith("._buffers")))
    links = model.links_by_path() if any(touched[1:]) else {}
    written = []
    for path in touched.written:
        source = links[path].source
        own = [replica.links[id(source)] for replica in replicas]
        parted = next((link for link in own if link.is_alias), links[path])
        written.append(Written(parted, [link.copy.detach() for link in own]))
    cells = {id(entry.cell): entry.cell for entry in entries}
    return Changes(
        entries,
        written,
        [replica.norms for replica in replicas],
        list(cells.values()),
        raced=[links[path] for path in touched.raced],
        switched=[links[path] for path in touched.switched],
    )


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
        self, changes: Changes, rows: Sequence[int], own: slice | None = None
    ) -> list[tuple[Any, Any, list[tuple[Tensor, int]]]]:
        """Bring ``changes`` back to the source module.

        Args:
            changes: from :func:`collect`, of the shards with rows.
            rows: B_k of each shard.
            own: of the batch's rows, those that this process keeps in attributes; None: all.

        Returns:
            By cell and key, the tensors written that hold one entry per row, and on which dim.

        Raises:
            MergeError: an integer buffer differs between the shards and has no rule.
        """
        done: set[int] = set()
        decided: list[Callable[[], Any]] = []
        carried: list[tuple[Any, Any, list[tuple[Tensor, int]]]] = []
        for records in zip(*changes.norms, strict=True):
            merged = merge_statistics(records)
            for name, value in (merged or {}).items():
                buffer = getattr(records[0].module, name)
                done.add(id(buffer))
                is_counter = name == "num_batches_tracked"
                decided.append(partial(write, buffer, value, keep_version=not is_counter))
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
                    value, in_rows = _keep_rows(value, in_rows, own)
                decided.append(partial(_write, entry, value))
                carried.append((entry.cell, entry.key, in_rows))
        with torch.no_grad():
            for action in decided:
                action()
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
            return MISSING if entry.key is not None else _KEEP
        if any(value is MISSING for value in entry.values):
            return self._warn(entry, "only some of the shards have it")
        old = entry.cell.get(entry.key) if entry.is_buffer else None
        is_buffer = entry.is_buffer and all(isinstance(value, Tensor) for value in entry.values)
        # A buffer that was given another shape, with an entry per row, is gathered like an
        # attribute.
        is_per_row = (
            is_buffer
            and _is_reshaped(old, entry.values)
            and _find_row_dim(entry.values, rows) is not None
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
        name = show_path(entry.path if entry.key is None else f"{entry.path}.{entry.key}")
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


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

# The dictionaries in which a module keeps its hooks.
_HOOKS = {name for name in nn.Module().__dict__ if name.endswith(("_hooks", "_hooks_with_kwargs"))}
_KEEP = object()  # leave the source module's value as it is


def _changed_keys(cell: Any, before: Any) -> list[Any]:
    if not isinstance(cell, dict):
        return [None]
    return [
        key
        for key in {**before, **cell}
        if cell.get(key, MISSING) is not before.get(key, MISSING)
        # torch.compile leaves marks of its own, in whichever replica it compiled.
        and not (isinstance(key, str) and key.startswith("_dynamo"))
    ]


def _read(replica: Replica, cell: Any, key: Any) -> Any:
    """What ``replica`` has for this entry, with the source's objects in place of its copies."""
    target = replica.target(cell)
    if target is None:
        return MISSING
    if key is None:
        kind = type(target) if type(target) in (list, set) else list
        return kind(_to_source(replica, value) for value in target)
    return _to_source(replica, target.get(key, MISSING))


def _to_source(replica: Replica, value: Any) -> Any:
    found = replica.original(value)
    if found is not value:
        return found
    if type(value) in (list, tuple):
        return type(value)(_to_source(replica, entry) for entry in value)
    if type(value) is dict:
        return {key: _to_source(replica, entry) for key, entry in value.items()}
    return value


def _is_structural(entry: Entry) -> bool:
    """A new module, parameter, buffer or hook: an entry that was not there before."""
    if entry.key is None or entry.cell.get(entry.key) is not None:
        return False
    if entry.is_buffer:
        return any(isinstance(value, Tensor) for value in entry.values)
    is_hook = entry.path.rpartition(".")[2] in _HOOKS
    return is_hook or any(isinstance(value, (nn.Module, nn.Parameter)) for value in entry.values)


def _is_flag(entry: Entry, rows: Sequence[int]) -> bool:
    """An attribute that goes from False to True, or from None to a tensor that is not about
    rows."""
    if entry.key is None or entry.key not in entry.cell:
        return False
    before, values = entry.cell[entry.key], entry.values
    if before is None and all(isinstance(value, Tensor) for value in values):
        return _find_row_dim(values, rows) is None and not _are_equal_tensors(values)
    return before is False and values[0] is True


def _find_row_dim(values: Sequence[Tensor], rows: Sequence[int]) -> int | None:
    """The first dim that has r_k entries in every shard's value."""
    for dim in range(values[0].dim()):
        if all(v.dim() > dim and v.size(dim) == r for v, r in zip(values, rows, strict=True)):
            return dim
    return None


def _is_reshaped(old: Tensor | None, values: Sequence[Tensor]) -> bool:
    return old is None or any(value.shape != old.shape for value in values)


def _are_equal_tensors(values: Sequence[Tensor]) -> bool:
    return all(v.shape == values[0].shape and torch.equal(v, values[0]) for v in values[1:])


def _is_flag_set(found: Written) -> bool:
    """An integer or bool buffer that was zero everywhere and is not any more."""
    source = found.link.source
    if (
        source.is_floating_point()
        or source.is_complex()
        or found.link.path.endswith(".num_batches_tracked")
    ):
        return False
    return not source.any() and bool(found.values[0].any())


def _write(entry: Entry, value: Any) -> None:
    if entry.key is None:
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
            dim = _find_row_dim(shards, rows)
            if dim is not None and leaf.dim() > dim and leaf.size(dim) == sum(rows):
                found.append((leaf, dim))
    return found


def _keep_rows(
    value: Any, in_rows: Sequence[tuple[Tensor, int]], own: slice
) -> tuple[Any, list[tuple[Tensor, int]]]:
    """``value`` with these rows of its tensors only."""
    dims = {id(tensor): dim for tensor, dim in in_rows}
    kept: list[tuple[Tensor, int]] = []

    def keep(leaf: Any) -> Any:
        dim = dims.get(id(leaf))
        if dim is None:
            return leaf
        kept.append((leaf.narrow(dim, own.start, own.stop - own.start), dim))
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
