"""Large memory that is kept from step to step.

What it holds: :class:`Lender`. Why: the system hands out new memory page by page, cleared; for
hundreds of megabytes in every step that takes longer than to fill it.

Guarantees: memory is lent again only when no tensor is left that lies in it, whoever had one.
Must not: know what it is for.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch
from torch import Tensor

__all__ = ["Lender"]


class Lender:
    """Lends memory, and keeps what comes back: as much as was asked for last, at most twice.

    Twice, because gradients that a script accumulates into stay where they first were, and those of
    the next step are there beside them.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[mmap.mmap, weakref.ref[memoryview] | None]] = []
        self._lock = threading.Lock()

    def lend(self, num_bytes: int) -> Tensor:
        """Return memory, as bytes; what is in it is undefined."""
        with self._lock:
            # The other sizes are let go: their memory goes when no tensor lies in it any more.
            self._kept = [one for one in self._kept if len(one[0]) == num_bytes]
            for number, (memory, lent) in enumerate(self._kept):
                if lent is None or lent() is None:
                    return self._hand_out(number, memory)
            if len(self._kept) == _NUM_KEPT or num_bytes == 0:
                return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            # Private: a forked child's gradients are its own.
            memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
            with contextlib.suppress(AttributeError, OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._kept.append((memory, None))
            return self._hand_out(len(self._kept) - 1, memory)

    def _hand_out(self, number: int, memory: mmap.mmap) -> Tensor:
        # Every tensor over it holds the view, and nothing else does.
        view = memoryview(memory)
        self._kept[number] = memory, weakref.ref(view)
        return torch.frombuffer(view, dtype=torch.uint8)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_NUM_KEPT = 2
_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
