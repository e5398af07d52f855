"""The four verbs of data parallelism, with the signatures of ``torch.nn.parallel``.

What it holds: :func:`scatter`, :func:`replicate`, :func:`parallel_apply`, :func:`gather`. They do
what ``DataParallel.forward`` does, which keeps its replicas from call to call and passes what it
knows in advance. Why not torch's: those know no CPU, lose types and names, and give replicas
without parameters.

Guarantees: each verb is differentiable by itself, so they can be used apart.
Must not: keep state between calls.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.comm import ALONE
from samestep.context import Shard, make_shards
from samestep.devices import Device, Slot, move_tensor, plan_slots, resolve_device
from samestep.engine import Engine, ThreadEngine
from samestep.merge import merge
from samestep.norm import install
from samestep.reduce import tree_sum
from samestep.replica import Replica, find_replica, home_device
from samestep.replicas import ReplicaSet
from samestep.rng import Draws, Stream
from samestep.runner import Runner
from samestep.split import SplitPlan, cut, plan_split
from samestep.spread import Spread
from samestep.state import StateWriter
from samestep.step import run_shards
from samestep.tie import map_tensors

__all__ = ["gather", "parallel_apply", "replicate", "scatter"]


def scatter(
    inputs: Any,
    target_gpus: Sequence[Device] | Sequence[Slot],
    dim: int = 0,
    *,
    plan: SplitPlan | None = None,
    only: Container[int] | None = None,
) -> tuple[Any, ...]:
    """Cut a batch into shards and move each to its device.

    Shapes:
        a tensor (..., B, ...) with B rows on ``dim`` becomes (..., B_k, ...) in shard k.

    Args:
        inputs: any nested value.
        target_gpus: one device per slot, CPU slots included (the name is torch's).
        dim: the tensor dimension that counts rows.
        plan: how to cut ``(args, kwargs)`` pairs; decided from ``inputs`` if None.
        only: the shards that are moved; the others stay where the batch is.

    Returns:
        One value per shard, of the types of ``inputs``. A shard on the device of the batch is a
        view.

    Raises:
        SplitError: an argument cannot be cut.

    Exactness:
        ``gather(scatter(x, devices), device)`` is ``x`` bit for bit; differentiable.

    Source:
        The role of ``torch.nn.parallel.scatter``; unlike it, any container keeps its type.

    Example:
        >>> [x.shape[0] for x in scatter(torch.arange(30), ["cpu"] * 8)]
        [4, 4, 4, 4, 4, 4, 4, 2]
    """
    slots = _slots(target_gpus)
    if plan is not None:
        args, kwargs = inputs
        pairs: list[Any] = cut(plan, args, kwargs)
        if _are_at_home(slots):
            return tuple(pairs)
    else:
        plan = plan_split((inputs,), {}, num_slots=len(slots), dim=dim)
        pairs = [args[0] for args, _ in cut(plan, (inputs,), {})]
    indices = plan.slots or (0,)
    return tuple(
        move(pair, slots[i].device) if only is None or k in only else pair
        for k, (i, pair) in enumerate(zip(indices, pairs, strict=False))
    )


def replicate(
    network: nn.Module,
    devices: Sequence[Device] | Sequence[Slot],
    detach: bool = False,
) -> list[nn.Module]:
    """Make one replica of a module per slot.

    Replicas are real modules of the same class. Their parameters are leaves over the memory of the
    source's (a copy on another device); :func:`parallel_apply` ties their gradients to the source.

    Args:
        network: the source module.
        devices: one per slot.
        detach: True: no gradient reaches the source module.

    Raises:
        ReplicaError: the module lies on several devices, or holds a function that cannot be
            rebound.

    Source:
        The role of ``torch.nn.parallel.replicate``.
    """
    slots = _slots(devices)
    replicas = ReplicaSet(prepare=partial(prepare, sync=False)).refresh(network, slots)
    for replica in replicas if detach else ():
        for link in replica.links.values():
            link.copy.requires_grad_(False)
    for replica in replicas:
        replica.attach()
    return [replica.module for replica in replicas]


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Run each module on its inputs, in parallel.

    Args:
        modules: from :func:`replicate`, or any modules of the user's.
        inputs: one tuple of positional arguments (or one single argument) per module.
        kwargs_tup: one dict of keyword arguments per module.
        devices: one per module; the replica's own, or the module's, if None.

    Returns:
        One output per module, part of the caller's graph.

    Raises:
        ValueError: the sequences differ in length.

    Source:
        The role of ``torch.nn.parallel.parallel_apply``; backward is parallel too for replicas.
    """
    keywords = [{}] * len(modules) if kwargs_tup is None else list(kwargs_tup)
    lengths = {
        len(modules),
        len(inputs),
        len(keywords),
        len(modules if devices is None else devices),
    }
    if len(lengths) != 1 or not modules:
        raise ValueError(
            f"one entry per module is needed (modules: {len(modules)}, inputs: {len(inputs)}, "
            f"kwargs_tup: {len(keywords)}, devices: {len(devices or modules)})"
        )
    pairs = [
        (tuple(args) if isinstance(args, (list, tuple)) else (args,), kwargs)
        for args, kwargs in zip(inputs, keywords, strict=True)
    ]
    found = [find_replica(module) for module in modules]
    places = (
        [home_device(module) for module in modules]
        if devices is None
        else [resolve_device(device) for device in devices]
    )
    rows = [_count_rows(pair) for pair in pairs]
    lock = None if found[0] is None else found[0].lock
    runner = make_runner(
        ThreadEngine(1),
        make_shards(places, rows),
        drawing="intercept",
        together=False,
        lock=lock,
    )
    replicas = [replica for replica in found if replica is not None]
    if len(replicas) < len(modules):
        # Modules of the user's own: nothing to stitch, their graphs are the caller's already.
        return runner.run(
            [
                partial(module, *pair[0], **pair[1])
                for module, pair in zip(modules, pairs, strict=True)
            ]
        )
    if len({id(replica.source) for replica in replicas}) > 1:
        raise ValueError(
            "the modules are replicas of different source modules; call parallel_apply once for "
            "each of those"
        )
    outputs, changes, _ = run_shards(replicas, pairs, runner)
    StateWriter("merge", merge_state).write(changes, rows)
    return outputs


def gather(
    outputs: Sequence[Any],
    target_device: Device | None,
    dim: int = 0,
    *,
    rows: Sequence[int] | None = None,
    weights: Sequence[int] | None = None,
    out_dims: Any = None,
    reduction: str = "mean",
) -> Any:
    """Join the shards' outputs into the whole batch's.

    Args:
        outputs: one per shard.
        target_device: where tensors land; None: shard 0's device.
        dim: the tensor dimension that counts rows.
        rows: B_k of each shard; taken from the first tensor with ``dim`` if None.
        weights: what a mean is weighted by; ``rows`` if None.
        out_dims, reduction: as in ``DataParallel``.

    Returns:
        One value of the outputs' type.

    Raises:
        MergeError: the outputs do not fit together.

    Source:
        The role of ``torch.nn.parallel.gather``.

    Example:
        >>> gather([torch.zeros(2, 3), torch.ones(1, 3)], "cpu").shape
        torch.Size([3, 3])
    """
    device = (
        None if target_device is None else resolve_device(target_device, argument="target_device")
    )
    if not outputs:
        raise ValueError("there are no outputs to gather; pass one per shard")
    if rows is None:
        rows = [_count_rows(((output,), {}), dim) for output in outputs]
    return merge(
        list(outputs),
        list(rows),
        weights=weights,
        dim=dim,
        out_dims=out_dims,
        reduction=reduction,
        device=device,
        total=tree_sum,
        # What is the same object in all shards; of two tensors that is seen at once.
        whole=None if type(outputs[0]) is Tensor and outputs[0] is not outputs[-1] else _same,
    )


def prepare(replica: Replica, *, sync: bool) -> None:
    """Give a new replica what its BatchNorm modules need."""
    replica.norms = install(replica.follower.modules, sync=sync)


def merge_state(values: Sequence[Any], rows: Sequence[int], dim: int = 0) -> Any:
    """Merge what the shards wrote to one attribute; raises MergeError where that needs a guess."""
    return merge(list(values), list(rows), dim=dim, total=tree_sum, whole=_same, strict=True)


def make_runner(
    engine: Engine,
    shards: Sequence[Shard],
    *,
    drawing: Any,
    together: bool,
    draws: Draws | None = None,
    home: torch.device | None = None,
    lock: threading.RLock | None = None,
    spread: Spread | None = None,
    kind: Hashable = None,
) -> Runner:
    """Say how the shards of one call are run: those of ``spread`` that are here."""
    source = draws or Draws()
    spread = spread or Spread(ALONE, [0] * len(shards), [s.stop - s.start for s in shards])
    mine = spread.mine
    return Runner(
        engine=engine,
        shards=shards[mine.start : mine.stop],
        streams=[Stream(source, k) for k in mine],
        draws=source,
        drawing=drawing,
        together=together,
        home=home or shards[0].device,
        lock=lock or threading.RLock(),
        spread=spread,
        kind=kind,
    )


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _slots(devices: Sequence[Device] | Sequence[Slot]) -> Sequence[Slot]:
    if set(map(type, devices)) == {Slot}:
        return devices  # type: ignore[return-value]  # just checked
    return plan_slots(devices, None)  # type: ignore[arg-type]  # not slots, so devices


def _are_at_home(slots: Sequence[Slot]) -> bool:
    """Whether there is nowhere else where a tensor could be."""
    return not torch.accelerator.is_available() and {s.device.type for s in slots} == {"cpu"}


def move(tree: Any, device: torch.device) -> Any:
    """Return ``tree`` with every tensor on ``device``."""
    if device.type == "cpu" and not torch.accelerator.is_available():
        return tree  # there is nowhere else it could be
    return map_tensors(lambda tensor: move_tensor(tensor, device, non_blocking=True), tree)


def _count_rows(pair: Any, dim: int = 0) -> int:
    return plan_split(pair[0], pair[1], num_slots=1, dim=dim).num_rows or 0


def _same(values: list[Any]) -> Any:
    first = values[0]
    return first if all(value is first for value in values) else None
