"""One file that is written whole or not at all, and tells when it is damaged.

What it holds: writing a torch file with a seal (the SHA-256 of everything before it), reading it
back only if the seal is right, and keeping the file that was there before. Why: a training that
dies while it saves must not take its last checkpoint with it, and a damaged one must not be trained
on.

Guarantees: at every instant one of :func:`find_candidates` is a whole file, once one was written;
a file cut short, or with any bit other than it was, is refused. The seal lies in the comment of the
zip archive that ``torch.save`` makes, so ``torch.load`` reads the file as any other.
Must not: know what is in the file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import struct
from collections import deque
from pathlib import Path
from typing import IO, Any, cast

import torch

__all__ = [
    "DamagedError",
    "check_place",
    "find_candidates",
    "read_sealed",
    "unpack",
    "write_sealed",
]

_MARK = b"samestep sha256 "
_SEAL = len(_MARK) + hashlib.sha256().digest_size
# The last two bytes of a zip archive give the length of its comment, which torch leaves empty.
_COMMENT = struct.pack("<H", _SEAL)
_EMPTY = struct.pack("<H", 0)


# Files that this process wrote, or read and found whole: they need not be read to be trusted.
_whole: deque[tuple[int, ...]] = deque(maxlen=64)


class DamagedError(Exception):
    """A file is not what was written; the text says how it differs."""


def find_candidates(path: Path) -> list[Path]:
    """Return the files that may hold the newest state, in the order in which to try them.

    The second is whole only if a crash came between its last byte and its renaming. Of a symbolic
    link they are the target and the files beside it.
    """
    path = _follow(path)
    return [path, _writing(path), _previous(path)]


def _follow(path: Path) -> Path:
    """The file that a path means: renaming onto a link would put a file in its place."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _writing(path: Path) -> Path:
    return path.with_name(path.name + ".writing")


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def write_sealed(value: Any, path: Path) -> None:
    """Write ``value`` with ``torch.save`` so that ``path`` is the new file or still the old one.

    The old one, if it is whole, is kept as ``path`` + ``.previous``. On return the new one is on
    the disk, as far as the operating system can tell.

    Raises:
        IsADirectoryError: ``path`` is a folder.
        FileNotFoundError: its folder does not exist.
        OSError: the disk is full, ...; in all these cases ``path`` is as it was.
    """
    path = _follow(path)
    check_place(path)
    writing = _writing(path)
    if _is_only_one(writing, path):
        os.replace(writing, path)  # where a failure of what follows cannot take it
    try:
        with writing.open("wb") as file:
            sealing = _Sealing(file)
            torch.save(value, cast(IO[bytes], sealing))
            sealing.close()
            file.flush()
            os.fsync(file.fileno())
            identity = _identify(file)
    except BaseException:
        with contextlib.suppress(OSError):
            writing.unlink()
        raise
    # From here on `writing` is whole, and so a candidate: a crash between these lines loses nothing
    # even if `path` was damaged.
    if _may_be_kept(path):
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, _previous(path))
    os.replace(writing, path)
    _whole.append(identity)
    _sync_folder(path.parent)


def check_place(path: Path) -> None:
    """Refuse a path that no file can be written to.

    Raises:
        IsADirectoryError, FileNotFoundError: see :func:`write_sealed`.
    """
    path = _follow(path)
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, f"this is a folder, and a checkpoint is a file: {path / 'last.pt'}, say"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT,
            f"there is no folder {path.parent} to write {path.name} into; make it first: "
            f"os.makedirs({str(path.parent)!r}, exist_ok=True)",
        )


def _may_be_kept(path: Path) -> bool:
    """Is a file better than the one before it? A damaged one must not take a whole one's place."""
    return not _previous(path).exists() or _is_whole(path)


def _is_only_one(writing: Path, path: Path) -> bool:
    """Whether a save that died before its renaming left the newest whole file behind."""
    return _is_whole(writing) and not _is_whole(path)


def _is_whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _identify(file) in _whole or _has_seal(file)
    except OSError:
        return False


def _has_seal(file: Any) -> bool:
    """Whether the seal is right, without holding the file in memory."""
    rest = os.fstat(file.fileno()).st_size - _SEAL
    digest = hashlib.sha256()
    while rest > 0 and (piece := file.read(min(rest, 1 << 20))):
        digest.update(piece)
        rest -= len(piece)
    return bool(file.read() == _MARK + digest.digest())


def _identify(file: Any) -> tuple[int, ...]:
    """What tells this version of a file from any other."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows does not open folders; its renames are written through
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sealing:
    """A file to write to that adds up what passes; the archive's last two bytes are held back."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._tail = b""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) <= len(_EMPTY):
            self._pass_on(self._tail + bytes(view))
        else:
            self._pass_on(self._tail, hold=0)
            self._pass_on(view[: -len(_EMPTY)], hold=0)
            self._tail = bytes(view[-len(_EMPTY) :])
        return len(view)

    def _pass_on(self, data: Any, hold: int = len(_EMPTY)) -> None:
        end = max(0, len(data) - hold)
        self._file.write(data[:end])
        self._hash.update(data[:end])
        self._tail = bytes(data[end:])

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Write the comment: the seal."""
        if self._tail != _EMPTY:
            raise RuntimeError("torch.save did not end the file as a zip archive does")
        self._pass_on(_COMMENT, hold=0)
        self._file.write(_MARK + self._hash.digest())


def read_sealed(path: Path) -> bytes:
    """Return what a file holds, if its seal is right.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it is cut short, changed, or was not written by :func:`write_sealed`.
    """
    with path.open("rb") as file:
        identity = _identify(file)
        data = file.read()
    body, seal = data[:-_SEAL], data[-_SEAL:]
    if not seal.startswith(_MARK):
        raise DamagedError(
            f"it is cut short ({len(data)} bytes), or was not written by samestep.save"
        )
    if hashlib.sha256(body).digest() != seal[len(_MARK) :]:
        raise DamagedError("its bytes are not those that were written")
    _whole.append(identity)
    return data


def unpack(data: bytes) -> Any:
    """Return what the bytes of a file hold, with all tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
