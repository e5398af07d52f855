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

import functools
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.comm import Comm, Message, Wants
from samestep.errors import RankError
from samestep.reduce import Node, Recipe, add_into, evaluate, limit_recipe, plan_tree
from samestep.segments import Layout, read_layout

__all__ = ["Summing"]

MaybeTensors = list[Tensor | None]
_Odd = Mapping[tuple[int, int], Tensor]  # by row and entry, what is sent as it is
Meta = Layout | str | None  # of what is sent as it is, only that it is there: "odd"


class _Form(NamedTuple):
    """What a rank has, but for the values: mostly the same in every step."""

    nodes: tuple[Node, ...]
    metas: tuple[tuple[Meta, ...], ...]  # per subtree and entry
    offsets: tuple[tuple[int, ...], ...]  # where its bytes begin
    labels: tuple[str, ...]


class _Part(NamedTuple):
    """One subtree: whose it is, and per entry what it has, and where its bytes are."""

    rank: int
    metas: Sequence[Meta]
    offsets: Sequence[int]


class _Span(NamedTuple):
    """Neighbouring entries, or parts of them, that lie side by side in every subtree with them."""

    dtype: torch.dtype
    present: tuple[int, ...]  # the subtrees that have them
    starts: tuple[int, ...]  # where they begin there, in bytes
    num_bytes: int
    entries: tuple[int, ...]  # of whole entries only
    recipe: Recipe  # counts those that are present


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
        self._num_values = num_values
        self._labels = tuple(labels)
        self._follow = follow
        self._plan: _Plan  # found when all ranks have said what they have
        self._read: list[Iterator[Tensor]] = []  # by rank, what was read of it

    def run(
        self, kind: str, parts: Mapping[Node, MaybeTensors], note: Any
    ) -> tuple[MaybeTensors, list[Any]]:
        """Return the sums, and what each rank noted.

        Args:
            kind: the message's kind.
            parts: this rank's subtrees: lists of one length, the same in every rank.
            note: anything to tell.
        """
        looks = tuple(tuple(map(_look_at, values)) for values in parts.values())
        said, num_bytes, runs = _describe(tuple(parts), looks, self._labels)
        bulk = self._comm.prepare(num_bytes)
        with torch.no_grad():
            for values, places in zip(parts.values(), runs, strict=True):
                for run in places:
                    _write(bulk.memory, run, [values[entry] for entry in run.entries])
        odd = {
            (row, entry): value.detach()
            for row, (values, seen) in enumerate(zip(parts.values(), looks, strict=True))
            for entry, value in enumerate(values)
            if seen[entry] == _ODD and value is not None
        }
        told, read = self._comm.trade(
            kind, (said, note, odd), bulk, self._find_plan, follow=self._follow
        )
        self._read = [iter(found) for found in read]
        sums: MaybeTensors = [None] * self._plan.num_entries
        for span in self._plan.whole:
            total = torch.empty(
                span.num_bytes // span.dtype.itemsize, dtype=span.dtype, device="cpu"
            )
            self._add_span(span, total)
            at = 0
            for entry in span.entries:
                layout = self._plan.layouts[entry]
                sums[entry] = total.as_strided(layout.shape, layout.stride, at)
                at += layout.num_entries
        self._add_odd([odd for _, _, odd in told], sums)
        if self._plan.sliced:
            self._add_slices(f"{kind}, sums", sums)
        return sums, [note for _, note, _ in told]

    def _find_plan(self, messages: list[Message]) -> Wants:
        """From what all ranks said, find who adds what; the same in every rank."""
        comm = self._comm
        said = tuple(message.value[0] for message in messages)
        most = _SMALL_HERE // comm.num_ranks if comm.is_shared else _SMALL
        self._plan = _make_plan(self._num_values, comm.rank, said, most)
        return self._plan.find_ranges

    def _add_span(self, span: _Span, total: Tensor) -> None:
        plan = self._plan
        values = [next(self._read[plan.parts[n].rank]).view(span.dtype) for n in span.present]
        add_into(total, span.recipe, values)

    def _add_odd(
        self, told: Sequence[Mapping[tuple[int, int], Tensor]], sums: MaybeTensors
    ) -> None:
        plan = self._plan
        for entry in plan.odd:
            values: MaybeTensors = [
                told[part.rank].get((plan.row_of(number), entry))
                for number, part in enumerate(plan.parts)
            ]
            for number, part, layout in plan.dense(entry):
                values[number] = layout.view(next(self._read[part.rank]), 0).clone()
            sums[entry] = evaluate(plan.recipe, values)

    def _add_slices(self, kind: str, sums: MaybeTensors) -> None:
        comm, cuts = self._comm, self._plan.cuts
        bulk, at = comm.prepare(cuts[comm.rank + 1] - cuts[comm.rank]), 0
        for span in self._plan.find_slice(comm.rank):
            memory = bulk.memory[at : at + span.num_bytes]
            self._add_span(span, memory.view(span.dtype))
            at += span.num_bytes
        _, found = comm.trade(
            kind, None, bulk, lambda _: lambda _, writer: [(0, cuts[writer + 1] - cuts[writer])]
        )
        total = comm.sums.lend(cuts[-1])
        for (start, stop), (part,) in zip(itertools.pairwise(cuts), found, strict=True):
            total[start:stop] = part
        at = 0
        for entry in self._plan.sliced:
            layout = self._plan.layouts[entry]
            sums[entry] = layout.view(total, at)
            at += layout.num_bytes


class _Plan:
    """Who adds what, found once for as long as all ranks have the like.

    Args:
        num_values: K.
        forms: what each rank has.
        most: up to how many bytes everybody adds everything.
    """

    def __init__(self, num_values: int, forms: Sequence[_Form], most: int) -> None:
        self.parts = [
            _Part(rank, *pair)
            for rank, form in enumerate(forms)
            for pair in zip(form.metas, form.offsets, strict=True)
        ]
        ((_, self.recipe),) = plan_tree(num_values, [n for f in forms for n in f.nodes]).items()
        self._firsts = [0, *itertools.accumulate(len(form.nodes) for form in forms)]
        columns = list(zip(*(part.metas for part in self.parts), strict=True))
        self.num_entries = len(columns)
        plain = [entry for entry in _sort(columns) if _is_plain(columns[entry])]
        #: Of the entries that are added as bytes.
        self.layouts = {e: next(m for m in columns[e] if isinstance(m, Layout)) for e in plain}
        size = sum(layout.num_bytes for layout in self.layouts.values())
        is_small = size <= most
        #: Entries that are added in slices, in the order of the bytes.
        self.sliced = [] if is_small else plain
        #: Entries that are sparse, or not of one dtype, somewhere.
        self.odd = [entry for entry, column in enumerate(columns) if _is_odd(column)]
        num_ranks, size = len(forms), 0 if is_small else size
        #: Where each rank's slice begins, and the end.
        self.cuts = [size * r // num_ranks // 16 * 16 for r in range(num_ranks)] + [size]
        #: What every rank adds.
        self.whole = self._join((entry, 0, None) for entry in (plain if is_small else []))
        self._slices = [self._join(self._pieces(*pair)) for pair in itertools.pairwise(self.cuts)]
        self._ranges = functools.cache(self._list_ranges)

    def row_of(self, number: int) -> int:
        """Which of its rank's subtrees this one is."""
        return number - self._firsts[self.parts[number].rank]

    def find_slice(self, rank: int) -> list[_Span]:
        """What ``rank`` adds."""
        return self._slices[rank]

    def dense(self, entry: int) -> Iterator[tuple[int, _Part, Layout]]:
        """The subtrees whose bulk has the entry."""
        for number, part in enumerate(self.parts):
            if isinstance(meta := part.metas[entry], Layout):
                yield number, part, meta

    def find_ranges(self, reader: int, writer: int) -> list[tuple[int, int]]:
        """Which bytes of the writer's bulk the reader reads, in the order of the additions."""
        return self._ranges(reader, writer)

    def _list_ranges(self, reader: int, writer: int) -> list[tuple[int, int]]:
        found = self._of_spans(self.whole, writer)
        for entry in self.odd:
            for _, part, layout in self.dense(entry):
                if part.rank == writer:
                    start = part.offsets[entry]
                    found.append((start, start + layout.num_bytes))
        return found + self._of_spans(self._slices[reader], writer)

    def _of_spans(self, spans: Sequence[_Span], writer: int) -> list[tuple[int, int]]:
        return [
            (start, start + span.num_bytes)
            for span in spans
            for number, start in zip(span.present, span.starts, strict=True)
            if self.parts[number].rank == writer
        ]

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int | None]]:
        """The parts of entries between two cuts: entry, first byte in it, number of bytes."""
        begin = 0
        for entry in self.sliced:
            end = begin + self.layouts[entry].num_bytes
            if max(first, begin) < min(last, end):
                yield entry, max(first - begin, 0), min(last, end) - max(first, begin)
            begin = end

    def _join(self, pieces: Iterator[tuple[int, int, int | None]]) -> list[_Span]:
        spans: list[_Span] = []
        for entry, skipped, size in pieces:
            found = list(self.dense(entry))
            layout = self.layouts[entry]
            size = layout.num_bytes if size is None else size
            present = tuple(number for number, _, _ in found)
            starts = tuple(part.offsets[entry] + skipped for _, part, _ in found)
            last = spans[-1] if spans else None
            if (
                last is not None
                and (last.dtype, last.present) == (layout.dtype, present)
                and starts == tuple(start + last.num_bytes for start in last.starts)
            ):
                spans[-1] = last._replace(
                    num_bytes=last.num_bytes + size, entries=(*last.entries, entry)
                )
            else:
                recipe = limit_recipe(self.recipe, present)
                assert recipe is not None
                spans.append(_Span(layout.dtype, present, starts, size, (entry,), recipe))
        return spans


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

# Bytes: below, a second round takes longer than to read and add everything; in memory that all
# ranks see, those of all ranks together.
_SMALL = 1 << 16
_SMALL_HERE = 1 << 21
_ALIGN = 64  # bytes
_ODD = "odd"
_NUM_KEPT = 64  # forms and plans; more than a module has kinds of steps

Look = tuple[torch.dtype, torch.Size, tuple[int, ...]] | str | None


class _Run(NamedTuple):
    """Entries of a subtree that are written one after another in one go."""

    start: int  # in bytes
    num_bytes: int
    layout: Layout  # of the first
    entries: list[int]
    is_joined: bool  # whether they are as contiguous as the run itself


def _look_at(value: Tensor | None) -> Look:
    if value is None:
        return None
    if value.layout != torch.strided or value.is_nested:
        return _ODD
    return value.dtype, value.shape, value.stride()


@functools.lru_cache(_NUM_KEPT)
def _describe(
    nodes: tuple[Node, ...], looks: tuple[tuple[Look, ...], ...], labels: tuple[str, ...]
) -> tuple[bytes, int, list[list[_Run]]]:
    """What a rank says of its subtrees, how many bytes they take, and how these are written."""
    metas = tuple(tuple(map(_meta, row)) for row in looks)
    offsets, num_bytes = _place(metas)
    runs = list(itertools.starmap(_find_runs, zip(metas, offsets, strict=True)))
    return pickle.dumps(_Form(nodes, metas, offsets, labels)), num_bytes, runs


def _find_runs(metas: Sequence[Meta], offsets: Sequence[int]) -> list[_Run]:
    runs: list[_Run] = []
    for entry in _sort([[meta] for meta in metas]):
        layout = metas[entry]
        if not isinstance(layout, Layout) or not layout.num_bytes:
            continue
        is_joined = layout.is_contiguous
        last = runs[-1] if runs else None
        if last and last.is_joined and is_joined and last.layout.dtype == layout.dtype:
            size = last.num_bytes + layout.num_bytes
            runs[-1] = last._replace(num_bytes=size, entries=[*last.entries, entry])
        else:
            runs.append(_Run(offsets[entry], layout.num_bytes, layout, [entry], is_joined))
    return runs


def _write(memory: Tensor, run: _Run, values: Sequence[Tensor | None]) -> None:
    present = [value for value in values if value is not None]
    if not run.is_joined:
        run.layout.view(memory, run.start).copy_(present[0])
        return
    into = memory[run.start : run.start + run.num_bytes].view(run.layout.dtype)
    flat = [value.reshape(-1) for value in present]  # it may have gaps, or be expanded
    if all(value.is_cpu for value in flat):
        torch.cat(flat, out=into)
        return
    at = 0
    for value in flat:
        into[at : at + value.numel()].copy_(value)
        at += value.numel()


@functools.lru_cache(_NUM_KEPT)
def _make_plan(num_values: int, own: int, said: tuple[bytes, ...], most: int) -> _Plan:
    forms: list[_Form] = list(map(pickle.loads, said))
    for rank, form in enumerate(forms):
        if form.labels != forms[own].labels:
            odd = sorted({*form.labels} ^ {*forms[own].labels})
            raise RankError(
                f"rank {own} and rank {rank} want gradients of other parameters "
                f"({', '.join(odd[:4])}): requires_grad_() and what autograd.grad asks for must be "
                f"the same in every rank"
            )
    return _Plan(num_values, forms, most)


def _meta(look: Look) -> Meta:
    if look is None or isinstance(look, str):
        return look
    dtype, shape, stride = look
    return read_layout(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))


def _place(metas: Sequence[Sequence[Meta]]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Where each entry of each subtree begins in the bulk, and the size of that."""
    offsets, at = [], 0
    for row in metas:
        places = [0] * len(row)
        for entry in _sort([[meta] for meta in row]):
            meta = row[entry]
            if isinstance(meta, Layout):
                places[entry] = at
                at += meta.num_bytes
        offsets.append(tuple(places))
        at = -(-at // _ALIGN) * _ALIGN
    return tuple(offsets), at


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
    return bool(found) and all(isinstance(meta, Layout) and meta == found[0] for meta in found)


def _is_odd(column: Sequence[Meta]) -> bool:
    return not _is_plain(column) and any(meta is not None for meta in column)
