"""The K shards of one call, spread over ranks, and what the ranks tell each other about them.

What it holds: :class:`Spread`, made anew for each call. Why apart from :mod:`samestep.comm`: that
one sends values, this one knows whose shards they belong to. With one rank every question is
answered at once, without a message.

Guarantees: each rank has a contiguous run of shards; what all ranks get is in shard order and the
same everywhere; if one rank fails, every rank raises.
Must not: know modules.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from samestep.comm import Comm, Failure
from samestep.errors import RankError
from samestep.reduce import Node, sum_slices
from samestep.rng import Draws

__all__ = ["Spread", "describe", "pick_entries"]

T = TypeVar("T")
MaybeTensors = list[Tensor | None]


@dataclass(frozen=True, eq=False, repr=False)
class Spread:
    """Which rank has which shards of a call.

    Attributes:
        comm: the line to the other ranks.
        owners: the rank of each shard, ascending.
        sizes: B_k of each shard.
        place: names the call, in every message: ``Net (wrapper 0) on 29 rows (15 14)``.
        number: the how manieth of the wrapper it is.
        weight: what a gradient of this rank's own loss counts for in the batch's.
        is_local: each rank's caller has its own rows only, and gets its own outputs only.
        dim: the dim that counts rows.
    """

    comm: Comm
    owners: Sequence[int]
    sizes: Sequence[int]
    place: str = ""
    number: int = 0
    weight: float = 1.0
    is_local: bool = False
    dim: int = 0

    @cached_property
    def is_alone(self) -> bool:
        """Whether there is one rank, so that nothing need be told."""
        return self.comm.num_ranks == 1

    @cached_property
    def num_shards(self) -> int:
        """K."""
        return len(self.owners)

    @cached_property
    def mine(self) -> range:
        """The shards of this rank."""
        if self.is_alone:
            return range(self.num_shards)
        rank = self.comm.rank
        first = sum(owner < rank for owner in self.owners)
        return range(first, first + sum(owner == rank for owner in self.owners))

    def at(self, what: str) -> str:
        """Name a place in this call."""
        return f"{what} of {self.place}#{self.number}"

    @property
    def title(self) -> str:
        """The call in words, for errors."""
        return f"call {self.number} of {self.place}"

    def agree(self, what: str, value: T) -> list[T]:
        """Return what every rank says, in rank order."""
        return [value] if self.is_alone else self.comm.exchange(self.at(what), value)

    def fail(self, what: str, error: BaseException) -> None:
        """Tell the other ranks that this one failed: in place of what they wait for at ``what``."""
        if not self.is_alone and not isinstance(error, RankError):  # of those they know already
            self.comm.exchange(self.at(what), describe(error))

    def meet(self, key: Sequence[Any], values: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return what every shard brought to a meeting; ``values`` are this rank's shards'."""
        what = "meeting " + " ".join(map(str, key))
        present = [value is not None for value in values]
        tensors = [value for value in values if value is not None]
        told, found = self.comm.gather(self.at(what), present, tensors)
        everyone: list[Tensor | None] = []
        for flags, row in zip(told, found, strict=True):
            rest = iter(row)
            everyone += [next(rest) if is_there else None for is_there in flags or ()]
        return everyone

    def draw_alike(self, draws: Draws, drawn: Sequence[int | None]) -> None:
        """Let every rank's generator move if one's did; what they drew must agree.

        Args:
            draws: of this rank.
            drawn: by rank, what it drew.
        """
        seeds = {seed for seed in drawn if seed is not None}
        if len(seeds) > 1:
            odd = next(rank for rank, seed in enumerate(drawn) if seed != drawn[0])
            raise RankError(
                f"rank {odd} draws other random numbers than rank 0 in {self.title}: their "
                f"generators differ. Call torch.manual_seed with the same seed in every rank, and "
                f"draw equally often"
            )
        if seeds and draws.drawn is None:
            draws.draw()

    def pass_on_generator(self) -> None:
        """Give every rank the default generator's state of the rank with the one shard."""
        state = torch.get_rng_state() if self.mine else None
        found = self.agree("random state", state)[self.owners[0]]
        if found is not None:
            torch.set_rng_state(found)

    def share(
        self,
        what: str,
        values: Sequence[T],
        names: Mapping[int, str],
        objects: Mapping[str, Any],
        *,
        note: Any = None,
        hollow: Container[int] = (),
    ) -> tuple[list[T], list[Any]]:
        """Return every shard's value.

        Args:
            what: the place in this call.
            values: of this rank's shards.
            names, objects: what every rank has a copy of: by id its name, and by name the object.
            note: anything more to tell.
            hollow: see :func:`samestep.parcel.pack`.

        Returns:
            One value per shard (this rank's own are themselves), and every rank's note.

        Raises:
            TypeError: a value cannot be sent; also in the other ranks, as a RankError.
        """
        if self.is_alone:
            return list(values), [note]
        from samestep.parcel import pack, unpack  # for several ranks

        try:
            data, tensors = pack(list(values), names, hollow)
        except TypeError as error:
            self.fail(what, error)
            raise
        told, gathered = self.comm.gather(
            self.at(what), (data, note), tensors, follow=not self.mine
        )
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
        *,
        labels: Sequence[str] = (),
    ) -> tuple[MaybeTensors, list[Any]]:
        """Add the shards' lists of tensors in the canonical tree.

        Args:
            what: the place in this call.
            parts: the subtrees that this rank has.
            num_workers, run: see :func:`samestep.reduce.sum_slices`.
            note: anything more to tell.
            labels: of the lists' entries; ranks with others would add unlike things.

        Returns:
            The sums, the same bits in every rank; and every rank's note.
        """
        if len(parts) > 1:
            parts = sum_slices(self.num_shards, parts, num_workers, run)
        if self.is_alone:
            return next(iter(parts.values())), [note]
        from samestep.slices import Summing  # for several ranks

        summing = Summing(self.comm, self.num_shards, labels, follow=not self.mine)
        return summing.run(self.at(what), parts, note)


def describe(error: BaseException) -> Failure:
    """What other ranks are told about an error."""
    return Failure(f"{type(error).__name__}: {error}")


def pick_entries(num_entries: int, num_picked: int, turn: int) -> Tensor:
    """Positions of some entries of a tensor, scattered, for each ``turn`` others."""
    steps = torch.arange(num_picked, device="cpu") + turn * num_picked
    return steps.mul_(2654435761).add_(turn).remainder_(num_entries)
