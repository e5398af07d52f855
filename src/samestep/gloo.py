"""Messages between ranks anywhere: through gloo.

What it holds: :class:`Gloo`: what :class:`samestep.wires.Wires` does, between any machines, and the
bulk that machines have no common memory for.

Guarantees: values of any length; each rank gets just the bytes that it reads.
Must not: know what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.segments import open_bytes

__all__ = ["Gloo", "Wants"]

# Which bytes of a writer's bulk a reader reads: (reader, writer) -> [(start, stop), ...]. Every
# rank must find the same answers, from what the small part told them.
Wants = Callable[[int, int], list[tuple[int, int]]]


class Gloo:
    """One rank's end of a gloo group.

    Args:
        group: a ``ProcessGroupGloo`` of these ranks, of which nobody else makes use.
        rank: this rank.
        num_ranks: W.
    """

    def __init__(self, group: Any, rank: int, num_ranks: int) -> None:
        self._group = group
        self._rank = rank
        self._num_ranks = num_ranks
        self._own = torch.empty(_INLINE, dtype=torch.uint8, device="cpu")
        self._all = torch.empty(num_ranks * _INLINE, dtype=torch.uint8, device="cpu")

    def swap(self, data: bytes) -> list[bytes]:
        """Tell every rank ``data``; return what each of them told, in rank order: one round, or
        two where one of them is long.

        Raises:
            RuntimeError: a rank has ended or let go of the line, or says nothing for too long.
        """
        found = self._round(self._own, self._all, data)
        sizes = [_read_size(part) for part in found]
        longest = max(sizes)
        if longest + _SIZE > _INLINE:
            own = torch.empty(_SIZE + longest, dtype=torch.uint8, device="cpu")
            found = self._round(own, own.new_empty(self._num_ranks * own.numel()), data)
        return [
            bytes(open_bytes(part[_SIZE : _SIZE + size]))
            for part, size in zip(found, sizes, strict=True)
        ]

    def send_bytes(self, own: Tensor, wants: Wants) -> list[list[Tensor]]:
        """Each rank sends each other what that one reads of its bulk. Raises as :meth:`swap`."""
        sends: list[Any] = []
        received: list[list[Tensor]] = []
        for other in range(self._num_ranks):
            ranges = wants(self._rank, other)
            if other == self._rank:
                received.append([own[first:last] for first, last in ranges])
                continue
            found = [torch.empty(last - first, dtype=_BYTE, device="cpu") for first, last in ranges]
            received.append(found)
            for part in found:
                if part.numel():
                    sends.append(self._group.recv([part], other, 0))
            for first, last in wants(other, self._rank):
                if first < last:
                    part = own[first:last]
                    sends.append(self._group.send([part], other, 0))
        for work in sends:
            work.wait()
        return received

    def _round(self, own: Tensor, everyone: Tensor, data: bytes) -> Sequence[Tensor]:
        own[:_SIZE] = torch.frombuffer(bytearray(len(data).to_bytes(_SIZE, "little")), dtype=_BYTE)
        fits = data[: own.numel() - _SIZE]
        own[_SIZE : _SIZE + len(fits)] = torch.frombuffer(bytearray(fits), dtype=_BYTE)
        self._group._allgather_base(everyone, own).wait()
        return everyone.chunk(self._num_ranks)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_BYTE = torch.uint8
_SIZE = 8  # bytes of a length
_INLINE = 4096  # bytes of a value that goes in one round


def _read_size(part: Tensor) -> int:
    return int.from_bytes(open_bytes(part[:_SIZE]), "little")
