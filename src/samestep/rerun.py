"""A function whose graph keeps no tensors: what a backward asks for is computed by a second run.

What it holds: :class:`Rerun`. Why: ``torch.utils.checkpoint`` does the same, and more that is not
needed here; what it does for each tensor took some 4 % of a training step (see decision 0025).

Guarantees:
- The second run sees what the first saw of its arguments, random numbers, autocast and default
  device; it is run as far as the last tensor that was saved. If an argument was written in place
  since, or if it computes other tensors (their number, shapes, dtypes, devices), that is an error.
- A tensor is forgotten when it is handed out, also where the graph is kept; each backward runs the
  function again. Any order of derivative; backward or ``torch.utils.checkpoint`` in the function.
- No object here is part of a cycle: what a graph held is free when the graph is.
Must not: know modules, or what else a function reads; that is for the caller to restore.

[Note: one backward at a time] Tensors are numbered as they are saved, and found by that number in
the list that a second run made. There is one list, of the backward that asked last. If two take
turns on one graph (one runs in a hook of the other), the first finds its list gone, and the
function runs once more.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from samestep.holders import storage_of
from samestep.intercept import unseen
from samestep.rng import Moment
from samestep.tree import iter_leaves, open_container

__all__ = ["Rerun"]

_NO_TASK = -1  # what torch says outside of a backward
_UNKNOWN = -1  # the version of an inference tensor
# Entries of all that a function returns: up to here, what it does after the last saved tensor takes
# less time than to end it by an exception, which is thrown through torch's C++.
_SMALL = 4096


class Rerun:
    """One call of a function, and its second runs.

    Args:
        function: what to call; it must do the same again.
        device: where it computes.
        find_written: returns the tensors that somebody writes when a second run is over, to bring
            them back to what they were before; asked while it runs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: torch.device,
        find_written: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self._function = function
        self._device = device
        self._find_written = find_written
        self._looks: list[tuple[Any, ...]] = []  # of the tensors that the first run saved
        self._is_short = False  # whether what comes after the last saved tensor is little
        self._task = _NO_TASK
        # Of the last second run, for this task, with the versions that they had when saved.
        self._tensors: list[tuple[Tensor, int] | None] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function for the first time."""
        with unseen():
            inputs = [x for _, x in iter_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self._versions = [(x, x._version) for x in inputs if not x.is_inference()]
        self._surroundings = _Surroundings(self._device, inputs)
        self._arguments = _copy((args, kwargs))  # the function may change what they are in
        with saved_tensors_hooks(self._note, self._find):
            output = self._function(*args, **kwargs)
        with unseen():
            returned = (x for _, x in iter_leaves(output) if isinstance(x, Tensor))
            self._is_short = sum(map(Tensor.numel, returned)) <= _SMALL
        return output

    def _note(self, tensor: Tensor) -> int:
        # Here and below one block and no call of our own: each would be made for every tensor.
        looks = self._looks
        with unseen():
            looks.append((tensor.dtype, tensor.device, tensor.shape))
        return len(looks) - 1

    def _find(self, index: int) -> Tensor:
        task = torch._C._current_graph_task_id()
        saved = self._tensors[index] if task == self._task != _NO_TASK else None
        if saved is None:  # see [Note: one backward at a time]
            tensors = self._run_again()
            self._task, self._tensors = task, tensors
            saved = tensors[index]
            assert saved is not None
        self._tensors[index] = None
        tensor, version = saved
        with unseen():
            if version != _UNKNOWN and tensor._version != version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation in forward: [{tensor.dtype} {list(tensor.shape)}] is at "
                    f"version {tensor._version}; expected version {version}"
                )
        return tensor

    def _run_again(self) -> list[tuple[Tensor, int] | None]:
        with unseen():
            is_changed = any(tensor._version != version for tensor, version in self._versions)
        if is_changed:
            raise RuntimeError(
                "an argument of the forward was modified by an inplace operation after the forward "
                "began; with recompute=True the forward runs again in backward and needs it as it "
                "was"
            )
        found = _Found(self._looks, self._find_written, is_short=self._is_short)
        with contextlib.ExitStack() as stack:
            self._surroundings.restore(stack)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(found.take, _keep))
            args, kwargs = _copy(self._arguments)
            try:
                self._surroundings.variables.copy().run(self._function, *args, **kwargs)
            except Exception:
                if not found.is_complete:  # else it is what ended the run, whatever became of it
                    raise
        found.check()
        return found.tensors


class _Enough(Exception):
    """All tensors that the first run saved are there."""


class _Found:
    """The tensors that a second run makes, compared with those of the first by their looks."""

    def __init__(
        self,
        looks: list[tuple[Any, ...]],
        find_written: Callable[[], Sequence[Tensor]],
        *,
        is_short: bool,
    ) -> None:
        self._looks = looks
        self._is_short = is_short
        self._find_written = find_written
        self._written: set[int] | None = None  # where they lie; not known before it runs
        self._num = len(looks)
        self.tensors: list[tuple[Tensor, int] | None] = []
        self._others: list[str] = []
        self._num_more = 0

    @property
    def is_complete(self) -> bool:
        """Whether all are there."""
        return len(self.tensors) == self._num

    def take(self, tensor: Tensor) -> Tensor:
        """Keep one; the graph of the second run gets it without its own graph, as a cycle else."""
        tensors = self.tensors
        index = len(tensors)
        if index == self._num:
            # It is another function now, or caught what should have ended it.
            self._num_more += self._is_short
            return tensor
        with unseen():
            look = (tensor.dtype, tensor.device, tensor.shape)
            if look != self._looks[index]:
                self._others.append(
                    f"tensor {index}: {_tell(self._looks[index])}, then {_tell(look)}"
                )
            if tensor.requires_grad:
                tensor = tensor.detach()
            written = self._written
            if written is None:
                written = self._written = self._ask()
            if written and storage_of(tensor) in written:
                with torch.no_grad():
                    tensor = tensor.clone()
            tensors.append((tensor, _UNKNOWN if tensor.is_inference() else tensor._version))
        if index + 1 == self._num and not self._is_short:
            raise _Enough
        return tensor

    def _ask(self) -> set[int]:
        return {*filter(None, map(storage_of, self._find_written()))}

    def check(self) -> None:
        """Say so if they are others."""
        others = self._others
        found = len(self.tensors) + self._num_more
        if found != self._num:
            others = [f"{self._num} tensors, then {found}"]
        if others:
            raise RuntimeError(
                "the forward ran again in backward, for recompute=True, and saved other tensors "
                "than the first time: " + "; ".join(others) + ". It must do the same both times: "
                "depend on nothing that changes in between"
            )


class _Surroundings:
    """What a run sees of its thread, and a second run is to see."""

    def __init__(self, device: torch.device, inputs: list[Tensor]) -> None:
        self._kinds = tuple(sorted({"cpu", device.type} - {"meta"}))
        self._autocast = self._read_autocast()
        self._default_device = torch.get_default_device()
        self._moment = Moment()
        self.variables = contextvars.copy_context()
        self._states: tuple[list[int], list[Tensor]] = [], []
        if device.type not in ("cpu", "meta"):
            self._states = get_device_states(*inputs)

    def _read_autocast(self) -> tuple[Any, ...]:
        kinds = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in self._kinds
        ]
        return torch.is_autocast_cache_enabled(), kinds

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Be there again until the stack is left."""
        stack.enter_context(self._moment.again())
        devices, states = self._states
        if devices:
            kind = self._kinds[-1]
            stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            set_device_states(devices, states, device_type=kind)
        if self._read_autocast() != self._autocast:
            cache, kinds = self._autocast
            for kind, enabled, dtype in kinds:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=cache))
        if torch.get_default_device() != self._default_device:
            stack.enter_context(self._default_device)


def _copy(tree: Any) -> Any:
    """The same leaves in containers of their own."""
    opened = open_container(tree)
    return tree if opened is None else opened.rebuild([_copy(child) for child in opened.children])


def _tell(look: tuple[Any, ...]) -> str:
    dtype, device, shape = look
    return f"{dtype} on {device}, {list(shape)}"


def _keep(tensor: Tensor) -> Tensor:
    return tensor
