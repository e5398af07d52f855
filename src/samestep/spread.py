"""The K shards of one call, spread over ranks, and what the ranks tell each other about them.

What it holds: :class:`Spread`, made anew for each call. Why apart from :mod:`samestep.comm`: that
one sends values, this one knows whose shards they belong to. With one rank every question is
answered at once, without a message.

Guarantees: each rank has a contiguous run of shards; what all ranks get is in shard order and the
same everywhere; if one rank fails, every rank raises.
Must not: know modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from samestep.comm import Comm, Failure
from samestep.errors import RankError
from samestep.parcel import pack, unpack
from samestep.reduce import Node, sum_slices
from samestep.slices import Summing

__all__ = ["Spread", "owner_of_slot"]

T = TypeVar("T")
MaybeTensors = list[Tensor | None]


def owner_of_slot(slot: int, num_slots: int, num_ranks: int) -> int:
    """The rank that slot k belongs to: contiguous runs whose lengths differ by at most one."""
    return slot * num_ranks // num_slots


@dataclass(frozen=True)
class Spread:
    """Which rank has which shards of a call.

    Attributes:
        comm: the line to the other ranks.
        owners: the rank of each shard, ascending.
        place: names the call, in every message: ``call 7 of Net on 29 rows``.
        is_local: each rank's caller has its own rows only, and gets its own outputs only.
    """

    comm: Comm
    owners: Sequence[int]
    place: str = ""
    is_local: bool = False
    _steps: list[int] = field(default_factory=lambda: [0])

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank, so that nothing need be told."""
        return self.comm.num_ranks == 1

    @property
    def num_shards(self) -> int:
        """K."""
        return len(self.owners)

    @property
    def mine(self) -> range:
        """The shards of this rank."""
        if self.is_alone:
            return range(self.num_shards)
        rank = self.comm.rank
        first = sum(owner < rank for owner in self.owners)
        return range(first, first + sum(owner == rank for owner in self.owners))

    def at(self, what: str) -> str:
        """Name a place in this call."""
        return f"{what} of {self.place}"

    def agree(self, what: str, value: T) -> list[T]:
        """Return what every rank says, in rank order."""
        return [value] if self.is_alone else self.comm.exchange(self.at(what), value)

    def attempt(self, what: str, function: Callable[[], T]) -> T:
        """Do something that may fail in one rank; if it does, every rank raises.

        Raises:
            BaseException: what ``function`` raised.
            RankError: another rank failed.
        """
        if self.is_alone:
            return function()
        try:
            found = function()
        except RankError:
            raise  # the others know already
        except Exception as error:
            self.comm.exchange(self.at(what), describe(error))
            raise
        self.check(self.comm.exchange(self.at(what), None))
        return found

    def check(self, told: Sequence[Any]) -> None:
        """Raise if another rank told that it failed."""
        failed = {rank: said.text for rank, said in enumerate(told) if isinstance(said, Failure)}
        if failed:
            rank, text = next(iter(failed.items()))
            raise RankError(f"rank {rank} failed in {self.place}: {text}")

    def share(
        self,
        what: str,
        values: Sequence[T],
        names: Mapping[int, str],
        objects: Mapping[str, Any],
        *,
        note: Any = None,
    ) -> tuple[list[T], list[Any]]:
        """Return every shard's value.

        Args:
            what: the place in this call.
            values: of this rank's shards.
            names, objects: what every rank has a copy of: by id its name, and by name the object.
            note: anything more to tell.

        Returns:
            One value per shard (this rank's own are themselves), and every rank's note.

        Raises:
            TypeError: a value cannot be sent; also in the other ranks, as a RankError.
        """
        if self.is_alone:
            return list(values), [note]
        data: Any
        try:
            data, tensors = pack(list(values), names)
        except TypeError as error:
            self.comm.gather(self.at(what), describe(error), [])
            raise
        told, gathered = self.comm.gather(self.at(what), (data, note), tensors)
        self.check(told)
        everyone: list[T] = []
        for rank, ((data, _), found) in enumerate(zip(told, gathered, strict=True)):
            is_mine = rank == self.comm.rank
            everyone += values if is_mine else unpack(data, found, objects)
        return everyone, [said for _, said in told]

    def reduce(
        self,
        what: str,
        parts: Mapping[Node, MaybeTensors],
        num_workers: int,
        run: Callable[[list[Callable[[], None]]], object],
        note: Any = None,
    ) -> tuple[MaybeTensors, list[Any]]:
        """Add the shards' lists of tensors in the canonical tree.

        Args:
            what: the place in this call.
            parts: the subtrees that this rank has.
            num_workers, run: see :func:`samestep.reduce.sum_slices`.
            note: anything more to tell.

        Returns:
            The sums, the same bits in every rank; and every rank's note.
        """
        if len(parts) > 1:
            parts = sum_slices(self.num_shards, parts, num_workers, run)
        if self.is_alone:
            return next(iter(parts.values())), [note]
        return Summing(self.comm, self.num_shards).run(self.at(what), parts, note)


def describe(error: BaseException) -> Failure:
    """What other ranks are told about an error."""
    return Failure(f"{type(error).__name__}: {error}")
