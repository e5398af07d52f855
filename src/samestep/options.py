"""What the user said to ``DataParallel``, checked before anything else is done.

What it holds: :class:`Options` and :func:`check_options`. Guarantees: an option that cannot be met
is an error that names it and says what to do; what is in an :class:`Options` needs no further
check. Must not: look at the module or at a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.devices import Device, Slot, plan_slots, resolve_device
from samestep.merge import check_out_dims
from samestep.split import check_in_dims, plan_sizes

__all__ = ["Options", "check_options"]


@dataclass(frozen=True)
class Options:
    """What the user said, checked."""

    slots: tuple[Slot, ...]
    output: torch.device | None
    dim: int
    split: str | tuple[float, ...]
    in_dims: Any
    out_dims: Any
    reduction: str
    sync_batch_norm: bool
    recompute: bool
    threads_per_replica: int


def check_options(
    device_ids: Sequence[Device] | None,
    output_device: Device | None,
    replicas: int | None,
    *,
    dim: Any,
    split: Any,
    in_dims: Any,
    out_dims: Any,
    reduction: Any,
    sync_batch_norm: Any,
    recompute: Any,
    threads_per_replica: Any,
) -> Options:
    """Return the options; raise TypeError or ValueError for one that cannot be met."""
    slots = plan_slots(device_ids, replicas)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}")
    plan_sizes(len(slots), len(slots), split)  # raises for a bad split
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if isinstance(threads_per_replica, bool) or not isinstance(threads_per_replica, int):
        raise TypeError(f"threads_per_replica must be an int, got {threads_per_replica!r}")
    if threads_per_replica < 1:
        raise ValueError(f"threads_per_replica must be at least 1, got {threads_per_replica}")
    for name, flag in (("sync_batch_norm", sync_batch_norm), ("recompute", recompute)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    check_in_dims(in_dims)
    check_out_dims(out_dims)
    output = None
    if output_device is not None:
        output = resolve_device(output_device, argument="output_device")
    return Options(
        slots=slots,
        output=output,
        dim=dim,
        split=split if isinstance(split, str) else tuple(split),
        in_dims=in_dims,
        out_dims=out_dims,
        reduction=reduction,
        sync_batch_norm=sync_batch_norm,
        recompute=recompute,
        threads_per_replica=threads_per_replica,
    )
