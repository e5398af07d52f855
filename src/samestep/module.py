"""``DataParallel``: the whole batch in, the whole output out, the same step on K slots.

What it holds: the wrapper. Its forward is four verbs: scatter, replicate, parallel_apply, gather.
What is around them: the pass-through for one slot, the watched first call, the repeated call where
the first attempt showed that random numbers were drawn after all, and the transparency of the
wrapper.

Guarantees: after a call, and also after a failed one, the source module is as one plain call would
have left it (a failed one: as it was). Calls from several threads take turns.
Must not: contain any of the ideas it composes.
"""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from samestep import rng, step
from samestep.context import current_shard, must_run_plainly, use_num_threads
from samestep.devices import Device, Slot, is_serial_forced, plan_slots, resolve_device
from samestep.engine import Engine, SerialEngine, ThreadEngine
from samestep.errors import note_shard
from samestep.functional import (
    gather,
    make_runner,
    merge_state,
    move,
    prepare,
    replicate,
    scatter,
)
from samestep.habits import Habits, Trial, Verdict
from samestep.norm import has_batch_norm, is_norm_refusal
from samestep.options import Options
from samestep.plan import SplitPlan, explain_plan, join_single_rows
from samestep.replica import LazyError, Replica, home_device, replicas_of
from samestep.replicas import ReplicaSet, ReplicaStats
from samestep.runner import Runner
from samestep.split import plan_split
from samestep.state import Changes, StateWriter, check_buffers
from samestep.step import find_tensors, run_shards
from samestep.wrapper import Wrapper

__all__ = ["DataParallel", "data_parallel"]


_runtimes: weakref.WeakSet[_Runtime] = weakref.WeakSet()


def _start_anew() -> None:
    """After a fork, in the child."""
    rng.renew_lock()
    step.renew_lock()
    for runtime in _runtimes:
        runtime.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


class _Runtime:
    """What a wrapper keeps between calls and never saves: replicas, engines, the lock.

    Copying or pickling it gives a fresh one.
    """

    def __init__(self, options: Options, buffers: str | Mapping[str, str]) -> None:
        self._arguments = (options, buffers)
        self.lock = threading.RLock()
        self._make_replicas()
        self.serial: Engine = SerialEngine(options.threads_per_replica)
        self.threads: Engine = ThreadEngine(options.threads_per_replica)
        self.writer = StateWriter(buffers, partial(merge_state, dim=options.dim))
        # Plans with a shard of one row that a BatchNorm refused, and the plans used instead.
        self.joined: dict[tuple[SplitPlan, bool], SplitPlan] = {}
        _runtimes.add(self)
        self.can_watch = all(slot.device.type == "cpu" for slot in options.slots)

    def __reduce__(self) -> Any:
        return _Runtime, self._arguments

    def _make_replicas(self) -> None:
        sync = self._arguments[0].sync_batch_norm
        self.replicas = ReplicaSet(prepare=partial(prepare, sync=sync))
        self.habits = Habits(self.replicas)

    def lend(self) -> tuple[ReplicaSet, Habits]:
        """Give the replicas away for a while: a call that comes meanwhile makes its own."""
        with self.lock:
            lent = self.replicas, self.habits
            self._make_replicas()
            return lent

    def take_back(self, lent: tuple[ReplicaSet, Habits]) -> None:
        """Use the replicas again that were lent."""
        with self.lock:
            self.replicas, self.habits = lent

    def renew(self) -> None:
        """Start anew in a forked child, where the thread that held a lock does not exist."""
        self.lock = threading.RLock()
        self.replicas.renew()


class DataParallel(Wrapper):
    """Run any module on several devices, as one step.

    The batch is cut into K shards, each runs on its slot's replica, outputs are joined, and
    gradients are summed into the one module, in a fixed order.

    Args:
        module: the source module; it stays the only owner of parameters, gradients and state.
        device_ids: devices, one per slot or fewer; repeated ones and ``"cpu"`` allowed. Default:
            every accelerator, else the CPU. ``SAMESTEP_REPLICAS=3`` gives three slots to every
            wrapper that names neither devices nor replicas.
        output_device: where outputs land; None: the device of shard 0.
        dim: the tensor dimension that counts rows.
        replicas: K. Default: one per device.
        split: ``"chunk"`` (torch.chunk's sizes), ``"balanced"``, or K weights.
        in_dims: which dim of which argument counts rows, by parameter name or position; None in it
            gives an argument whole to every shard; ``"rows"`` cuts a list.
        out_dims: for outputs: a dim, or ``"mean"``, ``"sum"``, ``"first"``, ``"list"``, as a tree
            prefix or ``{"key/path": ...}``.
        reduction: what a 0-dim floating output becomes: ``"mean"`` weighted by rows, or ``"sum"``.
        buffers: ``"merge"``, ``"mean"``, ``"sum"``, ``"first"``, ``"max"``, ``"min"``, or a rule
            per name.
        sync_batch_norm: normalise with the whole batch's statistics.
        recompute: keep no activations; backward runs each shard's forward again, shard by shard, so
            that a batch takes the memory of the shards that run at one time.
        threads_per_replica: intra-op threads of a CPU slot; part of what fixes the bits.

    Raises:
        TypeError, ValueError: an argument that cannot be met, with the reason and the remedy.

    Exactness:
        Run to run the same bits on the CPU. Equal to the plain module up to the order of additions
        if the model does not mix rows or BatchNorm is synchronised; see docs/numerics.md.

    Source:
        The interface of ``torch.nn.DataParallel``.

    Example:
        >>> model = DataParallel(nn.Linear(5, 2), replicas=2)
        >>> model(torch.randn(30, 5)).shape
        torch.Size([30, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
        split: str | Sequence[float] = "chunk",
        in_dims: Any = None,
        out_dims: Any = None,
        reduction: str = "mean",
        buffers: str | Mapping[str, str] = "merge",
        sync_batch_norm: bool = False,
        recompute: bool = False,
        threads_per_replica: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        self._samestep_options = Options(
            slots=plan_slots(device_ids, replicas),
            output=None
            if output_device is None
            else resolve_device(output_device, argument="output_device"),
            dim=dim,
            split=split,
            in_dims=in_dims,
            out_dims=out_dims,
            reduction=reduction,
            sync_batch_norm=sync_batch_norm,
            recompute=recompute,
            threads_per_replica=threads_per_replica,
        )
        check_buffers(buffers, module)
        self._samestep_runtime = _Runtime(self._samestep_options, buffers)
        # With one slot there is nothing to cut, and unless asked for more nothing to do.
        self._samestep_is_single = self.num_replicas == 1 and not recompute
        self.module = module

    # -- The step ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the whole batch; see the class."""
        if self._samestep_is_single:
            args, kwargs = self._to_slot(args, kwargs)
            return self.module(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _run_uncompiled(self, args, kwargs)
        return self._run(None, args, kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run another method of the module in parallel, cut and joined like forward.

        ``in_dims`` holds for the parameters of the same name; ``out_dims`` is about forward's
        outputs.

        Args:
            method: its name, such as ``"generate"``.

        Raises:
            AttributeError: the module has no such method.
        """
        function = getattr(self.module, method)
        if self._samestep_is_single:
            args, kwargs = self._to_slot(args, kwargs)
            return function(*args, **kwargs)
        return self._run(method, args, kwargs)

    def _run(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if current_shard() is not None or must_run_plainly():
            return self._call_source(method, args, kwargs)  # already parallel, or torch.func's
        options, runtime = self._samestep_options, self._samestep_runtime
        with runtime.lock:
            plan = self._plan(method, args, kwargs)
            plan = runtime.joined.get((plan, self.module.training), plan)
            is_whole = plan.num_shards == 1 and not options.recompute
            if is_whole and options.slots[0].device == home_device(self.module):
                return self._call_source(method, args, kwargs)
            try:
                return self._step(plan, method, args, kwargs)
            except LazyError:
                # The first batch gives the parameters their shape; nothing has run yet.
                return self._call_source(method, args, kwargs)

    def _step(
        self, plan: SplitPlan, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        options, runtime = self._samestep_options, self._samestep_runtime
        slots, rows = [options.slots[i] for i in plan.slots or (0,)], plan.sizes or (0,)

        shards = scatter((args, kwargs), options.slots, plan=plan)
        replicas = replicas_of(replicate(self.module, slots, keep=runtime.replicas, sizes=rows))
        trial = runtime.habits.start(
            self.module,
            find_tensors((args, kwargs)),
            may_repeat=1 in rows and has_batch_norm(self.module),
            can_watch=runtime.can_watch,
        )
        try:
            outputs, changes = run_shards(
                replicas,
                shards,
                self._runner(slots, plan, trial, replicas[0].home),
                method=method,
                recompute=options.recompute,
            )
            verdict = trial.judge(changes)
            if verdict is Verdict.STANDS:
                output = gather(
                    outputs,
                    options.output,
                    options.dim,
                    rows=rows,
                    out_dims=options.out_dims if method is None else None,
                    reduction=options.reduction,
                )
                self._keep(changes, replicas, rows)
                return output
        except BaseException as error:
            trial.undo()
            joined = join_single_rows(plan) if is_norm_refusal(error) else None
            if joined is None:
                _note_whole(plan, error)
                raise
            trial.restore_inputs()
            runtime.joined[plan, self.module.training] = plan = joined
            verdict = Verdict.AGAIN
        if verdict is Verdict.WHOLE or plan.num_shards == 1:
            return self._call_source(method, args, kwargs)
        return self._step(plan, method, args, kwargs)

    def _keep(self, changes: Changes, replicas: Sequence[Replica], rows: Sequence[int]) -> None:
        """Bring what the forwards wrote to the source module."""
        runtime = self._samestep_runtime
        for cell, key, tensors in runtime.writer.write(changes, replicas, rows):
            runtime.replicas.carry(cell, key, tensors)
        runtime.replicas.mark_dirty(changes.cells)
        runtime.replicas.mark_moved(changes.parted)

    def _runner(
        self, slots: Sequence[Slot], plan: SplitPlan, trial: Trial, home: torch.device
    ) -> Runner:
        options, runtime = self._samestep_options, self._samestep_runtime
        is_serial = (
            runtime.habits.must_take_turns((plan, torch.is_grad_enabled()))
            or is_serial_forced()
            or trial.drawing == "swap"
        )
        return make_runner(
            runtime.serial if is_serial else runtime.threads,
            [slot.device for slot in slots],
            plan.sizes or (0,),
            drawing=trial.drawing,
            together=options.sync_batch_norm and has_batch_norm(self.module),
            draws=trial.draws,
            home=home,
            lock=runtime.replicas.lock,
        )

    def _plan(self, method: str | None, args: Any, kwargs: Any) -> SplitPlan:
        options = self._samestep_options
        in_dims, names = options.in_dims, list[str]()
        if in_dims is not None:
            names = self._parameter_names(method)
            if method is not None and isinstance(in_dims, Mapping):
                # Said of forward: what another method has no parameter for does not concern it.
                foreign = {*self._parameter_names(None)} - {*names, *kwargs}
                in_dims = {key: spec for key, spec in in_dims.items() if key not in foreign}
        return plan_split(
            args,
            kwargs,
            num_slots=len(options.slots),
            dim=options.dim,
            in_dims=in_dims,
            split=options.split,
            parameter_names=names,
        )

    def _parameter_names(self, method: str | None) -> list[str]:
        function = getattr(self.module, method or "forward")
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = inspect.signature(function).parameters.values()
        return [parameter.name for parameter in found if parameter.kind in kinds]

    def _call_source(self, method: str | None, args: Any, kwargs: Any) -> Any:
        """One call with everything, on the source module."""
        function = self.module if method is None else getattr(self.module, method)
        args, kwargs = self._to_slot(args, kwargs)
        with use_num_threads(self._samestep_options.threads_per_replica):
            return function(*args, **kwargs)

    def _to_slot(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments for a call on the source module: on its device if that is an accelerator."""
        if self._samestep_runtime.can_watch:
            return args, kwargs
        moved: tuple[Any, Any] = move((args, kwargs), home_device(self.module))
        return moved

    # -- Looking in --------------------------------------------------------------------------

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Say, argument by argument, what a call would do with it. Runs nothing.

        Example:
            >>> model = DataParallel(nn.Linear(5, 2), replicas=3)
            >>> print(model.explain(torch.randn(30, 5)))
            args[0] float32 [30, 5]: cut on dim 0 into 10 10 10
        """
        return explain_plan(self._plan(None, args, kwargs))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The K slots."""
        return self._samestep_options.slots

    @property
    def num_replicas(self) -> int:
        """K, the number of slots."""
        return len(self._samestep_options.slots)

    def stats(self) -> ReplicaStats:
        """What the replicas have cost so far: builds, updates, bytes copied."""
        return self._samestep_runtime.replicas.stats()

    def refresh(self, force: bool = False) -> None:
        """Bring all replicas up to date now.

        Args:
            force: copy every tensor that a replica holds as a copy: for writes through ``.data``,
                which torch does not count as changes.
        """
        runtime = self._samestep_runtime
        with runtime.lock:
            runtime.replicas.refresh(self.module, self.slots, force=force)

    def extra_repr(self) -> str:
        """What is shown by ``print(model)`` beside the module."""
        kinds = [str(slot.device) for slot in self.slots]
        return f"slots=[{', '.join(kinds)}], split={self._samestep_options.split!r}"


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run ``module`` once on several slots; the function form of :class:`DataParallel`.

    Args:
        module: the source module.
        inputs: a tuple of positional arguments, or one single argument.
        device_ids, output_device, dim: as in :class:`DataParallel`.
        module_kwargs: keyword arguments of the module.

    Source:
        The signature of ``torch.nn.parallel.data_parallel``.

    Example:
        >>> data_parallel(nn.Linear(5, 2), torch.randn(30, 5), ["cpu", "cpu"]).shape
        torch.Size([30, 2])
    """
    args = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*args, **(module_kwargs or {}))


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


@_disable_dynamo  # imports the compiler at the first call: only while it is at work anyway
def _run_uncompiled(model: DataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Break the graph of a compiled caller here: threads and locks are nothing to compile."""
    return model._run(None, args, kwargs)


def _note_whole(plan: SplitPlan, error: BaseException) -> None:
    """Say which tensors no shard got its rows of: often the reason why shapes do not fit."""
    whole = [leaf for leaf in plan.leaves if leaf.action == "whole" and "[" in leaf.description]
    if whole and isinstance(error, Exception):
        named = ", ".join(f"{leaf.path} {leaf.description}" for leaf in whole)
        note_shard(error, f"given whole to every shard: {named}; see model.explain() and in_dims=")
