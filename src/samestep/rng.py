"""Random numbers: one stream per shard, ruled by the caller's generator.

What it holds: :class:`Draws` (one call's seed, drawn from the caller's generator when first
needed), :class:`Stream` (one shard's generator), :class:`use_stream`, in which it rules the thread,
and :class:`Moment`, to which a thread's numbers can go back. Why: on the CPU all threads share
torch's one default generator, so the numbers that a replica sees would depend on thread timing, and
``torch.manual_seed`` would rule nothing.

Guarantees:
- The numbers depend on the caller's generator and the shard's index; not on threads, timing,
  workers or which device of a kind runs the shard.
- The caller's generator moves on by one draw per call, and not at all if no shard draws. Calls with
  slots on accelerators draw always: the device's generator is seeded before anybody asks it.
- A model that draws nothing pays nothing: :class:`Watch` sees afterwards whether the default
  generator moved although no function was intercepted; the engine's caller then runs again.
Must not: know modules. Not covered: Python's ``random`` and numpy, which have streams of their own.

[Note: thread-aware state] ``torch.get_rng_state``, ``set_rng_state``, ``manual_seed`` and
``fork_rng`` all go through the name ``default_generator`` in the module ``torch.random``.
Activation checkpointing uses them to draw the same dropout masks again in backward. In a shard they
must mean the shard's stream, so that one name is bound to a proxy (:class:`_ThreadGenerator`) when
the first stream is used; outside of shards the proxy passes everything on.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from samestep.intercept import StreamMode

__all__ = [
    "Draws",
    "Moment",
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
                    drawn = torch.empty((), dtype=torch.int64, device="cpu")
                    drawn.random_(generator=generator)
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
        self._default: torch.Generator | None = None  # the one of them that is asked for most

    @property
    def is_used(self) -> bool:
        """Whether numbers were asked of it."""
        return bool(self._generators)

    def generator(self, user: torch.Generator | None = None) -> torch.Generator:
        """The shard's generator: of the default stream, or derived from ``user``."""
        if user is None:
            self._default = self._default or self._find(_REAL)
            return self._default
        return self._find(user)

    def _find(self, source: torch.Generator) -> torch.Generator:
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

    def copy(self) -> Stream:
        """Return a stream that will give the numbers that this one would give next."""
        copied = Stream(self._draws, self._index)
        for key, generator in self._generators.items():
            copied._generators[key] = torch.Generator()
            copied._generators[key].set_state(generator.get_state())
        return copied

    @contextlib.contextmanager
    def replaced(self, other: Stream) -> Iterator[None]:
        """Draw from ``other``, which moves on, until the ``with`` ends."""
        names = ("_draws", "_index", "_generators", "_default")
        before = [getattr(self, name) for name in names]
        self.__dict__.update((name, getattr(other, name)) for name in names)
        try:
            yield
        finally:
            self.__dict__.update(zip(names, before, strict=True))

    @contextlib.contextmanager
    def seeded(self, device: torch.device) -> Iterator[None]:
        """Seed an accelerator's generator from this stream, and put its state back afterwards.

        The slots of one accelerator run one after the other, so no operation need be intercepted.
        """
        module = torch.get_device_module(device)
        generator = module.default_generators[device.index]
        before = generator.get_state()
        drawn = torch.empty((), dtype=torch.int64, device="cpu")
        seed = int(drawn.random_(generator=self.generator()))
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
        self._mode = StreamMode(stream) if intercept else None

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


class Moment:
    """Where this thread's random numbers are now, to come back to any number of times."""

    def __init__(self) -> None:
        stream = _current.stream
        self._now = _REAL.get_state() if stream is None else stream.copy()
        self._is_intercepted = _find_mode() is not None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw again what was drawn from this moment on; then all is as before."""
        if isinstance(self._now, Tensor):
            before = _REAL.get_state()
            _REAL.set_state(self._now)
            try:
                yield
            finally:
                _REAL.set_state(before)
            return
        mode = _find_mode()
        if mode is None:  # or set aside, as torch.autograd.grad does when a forward calls it
            with use_stream(self._now.copy(), intercept=self._is_intercepted):
                yield
        else:
            ruling: Any = mode.stream
            with use_stream(ruling, intercept=False), ruling.replaced(self._now.copy()):
                yield


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


def _find_mode() -> StreamMode | None:
    """What gives random functions in this thread a stream's generator. The threads of torch's
    backward have the modes of the one that called it, and no current stream."""
    if torch._C._len_torch_function_stack() == 0:
        return None
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode for mode in reversed(modes) if isinstance(mode, StreamMode)), None)


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
