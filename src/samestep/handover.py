"""A file that one rank reads or writes for all of them.

What it holds: waiting for rank 0 while it is at the disk, handing out the bytes it read, and
raising everywhere if it failed somewhere. Why: ranks need not share a file system, and one that
says nothing for a minute is taken for dead, which a large file on a slow disk would make it.

Guarantees: every rank comes to the same end, with the same bytes; no rank is silent for longer than
a quarter of the time that the others would wait.
Must not: know what is in the file.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

import torch

from samestep.comm import Comm, Failure
from samestep.sealed import DamagedError, find_candidates, read_sealed
from samestep.segments import open_bytes

__all__ = ["Found", "agree", "hand_out", "read_for_all", "wait_together"]

PIECE = 1 << 26  # bytes handed to other ranks at a time


class Found(NamedTuple):
    """What there was to read: "read", "missing" or "damaged", and what is to be said about it."""

    outcome: str
    text: str
    num_bytes: int = 0
    data: bytes = b""


def _read(path: Path) -> Found:
    faults: list[str] = []
    candidates = find_candidates(path)
    for candidate in candidates:
        try:
            data = read_sealed(candidate)
        except FileNotFoundError:
            continue
        except (DamagedError, OSError) as error:
            faults.append(f"{candidate}: {error}")
            continue
        if candidate == candidates[0]:
            return Found("read", "", len(data), data)
        reason = "; ".join(faults) or "it is not there, which a crash can leave behind"
        text = f"using {candidate} in place of {path}: {reason}"
        return Found("read", text, len(data), data)
    if not faults:
        return Found("missing", "")
    return Found("damaged", f"no whole checkpoint to load: {'; '.join(faults)}")


def read_for_all(comm: Comm, path: Path) -> Found:
    """Let rank 0 read; every rank learns the outcome, rank 0 alone has the bytes yet."""
    found: list[Found] = []
    reader = threading.Thread(target=lambda: found.append(_read(path)), name="samestep-load")
    if comm.rank == 0:
        reader.start()
    wait_together(comm, reader)
    told = comm.exchange("load", found[0]._replace(data=b"") if found else None)
    own: Found = found[0] if found else told[0]
    return own


def hand_out(comm: Comm, found: Found) -> bytes:
    """Give rank 0's bytes to every rank, piece by piece: no rank stages more than one piece."""
    if comm.num_ranks == 1:
        return found.data
    pieces = []
    for start in range(0, found.num_bytes, PIECE):
        piece = bytearray(found.data[start : start + PIECE])
        tensors = [torch.frombuffer(piece, dtype=torch.uint8)] if comm.rank == 0 else []
        _, told = comm.gather("load bytes", None, tensors)
        pieces.append(bytes(open_bytes(told[0][0])))
    return b"".join(pieces)


def wait_together(comm: Comm, thread: threading.Thread) -> None:
    """Wait on every rank for rank 0's thread.

    The ranks meet again and again meanwhile: a rank that says nothing for a while is taken for
    dead, and a large file on a slow disk takes longer than that.
    """
    busy = True
    while busy:
        if comm.rank == 0:
            thread.join(comm.timeout / 4 if comm.num_ranks > 1 else None)
        busy = comm.exchange("file", thread.is_alive())[0]


def agree(comm: Comm, kind: str, failure: BaseException | None) -> None:
    """Raise on every rank if one has failed: its own error there, its text elsewhere."""
    own = None if failure is None else Failure(f"{type(failure).__name__}: {failure}")
    comm.exchange(kind, own)  # raises where another one has failed
    if failure is not None:
        raise failure
