"""One forward and its backward, recorded as CUDA graphs.

What it holds: :func:`record`, the one place that speaks to ``torch.cuda.graph``, and
:class:`Recording`. Why not ``torch.cuda.make_graphed_callables``: it captures every device on one
stream, that of the first device; in the mode in which any other thread's call for memory fails; and
its backward, replayed twice (``retain_graph``), reads memory that was given away meanwhile.

Guarantees: the device's own generator is never part of a capture, so random numbers go on as before
even after a capture that failed. Recordings are made one at a time in a process.
Must not: know modules, or decide what is recorded.

[Note: a capture that failed] torch says of it that generator and allocator may be left "in all
kinds of weird states". What is known of them is mended here: the generator (a clone stands in for
it), the allocator (told that the capture has ended), the current stream (set back), and the graph
(kept, since the allocator may refer to it). What would surely fail is found before: a forward or
backward that waits for the device is refused while it still runs as ever.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Recording", "RecordingError", "differentiate", "find_setting", "record"]


class RecordingError(RuntimeError):
    """What was to be recorded cannot be; nothing was tried."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(eq=False, repr=False)
class Recording:
    """A forward and its backward in static memory, which each run writes anew.

    Attributes:
        run: the forward, again.
        outputs: what it writes.
        at: which of them requires a gradient; None: none does, and there is no backward.
        arriving: where the backward reads the gradient of that output.
        run_backward: the backward, again; several times after one forward, if need be.
        gradients: what it writes, one per leaf; None where nothing flows.
        held: what must stay in memory.
    """

    run: Callable[[], None]
    outputs: list[Tensor]
    at: int | None = None
    arriving: Tensor | None = None
    run_backward: Callable[[], None] = _nothing
    gradients: list[Tensor | None] = field(default_factory=list)
    held: Any = None

    def differentiate(self, gradient: Tensor) -> list[Tensor | None]:
        """Run the backward; returns :attr:`gradients`."""
        assert self.arriving is not None
        self.arriving.copy_(gradient)
        self.run_backward()
        return self.gradients

    def clear(self) -> None:
        """Forget all results."""
        for tensor in (*self.outputs, *self.gradients):
            if tensor is not None:
                tensor.zero_()


def record(
    function: Callable[[], list[Tensor]],
    leaves: Sequence[Tensor],
    at: int | None,
    device: torch.device,
) -> Recording:
    """Record a function of static tensors, and its backward.

    Args:
        function: reads memory that stays where it is, and nothing else that may change.
        leaves: what is differentiated by.
        at: which of the tensors that it returns requires a gradient.
        device: where everything is.

    Raises:
        RecordingError: it cannot be recorded.
        RuntimeError: CUDA's, where that was seen only while recording.
    """
    with _lock, torch.cuda.device(device), _spare_generator(device), _without_autocast_cache():
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        # This context brings the current stream back if a capture fails; torch's own then does not.
        with torch.cuda.stream(stream):
            _warm_up(function, leaves, at)
            pool, forward = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            with _capturing(forward, pool, stream):
                outputs = function()
            made = Recording(forward.replay, [output.detach() for output in outputs], at)
            if at is not None:
                backward = torch.cuda.CUDAGraph()
                made.arriving = torch.zeros_like(outputs[at], requires_grad=False)
                with _capturing(backward, pool, stream):
                    made.gradients = differentiate(outputs[at], leaves, made.arriving)
                made.run_backward = backward.replay
                made.held = outputs  # and with them the activations, which each backward reads
        current.wait_stream(stream)
    return made


def differentiate(
    output: Tensor, leaves: Sequence[Tensor], gradient: Tensor
) -> list[Tensor | None]:
    """The gradients of ``leaves``, outside of autocast, as a script's backward is; the graph is
    kept."""
    with torch.autocast(output.device.type, enabled=False):
        return list(
            torch.autograd.grad(output, leaves, gradient, retain_graph=True, allow_unused=True)
        )


def find_setting(device: torch.device) -> tuple[Any, ...]:
    """What else decides which kernels run, and where: recorded, it would not be asked again."""
    kind = device.type
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        # Not by the older functions, which fail where a script uses these.
        *[module.fp32_precision for module in _PRECISIONS],
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.cuda.current_stream(device).cuda_stream if kind == "cuda" else 0,
    )


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_lock = threading.Lock()  # torch allows one capture at a time in a process
_failed: list[Any] = []  # see [Note: a capture that failed]
_PRECISIONS: list[Any] = [
    torch.backends,
    torch.backends.cuda.matmul,
    torch.backends.cudnn,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]  # made when torch is imported
    torch.backends.cudnn.rnn,
]
_NUM_WARM_UPS = 3  # as torch has it: libraries choose algorithms and make workspaces meanwhile


def _warm_up(
    function: Callable[[], list[Tensor]], leaves: Sequence[Tensor], at: int | None
) -> None:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(_NUM_WARM_UPS):
            # The first may wait, while libraries start.
            torch.cuda.set_sync_debug_mode("warn" if number else before)
            try:
                outputs = function()
                if at is not None:
                    differentiate(outputs[at], leaves, torch.ones_like(outputs[at]))
            finally:
                torch.cuda.set_sync_debug_mode(before)
    if any("called a synchronizing" in str(warning.message) for warning in seen):
        raise RecordingError("it waits for the device (.item(), .cpu(), a mask as an index)")


@contextlib.contextmanager
def _capturing(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
    # "thread_local": other threads, such as a loader's, may ask for memory meanwhile.
    context = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    try:
        with context:
            yield
    except BaseException:
        _failed.append(graph)
        end: Any = getattr(torch._C, "_cuda_endAllocateToPool", _nothing)
        with contextlib.suppress(Exception):  # it may have ended, or torch renamed the function
            end(stream.device.index, pool)
        raise


@contextlib.contextmanager
def _spare_generator(device: torch.device) -> Iterator[None]:
    """Let a clone stand in for the state of the device's generator."""
    generator = torch.cuda.default_generators[device.index]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """A parameter cast once and kept would be the parameter of today in every replay."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
