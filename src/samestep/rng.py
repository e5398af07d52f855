"""Random numbers: one stream per shard, ruled by the caller's generator.

What it holds: :class:`Draws` (one call's seed, drawn from the caller's generator when first
needed), :class:`Stream` (one shard's generator) and the function mode that hands a shard's
generator to the random functions called in its thread. Why: on the CPU all threads share torch's
one default generator, so the numbers that a replica sees would depend on thread timing, and
``torch.manual_seed`` would rule nothing.

Guarantees:
- The numbers depend on the caller's generator and the shard's index; not on threads, timing,
  workers or which device of a kind runs the shard.
- The caller's generator moves on by one draw per call, and not at all if no shard draws.
- A model that draws nothing pays nothing: :class:`Watch` sees afterwards whether the default
  generator moved although no function was intercepted; the engine's caller then runs again.
Must not: know modules. Not covered: Python's ``random`` and numpy, which have streams of their own.

[Note: three ways to draw]
1. A function that takes ``generator=`` gets the shard's own; an explicit CPU generator of the
user's
   is replaced by a shard's stream that is derived from it in the same way.
2. ``dropout`` is computed here with the shard's generator, as torch does it.
3. The rest (an LSTM's inner dropout, attention with dropout, ...) runs under one lock with the
   shard's state swapped into the default generator and out again.

[Note: thread-aware state] ``torch.get_rng_state``, ``set_rng_state``, ``manual_seed`` and
``fork_rng`` all go through the name ``default_generator`` in the module ``torch.random``.
Activation checkpointing uses them to draw the same dropout masks again in backward. In a shard they
must mean the shard's stream, so that one name is bound to a proxy (:class:`_ThreadGenerator`) when
the first stream is used; outside of shards the proxy passes everything on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

__all__ = [
    "Draws",
    "Stream",
    "Watch",
    "current_stream",
    "read_default",
    "renew_lock",
    "set_current_stream",
    "use_stream",
]

_REAL = torch.default_generator
# Held while the default generator is read or swapped; a swapped section may seed another stream.
_lock = threading.RLock()
# Sanctioned draws of this process; Watch needs it when two callers run at once.
_num_seeds = 0


def current_stream() -> Stream | None:
    """Return the stream that random functions in this thread draw from."""
    return _current.stream


def set_current_stream(stream: Stream | None) -> None:
    """Go back to a stream: after Ctrl-C may have struck in the middle of :class:`use_stream`."""
    _current.stream = stream


def renew_lock() -> None:
    """Make a new lock: in a forked child nobody may be left to release the old one."""
    global _lock
    _lock = threading.RLock()


class _Current(threading.local):
    stream: Stream | None = None


_current = _Current()


class Draws:
    """One call's source of seeds: a single draw from each generator that is asked for.

    Args:
        peek: True where no shard is expected to draw: a stream is then seeded without a draw from
            the caller's generator, so that reading or restoring its state has no lasting effect.
    """

    def __init__(self, *, peek: bool = False) -> None:
        self._seeds: dict[int, int] = {}
        self._users: list[torch.Generator] = []  # keeps the ids in _seeds unique
        self._peek = peek
        self.state_after: Tensor | None = None  # of the default generator, after our one draw

    @classmethod
    def fixed(cls) -> Draws:
        """Return a source whose seed comes of the default generator's state, without a draw."""
        draws = cls()
        digest = hashlib.blake2b(read_default(), digest_size=8).digest()
        draws._seeds[id(_REAL)] = int.from_bytes(digest) >> 1
        return draws

    @property
    def is_used(self) -> bool:
        """Whether a seed was drawn."""
        return bool(self._seeds)

    @property
    def drawn(self) -> int | None:
        """What was drawn from the default generator; None if nothing was."""
        return self._seeds.get(id(_REAL))

    def draw(self) -> None:
        """Draw from the default generator, if that was not done yet."""
        self._peek = False
        self.seed(_REAL, 0)

    def seed(self, generator: torch.Generator, index: int) -> int:
        """Return shard ``index``'s seed from ``generator``, drawing once per generator and call."""
        global _num_seeds
        with _lock:
            if id(generator) not in self._seeds:
                if self._peek and generator is _REAL:
                    return _mix(generator.initial_seed(), index)
                with (
                    torch._C.DisableTorchFunction(),
                    torch._C._DisableFuncTorch(),
                    torch.inference_mode(False),
                ):
                    drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
                self._seeds[id(generator)] = int(drawn)
                self._users.append(generator)
                if generator is _REAL:
                    _num_seeds += 1
                    self.state_after = generator.get_state()
            return _mix(self._seeds[id(generator)], index)


class Stream:
    """One shard's random numbers in one call, forward and backward.

    Args:
        draws: the call's source of seeds.
        index: the shard's index k.
    """

    def __init__(self, draws: Draws, index: int) -> None:
        self._draws = draws
        self._index = index
        self._generators: dict[int, torch.Generator] = {}

    @property
    def is_used(self) -> bool:
        """Whether numbers were asked of it."""
        return bool(self._generators)

    def generator(self, user: torch.Generator | None = None) -> torch.Generator:
        """The shard's generator: of the default stream, or derived from ``user``."""
        source = _REAL if user is None else user
        if source in self._generators.values():
            return source
        found = self._generators.get(id(source))
        if found is None:
            found = torch.Generator()
            found.manual_seed(self._draws.seed(source, self._index))
            self._generators[id(source)] = found
        return found

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the default generator be this stream, for everybody, until the ``with`` ends."""
        with _lock:
            mine = self.generator()
            before = _REAL.get_state()
            _REAL.set_state(mine.get_state())
            try:
                yield
            finally:
                mine.set_state(_REAL.get_state())
                _REAL.set_state(before)

    @contextlib.contextmanager
    def seeded(self, device: torch.device) -> Iterator[None]:
        """Seed an accelerator's generator from this stream, and put its state back afterwards.

        The slots of one accelerator run one after the other, so no operation need be intercepted.
        """
        module = torch.get_device_module(device)
        generator = module.default_generators[device.index]
        before = generator.get_state()
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator()))
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


class use_stream:
    """Make ``stream`` the one that random functions in this thread draw from.

    Args:
        stream: the shard's stream.
        intercept: False: only torch's state functions see the stream (see [Note: thread-aware
            state]); for models that were seen to draw nothing.
    """

    __slots__ = ("_before", "_mode", "_stream")

    def __init__(self, stream: Stream, *, intercept: bool) -> None:
        self._stream = stream
        self._mode = _StreamMode(stream) if intercept else None

    def __enter__(self) -> None:
        if _random.default_generator is not _PROXY:
            _random.default_generator = _PROXY
        self._before, _current.stream = _current.stream, self._stream
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *error: Any) -> None:
        _current.stream = self._before
        if self._mode is not None:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]  # torch's


class Watch:
    """Sees whether the default generator moved other than by the call's own draw."""

    def __init__(self) -> None:
        with _lock:
            self.before = _REAL.get_state()
            self._num_seeds = _num_seeds

    def has_moved(self, draws: Draws) -> bool:
        """Whether numbers were drawn that no stream ruled."""
        with _lock:
            expected = self.before if draws.state_after is None else draws.state_after
            own = 0 if draws.state_after is None else 1
            if _num_seeds - self._num_seeds != own:
                return False  # another caller's draw came between; nothing can be said
            return _read(_REAL.get_state()) != _read(expected)

    def restore(self) -> None:
        """Put the default generator back to where it was."""
        with _lock:
            _REAL.set_state(self.before)


# ---------------------------------------------------------------------------
# The function mode
# ---------------------------------------------------------------------------


class _StreamMode(TorchFunctionMode):
    """Gives random functions the shard's generator. See [Note: three ways to draw]."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
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
        return handler(self._stream, func, args, kwargs or {})


Handler = Callable[[Stream, Any, tuple[Any, ...], dict[str, Any]], Any]


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
    "dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax "
    "multi_head_attention_forward scaled_dot_product_attention "
    "fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices"
)
_RECURRENT = "lstm gru rnn_tanh rnn_relu"


def _names(module: Any, names: str) -> list[Any]:
    return [getattr(module, name) for name in names.split() if hasattr(module, name)]


def _with_generator(
    stream: Stream, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
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


def _swapped(stream: Stream, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    return bool(kwargs.get("training", True)) and bool(kwargs.get("p", 1.0))


def _recurrent(stream: Stream, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Both overloads pass (..., num_layers, dropout, train, ...); dropout is the only float.
    at = next((i for i, arg in enumerate(args) if type(arg) is float), None)
    if at is not None and (args[at] == 0.0 or not args[at + 1]):
        return func(*args, **kwargs)
    return _swapped(stream, func, args, kwargs)


def _dropout(
    stream: Stream,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inplace: bool = False,
) -> Any:
    values, p, training, inplace = _dropout_arguments(*args, **{"inplace": inplace, **kwargs})
    if not training or not 0.0 < p < 1.0 or values.device.type != "cpu" or not values.numel():
        return func(*args, **kwargs)  # nothing to draw, or a p that torch will refuse
    if _is_watched():
        return _swapped(stream, func, args, kwargs)  # the same numbers
    noise = torch.empty_like(values).bernoulli_(1.0 - p, generator=stream.generator())
    noise.div_(1.0 - p)
    return values.mul_(noise) if inplace else values * noise


def _is_watched() -> bool:
    """Whether a function mode of the caller's is active: it must see dropout, not what we make of
    it. Our own mode is off while it handles a call."""
    if torch._C._len_torch_function_stack() == 0:
        return False
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _dropout_arguments(
    values: Tensor, p: float = 0.5, training: bool = True, train: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    """``F.dropout`` and ``torch.dropout`` name the third argument differently."""
    return values, p, training and train, inplace


# ---------------------------------------------------------------------------
# The thread-aware default generator
# ---------------------------------------------------------------------------


class _ThreadGenerator:
    """Stands for the default generator in ``torch.random``. See [Note: thread-aware state]."""

    def __getattr__(self, name: str) -> Any:
        stream = _current.stream
        return getattr(_REAL if stream is None else stream.generator(), name)


def read_default() -> bytes:
    """Return the default generator's state."""
    return _read(_REAL.get_state())


def _read(state: Tensor) -> bytes:
    """The bytes of a generator's state: at every call, a quarter of what torch.equal takes."""
    return ctypes.string_at(state.data_ptr(), state.numel())


_PROXY = _ThreadGenerator()
_random: Any = torch.random  # the name in it is torch's own, not exported


def _mix(seed: int, index: int) -> int:
    """Mix a seed and a shard's index into a seed (the finaliser of the splitmix64 generator).

    torch's CPU generator uses the low 32 bits, so neighbouring inputs must differ there too.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    mask = (1 << 64) - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1  # manual_seed takes a signed 64-bit integer
