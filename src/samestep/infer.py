"""Inference over any iterable of batches: whole batches on several slots, outputs in order.

What it holds: :func:`map_batches`. Why: in inference nothing ties the rows of a batch together, so
a batch need not be cut. Each slot takes the next whole batch as soon as it is free; nothing waits
for the slowest shard, no output is joined, and slots of unlike speed balance themselves.

Guarantees: outputs do not depend on the number of slots, on timing, or on which slot ran a batch;
the source module is left as it was; when the iteration ends, in whatever way, nothing runs.
Must not: cut batches into shards, or own the bookkeeping of order and bounds (``lookahead``).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch import nn

from samestep.batches import Form, is_collated
from samestep.context import use_num_threads
from samestep.devices import Device, resolve_device
from samestep.lookahead import Lookahead
from samestep.module import DataParallel
from samestep.progress import Meter, Progress
from samestep.regroup import regroup
from samestep.rounds import share_rounds
from samestep.whole import WholeBatches
from samestep.workers import pool

__all__ = ["map_batches"]

Call = Callable[[Any, Any], Any]

# Batches per slot that may be out at one time. With fewer than about five, a slot that is four
# times as slow as the others would make them wait when its batch is the one whose turn it is.
_AHEAD = 6


def map_batches(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    ordered: bool = True,
    progress: bool | Callable[[Progress], Any] = False,
    batch_size: int | None = None,
    call: Call | None = None,
    max_in_flight: int | None = None,
    device_ids: Sequence[Device] | None = None,
    replicas: int | None = None,
    output_device: Device | None = None,
) -> Iterator[Any]:
    """Run a model on every batch of a loader, several batches at a time, and yield the outputs.

    Each slot takes the next whole batch when it is free. With several ranks each takes every so
    manieth batch, and all get all outputs, always in order. Everything runs in
    ``torch.inference_mode``: outputs have no graph and cannot get one (``output.clone()`` can).

    Args:
        model: a :class:`DataParallel`, whose slots are used; or any module, with ``device_ids`` and
            ``replicas``. It runs in the mode it is in: call ``model.eval()`` first.
        loader: any iterable of batches. It is iterated by one worker thread at a time, ahead of the
            consumer, so it must not use the memory of a batch again for the next.
        ordered: True: one output per batch, in their order. False: as they become ready.
        progress: True: a bar (tqdm if it is installed); or a function that is called with the
            figures so far (``num_batches``, ``num_rows``, ``seconds``, ``total``) per output.
        batch_size: rows. The stream of rows is cut anew into batches of this size, the last one
            smaller; None: batches as they come. Rows are found as in :func:`split_loader`; a list
            that is the batch holds positional arguments, unless ``call`` is given.
        call: ``call(model, batch)`` returns the output, where ``model`` is a replica. Default: a
            tuple or list becomes positional arguments, a mapping keyword arguments, anything else
            the only argument.
        max_in_flight: the most batches that are taken from the loader and whose output is not yet
            handed over; bounds memory. Default: 6 per slot.
        device_ids, replicas: of a plain module, as in :class:`DataParallel`.
        output_device: where outputs land; None: the wrapper's own ``output_device``, else the CPU.

    Returns:
        An iterator of outputs. It may be closed, or left by ``break``, at any time.

    Raises:
        TypeError, ValueError: an argument that cannot be met, at once.
        SplitError: in the iteration, for ``batch_size``: a batch has no rows to count, or it is
            not clear whether a list holds rows or columns.
        BaseException: in the iteration: what the loader, ``call`` or the model raised, with a note
            that names the batch, after the outputs of the batches before it (if ``ordered``).

    Warns:
        UserWarning: the model is in training mode.

    Exactness:
        An output is, bit for bit, that of the plain module on that batch, in the state in which
        the module was when the iteration began, with the wrapper's ``threads_per_replica``. Random
        numbers depend on the caller's generator and the batch's number alone.

    Example:
        >>> model = nn.Linear(5, 2).eval()
        >>> loader = [torch.randn(rows, 5) for rows in (4, 4, 3)]
        >>> [len(output) for output in map_batches(model, loader, replicas=2)]
        [4, 4, 3]
    """
    wrapper = _wrap(model, device_ids, replicas)
    for name, number in (("batch_size", batch_size), ("max_in_flight", max_in_flight)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"{name} must be an int, got {number!r}")
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if call is not None and not callable(call):
        raise TypeError(f"call must be a function of a model and a batch, got {call!r}")
    if not isinstance(loader, Iterable):
        raise TypeError(f"loader must be an iterable of batches, got {type(loader).__name__}")
    if output_device is None:
        target = wrapper._samestep_options.output or torch.device("cpu")
    else:
        target = resolve_device(output_device, argument="output_device")
    meter = Meter(progress, _len(loader) if batch_size is None else None)
    if wrapper.module.training:
        warnings.warn(
            "the model is in training mode: dropout draws, and BatchNorm normalises each batch by "
            "itself; call model.eval() before map_batches",
            stacklevel=2,
        )
    inference = WholeBatches(
        wrapper.module,
        wrapper._samestep_options,
        wrapper._samestep_runtime,
        call or _call,
        target,
    )
    form = wrapper._samestep_runtime.form(wrapper.module)._replace(
        is_collated=is_collated(loader), is_unpacked=call is None
    )
    limit = max_in_flight or _AHEAD * len(inference.slots)
    is_alone = inference.comm.num_ranks == 1
    own = _iterate(inference, loader, meter, batch_size, form, limit, ordered or not is_alone)
    return own if is_alone else _share(own, inference)


def _iterate(
    inference: WholeBatches,
    loader: Iterable[Any],
    meter: Meter,
    batch_size: int | None,
    form: Form,
    limit: int,
    ordered: bool,
) -> Generator[Any]:
    """The iterator that :func:`map_batches` returns. Nothing runs before its first ``next``."""
    crew: _Crew | None = None
    is_quiet = True
    try:
        inference.begin()
        meter.start()
        batches = iter(loader)
        if batch_size is not None:
            batches = regroup(batches, batch_size, form)
        comm = inference.comm
        mine = itertools.islice(enumerate(batches), comm.rank, None, comm.num_ranks)
        ahead = Lookahead(mine, limit=limit, ordered=ordered)
        # What is yielded is popped: a frame that waits must not keep an output alive.
        while inference.is_alone and (pair := ahead.pull()) is not None:
            inference.run_here(ahead, *pair)
            del pair
            if (taken := ahead.take()) is not None:
                meter.add(taken[1].pop())
                yield taken[1].pop()
        if not inference.is_alone:
            crew = _Crew(inference, ahead)
            is_quiet = False
            crew.start()
        while (taken := ahead.take()) is not None:
            meter.add(taken[1].pop())
            yield taken[1].pop()
    finally:
        try:
            if crew is not None:
                is_quiet = crew.stop()
        finally:
            inference.end(keep=is_quiet)
            meter.close()


def _share(own: Generator[Any], inference: WholeBatches) -> Iterator[Any]:
    """The iterator on several ranks: this rank's outputs in, everyone's outputs for the caller."""
    with contextlib.closing(own):
        yield from share_rounds(own, inference.comm, lambda: inference.draws)


class _Crew:
    """The workers of one iteration.

    Args:
        inference: what they run.
        ahead: where batches come from and outcomes go.
    """

    def __init__(self, inference: WholeBatches, ahead: Lookahead[Any]) -> None:
        self._inference, self._ahead = inference, ahead
        self._places = inference.places
        self._running = pool.lease(len(self._places))
        self._threads: set[int] = set()

    def start(self) -> None:
        """Let all workers begin."""
        # At the interpreter's end workers are frozen wherever they are: stop them before.
        atexit.register(self.stop)
        self._running.send([partial(self._work, place) for place in self._places])

    def stop(self) -> bool:
        """Let the workers end, and wait for them; False if that is not possible."""
        atexit.unregister(self.stop)
        self._ahead.stop()
        # The garbage collector may close an iterator in any thread, also in one of its own.
        if threading.get_ident() in self._threads or sys.is_finalizing():
            self._running.abandon()
            return False
        self._running.wait()
        return True

    def _work(self, place: int) -> None:
        self._threads.add(threading.get_ident())
        inference, cpu = self._inference, torch.device("cpu")
        is_cpu = inference.slots[place].device.type == "cpu"
        with use_num_threads(inference.num_threads if is_cpu else None, keep=True):
            while (pair := inference.context.run(self._ahead.pull, cpu)) is not None:
                inference.run(self._ahead, *pair, place)
                del pair  # not kept while this thread waits for the next


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _wrap(
    model: nn.Module, device_ids: Sequence[Device] | None, replicas: int | None
) -> DataParallel:
    if not isinstance(model, DataParallel):
        return DataParallel(model, device_ids, replicas=replicas)
    for name, value in (("device_ids", device_ids), ("replicas", replicas)):
        if value is not None:
            raise ValueError(
                f"{name} is for a plain module; this DataParallel has {model.num_replicas} slots "
                f"of its own. Leave it out, or pass model.module"
            )
    return model


def _len(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader has a length only if its dataset has one
        return None


def _call(model: Any, batch: Any) -> Any:
    """Hand a batch to a model the way most loaders and models understand each other."""
    if type(batch) in (tuple, list):  # not what is derived from them, such as a PackedSequence
        try:
            return model(*batch)
        except TypeError as error:
            error.add_note(
                f"the batch, a {type(batch).__name__} of {len(batch)}, was passed as so many "
                f"arguments; call=lambda model, batch: model(batch[0]) passes the first alone"
            )
            raise
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch)
