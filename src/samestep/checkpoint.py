"""``save`` and ``load``: a whole training in one file, and back.

What it holds: what goes into a checkpoint (the state of every object, the random generators, the
user's values), who writes it under several ranks, and how everything is put back or nothing. Why: a
training that resumes must take the step that it would have taken, and a crash at any instant must
leave something to resume from.

Guarantees:
- :func:`save` writes the file whole or not at all and keeps the one before (see
  :mod:`samestep.sealed`); what could not be read back is refused before anything is written.
- :func:`load` restores all objects or none, on all ranks or on none; random state comes last.
- Saves happen in the order in which they were asked for, also in the background.
Must not: know what is in a state_dict, or speak to torch.distributed.
"""

from __future__ import annotations

import atexit
import copy
import os
import threading
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from samestep.comm import Comm
from samestep.errors import note_shard
from samestep.handover import agree, hand_out, read_for_all, wait_together
from samestep.plain import to_plain
from samestep.randomness import read_accelerators, read_state, write_accelerators, write_state
from samestep.rendezvous import find_comm
from samestep.sealed import unpack, write_sealed
from samestep.tree import iter_leaves

__all__ = ["PendingSave", "load", "save"]

_VERSION = 1
_lock = threading.RLock()
_pending: PendingSave | None = None


# --------------------------------------------------------------------------------------------------
# Saving
# --------------------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Any = None,
    step: int | None = None,
    background: bool = False,
    process_group: Any = None,
    **more: Any,
) -> PendingSave | None:
    """Write everything that a training needs to go on as if it had never stopped.

    The file is new and whole, or still the old one, whatever happens meanwhile; the old one is kept
    as ``path`` + ``.previous``. Under several ranks every rank calls it, rank 0 writes, and all
    return when the file is safe, or all raise.

    Args:
        path: the file; its folder must exist. Of a symbolic link the target is written.
        model, optimizer, scheduler, scaler: anything with ``state_dict()``. A ``DataParallel`` has
            the keys of its module.
        loader: what :func:`samestep.split_loader` returned, or another loader with
            ``state_dict()``.
        step: how many steps are done; :func:`load` returns it.
        background: True: return as soon as the state is copied, and write in a thread. The script
            waits for it at its end and at the next ``save`` or ``load``.
        process_group: the torch.distributed group whose ranks call this; None: all.
        more: by name, further objects with ``state_dict()``, and values: numbers, text, tensors,
            lists and dicts of them. numpy's scalars come back as Python's numbers.

    Returns:
        None. With ``background=True`` a handle: ``wait()`` returns when the file is safe and raises
        what went wrong (which otherwise the next ``save`` or ``load`` does); under several ranks
        every rank calls it. ``done()`` tells without waiting.

    Raises:
        TypeError: an object has no ``state_dict()``, or something in a state or value could not be
            read back by ``torch.load(weights_only=True)``, or is on the meta device; nothing was
            written.
        IsADirectoryError, FileNotFoundError: ``path`` is a folder, or its folder does not exist.
        OSError: the file could not be written; the old one is as it was.
        RankError: rank 0 failed; raised on the other ranks.

    Exactness:
        What :func:`load` puts back is what was saved, bit for bit, with the states of the random
        generators of torch (CPU and accelerators), Python's ``random`` and numpy.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = torch.nn.Linear(3, 1)
        >>> save(folder.name + "/last.pt", model=model, step=7, note="first try")
        >>> load(folder.name + "/last.pt", model=model)
        {'step': 7, 'note': 'first try'}
        >>> folder.cleanup()
    """
    global _pending
    objects = _name_objects(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, loader=loader
    )
    values = {"step": step}
    for name, value in more.items():
        (objects if _has(value, "state_dict") else values)[name] = value
    for name, value in objects.items():
        if not _has(value, "state_dict"):
            raise TypeError(_refuse_stateless(name, value))
    comm, path = find_comm(process_group), Path(path)
    with _lock:
        _finish_pending()
        content: Any = None
        failure: BaseException | None = None
        if comm.rank == 0:
            try:
                content = _collect(objects, values, snapshot=background)
            except BaseException as error:
                failure = error
        agree(comm, "save", failure)
        # Known before it is waited for: after Ctrl-C there must not be two who write.
        pending = _pending = PendingSave(content, path, comm)
        if background:
            return pending
        pending.wait()
        return None


class PendingSave:
    """A checkpoint that is being written in the background; :func:`save` makes it."""

    def __init__(self, content: Any, path: Path, comm: Comm) -> None:
        self._content, self._path, self._comm = content, path, comm
        self._failure: BaseException | None = None
        self._is_settled = False
        # Not a daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._write, name="samestep-save")
        if comm.rank == 0:
            self._thread.start()

    def _write(self) -> None:
        try:
            write_sealed(self._content, self._path)
        except BaseException as error:  # of this thread, which nobody would hear of
            self._failure = error
        finally:
            self._content = None  # the snapshot's memory is free again

    def done(self) -> bool:
        """Whether this process has nothing to wait for any more."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the file is safe.

        Raises:
            OSError: it could not be written; the old one is as it was. Raised once.
            RankError: the same, on ranks other than 0.
        """
        with _lock:
            if self._is_settled:
                return
            wait_together(self._comm, self._thread)
            self._is_settled = True
            agree(self._comm, "save", self._failure)

    def report(self) -> None:
        """Print what went wrong if nobody has asked: the script is at its end."""
        if not self._is_settled and self._failure is not None:
            traceback.print_exception(self._failure)


def _finish_pending() -> None:
    if _pending is not None:
        _pending.wait()


@atexit.register
def _report_pending() -> None:
    if _pending is not None:
        _pending.report()


def _collect(objects: Mapping[str, Any], values: Mapping[str, Any], *, snapshot: bool) -> Any:
    """Return the checkpoint's content as plain values."""
    return {
        "samestep": _VERSION,
        "objects": {
            name: to_plain(value.state_dict(), name, copy=snapshot)
            for name, value in objects.items()
        },
        "values": {name: to_plain(value, name, copy=snapshot) for name, value in values.items()},
        "random": {**read_state(), "accelerators": read_accelerators()},
    }


# --------------------------------------------------------------------------------------------------
# Loading
# --------------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Any = None,
    missing_ok: bool = False,
    process_group: Any = None,
    **more: Any,
) -> dict[str, Any] | None:
    """Put back what :func:`save` wrote, on this or another number of ranks and replicas.

    A damaged or half-written file is noticed; the one before it is used then, with a warning. Under
    several ranks every rank calls it; rank 0 reads and hands the bytes to the others.

    Args:
        path: the file.
        model, optimizer, scheduler, scaler, loader: the objects to restore; those that are not
            passed are left out. They may be on any device.
        missing_ok: True: return None if there is no checkpoint yet, so that one script starts and
            resumes.
        process_group: the torch.distributed group whose ranks call this; None: all.
        more: further objects with ``load_state_dict()``, under the names they were saved by.

    Returns:
        the values that were saved, ``"step"`` among them.

    Raises:
        FileNotFoundError: there is no checkpoint, and ``missing_ok`` is False.
        RuntimeError: every file that is there is damaged.
        RankError: another rank failed.
        TypeError: an object has no ``load_state_dict()``. Values are returned, not passed.
        ValueError: the checkpoint lacks an object, or is of a later version.
        Whatever an object's ``load_state_dict`` raises. In all these cases every object, on every
        rank, is as it was.

    Exactness:
        See :func:`save`. The random generators are set last, whichever objects are restored.
    """
    objects = _name_objects(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, loader=loader, **more
    )
    for name, value in objects.items():
        if not _has(value, "load_state_dict"):
            raise TypeError(
                _refuse_stateless(name, value)
                if _has(value, "__iter__") and name == "loader"
                else f"{name} (a {type(value).__name__}) has no load_state_dict(); pass objects to "
                "be restored, and read values from what load returns"
            )
    comm = find_comm(process_group)
    _finish_pending()
    found = read_for_all(comm, Path(path))
    if found.outcome == "missing" and missing_ok:
        return None
    if found.outcome == "missing":
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if found.outcome == "damaged":
        raise RuntimeError(found.text)
    if found.text and comm.rank == 0:
        warnings.warn(found.text, stacklevel=2)
    return _restore(hand_out(comm, found), objects, comm, path)


def _check(content: Any, objects: Mapping[str, Any], path: Any) -> None:
    """Refuse what can be refused before anything is changed."""
    version = content.get("samestep")
    if version != _VERSION:
        raise ValueError(
            f"{path} has format {version}, this samestep reads {_VERSION}; load it with the "
            "samestep that wrote it"
        )
    missing = [name for name in objects if name not in content["objects"]]
    if missing:
        there = ", ".join(content["objects"]) or "nothing"
        raise ValueError(
            f"{path} has no state of {', '.join(missing)} (it has: {there}); leave it out, or pass "
            "it under the name it was saved by"
        )


def _restore(data: bytes, objects: Mapping[str, Any], comm: Comm, path: Any) -> dict[str, Any]:
    """Load every object and then the random state; on a failure anywhere, put all back."""
    random = read_state(), read_accelerators()
    before: list[tuple[Any, Any]] = []
    content: Any = None
    failure: BaseException | None = None
    try:
        content = unpack(data)
        _check(content, objects, path)
        for name, target in objects.items():
            before.append((target, _keep(target.state_dict())))
            target.load_state_dict(content["objects"][name])
        write_state(content["random"])
        write_accelerators(content["random"]["accelerators"], only_current=comm.num_ranks > 1)
    except BaseException as error:  # Ctrl-C too leaves nothing half loaded
        failure = error
    try:
        agree(comm, "load", failure)
    except BaseException as error:
        _put_back(before, error)
        write_state(random[0])
        write_accelerators(random[1])
        raise
    values: dict[str, Any] = content["values"]
    return values


def _keep(state: Any) -> Any:
    """Return a copy of a state_dict that loading cannot change; its tensors are on the CPU."""
    memo: dict[int, Any] = {}
    for _, leaf in iter_leaves(state):
        if isinstance(leaf, Tensor):
            memo[id(leaf)] = leaf if is_lazy(leaf) else leaf.detach().to("cpu", copy=True)
    return copy.deepcopy(state, memo)


def _put_back(before: list[tuple[Any, Any]], error: BaseException) -> None:
    for target, state in reversed(before):
        try:
            target.load_state_dict(state)
        except Exception as second:
            note_shard(error, f"{type(target).__name__} could not be put back: {second}")


# --------------------------------------------------------------------------------------------------
# What both need
# --------------------------------------------------------------------------------------------------


def _name_objects(**named: Any) -> dict[str, Any]:
    return {name: value for name, value in named.items() if value is not None}


def _has(value: Any, method: str) -> bool:
    return not isinstance(value, type) and callable(getattr(value, method, None))


def _refuse_stateless(name: str, value: Any) -> str:
    remedy = (
        "wrap it: loader = samestep.split_loader(loader)"
        if name == "loader"
        else "pass the object itself, or its values under another name"
    )
    return f"{name} (a {type(value).__name__}) has no state_dict(); {remedy}"
