"""How far a pass over batches is, shown or told.

What it holds: :class:`Progress` (the figures) and :class:`Meter`, which counts and passes them on:
to a tqdm bar if tqdm is installed, else to a line of text, or to the user's function.
Guarantees: tqdm is imported only when a bar is shown; lines go to standard error.
Must not: know models.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Meter", "Progress"]

_REFRESH_S = 0.1


@dataclass(frozen=True)
class Progress:
    """How far a pass is.

    Attributes:
        num_batches: handed to the consumer so far.
        num_rows: in those; None if they do not say.
        seconds: since the pass began.
        total: batches in all, None if unknown.
    """

    num_batches: int
    num_rows: int | None
    seconds: float
    total: int | None

    def __str__(self) -> str:
        total = "" if self.total is None else f"/{self.total}"
        seconds = max(self.seconds, 1e-9)
        batches = f"batch {self.num_batches}{total}"
        if self.num_rows is None:
            return f"{batches}, {self.num_batches / seconds:.1f} batches/s"
        return f"{batches}, {self.num_rows} rows, {self.num_rows / seconds:.1f} rows/s"


class Meter:
    """Counts what was handed over.

    Args:
        progress: True: show a bar; False: nothing; else a function that gets a :class:`Progress`.
        total: batches in all, None if unknown.

    Raises:
        TypeError: ``progress`` is none of these.
    """

    def __init__(self, progress: bool | Callable[[Progress], Any], total: int | None) -> None:
        if not isinstance(progress, bool) and not callable(progress):
            raise TypeError(f"progress must be True, False or a function, got {progress!r}")
        self._progress, self._total = progress, total
        self._tell: Callable[[Progress], Any] | None = None
        self._close: Callable[[], Any] | None = None

    def start(self) -> None:
        """The pass begins now."""
        self._num_batches, self._num_rows, self._has_rows = 0, 0, True
        self._start = time.perf_counter()
        if self._progress is True:
            self._tell, self._close = _make_bar(self._total)
        elif self._progress is not False:
            self._tell = self._progress

    def add(self, num_rows: int | None) -> None:
        """One more batch, of so many rows, is handed over."""
        if self._tell is None:
            return
        self._num_batches += 1
        self._num_rows += num_rows or 0
        self._has_rows = self._has_rows and num_rows is not None
        rows = self._num_rows if self._has_rows else None
        seconds = time.perf_counter() - self._start
        self._tell(Progress(self._num_batches, rows, seconds, self._total))

    def close(self) -> None:
        """Leave the bar as it is, and the line that it stands on."""
        if self._close is not None:
            self._close()


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _make_bar(total: int | None) -> tuple[Callable[[Progress], Any], Callable[[], Any]]:
    try:
        tqdm: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        line = _Line()
        return line.show, line.close
    bar = tqdm(total=total, unit=" batches")

    def show(done: Progress) -> None:
        if done.num_rows is not None:
            rate = done.num_rows / max(done.seconds, 1e-9)
            bar.set_postfix_str(f"{rate:.1f} rows/s", refresh=False)
        bar.update()

    return show, bar.close


class _Line:
    """One line of text that is written over again and again."""

    def __init__(self) -> None:
        self._text, self._shown_at = "", float("-inf")

    def show(self, done: Progress) -> None:
        self._text = str(done)
        if time.perf_counter() - self._shown_at >= _REFRESH_S:
            self._write("\r")
            self._shown_at = time.perf_counter()

    def close(self) -> None:
        if self._text:
            self._write("\r", "\n")

    def _write(self, start: str, end: str = "") -> None:
        sys.stderr.write(f"{start}{self._text:<60}{end}")
        sys.stderr.flush()
