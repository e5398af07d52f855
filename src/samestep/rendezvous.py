"""Finding the other ranks.

What it holds: :func:`find_comm`, which joins the process group that exists or makes one from
torchrun's environment, and :func:`is_main`.

Guarantees: a group that the user made is used and left as it was; one made here is taken down at
exit. Messages go through a gloo group of our own, so that they cannot get between the user's.
Must not: send anything.
"""

from __future__ import annotations

import atexit
import datetime
import os
import zlib
from typing import Any

import torch
import torch.distributed as dist

from samestep.comm import ALONE, ENV_TIMEOUT, Comm
from samestep.errors import RankError
from samestep.randomness import seed_all

__all__ = ["find_comm", "get_timeout", "is_main", "leave", "seed_alike"]

ENV_SHARED = "SAMESTEP_SHARED_MEMORY"


def find_comm(process_group: Any = None) -> Comm:
    """Return this process's end of the line to the ranks of a process group.

    Args:
        process_group: the ranks; None: all ranks, of the group that exists or that torchrun's
            environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``) describes. With
            neither there is one rank.

    Raises:
        ValueError: this process is not a rank of ``process_group``; ``SAMESTEP_TIMEOUT`` is not a
            number of seconds.
        RankError: the ranks do not find each other.
    """
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        if process_group is not None:
            raise ValueError("process_group is given, but torch.distributed is not initialized")
        if not _is_launched():
            return ALONE
        _start_group()
    group = dist.group.WORLD if process_group is None else process_group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not a rank of the process_group given")
    for known, comm in _comms:
        if known is group:
            return comm
    comm = _make_comm(group, rank)
    _comms.append((group, comm))
    return comm


def leave() -> None:
    """Forget every line; take the process group down if it was made here."""
    for _, comm in _comms:
        comm.close()
    _comms.clear()
    if _made_here and dist.is_initialized():
        dist.destroy_process_group()
    _made_here.clear()


def seed_alike() -> None:
    """Let ranks whose script has set no seed draw the same random numbers.

    Called when the package is imported. Without several ranks it does nothing: torch then begins
    with another seed in every process, and so would every rank, each with other data and another
    shuffle.
    """
    if not _is_launched() or torch.initial_seed() < _LEAST_UNSEEDED:
        return
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    seed = zlib.crc32(" ".join(os.environ.get(name, "") for name in names).encode())
    torch.manual_seed(seed)  # the accelerators', too
    seed_all(seed)


def is_main() -> bool:
    """Whether this process is rank 0, or the only one: the one to print and to write files.

    Example:
        >>> import samestep
        >>> samestep.is_main()
        True
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def get_timeout() -> float:
    """How many seconds to wait for another rank: ``SAMESTEP_TIMEOUT``, 60 by default.

    Raises:
        ValueError: it is not a number above zero.
    """
    text = os.environ.get(ENV_TIMEOUT, "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{ENV_TIMEOUT} must be a number of seconds above 0, got {text!r}")
    return seconds


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

# What torch begins with is a random number of 64 bits, what users write is seldom as large.
_LEAST_UNSEEDED = 1 << 32
_comms: list[tuple[Any, Comm]] = []
_num_lines: dict[Any, int] = {}  # made for each group so far
_made_here: list[bool] = []


def _is_launched() -> bool:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1


def _start_group() -> None:
    backend = "gloo"
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        local = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
        torch.accelerator.set_device_index(local)
        backend = f"cpu:gloo,{kind.type}:{dist.get_default_backend_for_device(kind.type)}"
    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=get_timeout()))
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"the ranks did not find each other at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} (rank {os.environ['RANK']} of "
            f"{os.environ['WORLD_SIZE']}): {error}"
        ) from error
    _made_here.append(True)


def _make_comm(group: Any, rank: int) -> Comm:
    timeout = get_timeout()
    text = os.environ.get(ENV_SHARED, "1")
    if text not in ("0", "1"):
        raise ValueError(f"{ENV_SHARED} must be 1 or 0, got {text!r}")
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return ALONE
    # Not dist.new_group: its names depend on how many groups this process has made before, so ranks
    # with different histories would wait for each other for ever.
    number = _num_lines[group] = _num_lines.get(group, 0) + 1
    store = dist.distributed_c10d.PrefixStore(
        f"samestep/{group.group_name}/{number}", dist.distributed_c10d._get_default_store()
    )
    try:
        own = dist.ProcessGroupGloo(store, rank, num_ranks, datetime.timedelta(seconds=timeout))
    except RuntimeError as error:
        raise RankError(
            f"the ranks did not meet within {timeout:g} s ({ENV_TIMEOUT} sets this): each must "
            f"make its first DataParallel (or call save, load, split_loader) where the others do"
        ) from error
    # A gloo group must not outlive the interpreter: its threads would end the process by abort().
    atexit.register(leave)
    return Comm(rank, num_ranks, own, store, timeout=timeout, shared=text == "1")
