"""Which submodules draw random numbers, and how to make them stop.

What it holds: :func:`find_drawing`, :func:`stop_drawing`, :class:`NoDraws`. Why: each replica draws
its own numbers, so a model can be compared with its replicas only if it draws none.

[Note: two ways to stop] The dropout of torch's own dropout, recurrent and attention modules is a
setting, and setting it to 0 leaves everything else as it is, threads included. All other code that
draws, such as ``F.dropout`` or ``torch.randn_like`` in a forward, is run under :class:`NoDraws`,
where torch's random operations return fixed numbers. A mode makes the shards run one after another;
the numbers are the same. A module is never put into evaluation mode: what it does in training only
would then not be looked at.

[Note: fixed numbers] Dropout returns its input. All else that draws gets numbers, and not
constants: ``n - n.mean(0)`` of a constant ``n`` would hide that rows are mixed, and so would a
permutation that moves nothing. Each element's number is made of its position in the whole batch's
tensor, so a row gets the same numbers in a shard as on one device, and rows differ. Two draws of
one shape are equal, so that a forward that is run again in backward draws the same again. Which dim
of a shard's tensor is the rows is seen from what the plain run asked for: the one dim that is
longer there, by B / B_k. Where that does not tell, :attr:`NoDraws.untold` says so.

Guarantees: the modules written to are copies, and their mode stays what it is.
Must not: compare anything. Whether drawing has stopped is for the caller to see from two runs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.context import current_shard
from samestep.observe import seed_all, watch_borders
from samestep.randomness import find_moved, read_accelerators, read_state

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
        moved = find_moved(state, now).keys() | (now.keys() - state.keys())
        if moved:  # outside of all that is watched: in a scripted module, or in the loss
            found.setdefault(stack[-1] if stack else "", set()).update(moved)
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
    note()
    return {name: ", ".join(sorted(sources)) for name, sources in found.items()}


def stop_drawing(model: nn.Module, names: list[str]) -> None:
    """Switch drawing off in these modules of a copy, if they are torch's and have a setting."""
    modules = dict(model.named_modules())
    for name in names:
        module: Any = modules[name]
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0


_WORDS = {"python": "Python's random", "numpy": "numpy's random"}


def _read_generators() -> dict[str, Any]:
    accelerators = read_accelerators()
    found = {_WORDS.get(kind, kind): state for kind, state in read_state().items()}
    return found | {accelerators["kind"]: tuple(accelerators["states"])} if accelerators else found


# ---------------------------------------------------------------------------
# Random operations without chance
# ---------------------------------------------------------------------------


class NoDraws(contextlib.ExitStack):
    """While entered, torch's random operations return fixed numbers. See [Note: fixed numbers].

    Not covered: Python's and numpy's generators, extensions, and the dropout inside an
    accelerator's fused recurrent kernels (:func:`stop_drawing` has it). Whether anything is still
    left to chance is for the caller to see.

    Args:
        asked: what plain runs of the whole batch asked for so far; a plain run adds to it.

    Attributes:
        untold: operations and shapes of which it cannot be told which dim is the rows.
        guessed: those whose rows are one of two factors of a dim; taken as the outer one.
    """

    def __init__(self, asked: dict[str, set[tuple[int, ...]]] | None = None) -> None:
        super().__init__()
        self._asked = {} if asked is None else asked
        self.untold: set[str] = set()
        self.guessed: set[str] = set()

    def __enter__(self) -> NoDraws:
        super().__enter__()
        self.enter_context(_NoDropout())
        self.enter_context(_Fixed(self.draw))
        return self

    def draw(self, name: str, shape: Sequence[int]) -> Tensor:
        """Numbers between 0 and 1 for an operation, each made of its position: never 0 or 1."""
        dim, offset = self._find_rows(name, tuple(shape))
        mixed = torch.tensor(1, device="cpu")
        for index, size in enumerate(shape):
            start = offset if index == dim else 0
            positions = torch.arange(start, start + size, device="cpu", dtype=torch.int64)
            places = [1] * len(shape)
            places[index] = size
            mixed = _scramble(mixed * 31 + positions.view(places) + 7 + index)
        part = (mixed & 0xFFFF).double().add(0.5) / 0x10000
        return part * 0.96875 + 0.015625  # bfloat16 rounds it to neither 0 nor 1

    def _find_rows(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """The dim of rows, and the first row's position there; 0 and 0 where nothing was cut."""
        shard = current_shard()
        if shard is None or shard.num_shards == 1:
            self._asked.setdefault(name, set()).add(shape)
            return 0, 0
        rows = shard.stop - shard.start
        found = set()
        for whole in self._asked.get(name, set()):
            longer = [d for d, (w, s) in enumerate(zip(whole, shape, strict=False)) if w != s]
            if whole == shape:
                found.add((0, 0))
            elif len(whole) == len(shape) and len(longer) == 1:
                [dim] = longer
                times = whole[dim] // shard.num_rows
                if (whole[dim], shape[dim]) == (times * shard.num_rows, times * rows):
                    found.add((dim, times * shard.start))
                    if times > 1:
                        self.guessed.add(f"{name} {list(whole)}")
        if len(found) == 1 or not shape:
            return found.pop() if shape else (0, 0)
        self.untold.add(f"{name} {list(shape)}")
        return 0, 0


class _NoDropout(TorchFunctionMode):
    """Lets dropout return its input: a mask that is applied to rows mixes none, whatever is in it.
    Takes chance out of other functions that may draw in a fused kernel by their arguments."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        place = _PLACES.get(func)
        if place is not None:
            name, index, value = place
            if len(args) > index:
                args = (*args[:index], value, *args[index + 1 :])
            else:
                kwargs = {**kwargs, name: value}
        return func(*args, **kwargs)


_DROPOUT_NAMES = (
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ dropout1d "
    "dropout2d dropout3d feature_alpha_dropout feature_alpha_dropout_"
)
_DROPOUTS = frozenset(
    getattr(place, name)
    for place in (torch, F)
    for name in _DROPOUT_NAMES.split()
    if hasattr(place, name)
)
_PLACES = {
    F.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
    F.multi_head_attention_forward: ("dropout_p", 10, 0.0),
    F.rrelu: ("training", 3, False),
    F.rrelu_: ("training", 3, False),
    torch.rrelu: ("training", 3, False),
    torch.rrelu_: ("training", 3, False),
}  # the argument's name, its place, and what it becomes


class _Fixed(TorchDispatchMode):
    """Replaces what random operations drew. Below autograd, so that gradients are torch's own."""

    def __init__(self, draw: Callable[[str, Sequence[int]], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._draw = draw

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        if name == "native_dropout" and args[2] is not False and 0 < args[1] < 1:
            mask = (self._draw(name, args[0].shape) < 0.5).to(args[0].device)
            return args[0] * mask / (1 - args[1]), mask
        result = func(*args, **kwargs)  # has the form that was asked for
        kind = name.removesuffix("_").removesuffix("_like")
        if kind in _KINDS and isinstance(result, Tensor) and result.layout is torch.strided:
            given = {a.name: a.default_value for a in func._schema.arguments}
            given.update(zip(given, args, strict=False))
            given.update(kwargs)
            target = torch.view_as_real(result) if result.is_complex() else result
            target.copy_(_KINDS[kind](lambda shape: self._draw(name, shape), target, given))
        return result


Draw = Callable[[Sequence[int]], Tensor]
Given = dict[str, Any]


def _rand(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return draw(target.shape)


def _uniform(draw: Draw, target: Tensor, given: Given) -> Tensor:
    low, high = _cpu(given["from"]), _cpu(given["to"])
    return low + (high - low) * draw(target.shape)


def _randn(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return torch.erfinv(2 * draw(target.shape) - 1) * math.sqrt(2)


def _normal(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return _cpu(given["mean"]) + _cpu(given["std"]) * _randn(draw, target, given)


def _log_normal(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return _normal(draw, target, given).exp()


def _exponential(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return -draw(target.shape).log() / _cpu(given["lambd"])


def _cauchy(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return _cpu(given["median"]) + _cpu(given["sigma"]) * torch.tan(
        math.pi * (draw(target.shape) - 0.5)
    )


def _geometric(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return (draw(target.shape).log() / math.log(max(1 - given["p"], 1e-9))).ceil().clamp(min=1)


def _randint(draw: Draw, target: Tensor, given: Given) -> Tensor:
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    if high is None:  # random_ without bounds: any numbers that the dtype holds
        high = 2 if target.dtype is torch.bool else 100
    spread = (draw(target.shape) * (high - low)).floor()
    return spread.clamp(max=high - low - 1) + _cpu(low)


def _bernoulli(draw: Draw, target: Tensor, given: Given) -> Tensor:
    """Half of what may be either is 1: a small p would give small tensors nothing but zeros."""
    p = given.get("p")
    p = _cpu(given["self"] if p is None else p)
    return torch.where((p <= 0) | (p >= 1), p, (draw(target.shape) < 0.5).double())


def _poisson(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return (2 * _cpu(given["self"]) * draw(target.shape)).round()


def _binomial(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return (_cpu(given["count"]) * _cpu(given["prob"]) + draw(target.shape)).floor()


def _gamma(draw: Draw, target: Tensor, given: Given) -> Tensor:
    return -_cpu(given["self"]) * draw(target.shape).log()


def _dirichlet(draw: Draw, target: Tensor, given: Given) -> Tensor:
    drawn = _gamma(draw, target, given)
    return drawn / drawn.sum(-1, keepdim=True)


def _multinomial(draw: Draw, target: Tensor, given: Given) -> Tensor:
    # Whoever waits least is drawn first, with waiting times that are exponential by the weights.
    weights = _cpu(given["self"])
    if given["replacement"]:
        times = -draw([*target.shape, weights.shape[-1]]).log()
        return (weights.unsqueeze(-2) / times).argmax(-1)
    times = -draw(weights.shape).log()
    return (weights / times).topk(target.shape[-1]).indices


def _randperm(draw: Draw, target: Tensor, given: Given) -> Tensor:
    """Moves every row, to another one at the border of a shard than on one device."""
    return torch.arange(given["n"], device="cpu").roll(-1)


_KINDS: dict[str, Callable[[Draw, Tensor, Given], Tensor]] = {
    "rand": _rand,
    "randn": _randn,
    "randint": _randint,
    "random": _randint,
    "uniform": _uniform,
    "normal": _normal,
    "log_normal": _log_normal,
    "exponential": _exponential,
    "cauchy": _cauchy,
    "geometric": _geometric,
    "bernoulli": _bernoulli,
    "poisson": _poisson,
    "binomial": _binomial,
    "_standard_gamma": _gamma,
    "_sample_dirichlet": _dirichlet,
    "multinomial": _multinomial,
    "randperm": _randperm,
}


def _cpu(value: Any) -> Tensor:
    """A number, or a tensor on any device, as the tensor that the formulas above are written in."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()


def _scramble(numbers: Tensor) -> Tensor:
    """Mix the low 32 bits of each number, so that neighbours have nothing in common."""
    for _ in range(2):
        numbers = ((numbers ^ (numbers >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)
