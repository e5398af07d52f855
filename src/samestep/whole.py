"""Whole batches on the replicas of a module: the forward of inference.

What it holds: :class:`WholeBatches`. Why: ``DataParallel`` cuts each batch and waits for all
shards; in inference each replica can have a batch of its own.
Guarantees: what a batch gives depends on the source module, the batch and its number; not on slots,
timing, or the batches before it. The source module is left as it was.
Must not: know loaders, or who asks for which batch when.

[Note: the first batch]
What :mod:`samestep.habits` must learn of a module (does it draw random numbers? does it write its
own parameters?) is seen by watching the default generator and the parameters. So the first batch
runs alone, in the caller's thread; the workers start when it stands.

[Note: late draws]
A module may draw for the first time in a later batch (a sampler that retries, a branch on the
data). Interception would close fast paths of torch and so change bits, therefore it stays off and
the default generator is compared before and after each batch. If it moved, this batch drew, or
another thread did: the loader's, the consumer's. So the batch runs again with interception. If that
draws, its output counts, from the batch's own stream; else the first output does. Either way an
output depends on the batch alone. Not seen: draws in compiled code, and by extensions that take no
generator, if they begin after the first batch.

[Note: state]
A batch must not see what an earlier one left in the same replica, or outputs would depend on which
slot ran what. So each replica is brought back to the source module after each batch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.changes import collect, find_touched
from samestep.context import CallerContext, Shard, ThreadGuard, has_modes, use_num_threads
from samestep.devices import Slot, is_serial_forced, move_tensor, slots_of_rank
from samestep.engine import Job, plan_runs
from samestep.errors import DrawWarning, RankError, note_shard
from samestep.functional import move
from samestep.habits import Verdict
from samestep.holders import storage_of
from samestep.lookahead import Lookahead
from samestep.options import Options
from samestep.replica import LazyError, Replica, home_device
from samestep.rng import Draws, Stream, current_stream, read_default, set_current_stream
from samestep.split import SplitPlan, plan_split
from samestep.tie import find_tensors, map_tensors

__all__ = ["WholeBatches"]

Call = Callable[[Any, Any], Any]


class WholeBatches:
    """Runs whole batches on the replicas of a module.

    Args:
        source: the source module.
        options: what was said to its wrapper.
        runtime: what the wrapper keeps between calls; its replicas are borrowed.
        call: ``call(module, batch)`` hands a batch to a replica.
        target: where outputs land.
    """

    def __init__(
        self, source: nn.Module, options: Options, runtime: Any, call: Call, target: torch.device
    ) -> None:
        comm = runtime.comm
        own = slots_of_rank(comm.rank, len(options.slots), comm.num_ranks) or [0]
        self.slots, self.dim = [options.slots[k] for k in own], options.dim
        self.comm = comm
        self.num_threads = options.threads_per_replica
        self._source, self._runtime = source, runtime
        self._call, self._target = call, target
        self._drawing: Any = None  # how random numbers are ruled; None: not known yet
        self._draws = Draws()
        self._late = Draws()  # of batches that draw although the first did not
        self._has_warned = False
        self._writes_input = False
        self._lent: Any = None
        self._own: dict[int, tuple[Any, set[int]]] = {}
        self._gate = _Gate()

    def begin(self) -> None:
        """Take the caller's settings and the wrapper's replicas."""
        self.context = CallerContext(home_device(self._source))
        self._is_serial = has_modes() or is_serial_forced()
        self._lent = self._runtime.lend()
        self._set, self._habits = self._lent

    def end(self, *, keep: bool) -> None:
        """Give the replicas back, or leave them to those who still run."""
        if keep and self._lent is not None:
            self._set.recover()
            self._runtime.take_back(self._lent)

    @property
    def draws(self) -> Draws:
        """The source of seeds of this iteration."""
        return self._draws

    @property
    def is_alone(self) -> bool:
        """Whether the next batch must run in the caller's thread."""
        return self._is_serial or self._drawing is None

    @property
    def places(self) -> list[int]:
        """The slots that work at one time; others would only take turns with them."""
        devices = [slot.device for slot in self.slots]
        return [run[0] for run in plan_runs(devices, self._runtime.threads.num_workers)]

    def run_here(self, ahead: Lookahead[Any], number: int, batch: Any) -> None:
        """The same in the caller's thread, where Ctrl-C may strike."""
        guard, stream = ThreadGuard(), current_stream()
        if not self.run(ahead, number, batch, 0):
            guard.restore()
            set_current_stream(stream)

    def run(self, ahead: Lookahead[Any], number: int, batch: Any, place: int) -> bool:
        """Run a batch on a slot's replica and put the outcome where it is waited for.

        Returns:
            Whether it has an output; if not, its error is the outcome.
        """
        plan = _count(batch, self.dim)
        rows = None if plan is None else plan.num_rows
        try:
            if self._drawing is None:
                output = self._watch(number, batch, rows)
            else:
                replica = self._replicas[place]
                if self._habits.is_compiled:
                    with self._passing(plan):
                        output = self._run(replica, number, batch, rows)
                else:
                    output = self._run_watched(replica, number, batch, rows)
                self._set.restore(replica)
        except BaseException as error:
            _note(error, number, rows, self.slots[place])
            ahead.put(number, error=error)
            return False
        ahead.put(number, [output, rows])
        return True

    def _passing(self, plan: SplitPlan | None) -> contextlib.AbstractContextManager[None]:
        """Let torch.compile, which is not thread-safe, be alone with a batch of new shapes."""
        return self._gate.passing(alone=self._habits.must_take_turns((plan, False)))

    def _watch(self, number: int, batch: Any, rows: int | None) -> Any:
        """See [Note: the first batch]."""
        verdict = Verdict.AGAIN
        while verdict is Verdict.AGAIN:
            try:
                # No replica has rows of its own of what steps carry from call to call.
                self._replicas = self._set.refresh(
                    self._source, self.slots, sizes=(0,) * len(self.slots)
                )
            except LazyError:
                return self._run_source(batch)
            replica = self._replicas[0]
            kept = _Kept(batch, with_values=False)
            trial = self._habits.start(
                self._source,
                find_tensors(batch),
                may_repeat=False,
                can_watch=self._runtime.can_watch,
                watch_first=True,
            )
            self._drawing, self._draws = trial.drawing, trial.draws
            try:
                replica.begin()
                replica.watch()
                output = self._run(replica, number, batch, rows)
                changes = collect([replica], find_touched([replica]), replica)
                verdict = trial.judge(changes, [trial.look()], [rows or 0])
            except BaseException:
                trial.undo()
                raise
            finally:
                self._drawing = None
        if verdict is Verdict.WHOLE:  # it builds or initialises itself from this batch
            return self._run_source(batch)
        self._set.restore(replica)
        self._drawing = self._habits.drawing
        self._writes_input = kept.has_changed()
        if self._drawing == "watch":
            self._draws = Draws(peek=True)
            # Fixed now: what the script does to its generator later must not matter.
            self._late = Draws.fixed()
        return output

    def _run_watched(self, replica: Replica, number: int, batch: Any, rows: int | None) -> Any:
        """See [Note: late draws]."""
        if self._drawing != "watch":
            return self._run(replica, number, batch, rows)
        kept = _Kept(batch, with_values=self._writes_input)
        before = read_default()
        output = self._run(replica, number, batch, rows)
        if read_default() == before:
            return output
        kept.put_back()
        self._set.restore(replica)
        stream = Stream(self._late, number)
        again = self._run(replica, number, batch, rows, stream)
        if not stream.is_used:
            return output
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"batch {number} drew random numbers, which the first batch did not. Outputs are "
                "repeatable all the same, but torch's default generator was moved before this was "
                "seen: seed it anew after map_batches if the script draws from it",
                DrawWarning,
                stacklevel=2,
            )
        return again

    def _run_source(self, batch: Any) -> Any:
        """Let the source module see this batch, as in a plain loop."""
        if self.comm.num_ranks > 1:
            raise RankError(
                "the module initialises itself from the first batch it sees, and each rank sees "
                "another one; run one batch through the module in every rank before map_batches"
            )
        home = home_device(self._source)
        # Not inference mode: parameters that get their shape now must be able to train later.
        with torch.no_grad(), use_num_threads(self.num_threads):
            output = self._call(self._source, move(batch, home))
            return map_tensors(lambda tensor: move_tensor(tensor, self._target), output)

    def _run(
        self,
        replica: Replica,
        number: int,
        batch: Any,
        rows: int | None,
        late: Stream | None = None,
    ) -> Any:
        device = replica.slot.device
        shard = _make_shard(rows or 0, device)
        forward = partial(self._forward, replica, batch)
        if late is None:
            job = Job(shard, forward, Stream(self._draws, number), self._drawing)
        else:
            job = Job(shard, forward, late, "intercept")
        count = self.num_threads if device.type == "cpu" else None
        if count is None or count == torch.get_num_threads():
            return self.context.run(job, device)
        with use_num_threads(count, keep=not self.context.is_own_thread):
            return self.context.run(job, device)

    def _forward(self, replica: Replica, batch: Any) -> Any:
        with torch.inference_mode():
            output = self._call(replica.module, move(batch, replica.slot.device))
            own = self._find_own(replica)

            def land(tensor: Tensor) -> Tensor:
                if own and storage_of(tensor) in own:
                    # The next batch on this slot may write there before the consumer has looked.
                    tensor = tensor.clone()
                elif isinstance(tensor, nn.Parameter):
                    tensor = replica.original(tensor)
                return move_tensor(tensor, self._target)

            return map_tensors(land, output)

    def _find_own(self, replica: Replica) -> set[int]:
        """Where the tensors lie that the replica holds as copies."""
        copies, found = self._own.get(replica.slot.index, (None, set()))
        if copies is not replica.copies:  # another list whenever a tensor was exchanged
            found = {storage_of(link.copy) for link in replica.copies} - {0}
            self._own[replica.slot.index] = (replica.copies, found)
        return found


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


class _Kept:
    """A batch that a forward may change in place, although it may have to run again.

    Args:
        with_values: keep copies; otherwise only of tensors that do not tell when they change.
    """

    def __init__(self, batch: Any, *, with_values: bool) -> None:
        self._tensors = find_tensors(batch)
        self._versions = [None if t.is_inference() else t._version for t in self._tensors]
        self._copies: list[Tensor | None] = [None] * len(self._tensors)
        if with_values or None in self._versions:
            self._copies = [
                tensor.detach().clone() if with_values or version is None else None
                for tensor, version in zip(self._tensors, self._versions, strict=True)
            ]

    def has_changed(self) -> bool:
        """Whether a tensor was written, as far as is known."""
        return any(
            not torch.equal(tensor, copy)
            if version is None and copy is not None
            else tensor._version != version
            for tensor, version, copy in self._each()
        )

    def put_back(self) -> None:
        """Let the batch be as it was.

        Raises:
            RuntimeError: a tensor was written for the first time, and no copy of it was kept.
        """
        for tensor, version, copy in self._each():
            if copy is not None:
                with torch.inference_mode():
                    tensor.copy_(copy)
            elif tensor._version != version:
                raise RuntimeError(
                    "forward changed its input in place, which it did not do with the first batch, "
                    "and the batch had to run again because random numbers were drawn meanwhile; "
                    "clone the input in forward"
                )

    def _each(self) -> Iterator[tuple[Tensor, int | None, Tensor | None]]:
        return zip(self._tensors, self._versions, self._copies, strict=True)


class _Gate:
    """Lets batches run together, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = self._num_waiting = 0
        self._is_closed = False

    @contextlib.contextmanager
    def passing(self, *, alone: bool) -> Iterator[None]:
        with self._changed:
            self._num_waiting += alone  # those who come later wait for it
            if alone:
                self._changed.wait_for(lambda: not self._num_inside)
            else:
                self._changed.wait_for(lambda: not self._is_closed and not self._num_waiting)
            self._num_waiting -= alone
            self._num_inside += 1
            self._is_closed = alone
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._is_closed = False
                self._changed.notify_all()


@functools.lru_cache(maxsize=64)
def _make_shard(rows: int, device: torch.device) -> Shard:
    """One shard of one: wrappers inside see that they run in parallel already."""
    return Shard(0, 1, 0, rows, rows, device)


def _count(batch: Any, dim: int) -> SplitPlan | None:
    """How many rows a batch has, with all shapes; None where that cannot be said."""
    try:
        return plan_split((batch,), {}, num_slots=1, dim=dim)
    except ValueError:
        return None


def _note(error: BaseException, number: int, rows: int | None, slot: Slot) -> None:
    size = "" if rows is None else f"{rows} rows, "
    note_shard(error, f"in batch {number} ({size}slot {slot.index}, {slot.device})")
