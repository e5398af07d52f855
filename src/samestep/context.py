"""What a thread knows: the current shard, and the caller's settings carried into each replica.

What it holds: :class:`Shard` and :func:`current_shard`; :class:`CallerContext`, which records the
settings that torch and Python keep per thread (grad mode, inference mode, autocast, default device,
streams, saved-tensor hooks, context variables) and sets them in another thread for the length of a
``with``. Why: a worker thread starts with the defaults, so an outer ``no_grad`` or ``autocast``
would be lost in every replica but the caller's.

Guarantees: leaving the ``with`` restores the thread, also after an exception.
Must not: decide anything. A function or dispatch mode cannot be carried: see :func:`has_modes`.

[Note: modes] A ``TorchFunctionMode`` or ``TorchDispatchMode`` object lives on one thread's stack
and may keep state that is not thread-safe. It is not copied: while one is active, the engine runs
the shards one after another in the caller's own thread, where it sees every operation. The one
exception is ``torch.device(...)`` as a context, which is a function mode too: a plain value, so it
is carried.

[Note: checkpoint around] Activation checkpointing around the whole wrapper counts the tensors that
are saved under its hooks and expects the same ones, in the same order, when it runs the forward
again. Shards save from several threads, in no fixed order, so its hooks are kept out of them:
gradients are right, but only the caller's own tensors are checkpointed. To save memory, checkpoint
inside the module.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.utils._device import DeviceContext

__all__ = [
    "CallerContext",
    "Shard",
    "ThreadGuard",
    "close_checkpoints",
    "current_shard",
    "has_modes",
    "make_shards",
    "must_run_plainly",
    "use_num_threads",
    "use_shard",
]

T = TypeVar("T")
_Streams = tuple[int, list[torch.Stream]]
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


@dataclass(frozen=True)
class Shard:
    """The shard that runs in this thread.

    Attributes:
        index: k, from 0.
        num_shards: K of this call.
        start: the first row of the batch in this shard.
        stop: one past the last.
        num_rows: B, the rows of the whole batch.
        device: where the shard runs.
    """

    index: int
    num_shards: int
    start: int
    stop: int
    num_rows: int
    device: torch.device

    def describe(self) -> str:
        """Return the text that is noted on errors: ``in shard 2 of 3 (rows 20-29 of 30, cpu)``."""
        rows = f"rows {self.start}-{self.stop - 1}" if self.stop > self.start else "no rows"
        return (
            f"in shard {self.index} of {self.num_shards} ({rows} of {self.num_rows}, {self.device})"
        )


def make_shards(devices: Sequence[torch.device], rows: Sequence[int]) -> list[Shard]:
    """Describe the shards of one call by where they run and how many rows each has."""
    total, stop, shards = sum(rows), 0, list[Shard]()
    for k, (device, count) in enumerate(zip(devices, rows, strict=True)):
        start, stop = stop, stop + count
        shards.append(Shard(k, len(rows), start, stop, total, device))
    return shards


class _Current(threading.local):
    shard: Shard | None = None


_current = _Current()


def current_shard() -> Shard | None:
    """Return the shard whose forward or backward runs in this thread; None outside of one.

    Example:
        >>> import samestep
        >>> samestep.current_shard() is None
        True
    """
    return _current.shard


# The two contexts below are entered once per shard, in forward and in backward. As classes they
# cost a third of what generators cost.


class use_shard:
    """Make ``shard`` the current one of this thread, for the length of a ``with``."""

    __slots__ = ("_before", "_shard")

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __enter__(self) -> None:
        self._before, _current.shard = _current.shard, self._shard

    def __exit__(self, *error: object) -> None:
        _current.shard = self._before


class use_num_threads:
    """Give torch ``count`` intra-op threads in this thread; None leaves the setting alone.

    With ``keep`` the setting stays afterwards: a worker's next job is one of ours again, and going
    back and forth costs torch's thread pools more than the jobs of a small model.

    The getter comes first because torch initialises a thread's setting lazily, at its first use,
    and would overwrite ours then.
    """

    __slots__ = ("_before", "_count", "_keep")

    def __init__(self, count: int | None, *, keep: bool = False) -> None:
        self._count = count
        self._keep = keep

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._count not in (None, self._before):
            torch.set_num_threads(self._count)

    def __exit__(self, *error: object) -> None:
        if not self._keep and self._count not in (None, self._before):
            torch.set_num_threads(self._before)


class ThreadGuard:
    """What this thread had when a run began, to go back to after Ctrl-C.

    Ctrl-C strikes between any two bytecodes of the main thread, also between entering a context and
    the ``try`` that would leave it.
    """

    __slots__ = ("_num_modes", "_num_threads", "_shard")

    def __init__(self) -> None:
        self._shard = _current.shard
        self._num_threads = torch.get_num_threads()
        self._num_modes = torch._C._len_torch_function_stack()

    def restore(self) -> None:
        """Go back."""
        _current.shard = self._shard
        while torch._C._len_torch_function_stack() > self._num_modes:
            torch._C._pop_torch_function_stack()
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)


def has_modes() -> bool:
    """Whether the caller has a function or dispatch mode active. See [Note: modes]."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._len_torch_function_stack() == 0:
        return False
    return any(not isinstance(mode, DeviceContext) for mode in _function_modes())


def must_run_plainly() -> bool:
    """Whether what runs now is about one device: a ``torch.func`` transform, forward-mode
    derivatives, a trace or an export."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_exporting()
    )


class CallerContext:
    """The calling thread's settings, captured once per call.

    Args:
        home: the device of the source module; a default device equal to it becomes each slot's own.
    """

    def __init__(self, home: torch.device | None = None) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._hooks is not None and self._hooks[0].__module__ == "torch.utils.checkpoint":
            self._hooks = (_pass, _pass)  # see [Note: checkpoint around]
        self._autocast = _capture_autocast()
        self._cache = torch.is_autocast_cache_enabled()
        self._device = _default_device()
        self._home = home
        self._streams = _capture_streams()
        self._variables = contextvars.copy_context()
        self._thread = threading.get_ident()
        # What a fresh thread has, but for the grad mode: nothing to enter.
        self._is_default = not (
            self._inference
            or self._streams is not None
            or self._hooks is not None
            or self._device is not None
            or self._autocast
        )

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread whose settings these are."""
        return threading.get_ident() == self._thread

    def run(self, function: Callable[[], T], device: torch.device) -> T:
        """Call ``function`` under the captured settings, in whichever thread this is.

        Each call has its own copy of the context variables: one copy cannot be entered twice.
        """
        before = torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
        try:
            return self._variables.copy().run(self._run, function, device)
        finally:
            # What a shard left on or off: the next one in this thread would see it, and so its bits
            # would depend on who runs which shard.
            if (torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()) != before:
                self._put_back(*before)

    def _put_back(self, grad: bool, autocast: bool) -> None:
        torch._C._set_grad_enabled(grad)
        is_own = threading.get_ident() == self._thread
        kept = {kind for kind, _ in self._autocast} if autocast and is_own else set()
        for kind in _device_types():
            torch.set_autocast_enabled(kind, kind in kept)

    def _run(self, function: Callable[[], T], device: torch.device) -> T:
        is_checkpointed = self._hooks is not None and self._hooks[0] is _pass
        is_own = threading.get_ident() == self._thread
        if is_own and self._streams is None and not is_checkpointed:
            # The caller's own thread has the settings already; its grad mode may be another one
            # by now only inside the stitch's backward, which passes a context of its own.
            return function()
        if self._is_default:
            if torch.is_grad_enabled() == self._grad:
                return function()
            torch._C._set_grad_enabled(self._grad)
            try:
                return function()
            finally:
                torch._C._set_grad_enabled(not self._grad)
        with contextlib.ExitStack() as stack:
            self._enter(stack, device)
            return function()

    def _enter(self, stack: contextlib.ExitStack, device: torch.device) -> None:
        if self._streams is not None:
            own = _capture_streams()
            assert own is not None
            stack.callback(_set_streams, own)
            _set_streams(self._streams)
            # Else torch runs what lies on an accelerator in a thread of the device's, which knows
            # no shard and no stream of random numbers, and where shards that wait for each other
            # would wait for ever.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if device.type not in ("cpu", "meta"):
            stack.enter_context(torch.accelerator.device_index(device.index))
        if self._inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cache))
        if self._hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
        if self._device is not None:
            stack.enter_context(device if self._device == self._home else self._device)


def close_checkpoints(error: BaseException) -> None:
    """Leave the activation checkpoints that an error came through.

    Before torch 2.13 a checkpoint whose function raised left its hooks for saved tensors in the
    thread, until its generator was collected, perhaps by another thread. A worker would run its
    next shards under them.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_filename.endswith(_CHECKPOINT):
            generator = frame.f_locals.get("gen")
            if isinstance(generator, GeneratorType):
                generator.close()


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


@functools.cache
def _device_types() -> list[str]:
    if not torch.accelerator.is_available():
        return ["cpu"]
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return ["cpu", accelerator.type]


def _capture_autocast() -> list[tuple[str, torch.dtype]]:
    """The kinds of device for which it is on, and in which dtype."""
    if not torch._C._is_any_autocast_enabled():
        return []
    return [
        (kind, torch.get_autocast_dtype(kind))
        for kind in _device_types()
        if torch.is_autocast_enabled(kind)
    ]


def _default_device() -> torch.device | None:
    if torch._C._len_torch_function_stack() == 0:
        return None
    devices = [mode.device for mode in _function_modes() if isinstance(mode, DeviceContext)]
    return devices[-1] if devices else None


def _function_modes() -> list[Any]:
    found: list[Any] = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return found


def _pass(value: Any) -> Any:
    return value


def _capture_streams() -> _Streams | None:
    """Of every accelerator the current stream, and which one is current; None if there is none."""
    if len(_device_types()) == 1:
        return None
    indices = range(torch.accelerator.device_count())
    streams = list(map(torch.accelerator.current_stream, indices))
    return torch.accelerator.current_device_index(), streams


def _set_streams(wanted: _Streams) -> None:
    """Make them this thread's own.

    Not by ``with stream``, which keeps what it has to go back to in the stream: of two threads that
    are in one at the same time, each would go back to what the other had. And only those that
    differ: a stream that is set makes its device current, and a process has memory on such a one.
    """
    current, streams = wanted
    for index, stream in enumerate(streams):
        if torch.accelerator.current_stream(index) != stream:
            torch.accelerator.set_stream(stream)
    if torch.accelerator.current_device_index() != current:
        torch.accelerator.set_device_index(current)
