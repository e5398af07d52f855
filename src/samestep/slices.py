"""Gradients that lie with several ranks, added in the canonical tree, each rank one slice.

What it holds: :class:`Summing`, one such addition. Why not an all-reduce of ``torch.distributed``:
its order of additions depends on the number of ranks, so the bits would.

How, with W ranks::

    each rank   writes its finished subtrees' gradients where the others can read them
                reads slice r (1/W of the entries) of every subtree, and adds in the tree's order
                writes the sum of its slice
                reads the other slices' sums

Small gradients take one round: everybody reads everything and adds all of it.

Guarantees: the bits of :func:`samestep.reduce.tree_sum` over all shards, in every rank.
Must not: know what is added.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.comm import Comm, Message, Wants
from samestep.errors import RankError
from samestep.reduce import Node, Recipe, add_into, evaluate, plan_tree
from samestep.segments import Layout, read_layout

__all__ = ["Summing"]

MaybeTensors = list[Tensor | None]
Meta = Layout | Tensor | None  # a Tensor is sent as it is


class _Part(NamedTuple):
    """One subtree as its rank describes it: per entry what it has, and where its bytes are."""

    rank: int
    metas: Sequence[Meta]
    offsets: Sequence[int]


@dataclass(eq=False, repr=False)
class _Span:
    """Neighbouring entries, or parts of them, that lie side by side in every subtree with them."""

    dtype: torch.dtype
    present: tuple[int, ...]  # the subtrees that have them
    starts: list[int]  # where they begin there, in bytes
    num_bytes: int
    entries: list[int] = field(default_factory=list)  # of whole entries only


class Summing:
    """One addition over ranks.

    Args:
        comm: the line to the other ranks.
        num_values: K.
        labels: of the entries of each list; every rank must have the same.
        follow: see :meth:`Comm.trade`.
    """

    def __init__(
        self, comm: Comm, num_values: int, labels: Sequence[str] = (), *, follow: bool = False
    ) -> None:
        self._comm = comm
        self._follow = follow
        self._labels = list(labels)
        self._num_values = num_values
        self._parts: list[_Part] = []
        self._recipe: Recipe = 0
        self._sliced: list[int] = []  # entries that are added in slices, in the order of the bytes
        self._whole: list[int] = []  # entries that every rank adds
        self._begins: dict[int, int] = {}  # of each sliced entry, among all sliced bytes
        self._odd: list[int] = []  # entries that are sparse, or not of one dtype, somewhere
        self._read: list[Iterator[Tensor]] = []  # by rank, what was read of it
        self._cuts: list[int] = []  # where each rank's slice begins, and the end

    def run(
        self, kind: str, parts: Mapping[Node, MaybeTensors], note: Any
    ) -> tuple[MaybeTensors, list[Any]]:
        """Return the sums, and what each rank noted.

        Args:
            kind: the message's kind.
            parts: this rank's subtrees: lists of one length, the same in every rank.
            note: anything to tell.
        """
        num_entries = len(next(iter(parts.values()), ()))
        metas = [[_describe(value) for value in values] for values in parts.values()]
        offsets, num_bytes = _place(metas)
        bulk = self._comm.prepare(num_bytes)
        for values, row, places in zip(parts.values(), metas, offsets, strict=True):
            for value, meta, start in zip(values, row, places, strict=True):
                if isinstance(meta, Layout) and value is not None:
                    meta.view(bulk.memory, start).copy_(value.detach())
        told, read = self._comm.trade(
            kind,
            (list(parts), metas, num_entries, note, self._labels),
            bulk,
            self._plan,
            follow=self._follow,
        )
        self._read = [iter(found) for found in read]
        sums: MaybeTensors = [None] * max(count for _, _, count, *_ in told)
        self._add_whole(sums)
        self._add_odd(sums)
        if self._sliced:
            self._add_slices(f"{kind}, sums", sums)
        return sums, [note for *_, note, _ in told]

    # -- Planning ----------------------------------------------------------------------------

    def _plan(self, messages: list[Message]) -> Wants:
        """From what all ranks said, find who adds what; the same in every rank."""
        nodes: list[Node] = []
        for rank, (own, metas, _, _, labels) in enumerate(m.value for m in messages):
            self._check_labels(rank, labels)
            nodes += own
            offsets, _ = _place(metas)
            self._parts += [_Part(rank, *pair) for pair in zip(metas, offsets, strict=True)]
        ((_, self._recipe),) = plan_tree(self._num_values, nodes).items()
        columns = list(zip(*(part.metas for part in self._parts), strict=True))
        plain = [e for e in _sort(columns) if _is_plain(columns[e])]
        sizes = {e: next(m for m in columns[e] if m is not None).num_bytes for e in plain}
        is_small = sum(sizes.values()) <= _SMALL
        self._whole, self._sliced = (plain, []) if is_small else ([], plain)
        at = 0
        for entry in self._sliced:
            self._begins[entry] = at
            at += sizes[entry]
        num_ranks = self._comm.num_ranks
        self._cuts = [at * r // num_ranks // 16 * 16 for r in range(num_ranks)] + [at]
        self._odd = [e for e, column in enumerate(columns) if _is_odd(column)]

        def wants(reader: int, writer: int) -> list[tuple[int, int]]:
            found = self._find_ranges(self._whole_spans(), writer)
            for entry in self._odd:
                for _, part, meta in self._dense(entry):
                    if part.rank == writer:
                        start = part.offsets[entry]
                        found.append((start, start + meta.num_bytes))
            return found + self._find_ranges(self._spans(reader), writer)

        return wants

    def _check_labels(self, rank: int, labels: Sequence[str]) -> None:
        if list(labels) != self._labels:
            odd = sorted({*labels} ^ {*self._labels})
            raise RankError(
                f"rank {self._comm.rank} and rank {rank} want gradients of other parameters "
                f"({', '.join(odd[:4])}): requires_grad_() and what autograd.grad asks for must be "
                f"the same in every rank"
            )

    def _find_ranges(self, spans: Sequence[_Span], writer: int) -> list[tuple[int, int]]:
        return [
            (start, start + span.num_bytes)
            for span in spans
            for number, start in zip(span.present, span.starts, strict=True)
            if self._parts[number].rank == writer
        ]

    def _dense(self, entry: int) -> Iterator[tuple[int, _Part, Any]]:
        """The subtrees whose bulk has the entry."""
        for number, part in enumerate(self._parts):
            if isinstance(part.metas[entry], Layout):
                yield number, part, part.metas[entry]

    def _whole_spans(self) -> list[_Span]:
        return self._join((entry, 0, None) for entry in self._whole)

    def _spans(self, rank: int) -> list[_Span]:
        """What ``rank`` adds."""
        return self._join(self._pieces(*self._cuts[rank : rank + 2]))

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int | None]]:
        """The parts of entries between two cuts: entry, first byte in it, number of bytes."""
        for entry in self._sliced:
            begin = self._begins[entry]
            size = next(self._dense(entry))[2].num_bytes
            start, stop = max(first, begin), min(last, begin + size)
            if start < stop:
                yield entry, start - begin, stop - start

    def _join(self, pieces: Iterator[tuple[int, int, int | None]]) -> list[_Span]:
        spans: list[_Span] = []
        for entry, skipped, size in pieces:
            found = list(self._dense(entry))
            meta = found[0][2]
            size = meta.num_bytes if size is None else size
            present = tuple(number for number, _, _ in found)
            starts = [part.offsets[entry] + skipped for _, part, _ in found]
            last = spans[-1] if spans else None
            if (
                last is not None
                and (last.dtype, last.present) == (meta.dtype, present)
                and starts == [start + last.num_bytes for start in last.starts]
            ):
                last.num_bytes += size
                last.entries.append(entry)
            else:
                spans.append(_Span(meta.dtype, present, starts, size, [entry]))
        return spans

    # -- Adding ------------------------------------------------------------------------------

    def _add_span(self, span: _Span, total: Tensor) -> None:
        values: list[Tensor | None] = [None] * len(self._parts)
        for number in span.present:
            values[number] = next(self._read[self._parts[number].rank]).view(span.dtype)
        recipe = _without(self._recipe, values)
        assert recipe is not None
        # What is not there is in no recipe any more; an empty tensor stands in for it.
        nothing = total[:0]
        add_into(total.view(span.dtype), recipe, [nothing if v is None else v for v in values])

    def _add_whole(self, sums: MaybeTensors) -> None:
        for span in self._whole_spans():
            total = torch.empty(span.num_bytes, dtype=torch.uint8)
            self._add_span(span, total)
            self._hand_out(span.entries, total, sums)

    def _add_odd(self, sums: MaybeTensors) -> None:
        for entry in self._odd:
            values: MaybeTensors = [
                meta if isinstance(meta, Tensor) else None
                for meta in (part.metas[entry] for part in self._parts)
            ]
            for number, part, meta in self._dense(entry):
                values[number] = meta.view(next(self._read[part.rank]), 0).clone()
            sums[entry] = evaluate(self._recipe, values)

    def _add_slices(self, kind: str, sums: MaybeTensors) -> None:
        comm, cuts = self._comm, self._cuts
        bulk, at = comm.prepare(cuts[comm.rank + 1] - cuts[comm.rank]), 0
        for span in self._spans(comm.rank):
            self._add_span(span, bulk.memory[at : at + span.num_bytes])
            at += span.num_bytes
        _, found = comm.trade(
            kind, None, bulk, lambda _: lambda _, writer: [(0, cuts[writer + 1] - cuts[writer])]
        )
        total = torch.empty(cuts[-1], dtype=torch.uint8)
        for (start, stop), (part,) in zip(itertools.pairwise(cuts), found, strict=True):
            total[start:stop] = part
        self._hand_out(self._sliced, total, sums)

    def _hand_out(self, entries: Sequence[int], total: Tensor, sums: MaybeTensors) -> None:
        at = 0
        for entry in entries:
            meta = next(self._dense(entry))[2]
            sums[entry] = meta.view(total, at)
            at += meta.num_bytes


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_SMALL = 1 << 16  # bytes: below, a second round takes longer than to read and add everything
_ALIGN = 64  # bytes


def _describe(value: Tensor | None) -> Meta:
    if value is None:
        return None
    if value.layout != torch.strided or value.is_nested:
        return value.detach()
    return read_layout(value)


def _place(metas: Sequence[Sequence[Meta]]) -> tuple[list[list[int]], int]:
    """Where each entry of each subtree begins in the bulk, and the size of that."""
    offsets, at = [], 0
    for row in metas:
        places = [0] * len(row)
        for entry in _sort([[meta] for meta in row]):
            meta = row[entry]
            if isinstance(meta, Layout):
                places[entry] = at
                at += meta.num_bytes
        offsets.append(places)
        at = -(-at // _ALIGN) * _ALIGN
    return offsets, at


def _sort(columns: Sequence[Sequence[Meta]]) -> list[int]:
    """The entries in the order of their bytes: widest first, so that all are aligned."""
    widths = [
        max((meta.dtype.itemsize for meta in column if isinstance(meta, Layout)), default=0)
        for column in columns
    ]
    return sorted(range(len(columns)), key=lambda entry: -widths[entry])


def _is_plain(column: Sequence[Meta]) -> bool:
    """Whether the entry is there somewhere, dense and of one dtype wherever it is."""
    found = [meta for meta in column if meta is not None]
    return bool(found) and all(
        isinstance(meta, Layout) and isinstance(found[0], Layout) and meta == found[0]
        for meta in found
    )


def _is_odd(column: Sequence[Meta]) -> bool:
    return not _is_plain(column) and any(meta is not None for meta in column)


def _without(recipe: Recipe, values: Sequence[Tensor | None]) -> Recipe | None:
    """The recipe for the values that are there; the order of the others stays."""
    if isinstance(recipe, int):
        return None if values[recipe] is None else recipe
    left, right = (_without(part, values) for part in recipe)
    return right if left is None else left if right is None else (left, right)
