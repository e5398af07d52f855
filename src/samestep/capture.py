"""Which calls of a replica are captured as CUDA graphs, and what a captured call does.

What it holds: :class:`Captures`, what a wrapper with ``cuda_graphs=True`` knows of its replicas'
calls; and :class:`Captured`, one call that is replayed. How a graph is recorded is in
:mod:`samestep.recording`.

A call is captured after a few calls of its form, each pure: nothing was written. It then runs on
copies of its inputs, plainly and replayed, and is dropped if one bit differs: a replay runs the
very kernels of the plain call, so there is no rounding to tolerate; and where bits differ from run
to run anyway, equal ones could not be promised.

Guarantees: what is not captured runs as without the option. No tensor that a caller gets lies in a
graph's memory. A graph whose backward may still come is not replayed: that call runs plainly.
Must not: speak to CUDA.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.backward import MSG_FREED
from samestep.changes import Changes
from samestep.context import Shard, has_modes, use_shard
from samestep.graphs import make_edge, survey
from samestep.links import as_leaf
from samestep.randomness import find_moved, kept_state, read_accelerators, read_state
from samestep.recording import Recording, RecordingError, differentiate, find_setting, record
from samestep.replica import Replica
from samestep.snapshot import Snapshot
from samestep.tree import is_atom, map_leaves, open_container

__all__ = ["Captured", "Captures"]

NUM_CALLS = 3  # of a form, before it is captured: a capture costs about ten calls
MAX_CAPTURED = 8  # per replica: each holds the memory of its activations
_MAX_FORMS = 256

Row = tuple[Replica, Shard, Callable[..., Any], Any]


class Captures:
    """The captured calls of one wrapper, by replica.

    Attributes:
        num_replays: how many shards' forwards were replayed.
        reasons: why others were not; of each there is one warning.
    """

    def __init__(self) -> None:
        self._forms: weakref.WeakKeyDictionary[Replica, dict[Any, _Form]] = (
            weakref.WeakKeyDictionary()
        )
        self._plain: list[_Form] = []  # the forms of a call's shards that were not replayed
        self._is_broken = False
        self.num_replays = 0
        self.reasons: list[str] = []

    def choose(self, rows: Sequence[Row]) -> list[Callable[..., Any]]:
        """Return what to call for each shard: its function, or a replay.

        Args:
            rows: per shard its replica, the shard, the function, and its (args, kwargs).

        In the caller's thread, while no shard runs: nothing of ours meets a capture.
        """
        self._plain.clear()  # a call that failed left its own
        if not _can_capture():
            return [function for _, _, function, _ in rows]
        return [self._choose(*row) for row in rows]

    def note(self, changes: Changes, has_gradients: bool) -> None:
        """Learn what the call's forwards left behind; a replay leaves nothing."""
        is_pure = changes.are_none and not changes.raced and not has_gradients
        for form in self._plain:
            form.num_pure = form.num_pure + 1 if is_pure else 0
        if self._plain and not is_pure:
            self._say("forward writes to the module (BatchNorm in training does)")
        self._plain.clear()

    def _choose(
        self, replica: Replica, shard: Shard, function: Callable[..., Any], pair: Any
    ) -> Callable[..., Any]:
        device = replica.slot.device
        try:
            opened, tensors = _open(pair, device)
        except RecordingError as error:
            self._say(error)
            return function
        key = (shard, replica.module.training, find_setting(device), opened)
        forms = self._forms.setdefault(replica, {})
        form = forms.get(key)
        if form is None and len(forms) >= _MAX_FORMS:
            return function
        if form is None or not form.is_current(replica):
            form = forms[key] = _Form(replica)
        is_open = not (self._is_broken or form.captured or form.is_refused)
        if is_open and form.num_pure >= NUM_CALLS and _count(forms) < MAX_CAPTURED:
            self._capture(form, replica, shard, tensors, pair)
        captured = form.captured
        if captured is None or not captured.is_free:
            self._plain.append(form)
            return function
        self.num_replays += 1
        return lambda *args, **kwargs: captured.run(tensors)

    def _capture(
        self, form: _Form, replica: Replica, shard: Shard, tensors: list[Tensor], pair: Any
    ) -> None:
        index = replica.slot.device.index
        place = contextlib.nullcontext() if index is None else torch.accelerator.device_index(index)
        try:
            with use_shard(shard), kept_state(), place:
                form.captured = _capture(replica, tensors, pair)
        except RecordingError as error:
            form.is_refused = True
            self._say(error)
        except Exception as error:  # which leaves torch's own state in doubt: no second one
            self._is_broken = True
            self._say(f"recording failed, and is not tried again: {error}")

    def _say(self, reason: object) -> None:
        if str(reason) not in self.reasons:
            self.reasons.append(str(reason))
            warnings.warn(
                f"cuda_graphs=True: some calls are not captured and run as without it: {reason}",
                UserWarning,
                stacklevel=2,
            )


class Captured:
    """One call of one replica, replayed.

    Args:
        recording: what is replayed, in static memory.
        shell: what forward returned, around the recording's outputs.
        inputs: where the recording reads the arguments.
        leaves: positions of arguments, and parameters of the replica, whose gradients it computes.
        guarded: tensors that must not be written between a forward and its backward.
    """

    def __init__(
        self,
        recording: Recording,
        shell: Any,
        inputs: list[Tensor],
        leaves: list[Any],
        guarded: list[Tensor],
    ) -> None:
        self._recording, self._shell = recording, shell
        self._inputs, self._leaves, self._guarded = inputs, leaves, guarded
        self._last: Callable[[], _Turn | None] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether no backward may still come that reads what the last forward left."""
        turn = self._last()
        return turn is None or turn.is_done

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The forward; returns new tensors."""
        static = self._recording.outputs
        with torch._C.DisableTorchFunction():
            with torch.no_grad():
                for own, tensor in zip(self._inputs, tensors, strict=True):
                    own.copy_(tensor)
                self._recording.run()
                outputs = [output.clone() for output in static]
            if (at := self._recording.at) is not None:
                turn = _Turn(self._versions())
                self._last = weakref.ref(turn)
                leaves = [tensors[x] if isinstance(x, int) else x for x in self._leaves]
                outputs[at] = _replay(self, turn, outputs[at], *leaves)
        # Deep, as a list of constants in it would be the caller's to change.
        table = zip(static, outputs, strict=True)
        return copy.deepcopy(self._shell, {id(one): other for one, other in table})

    def run_backward(self, turn: _Turn, gradient: Tensor) -> list[Tensor | None]:
        """The backward of that forward; returns new tensors."""
        if torch.is_grad_enabled():
            raise RuntimeError(_MSG_TWICE)
        if turn.is_done:
            raise RuntimeError(MSG_FREED)
        if turn.versions != self._versions():
            raise RuntimeError(_MSG_WRITTEN)
        if torch.is_autocast_enabled(gradient.device.type):
            raise RuntimeError(_MSG_AUTOCAST)
        with torch._C.DisableTorchFunction():
            static = self._recording.differentiate(gradient)
            found = [None if g is None else g.clone() for g in static]
        turn.is_done = not torch._C._autograd._get_current_graph_task_keep_graph()
        return found

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self._guarded]


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_MSG_TWICE = (
    "create_graph=True is not there for a captured forward, whose backward is recorded; use "
    "cuda_graphs=False for a model whose gradients are differentiated"
)
_MSG_WRITTEN = (
    "a parameter or buffer was modified by an inplace operation (an optimizer's step?) between the "
    "forward and its backward; with cuda_graphs=True the backward needs them as they were"
)
_MSG_AUTOCAST = (
    "backward() was called under autocast; with cuda_graphs=True it was recorded outside of it, "
    "where torch advises to call it"
)
_WHY = "operations whose bits differ from run to run are the likely cause"
_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks") and "ward_" in name]


class _Turn:
    """From a forward to the end of its backward; lives as long as the graph it is part of."""

    def __init__(self, versions: list[int]) -> None:
        self.versions = versions
        self.is_done = False


class _Replay(torch.autograd.Function):
    """A captured forward as one node of the shard's graph."""

    @staticmethod
    def forward(ctx: Any, captured: Captured, turn: _Turn, output: Tensor, *leaves: Tensor) -> Any:
        ctx.captured, ctx.turn = captured, turn
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (None, None, None, *ctx.captured.run_backward(ctx.turn, gradient))


_replay: Any = _Replay.apply


class _Form:
    """The calls of one replica that are alike, while it holds the same objects."""

    def __init__(self, replica: Replica) -> None:
        self._age = replica.age
        self._cells = Snapshot(replica.follower.targets)
        self.num_pure = 0
        self.is_refused = False
        self.captured: Captured | None = None

    def is_current(self, replica: Replica) -> bool:
        """Whether every attribute, container and tensor is the one that it was: another number, or
        another memory of a parameter, is another object."""
        if self._age != replica.age and not self._cells.is_current():
            return False
        self._age = replica.age
        return True


def _count(forms: dict[Any, _Form]) -> int:
    return sum(form.captured is not None for form in forms.values())


def _can_capture() -> bool:
    """Whether nothing is active that would have to see each operation."""
    return not (
        has_modes()
        or torch._C._len_torch_function_stack()
        or torch.is_inference_mode_enabled()
        or torch.is_anomaly_enabled()
        or torch._C._autograd._profiler_enabled()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def _open(tree: Any, device: torch.device) -> tuple[Any, list[Tensor]]:
    """What must be the same for a graph to be replayed; and the tensors, whose values need not."""
    tensors: list[Tensor] = []
    return _describe(tree, device, tensors), tensors


def _describe(value: Any, device: torch.device, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        _check_tensor(value, device)
        tensors.append(value)
        first = next(i for i, tensor in enumerate(tensors) if tensor is value)
        return first, value.shape, value.stride(), value.dtype, value.requires_grad
    if is_atom(value):
        return type(value), repr(value)  # 1 and True are equal, and so are 0.0 and -0.0
    opened = open_container(value)
    if opened is None:
        raise RecordingError(f"an argument or output is a {type(value).__name__}")
    kind = (type(value), repr(opened.context), *map(repr, opened.keys))
    return kind, tuple([_describe(child, device, tensors) for child in opened.children])


def _check_tensor(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise RecordingError(f"a tensor is on {tensor.device}, the replica on {device}")
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_nested
    if not is_plain or torch.empty_like(tensor).stride() != tensor.stride():
        raise RecordingError("an argument or output is of a special kind, or has gaps in memory")


def _capture(replica: Replica, tensors: list[Tensor], pair: Any) -> Captured:
    """Capture a call, and see that it gives what the plain one gives."""
    module, device = replica.module, replica.slot.device
    _check_module(replica)
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    args, kwargs = _exchange(pair, tensors, inputs)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    # Leaves of their own for the capture: those of the replica may be part of a graph that is kept,
    # made on another stream, and the backward would wait for that stream.
    fresh = {name: as_leaf(p.detach(), p) for name, p in parameters.items()}
    places: list[Any] = [i for i, t in enumerate(inputs) if t.requires_grad]
    leaves = [inputs[i] for i in places]

    def function() -> list[Tensor]:
        return _open(torch.func.functional_call(module, fresh, args, kwargs), device)[1]

    random, versions = _read_random(), [t._version for t in inputs]
    try:
        output = module(*args, **kwargs)
    except Exception as error:  # on copies; the call itself will tell
        raise RecordingError(f"forward fails on copies of its inputs: {error}") from error
    form, expected = _open(output, device)
    guarded = [link.copy for link in replica.links.values()]
    at = _find_graph(expected, [*inputs, *guarded])
    gradients: list[Tensor | None] = []
    if at is not None:
        gradient = _make_gradient(expected[at])
        gradients = differentiate(expected[at], [*leaves, *parameters.values()], gradient)
        _check_leaves(function()[at], [*leaves, *fresh.values()])
    if [t._version for t in inputs] != versions:
        raise RecordingError("forward changes its input in place")
    if find_moved(random, _read_random()):
        raise RecordingError("forward or backward draws random numbers")
    # Without its graph, which has the inputs' leaves in it, made on the caller's stream.
    plainly = [t.detach() for t in expected]
    output, expected = _exchange(output, expected, plainly), plainly
    places += parameters.values()
    used = [i for i, g in enumerate(gradients) if g is not None]
    if any(gradients[i].layout != torch.strided for i in used):  # type: ignore[union-attr]  # used
        raise RecordingError("a gradient is sparse")
    static = [*leaves, *fresh.values()]
    recording = record(function, [static[i] for i in used], at, device)
    recording.clear()  # a replay that does nothing must not pass for one that does
    shell = _exchange(output, expected, recording.outputs)
    captured = Captured(recording, shell, inputs, [places[i] for i in used], guarded)
    found_form, found = _open(captured.run(tensors), device)
    pairs: list[Any] = list(zip(found, expected, strict=True))
    if at is not None:
        leaves = [tensors[place] if isinstance(place, int) else place for place in places]
        again = differentiate(found[at], leaves, gradient)
        pairs += zip(again, gradients, strict=True)
    if found_form != form or not all(_are_equal(*both) for both in pairs):
        raise RecordingError(f"a replay does not give the bits of the plain call; {_WHY}")
    return captured


def _check_module(replica: Replica) -> None:
    for link in replica.links.values():
        copied = link.copy
        if copied.device != replica.slot.device or copied.layout != torch.strided:
            raise RecordingError(f"the module has a tensor of a special kind or on {copied.device}")
        if link.rows is not None or copied.is_inference():
            raise RecordingError("the module keeps rows of the last batch, or inference tensors")
    everywhere = [getattr(nn.modules.module, f"_global{name}", None) for name in _HOOKS]
    modules = list(replica.module.modules())
    if any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in modules):
        raise RecordingError("the module is compiled: torch.compile has graphs of its own")
    own = [getattr(module, name) for module in modules for name in _HOOKS]
    if any(everywhere) or any(own):
        raise RecordingError("the module has hooks, which a replay would not call")


def _find_graph(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> int | None:
    """Which output requires a gradient."""
    memory = [tensor.untyped_storage().data_ptr() for tensor in outputs]
    foreign = {tensor.untyped_storage().data_ptr() for tensor in others}
    if len({*memory}) < len(memory) or foreign & {*memory}:
        raise RecordingError("an output shares memory with an argument, parameter or other output")
    places = [i for i, output in enumerate(outputs) if output.requires_grad]
    if not outputs or len(places) > 1:
        raise RecordingError("forward returns no tensor, or several that require a gradient")
    return places[0] if places else None


def _check_leaves(output: Tensor, known: Sequence[Tensor]) -> None:
    (found,) = survey([make_edge(output)], ()).leaves
    if not found.keys() <= {id(leaf) for leaf in known}:
        raise RecordingError(
            "a gradient flows to a tensor that is no argument and no registered parameter, or to a "
            "parameter that forward reaches in another way than by its name"
        )


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _make_gradient(output: Tensor) -> Tensor:
    generator = torch.Generator(output.device).manual_seed(0)
    values = torch.randn(output.shape, generator=generator, device=output.device)
    return torch.empty_like(output, requires_grad=False).copy_(values)


def _exchange(tree: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    table = {id(one): other for one, other in zip(old, new, strict=True)}
    return map_leaves(lambda value: table.get(id(value), value), tree)


def _read_random() -> dict[str, Any]:
    return {**read_state(), "accelerators": tuple(read_accelerators().get("states", ()))}
