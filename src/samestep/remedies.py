"""What the user could change so that the parallel step is the plain one: tried, not guessed.

What it holds: :func:`list_candidates`, the options of ``DataParallel`` that could help, given what
is not equal; and :func:`search`, which tries them. Why: the same symptom has many causes, and an
advice that has been run is worth more than a rule of thumb.

Guarantees: a remedy is named only if a run with it had fewer unequal values and no new one.
Must not: know how a step is run or compared; it is given a function that does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from samestep.norm import has_batch_norm
from samestep.plan import SplitPlan
from samestep.tree import iter_leaves

__all__ = ["Candidate", "list_candidates", "search"]

Failing = frozenset[tuple[str, str]] | None  # kinds and paths; None: the step raised
MAX_RUNS = 80


@dataclass(frozen=True)
class Candidate:
    """One option, or one entry of an option that is a dict.

    Attributes:
        option: its name.
        value: what it becomes; a dict is merged into what the user said.
        reason: why it helps, for the report.
    """

    option: str
    value: Any
    reason: str

    def apply(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """The options with this one, or None if the user has said something else there."""
        old = options.get(self.option)
        if isinstance(self.value, Mapping):
            if old is None or (self.option == "buffers" and old == "merge"):
                return {**options, self.option: self.value}
            merged = _join(old, self.value) if isinstance(old, Mapping) else None
            return None if merged is None else {**options, self.option: merged}
        return None if self.option in options else {**options, self.option: self.value}

    def __str__(self) -> str:
        return f"{self.option}={self.value!r}: {self.reason}"


def list_candidates(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    plan: SplitPlan,
    outputs: Mapping[str, Any],
    failing: Failing,
) -> list[Candidate]:
    """Return what may help, the likeliest first.

    Args:
        module: the plain module.
        args, kwargs: the arguments of the call.
        names: of forward's positional parameters.
        plan: how they are cut now.
        outputs: of the plain module, by path.
        failing: what is not equal.
    """
    found: list[Candidate] = []
    if has_batch_norm(module):
        reason = "BatchNorm then normalises with the whole batch's statistics"
        found.append(Candidate("sync_batch_norm", True, reason))
    found += _list_in_dims(args, kwargs, names, plan)
    unequal = [p for kind, p in failing if kind == "output"] if failing else list(outputs)
    single = [path for path in unequal if _is_single(outputs.get(path))]
    if any(_is_loss(outputs[path]) for path in single) or ("loss", "loss") in (failing or ()):
        found.append(Candidate("reduction", "sum", "what forward returns is a sum over rows"))
    for path in single:
        spec = _nest(_keys(path), "sum")
        found.append(Candidate("out_dims", spec, f"{path} is a sum over rows"))
    buffers = {name: b for name, b in module.named_buffers() if b is not None}
    for name in buffers:
        if failing is None or ("buffer", name) in failing:
            for rule in ("sum", "max", "min", "first"):
                reason = f"forward's way of updating the buffer {name!r}"
                found.append(Candidate("buffers", {name: rule}, reason))
    return found


def search(
    attempt: Callable[[Mapping[str, Any]], Failing],
    candidates: Callable[[Failing], list[Candidate]],
    options: Mapping[str, Any],
    failing: Failing,
) -> tuple[list[Candidate], dict[str, Any], Failing]:
    """Try candidates until nothing is unequal or none helps.

    Args:
        attempt: runs the step with these options and says what is unequal.
        candidates: may help against this.
        options: the user's own.
        failing: what is unequal with them.

    Returns:
        The candidates that helped, the options with them, and what is unequal still.
    """
    chosen: list[Candidate] = []
    best = dict(options)
    runs = 0
    while failing is None or failing:
        singles = candidates(failing)
        pairs = combinations([one for one in singles if one.option == "in_dims"], 2)
        winner: tuple[int, tuple[Candidate, ...], dict[str, Any], Failing] | None = None
        for group in [*((one,) for one in singles), *pairs]:
            if len(group) > 1 and winner is not None:
                break  # pairs only where no single one helps
            changed = _apply(group, best)
            if changed is None or runs >= MAX_RUNS:
                continue
            runs += 1
            left = attempt(changed)
            if not _is_better(left, failing):
                continue
            assert left is not None
            if winner is None or len(left) < winner[0]:
                winner = (len(left), group, changed, left)
            if not left:
                break
        if winner is None:
            break
        _, group, best, failing = winner
        chosen += group
    return chosen, best, failing


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _is_better(left: Failing, failing: Failing) -> bool:
    if left is None or failing is None:
        return left is not None
    return left < failing


def _apply(group: Sequence[Candidate], options: Mapping[str, Any]) -> dict[str, Any] | None:
    changed: dict[str, Any] | None = dict(options)
    for candidate in group:
        if changed is None:
            return None
        changed = candidate.apply(changed)
    return changed


def _list_in_dims(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str], plan: SplitPlan
) -> list[Candidate]:
    """Each argument that is cut, given whole; each that is whole but as long on another dim, cut
    there."""
    values = dict([*iter_leaves(args, "args"), *iter_leaves(dict(kwargs), "kwargs")])
    found = []
    for leaf in plan.leaves:
        keys = _keys(leaf.path)
        if keys and isinstance(keys[0], int) and leaf.path.startswith("args"):
            keys = (names[keys[0]] if keys[0] < len(names) else keys[0], *keys[1:])
        value = values.get(leaf.path)
        if leaf.action != "whole":
            reason = f"{leaf.path} {leaf.description} is not about rows, though as long as they are"
            found.append(Candidate("in_dims", _nest(keys, None), reason))
        elif isinstance(value, Tensor) and plan.num_rows and plan.num_rows in value.shape:
            dim = list(value.shape).index(plan.num_rows)
            reason = f"{leaf.path} {leaf.description} has its rows on dim {dim}"
            found.append(Candidate("in_dims", _nest(keys, dim), reason))
    return found


def _keys(path: str) -> tuple[Any, ...]:
    """The keys in a path such as ``args[0]['prices'].table[1]``."""
    parts = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)", path)
    return tuple(int(index) if index else text or name for text, index, name in parts)


def _nest(keys: tuple[Any, ...], spec: Any) -> Any:
    for key in reversed(keys):
        spec = {key: spec}
    return spec


def _join(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """Both together, or None if they disagree."""
    joined = dict(old)
    for key, value in new.items():
        if key not in joined:
            joined[key] = value
        elif isinstance(joined[key], Mapping) and isinstance(value, Mapping):
            inner = _join(joined[key], value)
            if inner is None:
                return None
            joined[key] = inner
        else:
            return None
    return joined


def _is_single(value: Any) -> bool:
    """One number, of any kind."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
