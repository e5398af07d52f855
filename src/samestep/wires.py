"""Messages between the ranks of one machine: a socket to each of them.

What it holds: :class:`Wires`. Why: a message through gloo passes through threads of its own and the
network's layers in each process, about half a millisecond where both cores work; through a socket
of the machine's own it costs what waking the other process costs.

Guarantees:
- Messages are numbered. A rank that was interrupted while it waited (Ctrl-C) has said its part, and
  what the others said is dropped when the next message comes: it is in step again.
- A process that has ended is noticed at once, also where its children live on and hold its sockets.
- The sockets have names in no file system; nothing is left behind. Only the ranks' own processes
  are let in.
Must not: know what is sent.

Source: unix(7) (names without a file, ``SO_PEERCRED``), pidfd_open(2).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from samestep.segments import Address, Segments, open_bytes

__all__ = ["Place", "Wires"]


class Place(NamedTuple):
    """Where a rank is reached: the name of its socket, and its process."""

    name: bytes
    process: int


class Wires:
    """One rank's sockets to all others.

    Args:
        rank: this rank.
        timeout: seconds to wait for a message.

    Raises:
        OSError: there are no such sockets here.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._process = os.getpid()
        self._number = 0
        self._sockets: dict[int, socket.socket] = {}
        self._rank_of: dict[int, int] = {}  # by the descriptor of its socket, or of its process
        self._processes: list[int] = []  # descriptors
        self._long = Segments()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(_PATIENCE)
        self._listener.bind("")  # the system finds a name, which is in no directory
        self._listener.listen(128)

    @property
    def place(self) -> Place:
        """Where the other ranks find this one."""
        name = self._listener.getsockname()
        return Place(name if isinstance(name, bytes) else name.encode(), self._process)

    def connect(self, places: Sequence[Place]) -> None:
        """Reach out to the ranks below this one. Raises OSError if one cannot be reached."""
        for rank, place in enumerate(places[: self._rank]):
            found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                found.settimeout(_PATIENCE)
                found.connect(place.name)
                self._keep(found, {place.process: rank})
            except OSError:
                found.close()
                raise

    def accept(self, places: Sequence[Place]) -> None:
        """Let in the ranks above this one, which have reached out. Raises OSError if one is not
        there."""
        above = {place.process: rank for rank, place in enumerate(places) if rank > self._rank}
        while len(self._sockets) < len(places) - 1:
            found, _ = self._listener.accept()
            try:
                self._keep(found, above)
            except ConnectionRefusedError:  # a stranger's
                found.close()
        self._listener.close()

    def swap(self, data: bytes) -> list[bytes]:
        """Tell every rank ``data``; return what each of them told, in rank order.

        Raises:
            OSError: a rank has ended or let go of the line, or says nothing for too long.
        """
        is_long = len(data) > _LONGEST
        body = self._put_aside(data) if is_long else data
        self._number += 1
        packet = _HEAD.pack(self._number, is_long) + body
        for one in self._sockets.values():
            one.send(packet)  # has room: each rank lags behind by one message at most
        found = {self._rank: data}
        waiting = select.poll()
        for descriptor in self._rank_of:
            waiting.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + self._timeout
        while len(found) <= len(self._sockets):
            spun = time.monotonic() + _SPIN
            while not (ready := waiting.poll(0)) and time.monotonic() < spun:
                os.sched_yield()
            ready = ready or waiting.poll(
                min(max(deadline - time.monotonic(), 0) * 1e3, _LONGEST_WAIT)
            )
            if not ready:
                raise TimeoutError("no message came")
            # Sockets first: a rank may have ended after it said what it had to say.
            for descriptor in sorted((one for one, _ in ready), key=self._processes.__contains__):
                rank = self._rank_of[descriptor]
                if rank in found:
                    waiting.unregister(descriptor)  # the rest is for the next message
                elif descriptor in self._processes:
                    raise ConnectionResetError(f"rank {rank} has ended")
                elif (said := self._receive(rank)) is not None:
                    found[rank] = said
                    waiting.unregister(descriptor)
        return [found[rank] for rank in range(len(found))]

    def close(self) -> None:
        """Let go of the line: each rank that waits for this one, or will, is told so."""
        for one in self._sockets.values():
            # A forked child has it open, too: then closing it tells nobody; nor may the child tell
            # the others that this rank has let go.
            if os.getpid() == self._process:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            one.close()
        for descriptor in self._processes:
            os.close(descriptor)
        self._sockets.clear()
        self._rank_of.clear()
        self._processes.clear()
        self._listener.close()
        self._long.close()

    # -- One rank ----------------------------------------------------------------------------

    def _keep(self, found: socket.socket, expected: Mapping[int, int]) -> None:
        credentials = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        process, _, _ = _PEER.unpack(credentials)
        if process not in expected:
            raise ConnectionRefusedError(f"process {process} is no rank")
        rank = expected[process]
        found.setblocking(False)
        self._sockets[rank] = found
        self._rank_of[found.fileno()] = rank
        with contextlib.suppress(OSError, AttributeError):  # an older system
            descriptor = os.pidfd_open(process)
            self._rank_of[descriptor] = rank
            self._processes.append(descriptor)

    def _receive(self, rank: int) -> bytes | None:
        """What the rank said for this message; None if it was for one that was interrupted."""
        packet = self._sockets[rank].recv(_HEAD.size + _LONGEST)
        if not packet:
            raise ConnectionResetError(f"rank {rank} has let go")
        number, is_long = _HEAD.unpack_from(packet)
        if number > self._number:
            raise ConnectionAbortedError(f"rank {rank} is at another message")
        if number < self._number:
            return None
        data = packet[_HEAD.size :]
        return self._fetch(rank, data) if is_long else data

    # -- Long messages: through memory, so that each is one packet ---------------------------

    def _put_aside(self, data: bytes) -> bytes:
        address, memory = self._long.stage(len(data))
        open_bytes(memory)[: len(data)] = data
        return pickle.dumps((tuple(address), len(data)))

    def _fetch(self, rank: int, note: bytes) -> bytes:
        address, size = pickle.loads(note)
        memory: torch.Tensor = self._long.open(rank, Address(*address))
        return bytes(open_bytes(memory[:size]))


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_HEAD = struct.Struct("<Q?")  # the number of the message, and whether it lies in memory
_PEER = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
_LONGEST = 1 << 14  # bytes of a message that goes through the socket itself
# Seconds in which a rank looks again and again before it sleeps: where all have a core, to sleep
# and be woken takes longer than the others need. Meanwhile whoever can run is let run.
_SPIN = 0.0002
_LONGEST_WAIT = (1 << 31) - 1  # milliseconds: poll(2) takes an int
_PATIENCE = 5.0  # seconds in which a rank that has reached out, or is reached, is there
