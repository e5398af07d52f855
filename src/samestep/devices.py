"""Which slots there are: from the user's arguments, the environment and the machine.

What it holds: :class:`Slot` and the rules that turn ``device_ids``, ``replicas`` and
``SAMESTEP_REPLICAS`` into K slots. Why: the slot, never the device, is the identity of a replica;
two slots may share a device, and CPU slots are as real as any.
Guarantees: a request that cannot be met is a ValueError that says why; nothing is dropped.
Must not: look at modules or batches, or start anything.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Slot",
    "count_cores",
    "is_serial_forced",
    "move_in_place",
    "move_tensor",
    "owner_of_slot",
    "plan_slots",
    "resolve_device",
    "slots_of_rank",
]

ENV_REPLICAS = "SAMESTEP_REPLICAS"
ENV_SERIAL = "SAMESTEP_SERIAL"

Device = int | str | torch.device  # what users may write for one device


@dataclass(frozen=True)
class Slot:
    """Where a shard runs: its index k and its device. Two slots may share a device."""

    index: int
    device: torch.device


def is_serial_forced() -> bool:
    """Whether ``SAMESTEP_SERIAL=1`` asks for shards one after another in the caller's thread."""
    text = os.environ.get(ENV_SERIAL, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{ENV_SERIAL} must be 1 or 0, got {text!r}")
    return text == "1"


def count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_device(device: Device, *, argument: str = "device_ids") -> torch.device:
    """Turn what the user wrote into a device with an index that exists on this machine.

    Raises:
        ValueError: no such device here, or no such device type.
        TypeError: ``device`` is neither an int, a string nor a ``torch.device``.
    """
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(
            f"{argument} holds {device!r} ({type(device).__name__}); "
            f"write an accelerator's index, a string such as 'cpu' or 'cuda:0', or a torch.device"
        )
    accelerator = torch.accelerator.current_accelerator() if _num_accelerators() else None
    if isinstance(device, int):
        if accelerator is None:
            raise ValueError(
                f"{argument} asks for accelerator {device}, but torch sees no accelerator on this "
                f"machine; for CPU slots pass replicas=2 or device_ids=['cpu', 'cpu']"
            )
        if device < 0:
            raise ValueError(f"{argument} asks for accelerator {device}, {_what_there_is()}")
        found = torch.device(accelerator.type, device)
    else:
        try:
            found = torch.device(device)
        except RuntimeError as error:
            raise ValueError(
                f"{argument} holds {device!r}, which torch does not know; write 'cpu' or 'cuda:0'"
            ) from error
    if found.type in ("cpu", "meta"):
        return torch.device(found.type)
    if accelerator is None or found.type != accelerator.type:
        seen = "none" if accelerator is None else f"{_num_accelerators()} x {accelerator.type}"
        raise ValueError(
            f"{argument} asks for {str(found)!r}, which is not on this machine "
            f"(accelerators: {seen}); for CPU slots pass replicas=2 or device_ids=['cpu', 'cpu']"
        )
    index = torch.accelerator.current_device_index() if found.index is None else found.index
    if not 0 <= index < _num_accelerators():
        raise ValueError(f"{argument} asks for {found.type}:{index}, {_what_there_is()}")
    return torch.device(found.type, index)


def owner_of_slot(slot: int, num_slots: int, num_ranks: int) -> int:
    """The rank that slot k belongs to: contiguous runs whose lengths differ by at most one.

    Example:
        >>> [owner_of_slot(slot, 8, 3) for slot in range(8)]
        [0, 0, 0, 1, 1, 1, 2, 2]
    """
    return slot * num_ranks // num_slots


def slots_of_rank(rank: int, num_slots: int, num_ranks: int) -> list[int]:
    """The slots that belong to a rank, ascending; perhaps none."""
    return [k for k in range(num_slots) if owner_of_slot(k, num_slots, num_ranks) == rank]


def plan_slots(
    device_ids: Sequence[Device] | None,
    replicas: int | None,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> tuple[Slot, ...]:
    """Decide the K slots.

    Args:
        device_ids: devices of this process, repeated ones allowed; None: every accelerator (with
            several ranks on one machine each has its share of them), or else the CPU.
        replicas: K, of all ranks together; None: one per device of each rank, or
            ``SAMESTEP_REPLICAS`` if ``device_ids`` is None too.
        rank, num_ranks: of this process. Slots of other ranks have no device of theirs here.

    Returns:
        K slots. With more replicas than devices each device gets a contiguous run of slots.

    Raises:
        ValueError: no devices, K < 1, or K smaller than the number of devices named.
        TypeError: an argument of another type.
    """
    if replicas is None and device_ids is None:
        replicas = _replicas_from_environment()
    elif replicas is not None and (isinstance(replicas, bool) or not isinstance(replicas, int)):
        raise TypeError(
            f"replicas must be an int or 'auto', got {replicas!r} ({type(replicas).__name__})"
        )
    if replicas is not None and replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    if isinstance(device_ids, (str, int, torch.device)):
        number = f", or replicas={device_ids}" if isinstance(device_ids, int) else ""
        raise TypeError(
            f"device_ids must be a sequence of devices, got {device_ids!r}; "
            f"write device_ids=[{device_ids!r}]{number}"
        )
    if device_ids is not None and not isinstance(device_ids, Iterable):
        raise TypeError(
            f"device_ids must be a sequence of devices, got a {type(device_ids).__name__}; the "
            f"module is the only argument that comes before it"
        )
    if device_ids is None:
        devices = _default_devices(replicas) if num_ranks == 1 else _share_of_devices(rank)
    else:
        devices = [resolve_device(device) for device in device_ids]
        if not devices:
            raise ValueError("device_ids is empty; name at least one device, or leave it out")
    num_slots = len(devices) * num_ranks if replicas is None else replicas
    mine = slots_of_rank(rank, num_slots, num_ranks)
    if device_ids is not None and len(mine) < len(devices):
        remedy = "" if num_ranks > 1 else f"device_ids[:{num_slots}] or "
        raise ValueError(
            f"replicas={num_slots} is smaller than the number of devices named "
            f"({len(devices) * num_ranks}); pass {remedy}more replicas"
        )
    # Contiguous runs of a rank's slots per device, whose lengths differ by at most one.
    devices = devices[: max(len(mine), 1)]
    found = {k: devices[i * len(devices) // len(mine)] for i, k in enumerate(mine)}
    return tuple(Slot(k, found.get(k, devices[0])) for k in range(num_slots))


def move_tensor(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """Return ``tensor`` on ``device``: itself if it is there.

    Copies between two accelerators are tried out at the first use of a pair. On some machines (an
    input-output memory manager in the way, a broken driver) they arrive as garbage, without an
    error; such pairs go through the host's memory, with one warning.
    """
    source = tensor.device
    if source == device:
        return tensor
    kinds = (source.type, device.type)
    if "cpu" not in kinds and "meta" not in kinds and not _arrives(source, device):
        return tensor.cpu().to(device)
    # On its way to the host it is waited for: torch would return memory that is yet to be filled.
    return tensor.to(device, non_blocking=non_blocking and device.type != "cpu")


def move_in_place(tensors: list[Tensor | None], devices: Sequence[torch.device]) -> None:
    """Put each tensor of a list on its device; the list holds no tensor more than before."""
    for index, device in enumerate(devices):
        tensor = tensors[index]
        if tensor is not None and tensor.device != device:
            tensors[index] = move_tensor(tensor, device)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


@functools.cache
def _arrives(source: torch.device, target: torch.device) -> bool:
    """Whether what is copied from one accelerator to another is there afterwards."""
    with torch.no_grad():
        sent = torch.arange(_NUM_TRIED, device=source)
        is_right = torch.equal(sent.to(target).cpu(), torch.arange(_NUM_TRIED, device="cpu"))
    if not is_right:
        warnings.warn(
            f"copies from {source} to {target} do not arrive as they were sent; they go through "
            f"the host's memory instead, which is slower. The machine's drivers or its IOMMU "
            f"settings are at fault",
            stacklevel=2,
        )
    return is_right


_NUM_TRIED = 1 << 18  # entries of 8 bytes: several pages


def _num_accelerators() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _what_there_is() -> str:
    return f"but this machine has {_num_accelerators()} (0 to {_num_accelerators() - 1})"


def _default_devices(replicas: int | None) -> list[torch.device]:
    count = _num_accelerators()
    if count == 0:
        return [torch.device("cpu")]
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    # Fewer replicas than accelerators, none of them named by the user: take the first ones.
    return [torch.device(kind.type, i) for i in range(min(count, replicas or count))]


def _share_of_devices(rank: int) -> list[torch.device]:
    """This rank's share of its machine's accelerators; torchrun says how many ranks have it."""
    devices = _default_devices(None)
    local = int(os.environ.get("LOCAL_RANK", rank))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", len(devices)))
    first, last = (len(devices) * r // num_local for r in (local, local + 1))
    return devices[first:last] or [devices[local % len(devices)]]


def _replicas_from_environment() -> int | None:
    text = os.environ.get(ENV_REPLICAS, "")
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{ENV_REPLICAS}={text!r} is not a whole number") from None
    if value < 1:
        raise ValueError(f"{ENV_REPLICAS} must be at least 1, got {value}")
    return value
