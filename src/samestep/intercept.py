"""Random functions that are called inside a shard get the shard's generator.

What it holds: :class:`StreamMode`, the function mode that sees every call, and what is done with
each random function of torch. Why apart from the streams: those are about which numbers, this is
about who asks for them.

Guarantees: on the CPU no function of torch that draws goes past the stream; a function that would
not draw, such as a dropout in evaluation, is left alone.
Must not: know where a stream comes from.

[Note: three ways to draw]
1. A function that takes ``generator=`` gets the shard's own; an explicit CPU generator of the
   user's is replaced by a shard's stream that is derived from it in the same way.
2. ``dropout``, and dropout of whole channels (``dropout2d``), are computed here with the shard's
   generator, as torch does it.
3. The rest (an LSTM's inner dropout, attention with dropout, ...) runs under one lock with the
   shard's state swapped into the default generator and out again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

__all__ = ["StreamMode", "unseen"]

#: Entered, for calls of the library's own inside a shard: each would go through the shard's mode.
unseen = torch._C.DisableTorchFunction


class Source(Protocol):
    """A shard's stream, as far as it is known here."""

    def generator(self, user: torch.Generator | None = None) -> torch.Generator:
        """The shard's generator: of the default stream, or derived from ``user``."""

    def swapped_in(self) -> contextlib.AbstractContextManager[None]:
        """Let the default generator be this stream, for everybody, until the ``with`` ends."""


class StreamMode(TorchFunctionMode):
    """Gives random functions the shard's generator. See [Note: three ways to draw]."""

    def __init__(self, stream: Source) -> None:
        super().__init__()
        self.stream = stream
        self._handlers = _handlers()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self.stream, func, args, kwargs or {})


# ---------------------------------------------------------------------------
# What is done with each function
# ---------------------------------------------------------------------------

Handler = Callable[[Source, Any, tuple[Any, ...], dict[str, Any]], Any]


@functools.cache
def _handlers() -> dict[Any, Handler]:
    """What to do with each random function. Built at first use: importing stays cheap."""
    table: dict[Any, Handler] = {}
    for func in _names(torch, _TAKE_GENERATOR) + _names(torch.Tensor, _TENSOR_METHODS):
        table[func] = _with_generator
    for func in _names(torch.nn.init, _INITIALISERS):
        table[func] = _with_generator
    for func in _names(torch, _SWAPPED) + _names(F, _SWAPPED_FUNCTIONAL):
        table[func] = _swapped
    for func in _names(torch, _RECURRENT):
        table[func] = _recurrent
    for func, num_dims in ((F.dropout1d, 3), (F.dropout2d, 4), (F.dropout3d, 5)):
        table[func] = functools.partial(_dropout_of_channels, num_dims=num_dims)
    table[F.dropout] = table[torch.dropout] = _dropout
    table[torch.dropout_] = functools.partial(_dropout, inplace=True)
    return table


_TAKE_GENERATOR = (
    "rand randn randint randperm normal bernoulli multinomial poisson binomial "
    "rand_like randn_like randint_like _standard_gamma _sample_dirichlet"
)
_TENSOR_METHODS = (
    "uniform_ normal_ exponential_ geometric_ log_normal_ cauchy_ random_ bernoulli_ "
    "bernoulli multinomial"
)
_INITIALISERS = (
    "uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ "
    "kaiming_normal_ orthogonal_ sparse_"
)
_SWAPPED = (
    "alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_ native_dropout rrelu rrelu_"
)
_SWAPPED_FUNCTIONAL = (
    "alpha_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax multi_head_attention_forward "
    "scaled_dot_product_attention "
    "fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices"
)
_RECURRENT = "lstm gru rnn_tanh rnn_relu"


def _names(module: Any, names: str) -> list[Any]:
    return [getattr(module, name) for name in names.split() if hasattr(module, name)]


def _with_generator(
    stream: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    user = kwargs.get("generator")
    if user is not None and user.device.type != "cpu":
        return func(*args, **kwargs)
    try:
        return func(*args, **{**kwargs, "generator": stream.generator(user)})
    except TypeError:
        # An overload (or an older torch) without ``generator=``; nothing was drawn yet.
        return _swapped(stream, func, args, kwargs)
    except RuntimeError as error:
        # A CPU generator for another device's tensor: that device's own is seeded per shard.
        if "device type" not in str(error):
            raise
        return func(*args, **kwargs)


def _swapped(stream: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _may_draw(func, args, kwargs):
        return func(*args, **kwargs)
    with stream.swapped_in():
        return func(*args, **kwargs)


def _may_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """False where the arguments say that nothing is drawn, so that the lock is not taken."""
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if func is F.multi_head_attention_forward:
        probability = args[10] if len(args) > 10 else kwargs["dropout_p"]
        return bool(probability) and bool(kwargs.get("training", True))
    if func is torch.native_dropout:
        return True  # it draws whatever p is
    return bool(kwargs.get("training", True)) and bool(kwargs.get("p", 1.0))


def _recurrent(stream: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Both overloads pass (..., num_layers, dropout, train, ...); dropout is the only float.
    at = next((i for i, arg in enumerate(args) if type(arg) is float), None)
    if at is not None and (args[at] == 0.0 or not args[at + 1]):
        return func(*args, **kwargs)
    return _swapped(stream, func, args, kwargs)


def _dropout(
    stream: Source,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inplace: bool = False,
) -> Any:
    values, p, training, is_asked = _dropout_arguments(*args, **kwargs)
    if not training or not 0.0 < p < 1.0 or not values.is_cpu or not values.numel():
        return func(*args, **kwargs)  # nothing to draw, or a p that torch will refuse
    if _is_watched() or torch._C._has_torch_function_unary(values):
        return _swapped(stream, func, args, kwargs)  # the same numbers, seen as one call
    return _drop(stream, values, torch.empty_like(values), p, inplace or is_asked)


def _dropout_of_channels(
    stream: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_dims: int
) -> Any:
    values, p, training, inplace = _dropout_arguments(*args, **kwargs)
    if not training or not 0.0 < p < 1.0 or not values.is_cpu or not values.numel():
        return func(*args, **kwargs)
    if values.dim() != num_dims or torch._C._has_torch_function_unary(values) or not _is_ordinary():
        # Torch has more to say to it, or somebody looks (a subclass, a mode of the caller's).
        return _swapped(stream, func, args, kwargs)  # the same numbers
    shape = [*values.shape[:2]] + [1] * (num_dims - 2)
    return _drop(stream, values, values.new_empty(shape), p, inplace)


def _drop(stream: Source, values: Tensor, noise: Tensor, p: float, inplace: bool) -> Tensor:
    """Drop values as torch does it; ``noise`` is memory for what they are multiplied by."""
    kept = 1.0 - float(p)
    noise.bernoulli_(kept, generator=stream.generator())
    noise.div_(_scalar(kept) if noise.dim() and _is_ordinary() else kept)
    return values.mul_(noise) if inplace else values * noise


def _is_ordinary() -> bool:
    """Whether tensors are made as ever: not under a dispatch mode or one of torch.func's
    transforms, whose tensors are nothing to keep."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


@functools.lru_cache(maxsize=64)
def _scalar(value: float) -> Tensor:
    """A number as torch itself makes it of a float, kept: making it takes longer than dividing."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float64, device="cpu")


def _is_watched() -> bool:
    """Whether a function mode of the caller's is active: it must see dropout, not what we make of
    it. Our own mode is off while it handles a call."""
    if torch._C._len_torch_function_stack() == 0:
        return False
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _dropout_arguments(
    input: Tensor,  # noqa: A002  # torch's name for it
    p: float = 0.5,
    training: bool = True,
    train: bool = True,
    inplace: bool = False,
) -> tuple[Tensor, float, bool, bool]:
    """``F.dropout`` and ``torch.dropout`` name the third argument differently."""
    return input, p, training and train, inplace
