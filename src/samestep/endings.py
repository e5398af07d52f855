"""How the ranks of a launch ended, and which of them is to blame.

What it holds: :class:`Ending`, the plain facts about one rank's end; the choice of the first that
failed; and the piece of its output that says why.

Why it exists: when one rank fails, the others die of it. Their errors ("Connection closed by
peer") are louder, often earlier on the terminal, and say nothing.

Guarantees: a rank that failed by itself comes before one that lost its connection to another, and
that before one that was only told to stop; among equals the earliest counts.

Must not: start, stop or wait for anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ending", "choose_first", "find_report", "find_traceback", "read_ending"]

MAX_BYTES = 64 * 1024  # from the end of a log
MAX_LINES = 200  # of a traceback
LAST_LINES = 20  # when there is no traceback

# Where a traceback begins, that of an exception group included.
# torch puts "[rank1]: " before each line once there is a process group.
TRACEBACK = re.compile(
    r"^(\[rank\d+\]: )?(  \+ Exception Group )?Traceback \(most recent call last\):$"
)
# Between two tracebacks of one exception and its cause.
CHAIN = re.compile(
    r"^(\[rank\d+\]: )?"
    r"(The above exception was the direct cause|During handling of the above exception)"
)
# What gloo, NCCL, torch's store and our own communication say when the other side is gone.
ECHO = re.compile(
    r"\bRankError\b"
    r"|Connection closed by peer|Connection reset by peer|Broken pipe"
    r"|Check the logs of the remote worker|Timed out waiting \d+ms for (send|recv) operation"
    r"|Connection was likely closed|Remote peer closed the connection"
    r"|remote process exited or there was a network error|NCCL communicator was aborted",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    ``status`` is the exit status, or minus the signal; ``time`` is in seconds since 1970; ``told``
    says that the launcher told it to stop before it ended; ``report`` is what its output says.
    """

    rank: int
    status: int
    time: float
    told: bool = False
    report: str = ""

    @property
    def exit_status(self) -> int:
        """What a shell would show: 128 + the signal for a program that a signal ended."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def is_echo(self) -> bool:
        """Whether the rank says that it failed because another one had gone."""
        return ECHO.search(self.report) is not None


def read_ending(rank: int, record: Path, log: Path) -> Ending | None:
    """What was written down when a rank ended, or None if nothing was or it cannot be read.

    A rank that was told to stop while it was still clearing up after an exception of its own
    counts as ended by that exception: its traceback is older than the word to stop.
    """
    try:
        found = json.loads(record.read_text())
        status, when = int(found["status"]), float(found["time"])
        told = None if found["told"] is None else float(found["told"])
    except (OSError, ValueError, KeyError, TypeError):  # killed before or while it was written
        return None
    text = read_end(log)
    if told is not None:
        written = log.stat().st_mtime if text else told
        report = find_traceback(text) if written < told else ""
        return Ending(rank, 1 if report else status, when, told=True, report=report)
    return Ending(rank, status, when, report=find_report(text, status))


def choose_first(endings: Iterable[Ending]) -> Ending | None:
    """The rank that failed first, or None if none failed.

    Example:
        >>> lost = Ending(0, 1, time=4.9, report="RuntimeError: Connection closed by peer")
        >>> cause = Ending(1, 1, time=5.0, report="ValueError: no such file")
        >>> choose_first([lost, cause, Ending(2, -15, time=4.0, told=True)]).rank
        1
    """
    failed = [ending for ending in endings if ending.status != 0]
    return min(failed, key=lambda one: (rank_blame(one), one.time), default=None)


def rank_blame(ending: Ending) -> int:
    """How far an ending is from being a cause: 0 for one that nothing else explains."""
    if ending.is_echo:
        return 2
    if ending.told:
        return 1 if ending.report else 3
    return 0


def find_report(text: str, status: int) -> str:
    """The part of a rank's standard error that says why it ended.

    Args:
        text: the end of its standard error.
        status: its exit status. Python ends with 1 after an exception; after anything else a
            traceback further up is about something that was handled.

    Returns:
        The last traceback, or else the last lines.
    """
    traceback = find_traceback(text) if status == 1 else ""
    return traceback or "\n".join(text.rstrip().splitlines()[-LAST_LINES:])


def find_traceback(text: str) -> str:
    """The last traceback, with those of its causes and all that follows; "" if there is none."""
    lines = text.rstrip().splitlines()
    heads = [number for number, line in enumerate(lines) if TRACEBACK.match(line)]
    if not heads:
        return ""
    start = heads.pop()
    # The sentence that ties two tracebacks stands between blank lines, just above the second.
    while heads and any(CHAIN.match(line) for line in lines[max(0, start - 2) : start]):
        start = heads.pop()
    lines = lines[start:]
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines left out", *lines[-half:]]
    return "\n".join(lines)


def read_end(path: Path) -> str:
    """The last part of a file, or nothing if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
