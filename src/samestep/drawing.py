"""Which submodules draw random numbers, and how to make them stop.

What it holds: :func:`find_drawing`, :func:`stop_drawing`, :class:`NoDraws`. Why: each replica draws
its own numbers, so a model can be compared with its replicas only if it draws none.

[Note: two ways to stop] Switching the module off (dropout's ``p``, or evaluation mode of that one
module) leaves everything else as it is, threads included. Code that draws in any mode, such as
``torch.randn_like`` in a forward, is run under :class:`NoDraws`, where torch's random functions
return constants. A function mode makes the shards run one after another; the numbers are the same.

Guarantees: the modules written to are copies.
Must not: compare anything. Whether drawing has stopped is for the caller to see from two runs.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from samestep.observe import seed_all, watch_borders

__all__ = ["NoDraws", "find_drawing", "stop_drawing"]


def find_drawing(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, str]:
    """Return the modules whose own code draws, by name, and from what; in the order they draw.

    Args:
        model: a copy.
        run: runs the step.
    """
    found: dict[str, set[str]] = {}
    stack: list[str] = []
    state = _read_generators()

    def note() -> None:
        nonlocal state
        now = _read_generators()
        moved = {name for name, value in now.items() if not _is_same(value, state.get(name))}
        if moved and stack:
            found.setdefault(stack[-1], set()).update(moved)
        state = now

    def enter(name: str, values: Any) -> Any:
        note()
        stack.append(name)
        return values

    def leave(name: str, values: Any) -> Any:
        note()
        stack.pop()
        return values

    seed_all()
    state = _read_generators()
    with watch_borders(model, enter, leave):
        run(model)
    return {name: ", ".join(sorted(sources)) for name, sources in found.items()}


def stop_drawing(model: nn.Module, names: list[str]) -> None:
    """Switch drawing off in these modules of a copy, as far as their settings allow it."""
    modules = dict(model.named_modules())
    for name in names:
        module: Any = modules[name]
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
        else:
            module.training = False  # of this module only, not of those inside it


def _read_generators() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.default_generator.get_state()}
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        states[device.type] = torch.get_device_module(device).get_rng_state()
    states["Python's random"] = random.getstate()
    if "numpy" in sys.modules:
        _, keys, position, *rest = sys.modules["numpy"].random.get_state()
        states["numpy's random"] = (keys.tobytes(), position, rest)
    return states


def _is_same(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if isinstance(one, Tensor) else bool(one == two)


# ---------------------------------------------------------------------------
# Random functions without chance
# ---------------------------------------------------------------------------


class NoDraws(TorchFunctionMode):
    """Lets torch's random functions return constants, and dropout return its input.

    A constant has no rows, so it is the same for one device and for a shard. Not covered: the
    dropout inside recurrent and attention modules (:func:`stop_drawing` has it), Python's and
    numpy's generators, extensions.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _handlers().get(func)
        kwargs = kwargs or {}
        return func(*args, **kwargs) if handler is None else handler(func, args, kwargs)


_FILLED = (
    "rand randn randint normal multinomial poisson binomial rand_like randn_like randint_like "
    "_standard_gamma _sample_dirichlet"
)
_FILLED_METHODS = "uniform_ normal_ exponential_ log_normal_ cauchy_ multinomial"
_DROPOUTS = (
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ dropout1d "
    "dropout2d dropout3d feature_alpha_dropout feature_alpha_dropout_"
)


@functools.cache
def _handlers() -> dict[Any, Callable[[Any, Any, dict[str, Any]], Any]]:
    table: dict[Any, Callable[[Any, Any, dict[str, Any]], Any]] = {}
    for place, names, handler in (
        (torch, _FILLED, _fill),
        (Tensor, _FILLED_METHODS, _fill),
        (torch, _DROPOUTS, _pass_on),
        (F, _DROPOUTS, _pass_on),
        (torch, "bernoulli", _expect),
        (Tensor, "bernoulli bernoulli_", _expect),
        (torch, "randperm", _count),
    ):
        for name in names.split():
            if hasattr(place, name):
                table[getattr(place, name)] = handler
    table[F.scaled_dot_product_attention] = _attend
    return table


def _fill(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The form that was asked for, with one number in it: 0.5, or the least that randint gives."""
    result = func(*args, **kwargs)
    if result.is_floating_point() or result.is_complex():
        return (
            result.detach().fill_(0.5) if result.grad_fn is None else torch.full_like(result, 0.5)
        )
    bounds = [arg for arg in args if isinstance(arg, int)]
    least = bounds[0] if len(bounds) > 1 and func is not torch.multinomial else 0
    return result.fill_(kwargs.get("low", least) if "randint" in func.__name__ else 0)


def _pass_on(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["input"]


def _expect(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Probabilities in place of ones and zeros; dropout that is made of them scales by 1 then."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if func is Tensor.bernoulli_ else args[0])
    if func is Tensor.bernoulli_:
        return args[0].copy_(p) if isinstance(p, Tensor) else args[0].fill_(p)
    return p.clone() if isinstance(p, Tensor) else torch.full_like(args[0], p)


def _count(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs).sort().values


def _attend(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if len(args) > 4:
        return func(*args[:4], 0.0, *args[5:], **kwargs)
    return func(*args, **{**kwargs, "dropout_p": 0.0})
