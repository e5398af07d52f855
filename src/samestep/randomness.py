"""The state of the process's random generators, as plain values.

What it holds: reading and writing the states of torch's CPU generator, Python's ``random``, numpy
and the accelerators, one entry per kind. Why: a checkpoint keeps all of them, and a loader that
resumes in mid-epoch goes back to what they were when the epoch's order was drawn.

Guarantees: what is read holds tensors, tuples, numbers and text only, so that
``torch.load(weights_only=True)`` reads it; writing what was read is exact; nothing is drawn.
Must not: import numpy on its own account, or know streams of shards (:mod:`samestep.rng` does).
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "State",
    "find_moved",
    "kept_state",
    "read_accelerators",
    "read_state",
    "seed_all",
    "write_accelerators",
    "write_state",
]

State = dict[str, Any]
_REAL = torch.default_generator


def read_state(own: Sequence[torch.Generator] = ()) -> State:
    """Return the states of the CPU's generators; ``own`` are generators of the user's."""
    state: State = {"torch": _REAL.get_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = (name, torch.from_numpy(words), *rest)
    for index, generator in enumerate(own):
        state[f"own {index}"] = generator.get_state()
    return state


def write_state(state: Mapping[str, Any], own: Sequence[torch.Generator] = ()) -> None:
    """Set the generators that ``state`` has an entry for; the others stay as they are."""
    if "torch" in state:
        _REAL.set_state(state["torch"])
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        name, words, *rest = state["numpy"]
        numpy.random.set_state((name, words.numpy(), *rest))
    for index, generator in enumerate(own):
        if f"own {index}" in state:
            generator.set_state(state[f"own {index}"])


@contextlib.contextmanager
def kept_state() -> Iterator[None]:
    """Put the states of all generators, the accelerators' too, back at the end."""
    state, accelerators = read_state(), read_accelerators()
    try:
        yield
    finally:
        write_state(state)
        write_accelerators(accelerators)


def find_moved(before: State, after: State) -> State:
    """Return the entries of ``before`` whose generators have drawn since."""
    return {
        kind: value
        for kind, value in before.items()
        if kind in after and not _is_same(value, after[kind])
    }


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple) and any(isinstance(item, Tensor) for item in left):
        return len(left) == len(right) and all(map(_is_same, left, right))
    return bool(left == right)


def seed_all(seed: int) -> None:
    """Seed the CPU's generators; accelerators are left alone, unlike in ``torch.manual_seed``."""
    _REAL.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def read_accelerators() -> State:
    """Return the accelerators' states, {} without one: the kind, all devices', the current one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return {}
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state_all"):  # one generator for all there is, as on mps
        return {"kind": device.type, "states": [module.get_rng_state()], "current": 0}
    current = torch.accelerator.current_device_index()
    return {"kind": device.type, "states": module.get_rng_state_all(), "current": current}


def write_accelerators(state: Mapping[str, Any], *, only_current: bool = False) -> None:
    """Set the accelerators' generators.

    Args:
        state: what :func:`read_accelerators` returned, perhaps on another machine: another kind of
            accelerator is left alone, and so are devices that it had not.
        only_current: set this process's current device to what was current there, and no other:
            for ranks that each use one device.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or state.get("kind") != device.type:
        return
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state_all"):
        module.set_rng_state(state["states"][0])
    elif only_current:
        here = torch.accelerator.current_device_index()
        module.set_rng_state(state["states"][state["current"]], here)
    else:
        for index, value in zip(range(module.device_count()), state["states"], strict=False):
            module.set_rng_state(value, index)
