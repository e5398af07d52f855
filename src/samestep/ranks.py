"""How one call is spread over ranks: who has which shards, and how this rank's arguments are cut.

What it holds: :func:`tell_rows` and :func:`open_call`. Why: with the whole batch in every rank the
plan of the call says it all; where each rank has its own rows, the ranks must first tell each other
how many.

Guarantees: every rank finds the same plan. Rows that were cut by :func:`samestep.split_loader` give
the very shards of the whole batch.
Must not: cut anything.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from functools import cached_property

import torch
from torch import Tensor

from samestep.comm import Comm
from samestep.context import Shard, make_shards
from samestep.devices import Slot, owner_of_slot, slots_of_rank
from samestep.errors import SplitError
from samestep.options import Options
from samestep.plan import SplitPlan, join_single_rows, plan_sizes
from samestep.spread import Spread

__all__ = ["Call", "align_rows", "join_rows_within", "open_call", "tell_rows"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Call:
    """One call: what depends on its plan alone, so that equal calls may share it.

    Attributes:
        plan: of all shards.
        cut: how this rank's arguments are cut; None if they have no rows.
        spread: who has which shards.
        slots: where each shard runs.
        kind: stands for all equal calls, which take about as long.
    """

    plan: SplitPlan
    cut: SplitPlan | None
    spread: Spread
    slots: tuple[Slot, ...]
    kind: object = dataclasses.field(default_factory=object)

    def named(self, name: str) -> Call:
        """The same call, under another name."""
        # Found out once, for all copies.
        _ = self.shards, self.places, self.own_rows, self.output_rows
        call = copy.copy(self)
        what, number = _name_place(name, self.plan)
        spread = dataclasses.replace(self.spread, place=what, number=number)
        object.__setattr__(call, "spread", spread)
        return call

    @cached_property
    def shards(self) -> list[Shard]:
        """The shards, as forward may ask for them."""
        return make_shards([slot.device for slot in self.slots], self.rows)

    @cached_property
    def places(self) -> list[int]:
        """The shards whose replicas are needed here."""
        # A rank without shards has a replica to know names by.
        return list(self.spread.mine) or [0]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """B_k of each shard."""
        return self.plan.sizes or (self.plan.num_rows or 0,)

    @cached_property
    def own_rows(self) -> slice:
        """The rows of the batch that this rank's shards have."""
        mine = self.spread.mine
        start = sum(self.rows[: mine.start])
        return slice(start, start + sum(self.rows[k] for k in mine))

    @cached_property
    def output_rows(self) -> tuple[int, ...]:
        """Rows of each shard that this rank's caller gets."""
        if not self.spread.is_local:
            return self.rows
        return tuple(size if k in self.spread.mine else 0 for k, size in enumerate(self.rows))


def tell_rows(
    comm: Comm, options: Options, plan: SplitPlan, name: str
) -> tuple[int | None, ...] | None:
    """How many rows each rank has; None where all have the whole batch.

    Args:
        comm, options, plan, name: as for :func:`open_call`.

    Raises:
        SplitError: with ``batch="local"``, arguments without rows.
    """
    if options.batch == "global" or comm.num_ranks == 1:
        return None
    counts = comm.exchange(f"rows of {name}", plan.num_rows)
    if plan.num_rows is None:
        raise SplitError(
            "nothing in the arguments counts rows, and with batch='local' each rank passes its own "
            "rows; pass a batch, or use batch='global'"
        )
    return tuple(counts)


def open_call(
    comm: Comm,
    options: Options,
    plan: SplitPlan,
    name: str,
    counts: tuple[int | None, ...] | None,
) -> Call:
    """Find out how a call is spread.

    Args:
        comm: the line to the other ranks.
        options: the wrapper's.
        plan: how this rank's arguments are cut, over all slots or (``batch="local"``) its own.
        name: of the call, with its number: ``Net (wrapper 0)#7``.
        counts: from :func:`tell_rows`.

    Raises:
        SplitError: no rank has a row.
    """
    if counts is None:
        return _make_call(comm, options, plan, plan, name)
    num_slots, total = len(options.slots), sum(count or 0 for count in counts)
    by_rank = [slots_of_rank(rank, num_slots, comm.num_ranks) for rank in range(comm.num_ranks)]
    sizes = dict(enumerate(plan_sizes(total, num_slots, options.split)))
    if any(sum(sizes.get(k, 0) for k in run) != n for run, n in zip(by_rank, counts, strict=True)):
        # Not cut by our rule: each rank's rows are cut over its own slots.
        sizes = {}
        for run, count in zip(by_rank, counts, strict=True):
            split = options.split
            if not isinstance(split, str):
                split = [split[k] for k in run]
            sizes |= dict(zip(run, plan_sizes(count or 0, len(run), split), strict=False))
    slots = [k for k, size in sizes.items() if size]
    if not slots:
        raise SplitError("no rank has a row in this batch; skip it in every rank")
    whole = SplitPlan(total, tuple(sizes[k] for k in slots), tuple(slots), plan.leaves)
    return _make_call(comm, options, whole, plan, name)


def join_rows_within(call: Call, comm: Comm, options: Options, name: str) -> Call | None:
    """Return the call without shards of one row; None if there are none to be joined.

    Where each rank has its own rows, they are joined to those of the same rank only.
    """
    if not call.spread.is_local:
        plan = join_single_rows(call.plan)
        return None if plan is None else _make_call(comm, options, plan, plan, name)
    sizes, slots, has_joined = list[int](), list[int](), False
    pairs = zip(call.spread.owners, call.plan.sizes, call.plan.slots, strict=True)
    for _, run in itertools.groupby(pairs, key=lambda entry: entry[0]):
        _, own, places = zip(*run, strict=True)
        plan = join_single_rows(SplitPlan(sum(own), own, places, ()))
        has_joined = has_joined or plan is not None
        sizes += own if plan is None else plan.sizes
        slots += places if plan is None else plan.slots
    if not has_joined:
        return None
    plan = call.plan._replace(sizes=tuple(sizes), slots=tuple(slots))
    return _make_call(comm, options, plan, call.cut, name)


def align_rows(tensor: Tensor, start: int, dim: int) -> Tensor:
    """Let a tensor of this rank's rows lie in memory as they would in the whole batch's.

    Where a matrix begins within 64 bytes decides which kernels some libraries (MKL) take for its
    ends, and so the last bits. A tensor that is a view of something larger is left alone: it lies
    where it would.
    """
    is_own = tensor._base is None and tensor.storage_offset() == 0
    if not (start and is_own and tensor.dim() > dim == 0 and tensor.is_contiguous()):
        return tensor
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.data_ptr() % _ALIGN:
        return tensor
    width = tensor.element_size()
    offset = start * tensor.stride(0) * width % _ALIGN
    if not offset or offset % width:
        return tensor
    memory = torch.empty(tensor.numel() + _ALIGN // width, dtype=tensor.dtype, device="cpu")
    skipped = (offset - memory.data_ptr()) % _ALIGN // width
    moved = memory[skipped : skipped + tensor.numel()].view(tensor.shape)
    return moved.copy_(tensor)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


_ALIGN = 64  # bytes: a line of the processor's cache, at which torch's allocator begins


def _make_call(
    comm: Comm, options: Options, plan: SplitPlan, cut: SplitPlan | None, name: str
) -> Call:
    is_local = options.batch == "local" and comm.num_ranks > 1
    num_slots = len(options.slots)
    slots = plan.slots or (0,)
    owners = [owner_of_slot(k, num_slots, comm.num_ranks) for k in slots]
    what, number = _name_place(name, plan) if comm.num_ranks > 1 else ("", 0)
    sizes = plan.sizes or (0,)
    weight = 1.0
    if is_local and options.reduction == "mean":
        own_rows = sum(n for n, owner in zip(sizes, owners, strict=True) if owner == comm.rank)
        weight = own_rows / max(sum(sizes), 1)
    spread = Spread(comm, owners, sizes, what, number, weight, is_local, options.dim)
    if is_local and cut is not None:
        mine = spread.mine
        own = tuple(plan.sizes[k] for k in mine)
        cut = cut._replace(sizes=own, slots=tuple(plan.slots[k] for k in mine))
        cut = cut if own else None
    return Call(plan, cut, spread, tuple(options.slots[k] for k in slots))


def _name_place(name: str, plan: SplitPlan) -> tuple[str, int]:
    """A call in words, and its number."""
    what, _, number = name.partition("#")
    return f"{what} on {plan.num_rows} rows ({' '.join(map(str, plan.sizes))})", int(number)
