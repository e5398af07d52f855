"""The tensors that a replica holds as copies: are they equal to the source's, and making them so.

What it holds: :class:`Copies`, which asks all of them at once, and :class:`Flat`, one piece of
memory for many. Why: after an optimizer's step everything is out of date, and what is done per
tensor in Python takes several times as long as copying the bytes.

Guarantees: a change of the source's values or of a copy's is seen, see the note. Each copy begins
where memory of its own would: the last bits of a product can depend on that.
Must not: make links, or know modules.

[Note: what tells of a change]
A tensor's version. torch's batch_norm updates ``running_mean`` and ``running_var`` without raising
theirs; the counter beside them, ``num_batches_tracked``, is raised by every such update, so its
version stands for theirs (the link's clocks). Where no version tells (an inference tensor, a norm
without a counter), a copy counts as out of date at every call; values say whether it was written.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from samestep.links import Link, copy_all, is_far, num_bytes, send_rows, write

__all__ = ["Copies", "Flat", "lay_out"]

_ALIGNMENT = 64  # bytes: as torch's allocator does on the CPU


class Flat:
    """Memory for the copies of many tensors of one dtype, one after another.

    Args:
        sources: what is copied; see :func:`lay_out`.
        device: where the copies are to be.

    Attributes:
        num_tensors: how many there are.
        views: the copies: tensors like the sources. Each has a version of its own.
    """

    def __init__(self, sources: Sequence[Tensor], device: torch.device) -> None:
        first, unit = sources[0], _ALIGNMENT // sources[0].element_size()
        gap = torch.zeros(unit, dtype=first.dtype, device=first.device)
        self._rows: list[Tensor] = []  # the sources' memory, and what lies between the copies
        starts, size = [], 0
        for source in sources:
            starts.append(size)
            count = source.numel()
            self._rows.append(source.detach().as_strided((count,), (1,)))
            if count % unit:
                self._rows.append(gap[: -count % unit])
            size += count + -count % unit
        self.num_tensors = len(sources)
        self._memory = torch.empty(size, dtype=first.dtype, device=device)
        # Few large tensors: each by itself is copied faster than joined.
        self._pieces: list[Tensor] = []
        if size >= _LARGE * len(sources):
            counts = list(map(Tensor.numel, self._rows))
            self._pieces = list(torch.split(self._memory, counts))
        self.views = [
            self._memory.as_strided(source.shape, source.stride(), start).data
            for source, start in zip(sources, starts, strict=True)
        ]
        self.fill()

    def fill(self) -> None:
        """Copy all sources. No version is raised."""
        here, there = self._rows[0].device, self._memory.device
        if is_far(here, there):
            self._memory.copy_(send_rows(self._rows, there))
        elif self._pieces:
            torch._foreach_copy_(self._pieces, self._rows)
        else:
            torch.cat(self._rows, out=self._memory)


def lay_out(tensors: Iterable[Tensor], device: torch.device) -> dict[int, tuple[Flat, Tensor]]:
    """Copy tensors, those that change together into memory that they share.

    Returns:
        Copies by id of the tensor. Without those that need, or are better off with, memory of their
        own.
    """
    groups: dict[Any, list[Tensor]] = {}
    for tensor in filter(_is_dense, tensors):
        key = (tensor.device, tensor.dtype, tensor.requires_grad)
        groups.setdefault(key, []).append(tensor)
    places: dict[int, tuple[Flat, Tensor]] = {}
    for group in groups.values():
        if len(group) > 1:
            flat = Flat(group, device)
            places |= {
                id(tensor): (flat, view) for tensor, view in zip(group, flat.views, strict=True)
            }
    return places


class Copies:
    """All that one replica holds as copies.

    Args:
        links: to the tensors.
        stale: ids of those links whose copy may have other values than the source.
    """

    def __init__(self, links: Sequence[Link], stale: Iterable[int] = ()) -> None:
        self._flats = _find_whole(links)
        in_flats = [link for flat_links in self._flats.values() for link in flat_links]
        others = [link for link in links if link.flat not in self._flats]
        for link in others:
            link.flat = None  # with the memory of a source that is gone from the module
        self.links = in_flats + others
        # In columns, which C loops go through: all sources, their clocks, all copies, their clocks.
        self._columns = [
            [link.source for link in self.links],
            [link.copy for link in self.links],
        ]
        if any(link.clocks for link in self.links):
            clocks = [link.clocks or (link.source, link.copy) for link in self.links]
            self._columns.insert(1, [source for source, _ in clocks])
            self._columns.append([copy for _, copy in clocks])
        self._is_unsure = [link.is_suspect for link in self.links]
        for column in self._columns:
            if any(map(Tensor.is_inference, column)):
                are_blind = list(map(Tensor.is_inference, column))
                self._is_unsure = list(map(operator.or_, self._is_unsure, are_blind))
                column[:] = [_STILL if tensor.is_inference() else tensor for tensor in column]
        self._is_any_unsure = any(self._is_unsure)
        self._middle = len(self._columns) // 2  # where the copies' columns begin
        self._seen = _versions(self._columns)
        known = set(stale)
        for i in [i for i, link in enumerate(self.links) if id(link) in known]:
            self._seen[0][i] = -1
        #: Whether it can be said from the versions alone that no copy was written.
        self._tells = not any(
            link.is_suspect or tensor is _STILL or (link.owner is not None and link.owner.training)
            for link, tensor in zip(self.links, self._columns[self._middle], strict=True)
        )
        self._left: list[int] = []

    def find_stale(self) -> list[Link]:
        """The links whose copy may have other values than the source."""
        return list(compress(self.links, self._are_stale(_versions(self._columns))))

    def find_written(self) -> list[Link]:
        """The links whose copy was written since it was last equal to the source."""
        now = _versions(self._columns[self._middle :])
        changed = _differ(now, self._seen[self._middle :])
        return [
            link
            for link, is_changed in zip(self.links, changed, strict=True)
            if (is_changed and not link.is_suspect) or _has_other_values(link)
        ]

    def renew(self, *, force: bool) -> tuple[int, int]:
        """Copy what may be out of date, or everything; returns the number of tensors and bytes."""
        now = _versions(self._columns)
        if now == self._seen and not (force or self._is_any_unsure):
            return 0, 0
        flags = [True] * len(self.links) if force else self._are_stale(now)
        start = 0
        others: list[Link] = []
        with torch.no_grad():
            for flat, links in self._flats.items():
                stop = start + len(links)
                if all(flags[start:stop]):
                    flat.fill()
                    increment_version([link.copy for link in links])
                else:
                    others += compress(links, flags[start:stop])
                start = stop
            _copy([*others, *compress(self.links[start:], flags[start:])])
        middle = self._middle
        self._seen = [*now[:middle], *_versions(self._columns[middle:])]
        return sum(flags), sum(compress(self._bytes, flags))

    @cached_property
    def _bytes(self) -> list[int]:
        return [num_bytes(link.copy) for link in self.links]

    def rest(self) -> None:
        """Every copy is equal to the source now; see :meth:`is_at_rest`."""
        self._left = _get_versions(self._columns[self._middle]) if self._tells else []

    def is_at_rest(self) -> bool:
        """Whether no copy was written since :meth:`rest`; False where that cannot be said."""
        return self._tells and _get_versions(self._columns[self._middle]) == self._left

    def _are_stale(self, now: list[list[int]]) -> list[bool]:
        return list(map(operator.or_, _differ(now, self._seen), self._is_unsure))


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_get_version = operator.attrgetter("_version")
_LARGE = 1 << 18  # entries of a tensor on average
_STILL = torch.zeros((), device="cpu")  # in the place of a tensor without a version


def _get_versions(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(_get_version, tensors))


def _versions(columns: Iterable[list[Tensor]]) -> list[list[int]]:
    return [_get_versions(column) for column in columns]


def _differ(now: list[list[int]], seen: list[list[int]]) -> list[bool]:
    """For each row of these columns whether it is another one."""
    found, *others = (map(operator.ne, *pair) for pair in zip(now, seen, strict=True))
    for other in others:
        found = map(operator.or_, found, other)
    return list(found)


def _has_other_values(link: Link) -> bool:
    """Whether values say that a copy was written, where they have to be asked."""
    # A call of F.batch_norm on the buffers themselves does not raise the counter.
    must_ask = link.is_suspect or (link.owner is not None and link.owner.training)
    return must_ask and not torch.equal(link.copy, link.source.to(link.copy.device))


def _copy(links: Sequence[Link]) -> None:
    plain = [link for link in links if not link.is_unversioned]
    if plain:
        copy_all([link.copy.detach() for link in plain], [link.view() for link in plain])
    for link in links:
        if link.is_unversioned:
            write(link.copy, link.view(), keep_version=True)


def _find_whole(links: Iterable[Link]) -> dict[Flat, list[Link]]:
    """The links by flat memory, for each all of whose tensors are still linked to it."""
    found: dict[Flat, list[Link]] = {}
    for link in links:
        if link.flat is not None:
            found.setdefault(link.flat, []).append(link)
    return {flat: members for flat, members in found.items() if len(members) == flat.num_tensors}


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill one piece of memory, and nothing is special about the tensor."""
    if type(tensor) is not nn.Parameter or is_lazy(tensor) or tensor.layout != torch.strided:
        return False
    if tensor.is_nested or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return False
    return (
        tensor.is_contiguous()
        or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )
