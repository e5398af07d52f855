"""The steps of one wrapper: every call from its arguments to its output.

What it holds: :class:`Runtime`: what a wrapper keeps between calls, and :meth:`Runtime.run`, which
goes through the four verbs: scatter, replicate, parallel_apply, gather. What is around them: the
watched first call, and the repeated call where the first attempt showed something new (that random
numbers are drawn after all, that a single row must join its neighbour, that shards want to meet).

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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samestep import rng, step
from samestep.changes import Changes
from samestep.comm import Comm
from samestep.context import current_shard, must_run_plainly, use_num_threads
from samestep.devices import is_serial_forced, slots_of_rank
from samestep.engine import Engine, SerialEngine, ThreadEngine
from samestep.errors import RankError, note_shard
from samestep.functional import gather, make_runner, merge_state, move, prepare, scatter
from samestep.graphs import scale_gradient
from samestep.group import MeetingNeeded
from samestep.habits import Habits, Trial, Verdict
from samestep.mirror import Mirror
from samestep.norm import has_batch_norm, is_norm_refusal
from samestep.options import Options
from samestep.plan import SplitPlan
from samestep.ranks import Call, align_rows, join_rows_within, open_call, tell_rows
from samestep.rendezvous import find_comm
from samestep.replica import LazyError, home_device
from samestep.replicas import ReplicaSet
from samestep.runner import Runner
from samestep.split import plan_split
from samestep.state import StateWriter, find_carried
from samestep.step import run_shards
from samestep.tie import find_tensors, map_tensors

if TYPE_CHECKING:
    from samestep.batches import Form
    from samestep.eager import EagerBackward

__all__ = ["Runtime"]

_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _start_anew() -> None:
    """After a fork, in the child."""
    rng.renew_lock()
    step.renew_lock()
    for runtime in _runtimes:
        runtime.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


class Runtime:
    """What a wrapper keeps between calls and never saves: replicas, engines, the lock.

    Copying or pickling it gives a fresh one.
    """

    def __init__(
        self, options: Options, buffers: str | Mapping[str, str], comm: Comm | None = None
    ) -> None:
        self.options = options
        self._arguments = (options, buffers)
        self.comm = comm or find_comm()
        self.lock = threading.RLock()
        self._make_replicas()
        self.captures: Any = None
        if options.cuda_graphs:
            from samestep.capture import Captures  # for few models

            self.captures = Captures()
        self.mirror = Mirror()
        count = options.num_threads
        self.serial: Engine = SerialEngine(count)
        self.threads: Engine = ThreadEngine(count, num_workers=options.workers)
        self.writer = StateWriter(buffers, partial(merge_state, dim=options.dim))
        # Plans with a shard of one row that a BatchNorm refused: these rows are joined.
        self.refused: set[tuple[SplitPlan, bool]] = set()
        self.number: int | None = None
        self.num_calls = 0
        # By id of their plans, the rows of all ranks and the method; see _open.
        self._calls: dict[tuple[int, Any, str | None], tuple[SplitPlan, Call]] = {}
        _runtimes.add(self)
        self.can_watch = all(slot.device.type == "cpu" for slot in options.slots)

    def __reduce__(self) -> Any:
        return Runtime, self._arguments

    def __deepcopy__(self, memo: Any) -> Runtime:
        return Runtime(*self._arguments, self.comm)

    def _make_replicas(self) -> None:
        self.replicas = ReplicaSet(prepare=partial(prepare, sync=self.options.sync_batch_norm))
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

    def _name_call(self, module: nn.Module, method: str | None) -> str:
        """A name for the next call, the same in every rank."""
        self.num_calls += 1
        what = type(module).__name__ + ("" if method is None else f".{method}")
        if self.number is None:  # not when it is made: a copy that one rank makes is not counted
            self.number = next(self.comm.numbers)
        return f"{what} (wrapper {self.number})#{self.num_calls}"

    def run(
        self, module: nn.Module, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of the module (None: the module itself) on all shards.

        Args:
            module: the source module.
            method: its name.
            args, kwargs: of the call, for the whole batch or for this rank's rows.
        """
        if current_shard() is not None or must_run_plainly():
            # Already parallel, or torch.func's.
            return self._call_source(module, method, args, kwargs)
        with self.lock:
            call = self._open(module, method, args, kwargs)
            if self._is_plain(module, call):
                if not call.spread.is_alone:
                    self._compare(module, call, args, kwargs)
                    noted = self.mirror.note(call.spread, module, (args, kwargs))
                    self.mirror.check(call.spread, call.spread.agree("plain call", noted))
                return self._call_source(module, method, args, kwargs)
            try:
                return self._step(module, call, method, args, kwargs)
            except LazyError:
                # The first batch gives the parameters their shape; nothing has run yet.
                return self._call_whole(module, call, method, args, kwargs)

    def _open(self, module: nn.Module, method: str | None, args: Any, kwargs: Any) -> Call:
        plan = self.plan(module, method, args, kwargs)
        name = "" if self.comm.num_ranks == 1 else self._name_call(module, method)
        counts = tell_rows(self.comm, self.options, plan, name)
        # Plans are kept by the shapes of the arguments, and so is what follows from them alone.
        key = id(plan), counts, method
        found = self._calls.get(key)
        if found is None or found[0] is not plan:
            if len(self._calls) >= _NUM_CALLS:
                self._calls.clear()
            call = open_call(self.comm, self.options, plan, name, counts)
            found = self._calls[key] = plan, call
        call = found[1].named(name) if name else found[1]
        if self.refused and (call.plan, module.training) in self.refused:
            call = join_rows_within(call, self.comm, self.options, name) or call
        return call

    def _is_plain(self, module: nn.Module, call: Call) -> bool:
        """Whether one call on the source module, where the batch is, does the same."""
        options = self.options
        is_cut = call.spread.is_local or call.plan.num_shards > 1
        if is_cut or options.recompute or options.cuda_graphs:
            return False
        if torch.is_grad_enabled() and call.plan.sizes and len(options.slots) > 1:
            return False  # its backward, too, must have the threads of a slot
        return not call.spread.is_alone or options.slots[0].device == home_device(module)

    def _step(
        self, module: nn.Module, call: Call, method: str | None, args: Any, kwargs: Any
    ) -> Any:
        options = self.options
        spread = call.spread
        if not spread.is_alone:
            self._compare(module, call, args, kwargs)
        shards = self._scatter(call, args, kwargs)
        places = call.places
        found = self.replicas.refresh(
            module,
            [call.slots[k] for k in places],
            sizes=[call.rows[k] for k in spread.mine] if spread.is_local else call.rows,
            shards=range(len(places)) if spread.is_local else places,
        )
        replicas, model = found[: len(spread.mine)], found[0]
        trial = self.habits.start(
            module,
            find_tensors((*args, *kwargs.values())),
            may_repeat=1 in call.rows and has_batch_norm(module),
            can_watch=self.can_watch,
        )
        eager = self._eager(call, method)
        # Before the forwards, which may write what is compared.
        mirrored = None
        if not spread.is_alone:
            version = self.replicas.version
            mirrored = self.mirror.note(spread, module, (args, kwargs), version)
        # One device would not cut such a batch: its one shard draws as the plain module would.
        is_plain = call.plan.num_shards == 1
        if is_plain:
            trial.draw_plainly()
        try:
            outputs, changes, notes = run_shards(
                replicas,
                shards,
                self._runner(module, call, trial, model.home),
                model=model,
                method=method,
                recompute=options.recompute,
                eager=eager,
                carried=self._carried(call),
                captures=self.captures,
                note=lambda: (trial.look(), mirrored),
            )
            facts = [seen for seen, _ in notes]
            if not spread.is_alone:
                self.mirror.check(spread, [seen for _, seen in notes])
            verdict = trial.judge(changes, facts, call.rows, is_local=spread.is_local)
            if verdict is Verdict.STANDS:
                if not spread.is_alone:
                    spread.draw_alike(trial.draws, [seen.drawn for seen in facts])
                    if is_plain:
                        spread.pass_on_generator()
                output = self._gather(call, outputs, method)
                if eager is not None:
                    output = eager.tie(output, changes)
                self._keep(call, changes)
                return output
        except BaseException as error:
            trial.undo()
            again = self._learn(module, call, error)
            if again is None:
                _note_whole(call.plan, error)
                raise
            trial.restore_inputs()
            call, verdict = again, Verdict.AGAIN
        if verdict is Verdict.WHOLE or self._is_plain(module, call):
            output = self._call_whole(module, call, method, args, kwargs)
            if verdict is Verdict.WHOLE:
                for cell, key, tensors in find_carried(changes, call.rows):
                    self.replicas.carry(cell, key, tensors)
            return output
        return self._step(module, call, method, args, kwargs)

    def _learn(self, module: nn.Module, call: Call, error: BaseException) -> Call | None:
        """What to do differently after this error; None if it is the user's."""
        options = self.options
        if _is_meeting_needed(error) and not self.habits.is_together:
            self.habits.is_together = True
            return call
        if not is_norm_refusal(error):
            return None
        name = f"{call.spread.place.partition(' on ')[0]}, rows joined#{call.spread.number}"
        joined = join_rows_within(call, self.comm, options, name)
        if joined is not None:
            self.refused.add((call.plan, module.training))
        return joined

    def _scatter(self, call: Call, args: Any, kwargs: Any) -> list[Any]:
        """Per shard of the call its arguments; None where another rank has its rows."""
        options, mine = self.options, call.spread.mine
        if not call.spread.is_local:
            return list(scatter((args, kwargs), options.slots, plan=call.plan, only=mine))
        first, inverse = call.own_rows.start, 1 / (call.spread.weight or 1)
        args, kwargs = map_tensors(
            lambda t: scale_gradient(align_rows(t, first, options.dim), inverse), (args, kwargs)
        )
        shards: list[Any] = [None] * call.plan.num_shards
        if call.cut is not None:
            shards[mine.start : mine.stop] = scatter((args, kwargs), options.slots, plan=call.cut)
        return shards

    def _gather(self, call: Call, outputs: Sequence[Any], method: str | None) -> Any:
        options = self.options
        output = gather(
            outputs,
            options.output,
            options.dim,
            rows=call.output_rows,
            weights=call.rows,
            out_dims=options.out_dims if method is None else None,
            reduction=options.reduction,
        )
        weight = call.spread.weight
        return output if weight == 1 else map_tensors(lambda t: scale_gradient(t, weight), output)

    def _eager(self, call: Call, method: str | None) -> EagerBackward | None:
        options = self.options
        if not options.eager_backward or method is not None or not torch.is_grad_enabled():
            return None
        return options.make_eager(call.rows)

    def _keep(self, call: Call, changes: Changes) -> None:
        """Bring what the forwards wrote to the source module."""
        if changes.are_none:
            return
        own = call.own_rows if call.spread.is_local else None
        for cell, key, tensors in self.writer.write(changes, call.rows, own, call.spread.weight):
            self.replicas.carry(cell, key, tensors)
        self.replicas.mark_dirty(changes.cells)
        self.replicas.mark_moved(changes.parted)

    def _carried(self, call: Call) -> list[Any]:
        carried, mine = self.replicas.carried, call.spread.mine
        if not call.spread.is_local or not carried:
            return carried
        return [carried[k - mine.start] if k in mine else {} for k in range(call.plan.num_shards)]

    def _compare(self, module: nn.Module, call: Call, args: Any, kwargs: Any) -> None:
        form = (call.plan, module.training, torch.is_grad_enabled())
        self.mirror.compare(call.spread, module, (args, kwargs), form, self._setting)

    def _setting(self) -> str:
        """What the user said, where it must be the same in every rank."""
        options, (_, buffers) = self.options, self._arguments
        said = {
            name: value
            for name, value in vars(options).items()
            if name not in ("slots", "output", "workers")
        }
        return f"{len(options.slots)} slots, buffers={buffers}, {said}"

    def _runner(self, module: nn.Module, call: Call, trial: Trial, home: torch.device) -> Runner:
        is_serial = (
            self.habits.must_take_turns((call.plan, torch.is_grad_enabled()))
            or is_serial_forced()
            or trial.drawing == "swap"
        )
        return make_runner(
            self.serial if is_serial else self.threads,
            call.shards,
            drawing=trial.drawing,
            together=self.habits.is_together
            or (self.options.sync_batch_norm and has_batch_norm(module)),
            draws=trial.draws,
            home=home,
            lock=self.replicas.lock,
            spread=call.spread,
            kind=(call.kind, module.training, torch.is_grad_enabled()) if self.can_watch else None,
        )

    def plan(self, module: nn.Module, method: str | None, args: Any, kwargs: Any) -> SplitPlan:
        options, comm = self.options, self.comm
        in_dims, names = options.in_dims, list[str]()
        if in_dims is not None:
            names = self.parameter_names(module, method)
            if method is not None and isinstance(in_dims, Mapping):
                # Said of forward: what another method has no parameter for does not concern it.
                foreign = {*self.parameter_names(module, None)} - {*names, *kwargs}
                in_dims = {key: spec for key, spec in in_dims.items() if key not in foreign}
        num_slots, split = len(options.slots), options.split
        if options.batch == "local" and comm.num_ranks > 1:
            own = slots_of_rank(comm.rank, num_slots, comm.num_ranks)
            num_slots = len(own)
            split = split if isinstance(split, str) else [split[k] for k in own]
        return plan_split(
            args,
            kwargs,
            num_slots=num_slots,
            dim=options.dim,
            in_dims=in_dims,
            split=split,
            parameter_names=names,
        )

    def form(self, module: nn.Module) -> Form:
        """What the options say of the batches of a loader."""
        is_plain = self.options.in_dims is None
        names = () if is_plain else tuple(self.parameter_names(module, None))
        return self.options.make_form(names)

    def parameter_names(self, module: nn.Module, method: str | None) -> list[str]:
        """The names of a method's positional parameters."""
        function = getattr(module, method or "forward")
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = inspect.signature(function).parameters.values()
        return [parameter.name for parameter in found if parameter.kind in kinds]

    def _call_source(self, module: nn.Module, method: str | None, args: Any, kwargs: Any) -> Any:
        """One call with everything, on the source module."""
        function = module if method is None else getattr(module, method)
        args, kwargs = self.to_slot(module, args, kwargs)
        with use_num_threads(self.options.threads_per_replica):
            return function(*args, **kwargs)

    def _call_whole(
        self, module: nn.Module, call: Call, method: str | None, args: Any, kwargs: Any
    ) -> Any:
        """One call with everything, because the module initialises itself from what it sees."""
        if call.spread.is_local:
            raise RankError(_MSG_LOCAL)
        return self._call_source(module, method, args, kwargs)

    def to_slot(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments for a call on the source module: on its device if that is an accelerator."""
        if self.can_watch:
            return args, kwargs
        moved: tuple[Any, Any] = move((args, kwargs), home_device(module))
        return moved


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_NUM_CALLS = 1024
_MSG_LOCAL = (
    "the module initialises itself from the first batch it sees, and with batch='local' each rank "
    "sees other rows; run one whole batch through the module before it is wrapped, the same one in "
    "every rank"
)


def _is_meeting_needed(error: BaseException) -> bool:
    """Whether a shard, here or in another rank, called a function that lets the shards meet."""
    if isinstance(error, MeetingNeeded):
        return True
    return isinstance(error, RankError) and MeetingNeeded.__name__ in str(error)


def _note_whole(plan: SplitPlan, error: BaseException) -> None:
    """Say which tensors no shard got its rows of: often the reason why shapes do not fit."""
    whole = [leaf for leaf in plan.leaves if leaf.action == "whole" and "[" in leaf.description]
    if whole and isinstance(error, Exception):
        named = ", ".join(f"{leaf.path} {leaf.description}" for leaf in whole)
        note_shard(error, f"given whole to every shard: {named}; see model.explain() and in_dims=")
