"""What the shards' forwards wrote: found in the replicas, in words that every process understands.

What it holds: :func:`find_touched` (what did the replicas change?), :func:`collect` (the values,
one per shard) and :class:`Changes`. Why apart from writing it back: the finding is done where the
replicas are, the deciding and writing in every process alike.

Guarantees: a value that a replica shares with the source (a submodule, a parameter) is named as the
source's own object.
Must not: decide or write anything.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.links import Link
from samestep.norm import NormRecord
from samestep.replica import Replica
from samestep.snapshot import WHOLE
from samestep.tree import open_container

__all__ = [
    "MISSING",
    "Changes",
    "Entry",
    "Touched",
    "Written",
    "collect",
    "find_row_dim",
    "find_touched",
]

MISSING = object()  # the shard has no such entry


@dataclass(eq=False, repr=False)
class Entry:
    """One entry of one source cell that at least one shard changed."""

    cell: Any
    key: Any  # of a dict; WHOLE: a list, set or deque, changed as a whole
    path: str
    values: list[Any]  # one per shard, in terms of the source's objects
    is_buffer: bool


@dataclass(eq=False, repr=False)
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


@dataclass(eq=False, repr=False)
class Changes:
    """What the forwards of one step wrote.

    Attributes:
        entries: attributes, container entries, rebound buffers.
        written: source tensors written in place.
        norms: per shard, what its BatchNorm modules saw.
        cells: source cells whose copies differ from them now.
        raced, switched: see :class:`Touched`.
        gradients: source tensors, and what the forwards added to their ``.grad`` themselves.
    """

    entries: list[Entry]
    written: list[Written]
    norms: list[list[NormRecord]]
    cells: list[Any]
    raced: list[Link]
    switched: list[Link]
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def are_none(self) -> bool:
        """Whether there is nothing to bring home."""
        is_touched = self.entries or self.written or self.switched or self.gradients
        return not (is_touched or any(self.norms))

    @property
    def parted(self) -> list[Tensor]:
        """Source tensors whose aliases got other memory (``parameter.data = ...`` in forward)."""
        return [found.link.source for found in self.written if found.link.is_alias]

    @property
    def is_structural(self) -> bool:
        """Whether a module, parameter, buffer or hook was made: this forward initialises itself
        from the data it sees."""
        return any(map(_is_structural, self.entries))

    def is_flagged(self, rows: Sequence[int], *, with_tensors: bool = True) -> bool:
        """Whether a flag was set, another sign of that; ``rows`` are the shards' B_k."""
        return any(_is_flag(entry, rows, with_tensors) for entry in self.entries) or any(
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
    written: dict[str, None] = {}
    entries: dict[tuple[str, int, Any], None] = {}
    for replica in replicas:
        for link in replica.find_written():
            written[link.path] = None
        if replica.snapshot.is_current():
            continue
        for index in replica.snapshot.changed():
            target = replica.follower.targets[index]
            path, number = replica.name_cell(index)
            for key in _changed_keys(target, replica.snapshot.content(index)):
                entries[path, number, key] = None
    # The memory that is shared, and with it the version, is the same in all shards; so, as forwards
    # go, is what they do to ``requires_grad``.
    raced = replicas[0].find_raced() if replicas else []
    switched = replicas[0].find_switched() if replicas else []
    return Touched(
        list(entries),
        list(written),
        list(map(_get_path, raced)),
        list(map(_get_path, switched)),
    )


def collect(replicas: Sequence[Replica], touched: Touched, model: Replica) -> Changes:
    """Read what was touched: one value per replica.

    Args:
        replicas: one per shard.
        touched: what to read; other processes' replicas may have touched more than these.
        model: any replica, to find the source module's own objects by.
    """
    norms = list(map(_get_norms, replicas))
    if not any(touched):
        return Changes([], [], norms, [], [], [])
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
        norms,
        list(cells.values()),
        raced=[links[path] for path in touched.raced],
        switched=[links[path] for path in touched.switched],
    )


def find_row_dim(values: Sequence[Tensor], rows: Sequence[int]) -> int | None:
    """The first dim that has r_k entries in every shard's value."""
    for dim in range(values[0].dim()):
        if all(v.dim() > dim and v.size(dim) == r for v, r in zip(values, rows, strict=True)):
            return dim
    return None


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_get_path, _get_norms = operator.attrgetter("path"), operator.attrgetter("norms")
# The dictionaries in which a module keeps its hooks.
_HOOKS = {name for name in nn.Module().__dict__ if name.endswith(("_hooks", "_hooks_with_kwargs"))}


def _changed_keys(cell: Any, before: Any) -> list[Any]:
    if not isinstance(cell, dict):
        return [WHOLE]
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
    if key is WHOLE:
        kind = type(target) if type(target) in (list, set) else list
        return kind(_to_source(replica, value) for value in target)
    return _to_source(replica, target.get(key, MISSING))


def _to_source(replica: Replica, value: Any) -> Any:
    found = replica.original(value)
    if found is not value:
        return found
    opened = open_container(value)
    if opened is None:
        return value
    children = [_to_source(replica, child) for child in opened.children]
    is_same = all(map(operator.is_, children, opened.children))
    # A list or dict that the forward made is copied: the replica goes on with its own.
    return value if is_same and type(value) not in (list, dict) else opened.rebuild(children)


def _is_structural(entry: Entry) -> bool:
    """A new module, parameter, buffer or hook: an entry that was not there before."""
    if entry.key is WHOLE or entry.cell.get(entry.key) is not None:
        return False
    if entry.is_buffer:
        return any(isinstance(value, Tensor) for value in entry.values)
    is_hook = entry.path.rpartition(".")[2] in _HOOKS
    return is_hook or any(isinstance(value, (nn.Module, nn.Parameter)) for value in entry.values)


def _is_flag(entry: Entry, rows: Sequence[int], with_tensors: bool) -> bool:
    """An attribute that goes from False to True, or from None to a tensor that is not about
    rows."""
    if entry.key is WHOLE or entry.key not in entry.cell:
        return False
    before, values = entry.cell[entry.key], entry.values
    if with_tensors and before is None and all(isinstance(value, Tensor) for value in values):
        return find_row_dim(values, rows) is None and not _are_equal(values)
    return before is False and values[0] is True


def _are_equal(values: Sequence[Tensor]) -> bool:
    first = values[0]  # and each is where its shard ran
    return all(
        v.shape == first.shape and torch.equal(v.to(first.device), first) for v in values[1:]
    )


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
