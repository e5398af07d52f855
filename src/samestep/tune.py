"""Settings of the process that make training on CPUs faster: memory that is kept, idle threads.

What it holds: :func:`tune_cpu`, which changes the running process, and what the same settings are
called in the environment of a process that is yet to start. Why: glibc gives large blocks back to
the system when they are freed, and each step has them mapped and cleared again, page by page.

Guarantees: what cannot be set on a system is left out and said; numbers do not change, except
through ``num_threads``. Nothing happens on import.
Must not: be called by the library; it is the script's process.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ENVIRONMENT", "Tuning", "tune_cpu"]

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Up to this size a block comes from memory that stays with the process. Older versions of glibc
# take no more than 32 MiB.
_KEPT_BYTES = (1 << 30, 32 << 20)
_NEVER_TRIM = (1 << 31) - 1  # mallopt takes an int

#: The same for a process that is yet to start.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BYTES[0]),
    "MALLOC_TRIM_THRESHOLD_": str(_NEVER_TRIM),
    "MALLOC_ARENA_MAX": "1",
}


@dataclass(frozen=True)
class Tuning:
    """What :func:`tune_cpu` did.

    Attributes:
        kept_bytes: blocks up to this size stay with the process when they are freed; 0: nothing was
            set.
        num_threads: intra-op threads of the calling thread now.
        notes: a sentence for each thing that was done or could not be done.
    """

    kept_bytes: int
    num_threads: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.notes)


def tune_cpu(*, memory: bool = True, num_threads: int | None = None) -> Tuning:
    """Make training on CPU slots faster; call it once, at the top of the script.

    Memory: glibc's ``malloc`` is told to keep large blocks, and to serve all threads from one
    place, which has no bound on what it keeps. The price: the process stays as large as it has been
    at its largest. It cannot be undone. Elsewhere (macOS, Windows, musl) nothing is done.

    Threads: with more than one intra-op thread, torch's idle threads spin for a while after each
    operation outside the wrapper, on the cores that the replicas need. ``num_threads=1`` ends that;
    the price: the parts of the script outside the wrapper, the optimizer's step among them, then
    run on one thread. ``OMP_WAIT_POLICY=passive`` in the environment costs them less, but counts
    only if it is set before torch is imported; ``samestep run`` sets it.

    Args:
        memory: whether to set up ``malloc``.
        num_threads: what to hand to ``torch.set_num_threads``; None leaves it as it is.

    Returns:
        What was done; print it.

    Raises:
        TypeError: ``num_threads`` is no int.
        ValueError: ``num_threads`` is less than 1.

    Exactness:
        Memory changes no bit. Another number of intra-op threads changes the order of additions
        outside the wrapper; inside it ``threads_per_replica`` rules.

    Source:
        mallopt(3); the measurements are in docs/performance.md.

    Example:
        >>> tuning = tune_cpu(memory=False)
        >>> print(tuning)
        memory: left as it was
    """
    if num_threads is not None:
        if isinstance(num_threads, bool) or not isinstance(num_threads, int):
            raise TypeError(f"num_threads must be an int, got {num_threads!r}")
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    kept, note = _keep_memory() if memory else (0, "memory: left as it was")
    notes = [note]
    if num_threads is not None:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        notes.append(f"intra-op threads: {before} before, {num_threads} now")
    return Tuning(kept, torch.get_num_threads(), tuple(notes))


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _keep_memory() -> tuple[int, str]:
    library = _find_glibc()
    if library is None:
        return 0, f"memory: left as it was, {sys.platform} without glibc has no such setting"
    # The threshold for trimming first: with it alone nothing is worse than before.
    if not library.mallopt(_TRIM_THRESHOLD, _NEVER_TRIM):
        return 0, "memory: left as it was, glibc refused the setting"
    kept = next((size for size in _KEPT_BYTES if library.mallopt(_MMAP_THRESHOLD, size)), 0)
    # A thread's own arena gives its heaps back whatever the thresholds say.
    library.mallopt(_ARENA_MAX, 1)
    return kept, f"memory: freed blocks of up to {kept >> 20} MiB stay with the process"


def _find_glibc() -> Any:
    """The C library of this process if it is glibc, else None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    is_glibc = hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")
    return library if is_glibc else None
