"""How shards that run at the same time exchange values.

What it holds: :class:`Group`, the meeting point of the shards of one run, and two differentiable
exchanges built on it: :func:`sum_shards` and :func:`join_shards`. Why: synchronised batch
statistics, say, need the whole batch's sums in the middle of a forward and again in the middle of a
backward.

Guarantees:
- Values come back in shard order, whoever arrived first.
- No deadlock: a shard that failed is not waited for, and shards that wait for different things, or
  for one that has ended, get an error. With ``one_at_a_time`` only one shard runs between two
  meetings, in shard order, which is what a serial engine promises.
Must not: know what is exchanged. Whoever uses a group gives each shard a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.context import current_shard

__all__ = ["Group", "MeetingNeeded", "current_group", "join_shards", "sum_shards"]

Key = tuple[Any, ...]
Total = Callable[[Sequence[Tensor]], Tensor]
# Given what this process's shards brought to a meeting: what the shards of all processes did.
Meet = Callable[[Key, list[Any]], list[Any]]


class MeetingNeeded(Exception):  # a message to the wrapper, not an error
    """A shard wants to meet the others, but each runs when its turn comes."""


class Group:
    """The meeting point of K shards for the length of one run.

    Args:
        num_shards: how many shards this process has.
        one_at_a_time: whether only one of them may run at any moment.
        meet: gets the values of other processes' shards; None if there are none.
    """

    def __init__(
        self, num_shards: int, *, one_at_a_time: bool = False, meet: Meet | None = None
    ) -> None:
        self._num_shards = num_shards
        self._meet = meet
        self._results: dict[Key, list[Any] | Exception] = {}
        self._serial = one_at_a_time
        self._turn = 0
        self._changed = threading.Condition()
        self._boxes: dict[Key, dict[int, Any]] = {}
        self._readers: dict[Key, int] = {}
        self._waiting: dict[int, Key] = {}
        self._left: set[int] = set()  # shards that ended,
        self._failed: set[int] = set()  # and those of them that failed
        self._is_broken = False

    @contextlib.contextmanager
    def joined(self, index: int) -> Iterator[None]:
        """Take part as shard ``index``; at the end nobody waits for it any more."""
        before, _current.member = _current.member, (self, index, [0])
        try:
            with self._changed:
                self._wait_for_turn(index)
            yield
        finally:
            _current.member = before
            with self._changed:
                self._left.add(index)
                self._pass_on()

    def fail(self, index: int) -> None:
        """Shard ``index`` is about to end, with an error: what it did not bring is done without."""
        with self._changed:
            self._failed.add(index)

    def exchange(self, index: int, key: Key, value: Any) -> list[Any]:
        """Give ``value`` and return every shard's, in shard order; None for one that has ended.

        Raises:
            RuntimeError: the shards wait for different things: their code paths differ.
            RankError: so do the ranks, or one is gone.
        """
        with self._changed:
            box = self._boxes.setdefault(key, {})
            box[index] = value
            self._waiting[index] = key
            self._pass_on()
            while not self._is_complete(key):
                if self._is_broken or self._is_stuck(key):
                    self._is_broken = True  # whoever wakes up later must not wait again
                    self._waiting.pop(index, None)
                    self._changed.notify_all()
                    raise RuntimeError(_MSG_STUCK)
                self._changed.wait()
            self._waiting.pop(index, None)
            if key not in self._results:
                self._results[key] = self._collect(key, box)
            found = self._results[key]
            self._readers[key] = self._readers.get(key, 0) + 1
            if self._readers[key] == len(box):  # the last reader clears the table
                del self._boxes[key], self._readers[key], self._results[key]
            self._wait_for_turn(index)
        if isinstance(found, Exception):
            raise found
        return found

    def _collect(self, key: Key, box: dict[int, Any]) -> list[Any] | Exception:
        values = [box.get(shard) for shard in range(self._num_shards)]
        if self._meet is None:
            return values
        try:
            return self._meet(key, values)
        except Exception as error:  # every shard that waits here is to get it
            return error

    def _is_complete(self, key: Key) -> bool:
        box = self._boxes.get(key)
        return box is None or len(box) + len(self._failed - box.keys()) == self._num_shards

    def _is_stuck(self, key: Key) -> bool:
        """Whether this key, or any, can never be complete."""
        if self._left - self._failed - self._boxes.get(key, {}).keys():
            return True  # a shard has ended and was not here
        still_there = self._num_shards - len(self._left)
        return len(self._waiting) == still_there and not any(
            self._is_complete(key) for key in self._waiting.values()
        )

    def _can_run(self, index: int) -> bool:
        if index in self._left:
            return False
        return index not in self._waiting or self._is_complete(self._waiting[index])

    def _pass_on(self) -> None:
        """Let the next shard run: the following one that can, in a circle."""
        order = [(self._turn + 1 + i) % self._num_shards for i in range(self._num_shards)]
        self._turn = next((index for index in order if self._can_run(index)), self._turn)
        self._changed.notify_all()

    def _wait_for_turn(self, index: int) -> None:
        while self._serial and self._turn != index:
            self._changed.wait()


_MSG_STUCK = (
    "the shards wait for each other at different places, or not equally often: their forwards took "
    "different paths through a synchronised module, all_reduce or all_gather; make the path "
    "independent of the rows, or do without them"
)


class _Current(threading.local):
    member: tuple[Group, int, list[int]] | None = None


_current = _Current()


def current_group() -> Group | None:
    """Return the group that the shard in this thread belongs to."""
    return None if _current.member is None else _current.member[0]


def sum_shards(value: Tensor, total: Total, place: int | str = "") -> Tensor:
    """Return the sum of every shard's ``value``, the same in every shard. Differentiable.

    Args:
        value: this shard's part.
        total: adds a list of tensors, one per shard, in the canonical order.
        place: where in the model this is; shards that meet at different places get an error.

    Exactness: every shard gets the same bits. The gradient of a sum is the sum of the gradients
        that arrive in all shards; any order of derivative is a sum again.
    """
    return _reduce(value, total, _next_key(place))


def join_shards(value: Tensor, dim: int, total: Total, place: int | str) -> Tensor:
    """Return all shards' values end to end along ``dim``, in every shard. Differentiable.

    Args:
        value: this shard's part; the others' agree in all other dims.
        dim: along which.
        total, place: as for :func:`sum_shards`.

    Exactness: the values' own bits. The gradient of this shard's part is the sum of the gradients
        that arrive for it in all shards.
    """
    joined: Tensor = _Join.apply(value, dim, total, _next_key(place))  # type: ignore[no-untyped-call]  # torch's
    return joined


def _next_key(place: int | str) -> Key:
    if _current.member is None:
        raise MeetingNeeded(
            "all_reduce and all_gather let the shards of a DataParallel meet; what runs the shards "
            "here (parallel_apply?) runs each by itself"
        )
    _, _, counter = _current.member
    counter[0] += 1
    return "forward", counter[0], place


class _Sum(torch.autograd.Function):
    """A sum over shards whose backward is a sum over shards: R <-> P."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, total: Total, key: Key) -> Tensor:
        ctx.total, ctx.key, ctx.num_backwards = total, key, 0
        parts = [part for part in _exchange(key, value) if part is not None]
        return total(parts) if len(parts) > 1 else parts[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _reduce(gradient, ctx.total, _backward_key(ctx)), None, None


class _Join(torch.autograd.Function):
    """Every shard gets all parts: S -> R; its backward is a sum, and a part of that."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int, total: Total, key: Key) -> Tensor:
        shard = current_shard()
        assert shard is not None
        ctx.total, ctx.key, ctx.num_backwards = total, key, 0
        parts = _exchange(key, value)
        before = sum(part.size(dim) for part in parts[: shard.index] if part is not None)
        ctx.place = (dim, before, value.size(dim))
        return torch.cat([part.to(value.device) for part in parts if part is not None], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        summed = _reduce(gradient, ctx.total, _backward_key(ctx))
        return summed.narrow(*ctx.place), None, None, None


def _backward_key(ctx: Any) -> Key:
    ctx.num_backwards += 1  # each shard passes here equally often, so the keys agree
    return (*ctx.key, "backward", ctx.num_backwards)


def _exchange(key: Key, value: Any) -> list[Any]:
    assert _current.member is not None
    group, index, _ = _current.member
    return group.exchange(index, key, value)


def _reduce(value: Tensor, total: Total, key: Key) -> Tensor:
    summed: Tensor = _Sum.apply(value, total, key)  # type: ignore[no-untyped-call]  # torch's
    return summed
