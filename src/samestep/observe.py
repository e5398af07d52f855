"""One step of a module, run on copies and written down as data.

What it holds: :class:`Call` (arguments that can be given again and again, in another dtype too),
:func:`copy_module`, :func:`run_step`, which runs a module's forward and backward once and returns
a :class:`Record` of everything that the step made and left, and the settings that such a run needs.
Why: whoever compares two ways of running a module must be sure that both started from the same.

Guarantees: modules and arguments are copies, and the default dtype is put back. Every step starts
from the same seeds; whoever calls this keeps the random state.
Must not: compare anything.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from samestep import randomness
from samestep.module import DataParallel
from samestep.rows import is_array
from samestep.tree import iter_leaves, map_leaves

__all__ = [
    "Call",
    "DtypeWatch",
    "Record",
    "as_dense",
    "copy_module",
    "find_dtype",
    "iter_state",
    "run_step",
    "seed_all",
    "use_default_dtype",
    "watch_borders",
]

SEED = 0  # any number: what matters is that every step starts from the same one
Key = tuple[str, str]  # kind of value, path


@dataclass(frozen=True)
class Call:
    """Arguments of a call and what is made of its output.

    Attributes:
        loss: from the output to a 0-dim tensor; None: see :func:`weigh`.
        wants_gradients: every floating argument gets a gradient; else those that ask for one.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Tensor] | None = None
    wants_gradients: bool = True

    def copy(self, dtype: torch.dtype | None = None) -> tuple[Any, Any, dict[str, Tensor]]:
        """Return (args, kwargs, the tensors in them that want a gradient, by path)."""
        copies: dict[int, Any] = {}  # what is one object stays one object

        def copy_leaf(leaf: Any) -> Any:
            if id(leaf) not in copies:
                copies[id(leaf)] = self._copy_leaf(leaf, dtype)
            return copies[id(leaf)]

        args = map_leaves(copy_leaf, self.args)
        kwargs = map_leaves(copy_leaf, dict(self.kwargs))
        found = [*iter_leaves(args, "args"), *iter_leaves(kwargs, "kwargs")]
        leaves = {p: v for p, v in found if isinstance(v, Tensor) and v.requires_grad}
        return args, kwargs, leaves

    def _copy_leaf(self, leaf: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(leaf, Tensor):
            with torch.no_grad():
                copied = leaf.detach().clone()
                if dtype is not None:
                    copied = _cast(copied, dtype)
            is_real = copied.is_floating_point() or copied.is_complex()
            wanted = self.wants_gradients and copied.layout is torch.strided
            return copied.requires_grad_(is_real and (wanted or leaf.requires_grad))
        if is_array(leaf):
            return leaf.astype("float64") if dtype is not None and leaf.dtype.kind == "f" else leaf
        return leaf


@dataclass(frozen=True)
class Record:
    """What a step made and left: values by kind and path.

    The kinds are "output", "loss", "gradient", "input gradient", "parameter", "buffer" and
    "attribute".

    Attributes:
        size: the largest finite absolute number among the floating arguments and parameters: what
            rounding is measured by where a value ought to be zero. 1 if there are none.
    """

    values: Mapping[Key, Any] = field(default_factory=dict)
    size: float = 1.0


def run_step(
    model: nn.Module,
    call: Call,
    dtype: torch.dtype | None = None,
    watch: TorchDispatchMode | None = None,
    seed: int = SEED,
) -> Record:
    """Run forward, and then one step, from fixed seeds.

    Two calls, because a first one is special: modules initialise themselves, and the wrapper lets
    it run on the whole batch if they do.

    Args:
        model: a copy that may be written to; a wrapper or a plain module.
        call: the arguments and the loss.
        dtype: what floating arguments are cast to; None leaves them.
        watch: a dispatch mode that is active during the step's forward.
        seed: of all generators.

    Raises:
        TypeError, ValueError: the call's loss is no 0-dim tensor.
        Exception: whatever the module or the loss raises.
    """
    source = model.module if isinstance(model, DataParallel) else model
    with use_default_dtype(dtype), torch.enable_grad():
        seed_all(seed)
        args, kwargs, _ = call.copy(dtype)
        model(*args, **kwargs)
        args, kwargs, leaves = call.copy(dtype)
        size = _find_size([args, kwargs, *source.parameters()])
        if watch is None:
            output = model(*args, **kwargs)
        else:
            with watch:
                output = model(*args, **kwargs)
        loss = weigh(output) if call.loss is None else _check_loss(call.loss(output))
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
    values: dict[Key, Any] = {}
    for path, leaf in iter_leaves(output, "output", is_leaf=_is_packed):
        values["output", path] = _detach(leaf)
    if call.loss is not None:
        values["loss", "loss"] = _detach(loss)
    for name, parameter in source.named_parameters():
        values["gradient", name] = _detach(parameter.grad)
    for path, leaf in leaves.items():
        values["input gradient", path] = _detach(leaf.grad)
    for kind, path, value in iter_state(source):
        values[kind, path] = _detach(value)
    return Record(values, size)


def weigh(output: Any) -> Tensor | None:
    """The default loss: the output itself if it is 0-dim, else a sum of all its floating numbers,
    each with a fixed random weight of its own, so that no error can cancel another. None if the
    output has no floating numbers."""
    leaves = [as_dense(leaf) for _, leaf in iter_leaves(output, is_leaf=_is_packed)]
    if isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point():
        return output
    total: Tensor | None = None
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        if leaf.is_complex():
            leaf = torch.view_as_real(leaf.resolve_conj())
        generator = torch.Generator().manual_seed(SEED + index)
        weights = torch.randn(leaf.shape, generator=generator, dtype=torch.float64, device="cpu")
        part = (leaf * weights.to(leaf)).sum()
        total = part if total is None else total + part.to(total)
    return total


def as_dense(leaf: Any) -> Any:
    """An output that is sparse, packed or nested as the dense tensor that it stands for."""
    if isinstance(leaf, PackedSequence):
        return pad_packed_sequence(leaf, batch_first=True)[0]
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return torch.nested.to_padded_tensor(leaf, 0.0)
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        return leaf.to_dense()
    return leaf


# ---------------------------------------------------------------------------
# The module's copy and its state
# ---------------------------------------------------------------------------


def copy_module(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a deep copy, without gradients; floating parameters and buffers cast to ``dtype``.

    Raises:
        TypeError: something that the module holds cannot be copied.
    """
    # deepcopy refuses results of a graph, such as a hidden state kept on the module; it leaves the
    # gradients of parameters behind.
    memo = {
        id(value): value.detach().clone()
        for _, _, value in iter_state(module)
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"{type(module).__name__} cannot be copied, and check works on copies only ({error}); "
            f"keep what cannot be copied outside the module"
        ) from error
    if dtype is not None:
        copied = copied.to(dtype)
    return copied


_TORCHS_OWN = frozenset(nn.Module().__dict__)
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_SKIPPED = (nn.Module, nn.Parameter, type, types.FunctionType, types.MethodType, types.ModuleType)


def iter_state(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, path, value) for all that a module keeps: parameters, buffers, attributes."""
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        for key, parameter in child._parameters.items():
            if parameter is not None:
                yield "parameter", prefix + key, parameter
        for key, buffer in child._buffers.items():
            yield "buffer", prefix + key, buffer
        for key, value in list(vars(child).items()):
            if key not in _TORCHS_OWN and not key.startswith("_dynamo"):
                for path, leaf in _iter_attribute(value, prefix + key, set()):
                    yield "attribute", path, leaf


def _iter_attribute(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The values that can be compared in an attribute: also inside containers and plain objects."""
    if isinstance(value, _ATOMS) or (isinstance(value, Tensor) or is_array(value)):
        if not isinstance(value, nn.Parameter):
            yield path, value
        return
    if isinstance(value, _SKIPPED) or id(value) in seen:
        return
    if type(value).__module__.startswith("torch._"):
        return  # torch's own machinery, such as what a compiled module keeps
    seen.add(id(value))
    if isinstance(value, (set, frozenset)):
        if all(isinstance(entry, _ATOMS) for entry in value):
            yield path, str(sorted(map(repr, value)))
        return
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", entry) for key, entry in value.items()]
    elif isinstance(value, (list, tuple, deque)):
        items = [(f"{path}[{index}]", entry) for index, entry in enumerate(value)]
        yield f"len({path})", len(value)
    else:
        items = [(f"{path}.{key}", entry) for key, entry in _read_object(value).items()]
    for inner, entry in items:
        yield from _iter_attribute(entry, inner, seen)


def _read_object(value: Any) -> dict[str, Any]:
    """An object's own values, those in slots too."""
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else list(slots):
            hidden = name.startswith("__") and not name.endswith("__")
            real = f"_{cls.__name__.lstrip('_')}{name}" if hidden else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, real):
                found[name] = getattr(value, real)
    return {**found, **getattr(value, "__dict__", {})}


@contextmanager
def watch_borders(
    model: nn.Module, enter: Callable[[str, Any], Any], leave: Callable[[str, Any], Any]
) -> Iterator[None]:
    """Call ``enter`` with (args, kwargs) and ``leave`` with the output of every submodule's call;
    what they return is used in place of it."""
    handles: list[Any] = []
    modules = list(model.modules())
    is_compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in modules)
    # What is watched runs uncompiled: hooks would be compiled into it, or refused.
    stance = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue

        def before(_: Any, args: Any, kwargs: Any, name: str = name) -> Any:
            return enter(name, (args, kwargs))

        def after(_: Any, args: Any, output: Any, name: str = name) -> Any:
            return leave(name, output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        with stance:
            yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------------
# Dtypes, seeds and settings
# ---------------------------------------------------------------------------


def find_dtype(model: nn.Module, call: Call) -> torch.dtype:
    """The narrowest floating dtype of parameters, buffers and arguments; float64 if there is none:
    then everything is compared exactly."""
    values = [*model.parameters(), *model.buffers()]
    values += [v for _, v in iter_leaves((call.args, dict(call.kwargs))) if isinstance(v, Tensor)]
    found = {value.dtype for value in values if value.is_floating_point() or value.is_complex()}
    return max((_real(dtype) for dtype in found), key=_eps, default=torch.float64)


class DtypeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sees whether a module computes in less than float64 although it was cast to it.

    Attributes:
        narrowest: the narrowest floating dtype of any result so far.
    """

    narrowest = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for value in results if isinstance(results, (list, tuple)) else (results,):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.narrowest = max(self.narrowest, _real(value.dtype), key=_eps)
        return results


def seed_all(seed: int = SEED) -> None:
    """Put every generator that a forward could draw from to the same state."""
    torch.manual_seed(seed)  # the accelerators', too
    randomness.seed_all(seed)


@contextmanager
def use_default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """New tensors in forward have ``dtype``: a cast module that makes float32 ones would mix."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if dtype is None else dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.is_complex():
        return value.to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return value.to(dtype) if value.is_floating_point() else value


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _detach(value: Any) -> Any:
    value = as_dense(value)
    return value.detach() if isinstance(value, Tensor) else value


def _find_size(values: Any) -> float:
    sizes = [
        float(leaf.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
        for _, leaf in iter_leaves(values)
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout is torch.strided
        if (leaf.is_floating_point() or leaf.is_complex()) and not leaf.is_nested
    ]
    return max(sizes, default=0.0) or 1.0


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _check_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must return a 0-dim tensor, it returned a {type(loss).__name__}")
    if loss.dim():
        raise ValueError(
            f"loss must return a 0-dim tensor, it returned one of shape {list(loss.shape)}; "
            f"reduce it with .mean() or .sum()"
        )
    return loss
