"""What one rank tells the others.

What it holds: :class:`Comm`, one rank's end of a line to all ranks of a process group. Why not the
collectives of ``torch.distributed`` themselves: they wait for half an hour for a rank that is gone,
do not notice that ranks speak of different things, and take tensors of equal size only. Beside
:mod:`samestep.rendezvous`, which makes it, nothing else speaks to ``torch.distributed``.

Guarantees:
- Every message says what it is about. Ranks that speak of different things all get an error that
  names who is where; afterwards they are in step again.
- A rank that is gone, or says nothing for ``SAMESTEP_TIMEOUT`` seconds, is an error that names it.
  The line is dead then: each later message is the same error at once.
Must not: know what the values mean.

[Note: two parts of a message]
Small things (the values, and what describes the rest) are pickled and go from each rank to each
other, which also is the barrier: a message is complete when every rank has come. On one machine
they go through sockets (:mod:`samestep.wires`), and the bulk, bytes of tensors, through shared
memory (:mod:`samestep.segments`): written before the small part is sent, read after it has come.
Otherwise both go through gloo (:mod:`samestep.gloo`), of the bulk just what each rank will read.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from samestep.errors import RankError
from samestep.gloo import Gloo, Wants
from samestep.lending import Lender
from samestep.segments import Address, Layout, Segments, is_supported, read_layout
from samestep.wires import Wires

__all__ = ["ALONE", "ENV_TIMEOUT", "Bulk", "Comm", "Failure", "Message", "Wants"]

ENV_TIMEOUT = "SAMESTEP_TIMEOUT"


class Failure(NamedTuple):
    """A value that says: this rank failed, and this is why."""

    text: str


class Message(NamedTuple):
    """What one rank said.

    A rank that follows has nothing to say until a message of its kind comes: it takes part in the
    ones before without a value.
    """

    kind: str
    value: Any
    num_bytes: int
    is_following: bool


class Bulk(NamedTuple):
    """Memory for the bytes that the next message will carry."""

    address: Address | None
    memory: Tensor


class Comm:
    """One rank's end of the line to all ranks of a group; with one rank, to itself.

    Args:
        rank: this rank, from 0.
        num_ranks: W.
        group: a ``ProcessGroupGloo`` of these ranks, of which nobody else makes use; None for one
            rank.
        store: a key-value store that all of them see.
        timeout: seconds to wait for another rank.
        shared: whether bulk goes through shared memory where all ranks are on one machine.
    """

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        group: Any = None,
        store: Any = None,
        *,
        timeout: float = 60.0,
        shared: bool = True,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.num_messages = 0
        self.sums = Lender()  # memory for what is computed from what all ranks said
        self.numbers = itertools.count()  # for what is made on this line: the same in every rank
        self._gloo = None if group is None else Gloo(group, rank, num_ranks)
        self._wires: Wires | None = None
        self._store = store
        self._lock = threading.RLock()
        self._dead: str | None = None
        self._process = os.getpid()
        self._segments: Segments | None = None
        # Two, in turn: one is still read while the next message's is written.
        self._plain = [torch.empty(0, dtype=_BYTE, device="cpu") for _ in range(2)]
        if num_ranks > 1 and self._are_neighbours(shared and is_supported()):
            self._segments = Segments()
            self._wires = self._lay_wires()

    @property
    def is_shared(self) -> bool:
        """Whether bulk goes through memory that all ranks see."""
        return self._segments is not None

    def exchange(self, kind: str, value: Any) -> list[Any]:
        """Tell every rank ``value`` and return what each of them told, in rank order.

        Args:
            kind: what this is about, in words: the same in every rank, or all get an error. A
                number at its end, ``#7``, is shown but not compared: after one rank has done
                something else, all can go on.
            value: anything that pickles. A :class:`Failure` is an error in all other ranks.

        Returns:
            The values; None for a rank that follows, see :meth:`trade`.

        Raises:
            RankError: a rank is gone, failed, or speaks of something else.
        """
        return [
            message.value if _bare(message.kind) == _bare(kind) else None
            for message in self._meet(kind, value, 0)
        ]

    def prepare(self, num_bytes: int) -> Bulk:
        """Return memory for the bulk of this rank's next message."""
        if self._segments is not None:
            return Bulk(*self._segments.stage(num_bytes))
        self._plain.reverse()
        if self._plain[0].numel() < num_bytes:
            self._plain[0] = torch.empty(num_bytes, dtype=_BYTE, device="cpu")
        return Bulk(None, self._plain[0][:num_bytes])

    def trade(
        self,
        kind: str,
        value: Any,
        bulk: Bulk,
        wants: Callable[[list[Message]], Wants],
        *,
        follow: bool = False,
    ) -> tuple[list[Any], list[list[Tensor]]]:
        """Tell every rank ``value``, and let each read what it wants of everyone's ``bulk``.

        Args:
            kind, value: as in :meth:`exchange`.
            bulk: from :meth:`prepare`, filled.
            wants: from what all ranks said, which bytes each reads of each.
            follow: take part in the others' messages of other kinds until they come to this one:
                for a rank without shards, which does not know what the shards will say.

        Returns:
            What each rank told, None for one that follows and is not there yet; and by rank the
            bytes that this one wanted, valid until the next message but one is sent.
        """
        with self._lock:
            messages = self._meet(kind, (value, bulk.address), bulk.memory.numel(), follow)
            here = [_bare(message.kind) == _bare(kind) for message in messages]
            told = [
                m._replace(value=m.value[0] if is_here else None)
                for m, is_here in zip(messages, here, strict=True)
            ]
            wanted, values = wants(told), [message.value for message in told]

            def found(reader: int, writer: int) -> list[tuple[int, int]]:
                return wanted(reader, writer) if here[reader] and here[writer] else []

            if self._segments is None:
                return values, self._send_bytes(bulk.memory, found)
            read: list[list[Tensor]] = []
            for writer, message in enumerate(messages):
                ranges = found(self.rank, writer)
                memory = bulk.memory
                if writer != self.rank and ranges:
                    memory = self._segments.open(writer, message.value[1])
                read.append([memory[start:stop] for start, stop in ranges])
            return values, read

    def gather(
        self, kind: str, value: Any, tensors: Sequence[Tensor], *, follow: bool = False
    ) -> tuple[list[Any], list[list[Tensor]]]:
        """Tell every rank ``value`` and ``tensors``; return everyone's, in rank order.

        Args:
            kind, value: as in :meth:`exchange`.
            tensors: dense, on any device; the others get them on the CPU.
            follow: see :meth:`trade`.

        Returns:
            What each rank told, and copies of its tensors; this rank's own tensors are themselves.

        Exactness: the same bits, shapes, dtypes and order of strides.
        """
        if self.num_ranks == 1:
            return self.exchange(kind, value), [list(tensors)]
        with self._lock:
            bulk = self.prepare(sum(map(_padded_size, tensors)))
            metas = _put(tensors, bulk.memory)
            told, read = self.trade(
                kind,
                (value, metas),
                bulk,
                lambda messages: lambda reader, writer: [(0, messages[writer].num_bytes)],
                follow=follow,
            )
            values, found = [], list[list[Tensor]]()
            for rank, (said, memory) in enumerate(zip(told, read, strict=True)):
                value, metas = (None, []) if said is None else said
                values.append(value)
                found.append(list(tensors) if rank == self.rank else _take(metas, *memory))
            return values, found

    def close(self) -> None:
        """Let go of shared memory; the line is dead from now on."""
        self._dead = self._dead or "the process group was taken down"
        self._gloo = None
        if self._wires is not None:
            self._wires.close()
        if self._segments is not None:
            self._segments.close()

    # -- Messages ----------------------------------------------------------------------------

    def _meet(self, kind: str, value: Any, num_bytes: int, follow: bool = False) -> list[Message]:
        if self.num_ranks == 1:
            return [Message(kind, value, num_bytes, False)]
        if os.getpid() != self._process:
            raise RankError(_MSG_FORKED)
        own_message = Message(kind, value, num_bytes, follow)
        said = pickle.dumps(tuple(own_message), protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            while True:
                if self._dead is not None:
                    raise RankError(self._dead)
                self.num_messages += 1
                messages = [
                    own_message if rank == self.rank else Message(*pickle.loads(told))
                    for rank, told in enumerate(self._swap(said, kind))
                ]
                if isinstance(value, Failure):
                    return messages  # wherever the others are: they know now
                _check_failures(messages)
                own = _bare(kind)
                kinds = {_bare(m.kind) for m in messages if not m.is_following} or {own}
                if kinds == {own}:
                    return messages
                if not follow or len(kinds) > 1:
                    raise RankError(_describe_places(messages))

    def _swap(self, said: bytes, kind: str) -> list[bytes]:
        line = self._wires or self._gloo
        start = time.monotonic()
        try:
            assert line is not None
            return line.swap(said)
        except (RuntimeError, OSError) as error:
            self._give_up(kind, time.monotonic() - start, error)

    def _send_bytes(self, own: Tensor, wants: Wants) -> list[list[Tensor]]:
        start = time.monotonic()
        try:
            assert self._gloo is not None
            return self._gloo.send_bytes(own, wants)
        except RuntimeError as error:
            self._give_up("bulk", time.monotonic() - start, error)

    # -- When a rank does not answer ---------------------------------------------------------

    def _give_up(self, kind: str, waited: float, error: BaseException) -> NoReturn:
        """Find out who is missing, and let the line be dead."""
        missing = self._find_missing(kind)
        names = _name_ranks(missing)
        if not missing:
            fact = (
                f"the other ranks had given up waiting for this one ({ENV_TIMEOUT} sets how long "
                f"they wait)"
            )
        elif waited >= self.timeout * 0.9:
            fact = (
                f"{names} did not answer within {self.timeout:g} s ({ENV_TIMEOUT} sets this): "
                f"it hangs, is much slower, or does not call the model where the others do "
                f"(every rank must make the same calls)"
            )
        else:
            fact = f"{names} ended or died; its own output has the reason. {_MSG_FEWER}"
        self._dead = f"rank {self.rank} was at {_show(kind)}, but {fact}"
        # Whoever still waits for this rank gets an error at once, not only after its time-out.
        self._gloo = None
        if self._wires is not None:
            self._wires.close()
        raise RankError(self._dead) from error

    def _find_missing(self, kind: str) -> list[int]:
        """The ranks that do not say, for a moment, that they are looking for others too."""
        missing = [rank for rank in range(self.num_ranks) if rank != self.rank]
        found: list[list[int]] = []

        def ask() -> None:
            left, store, prefix = missing, self._store, f"lost at {self.num_messages}"
            deadline = time.monotonic() + _PATIENCE
            with contextlib.suppress(Exception):
                store.set(f"{prefix}/{self.rank}", kind)
                while left and time.monotonic() < deadline:
                    left = [rank for rank in left if not store.check([f"{prefix}/{rank}"])]
                    time.sleep(0.05)  # the store tells nobody when a key comes
                found.append(left)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_PATIENCE + 0.5)
        # The process that has the store may be gone, or stopped: then there is no answer.
        return found[0] if found else [0] if self.rank else missing

    def _are_neighbours(self, is_wanted: bool) -> bool:
        """Whether each rank can open the memory of each other."""
        probe = Segments()
        try:
            address = probe.stage(1)[0] if is_wanted else None
            told = self.exchange("first words", (address, _machine()))
            can = all(place == told[0][1] and found is not None for found, place in told)
            if can:
                try:
                    for rank, (found, _) in enumerate(told):
                        assert found is not None
                        probe.open(rank, found)
                except OSError:
                    can = False
            return all(self.exchange("shared memory", can))
        finally:
            probe.close()

    def _lay_wires(self) -> Wires | None:
        """Sockets of the machine's own to all ranks; None where one of them cannot have them."""
        wires = None
        with contextlib.suppress(OSError):
            wires = Wires(self.rank, self.timeout)
        places = self.exchange("sockets", wires and wires.place)
        can = wires is not None and None not in places
        for find in (Wires.connect, Wires.accept):
            if wires is not None and can:
                try:
                    find(wires, places)
                except OSError:
                    can = False
            can = all(self.exchange("reached", can))
        if wires is not None and not can:
            wires.close()
        return wires if can else None


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_BYTE = torch.uint8
_ALIGN = 64  # bytes: each tensor of a bulk begins at a multiple of this
_MSG_FEWER = "If not: has it fewer batches, or is a call inside `if samestep.is_main():`?"
_MSG_FORKED = "this process was forked from a rank and is none; call wrapper.module here instead"
_PATIENCE = 2.0  # seconds in which ranks that lost another one tell each other so

#: The line of a process that is the only rank.
ALONE = Comm()
Meta = tuple[Layout, int]  # of one tensor, and where it begins


def _machine() -> str:
    """A name for the machine and, in it, for the set of processes that can see each other."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _padded_size(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN


def _put(tensors: Sequence[Tensor], memory: Tensor) -> list[Meta]:
    """Write the tensors' bytes one after another."""
    metas, at = list[Meta](), 0
    for tensor in tensors:
        layout = read_layout(tensor)
        layout.view(memory, at).copy_(tensor.detach())
        metas.append((layout, at))
        at += _padded_size(tensor)
    return metas


def _take(metas: Sequence[Meta], memory: Tensor | None = None) -> list[Tensor]:
    """Copies of the tensors that :func:`_put` wrote."""
    found = []
    for layout, at in metas:
        assert memory is not None
        tensor = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")
        found.append(tensor.copy_(layout.view(memory, at)))
    return found


def _bare(kind: str) -> str:
    """What is compared of a kind: all but a number at its end, ``#7``."""
    return kind.partition("#")[0]


def _show(kind: str) -> str:
    what, _, number = kind.partition("#")
    return f"{what!r}" + (f" (call {number})" if number else "")


def _check_failures(messages: Sequence[Message]) -> None:
    failed = {r: m for r, m in enumerate(messages) if isinstance(m.value, Failure)}
    if failed:
        rank, message = next(iter(failed.items()))
        raise RankError(f"rank {rank} failed at {_show(message.kind)}: {message.value.text}")


def _describe_places(messages: Sequence[Message]) -> str:
    """Say which rank is where."""
    places: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        places.setdefault(_show(message.kind), []).append(rank)
    where = "; ".join(f"{_name_ranks(ranks)} at {kind}" for kind, ranks in places.items())
    return (
        f"the ranks are at different places: {where}. Every rank must make the same calls, on "
        f"batches of the same size, in the same order: look for a branch on the rank, on the time "
        f"or on unseeded random numbers"
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
