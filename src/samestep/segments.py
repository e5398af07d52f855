"""Memory that several processes of one machine see, for the bulk of what ranks tell each other.

What it holds: :class:`Segments`. Why: between processes of one machine, a message through sockets
is copied several times; memory that all of them map is written once and read where it lies.

Guarantees: a segment has no name in any file system, so however a process dies, nothing is left
behind; the memory goes when the last process that maps it does. What was written before a message
about it was sent is what a reader of that message sees, for as long as :meth:`Segments.stage` says.
Must not: know ranks' groups, or send messages.

Source: ``memfd_create(2)``; a peer opens the segment as ``/proc/<process>/fd/<number>``, which
Linux permits among processes of one user. Where that cannot be done, :func:`is_supported` or
:meth:`Segments.open` say so, and the caller sends the bytes.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Address", "Layout", "Segments", "is_supported", "open_bytes", "read_layout"]


class Layout(NamedTuple):
    """What a tensor's bytes are: sent before them, so that a reader makes the same tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_entries(self) -> int:
        """How many values there are."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the values."""
        return self.num_entries * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether they lie in the order of the shape."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def view(self, memory: Tensor, start: int = 0) -> Tensor:
        """The tensor that lies in ``memory`` from ``start`` on."""
        flat = memory[start : start + self.num_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


def open_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they lie; for as long as the tensor lives.

    Without numpy, which torch does not need and may not be there.
    """
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def read_layout(tensor: Tensor) -> Layout:
    """The layout in which a dense tensor is sent.

    Its own strides if it has no gaps; else, as for ``torch.empty_like``, their order. It must not
    be another order: torch's sums depend on it, and so would the bits that come after.
    """
    stride = tensor.stride()
    if not tensor.is_contiguous():
        stride = torch.empty_like(tensor, device="meta").stride()
    return Layout(tensor.dtype, tuple(tensor.shape), stride)


class Address(NamedTuple):
    """Where a segment is found by another process, and its size.

    The number is another one for each segment of a process: its files' numbers come again.
    """

    process: int
    file: int
    num_bytes: int
    number: int


def is_supported() -> bool:
    """Whether this system has segments without a name."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class Segments:
    """This process's segments, and those of others that it has opened.

    There are two of its own, used in turn: while others still read one, the next message's bulk is
    written to the other.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._own: list[tuple[Address, Tensor] | None] = [None, None]
        self._opened: dict[tuple[int, int], tuple[Address, Tensor]] = {}  # by reader's key and turn

    def stage(self, num_bytes: int) -> tuple[Address, Tensor]:
        """Return memory to write to, as bytes, and its address for the others.

        It is theirs to read until the call after the next one: by then each of them must have sent
        a message that it sent after reading.
        """
        self._turn ^= 1
        own = self._own[self._turn]
        if own is None or own[0].num_bytes < num_bytes:
            if own is not None:
                self._own[self._turn] = None
                os.close(own[0].file)
            self._own[self._turn] = own = _make(max(num_bytes, _SMALLEST))
        return own[0], own[1][:num_bytes]

    def open(self, owner: int, address: Address) -> Tensor:
        """Return the bytes of another process's segment.

        Args:
            owner: a number for that process; what was opened of its older segments is let go.
            address: from its :meth:`stage`.

        Raises:
            OSError: this process may not see that one's files.
        """
        for turn in (0, 1):
            found = self._opened.get((owner, turn))
            if found is not None and found[0] == address:
                return found[1]
        file = os.open(f"/proc/{address.process}/fd/{address.file}", os.O_RDWR)
        try:
            memory = _map(file, address.num_bytes)
        finally:
            os.close(file)
        # The older of the two is the one that was replaced: segments are announced in turn.
        self._opened[owner, 1] = self._opened.pop((owner, 0), (address, memory))
        self._opened[owner, 0] = (address, memory)
        return memory

    def close(self) -> None:
        """Let go of everything."""
        for own in self._own:
            if own is not None:
                os.close(own[0].file)
        self._own = [None, None]
        self._opened.clear()


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_numbers = itertools.count()
_SMALLEST = 1 << 20  # growing costs a file and a mapping in every process


def _make(num_bytes: int) -> tuple[Address, Tensor]:
    num_bytes = 1 << (num_bytes - 1).bit_length()
    file = os.memfd_create("samestep", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, num_bytes)
        memory = _map(file, num_bytes)
    except BaseException:
        os.close(file)
        raise
    return Address(os.getpid(), file, num_bytes, next(_numbers)), memory


def _map(file: int, num_bytes: int) -> Tensor:
    # The tensor keeps the mapping alive; there is no other reference to it.
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
