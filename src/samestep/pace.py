"""Whether waking the workers is worth it, for one kind of work after another.

What it holds: :class:`Pace`, which an engine asks before it runs the shards of a call, and which it
tells how long they took. Why: to wake a thread, and to hand it the interpreter lock at each
operation, costs more than a small model's shard takes. Then the calling thread alone is faster, and
the bits are the same, since they depend on the shards and never on who runs them.

How: a few runs on the workers are looked at closely. Where the workers together had little more
processor time than the run took, the cores stood still, and the calling thread is given a try, in
turn with the workers, so that what else the machine does disturbs both. What was found is looked at
again, soon at first and the later the longer it stays the same, and at once when runs alone become
slow.

Guarantees: a try ends with the first run that takes twice as long as on the workers.
Must not: know what the work is.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Hashable, Sequence

__all__ = ["Mode", "Pace"]


class Mode(enum.Enum):
    """How one run is done."""

    WORKERS = "on the workers"
    WATCHED = "on the workers, with a look at their processor time"
    ALONE = "by the calling thread"


class Pace:
    """What was found out about each kind of work.

    Threads may share it: backwards run in whichever thread asks for them.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._lock = threading.Lock()

    def choose(self, kind: Hashable) -> Mode:
        """Say how the next run of this kind is done; tell what came of it, but for WORKERS."""
        with self._lock:
            return self._find(kind).choose()

    def note_workers(self, kind: Hashable, seconds: float, busy: Sequence[float]) -> None:
        """Tell what a run of :attr:`Mode.WATCHED` took.

        Args:
            kind: of the work.
            seconds: until all shards had ended.
            busy: processor time of each worker that took part, in seconds.
        """
        with self._lock:
            self._find(kind).note_workers(seconds, sum(busy))

    def note_alone(self, kind: Hashable, seconds: float) -> None:
        """Tell what a run of :attr:`Mode.ALONE` took."""
        with self._lock:
            self._find(kind).note_alone(seconds)

    def _find(self, kind: Hashable) -> _Kind:
        found = self._kinds.get(kind)
        if found is None:
            if len(self._kinds) >= _NUM_KINDS:
                self._kinds.clear()
            found = self._kinds[kind] = _Kind()
        return found


class _Kind:
    """One kind of work."""

    def __init__(self) -> None:
        self._is_alone = False
        self._rest = _FIRST  # runs until the next look
        self._length = _SHORTEST  # of the rest after it
        self._seconds: list[float] = []  # of the runs on the workers that were looked at
        self._busy: list[float] = []
        self._alone: list[float] = []  # of a try, in turn:
        self._other: list[float] = []
        self._usual = 0.0  # what a run alone took when it was found to be faster
        self._num_slow = 0

    def choose(self) -> Mode:
        if self._rest:
            self._rest -= 1
            return Mode.ALONE if self._is_alone else Mode.WORKERS
        is_try = len(self._seconds) >= _LOOKS and len(self._alone) <= len(self._other)
        return Mode.ALONE if is_try else Mode.WATCHED

    def note_workers(self, seconds: float, busy: float) -> None:
        if len(self._seconds) >= _LOOKS:
            self._other.append(seconds)
            if len(self._other) >= _LOOKS:
                self._usual = _median(self._alone)
                self._settle(is_alone=self._usual < _CLEARLY * _median(self._other))
            return
        self._seconds.append(seconds)
        self._busy.append(busy)
        is_last = len(self._seconds) == _LOOKS
        if is_last and _median(self._busy) > _BUSY * _median(self._seconds):
            self._settle(is_alone=False)

    def note_alone(self, seconds: float) -> None:
        if len(self._seconds) < _LOOKS:  # this was no try
            self._num_slow = self._num_slow + 1 if seconds > _SLOW * self._usual else 0
            if self._num_slow >= _LOOKS:
                self._settle(is_alone=False)
                self._rest = 0
            return
        self._alone.append(seconds)
        if seconds > _SLOW * _median(self._seconds):
            self._settle(is_alone=False)

    def _settle(self, *, is_alone: bool) -> None:
        is_same = is_alone == self._is_alone
        self._length = min(2 * self._length, _LONGEST) if is_same else _SHORTEST
        self._is_alone, self._rest, self._num_slow = is_alone, self._length, 0
        self._seconds, self._busy, self._alone, self._other = [], [], [], []


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


_NUM_KINDS = 1024
_FIRST = 4  # the first runs of a kind fill caches and memory
_LOOKS = 5
_SHORTEST, _LONGEST = 50, 1600  # runs between two looks
# So many cores busy on the workers, and it is not worth a try to do without them: the calling
# thread alone has one, though it loses less by waiting for the interpreter lock.
_BUSY = 1.25
_SLOW = 2.0
_CLEARLY = 0.95  # of the time on the workers: else they keep the work
