"""Two records of a step, compared; and what came of it, as data and as text.

What it holds: :func:`compare`, the records :class:`Comparison`, :class:`Trial` (one number of
replicas) and :class:`Report`, and the report's text. Why: "not equal" must come with numbers: how
far, measured by what, and how much was allowed.

[Note: what is allowed] Another order of additions changes the last bits, and a deep model makes
that grow. In float64 what is found is around 1e-14 of a tensor's largest value (docs/numerics.md),
and a real difference is many orders larger: 1e-9 lies between. float32 has 1e-7 for its last bit
and up to 1e-5 was measured: 1e-4. The 16-bit formats have a last bit of 1e-3 and 8e-3.

[Note: scale] A deviation is divided by the largest value of the plain tensor. What ought to be zero
(the gradient of a bias before a norm) holds nothing but rounding, so the scale has a floor: for a
gradient a hundredth of the model's largest gradient; for everything else 1e-5 (float64) or 1e-3 of
the largest value of its kind, and of the largest number among arguments and parameters, if that is
less than 1, else of 1. So in float64 a deviation below 1e-14 beside ordinary arguments is not seen.
In float64 each index of the last dim is measured by its own largest value, or a hundredth of the
tensor's: a small column beside a large one is seen, down to 1e-11 of the large one.

Guarantees: equal means within :data:`ALLOWED`, or exactly equal for what is no floating tensor.
Must not: run anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.observe import Record
from samestep.rows import is_array

__all__ = ["ALLOWED", "Comparison", "Report", "Trial", "compare", "get_allowed"]

ALLOWED = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}  # see [Note: what is allowed]
_PART = 1e-2  # these four: see [Note: scale]
_SLICE = 1e-2
_FLOOR = {torch.float64: 1e-5}
_WIDE_FLOOR = 1e-3
_MAX_SHOWN = 12  # values of one kind in the text; all are in the data


@dataclass(frozen=True)
class Comparison:
    """One value of the step, plain and parallel.

    Attributes:
        kind: "output", "loss", "gradient", "input gradient", "parameter", "buffer", "attribute".
        path: which one.
        equal: whether they are.
        deviation: the largest absolute difference; inf if the two cannot be subtracted.
        relative: ``deviation`` by the tensor's scale.
        allowed: the largest ``relative`` that counts as equal; 0: exactly equal.
        note: what else there is to say, such as two shapes.
        shape: of the plain value; None if it is no tensor.
    """

    kind: str
    path: str
    equal: bool
    deviation: float
    relative: float
    allowed: float
    note: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Kind and path."""
        return self.path if self.kind in ("output", "loss") else f"{self.kind} {self.path}"


@dataclass(frozen=True)
class Trial:
    """One number of replicas.

    Attributes:
        replicas: K.
        sizes: rows of each shard; one entry or none if the batch was not cut.
        comparisons: every value of the step; empty if there was an ``error``.
        error: what the parallel step raised.
        repeats: the same bits in two parallel runs from one seed; None if that was not looked at.
        rounding: the largest relative deviation in the model's own dtype.
        warnings: what the wrapper warned of.
    """

    replicas: int
    sizes: tuple[int, ...]
    comparisons: tuple[Comparison, ...]
    error: str = ""
    repeats: bool | None = None
    rounding: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def unequal(self) -> tuple[Comparison, ...]:
        """The values that are not equal."""
        return tuple(one for one in self.comparisons if not one.equal)

    @property
    def ok(self) -> bool:
        """Whether this number of replicas makes the plain module's step."""
        return not self.error and not self.unequal and self.repeats is not False


@dataclass(frozen=True)
class Report:
    """What ``samestep.check`` found. Print it; it is true if everything is equal.

    Attributes:
        model: the module's class.
        arguments: what the largest number of replicas does with each argument.
        decided: how equality was decided, and why so.
        trials: one per number of replicas.
        mixing: the modules whose own code makes a row depend on other rows, in the order they run.
        drawing: the modules that draw random numbers.
        advice: what to change.
        comparable: whether numbers were compared, not only their forms.
        notes: what else is worth knowing, such as what could not be looked at.
        unproven: why it is no proof though nothing differs, such as a batch that was never cut.
    """

    model: str
    arguments: str
    decided: str
    trials: tuple[Trial, ...]
    mixing: tuple[str, ...] = ()
    drawing: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    comparable: bool = True
    notes: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every number of replicas was seen to make the plain module's step."""
        return self.comparable and not self.unproven and all(trial.ok for trial in self.trials)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        failed = [trial.replicas for trial in self.trials if not trial.ok]
        verdict = "the same step"
        if failed:
            verdict = f"NOT the same step for replicas {_list(failed)}"
        elif not self.ok:
            verdict = "NOT PROVEN"
        if self.unproven:
            verdict += f"; {'; '.join(self.unproven)}" if failed else f": {self.unproven[0]}"
        lines = [f"{self.model}: {verdict}", f"decided {self.decided}", "", "arguments"]
        lines += [f"  {line}" for line in self.arguments.splitlines()]
        lines += ["", "replicas"]
        lines += [f"  {_show_trial(trial)}" for trial in self.trials]
        lines += [
            "",
            "values (the worst of the runs that raised nothing)",
            *_show_values(self.trials),
        ]
        for title, entries in (
            ("mixes rows, the first first", self.mixing),
            ("draws random numbers", self.drawing),
            ("what to change", self.advice),
            ("notes", self.notes),
        ):
            if entries:
                lines += ["", title, *(f"  - {entry}" for entry in entries)]
        return "\n".join(lines)


# ---------------------------------------------------------------------------
# Comparing
# ---------------------------------------------------------------------------


def compare(
    plain: Record,
    other: Record,
    before: Mapping[tuple[str, str], Any],
    dtype: torch.dtype,
    *,
    forms_only: bool = False,
) -> tuple[Comparison, ...]:
    """Compare what two ways of running a step have made and left.

    Args:
        plain: the truth.
        other: what is compared with it.
        before: the module's state before either; what both left as it was is not listed.
        dtype: what the tolerance belongs to.
        forms_only: compare which values there are, and their shapes, but not the numbers.
    """
    allowed = get_allowed(dtype)
    largest = {
        kind: max((_size(v) for (k, _), v in plain.values.items() if k == kind), default=0.0)
        for kind in {kind for kind, _ in [*plain.values, *other.values]}
    }
    part = _FLOOR.get(dtype, _WIDE_FLOOR)
    found = []
    for key in {**plain.values, **other.values}:
        kind, path = key
        is_state = kind in ("parameter", "buffer", "attribute")
        one, two = plain.values.get(key, _MISSING), other.values.get(key, _MISSING)
        old = before.get(key, _MISSING)
        if is_state and _is_same(one, old) and _is_same(two, old):
            continue
        if kind in ("gradient", "input gradient"):
            floor = largest[kind] * _PART
        else:
            floor = max(largest[kind], min(1.0, plain.size)) * part
        found.append(_compare(kind, path, one, two, allowed, floor, forms_only))
    return tuple(found)


def get_allowed(dtype: torch.dtype) -> float:
    """The relative deviation that counts as rounding in ``dtype``."""
    return ALLOWED.get(dtype, ALLOWED[torch.bfloat16])


def _compare(
    kind: str, path: str, one: Any, two: Any, allowed: float, floor: float, forms_only: bool
) -> Comparison:
    shape = tuple(one.shape) if isinstance(one, Tensor) else None
    form, other_form = _form(one), _form(two)
    if form != other_form:
        note = f"plain: {form}; parallel: {other_form}"
        return Comparison(kind, path, False, math.inf, math.inf, allowed, note, shape)
    if forms_only:
        return Comparison(kind, path, True, 0.0, 0.0, allowed, _FORM_ONLY, shape)
    if is_array(one):
        one, two = torch.as_tensor(one, device="cpu"), torch.as_tensor(two, device="cpu")
    if not isinstance(one, Tensor):
        if isinstance(one, float) and isinstance(two, float):
            one, two = torch.tensor([one, two], dtype=torch.float64, device="cpu")
        else:
            equal = not isinstance(one, _PLAIN) or one == two
            note = "" if equal else f"plain: {one!r}; parallel: {two!r}"
            deviation = 0.0 if equal else math.inf
            return Comparison(kind, path, equal, deviation, deviation, 0.0, note)
    is_exact = not (one.is_floating_point() or one.is_complex())
    deviation, relative = _measure(one, two, floor, by_slice=allowed == ALLOWED[torch.float64])
    limit = 0.0 if is_exact else allowed
    return Comparison(kind, path, relative <= limit, deviation, relative, limit, "", shape)


_MISSING = object()
_FORM_ONLY = "form only"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _form(value: Any) -> str:
    """What a value is, its numbers aside."""
    if value is _MISSING:
        return "not there"
    if isinstance(value, Tensor) or is_array(value):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _wide(value: Tensor) -> Tensor:
    wide = torch.complex128 if value.is_complex() else torch.float64
    return value.detach().cpu().to(wide)


def _deviation(one: Tensor, two: Tensor) -> float:
    """The largest absolute difference."""
    return float(_differences(one, two).max()) if one.numel() else 0.0


def _differences(one: Tensor, two: Tensor) -> Tensor:
    """Absolute differences; equal infinities and two NaN do not differ, and other integers do."""
    wide, other = _wide(one), _wide(two)
    is_exact = not (one.is_floating_point() or one.is_complex())
    is_equal = one.cpu() == two.cpu() if is_exact else wide == other
    # Integers may differ by less than a float of their size can tell.
    difference = (wide - other).abs().clamp(min=1.0 if is_exact else 0.0)
    difference[is_equal | (wide.isnan() & other.isnan())] = 0.0
    return difference.nan_to_num(nan=math.inf, posinf=math.inf)


def _measure(one: Tensor, two: Tensor, floor: float, *, by_slice: bool) -> tuple[float, float]:
    """The largest absolute difference, and the largest by its scale. See [Note: scale]."""
    deviation = _deviation(one, two)
    if deviation == 0 or not one.dim() or not by_slice:
        scale = max(_size(one), floor)
        return deviation, 0.0 if deviation == 0 else deviation / scale if scale else math.inf
    floor = max(floor, _size(one) * _SLICE)
    sizes = _sizes(one).reshape(-1, one.shape[-1]).amax(0).clamp(min=floor)
    off = _differences(one, two).reshape(-1, one.shape[-1]).amax(0)
    return deviation, float((off[off > 0] / sizes[off > 0]).max())


def _size(value: Any) -> float:
    """The largest finite absolute value."""
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    return float(_sizes(value).max())


def _sizes(value: Tensor) -> Tensor:
    return _wide(value).abs().nan_to_num(nan=0.0, posinf=0.0)


def _is_same(one: Any, two: Any) -> bool:
    """The same bits, or equal plain values."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return _form(one) == _form(two) and _deviation(one, two) == 0
    if is_array(one) and is_array(two):
        return _form(one) == _form(two) and bool((one == two).all())
    if isinstance(one, _PLAIN):
        return type(one) is type(two) and bool(one == two)
    return one is two


# ---------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------


def _show_trial(trial: Trial) -> str:
    cut = "not cut" if len(trial.sizes) < 2 else " ".join(map(str, trial.sizes))
    text = f"{trial.replicas} ({cut}): "
    if trial.error:
        return text + trial.error
    if trial.unequal:
        text += f"not equal, {len(trial.unequal)} of {len(trial.comparisons)} values"
    else:
        is_form = any(one.note == _FORM_ONLY for one in trial.comparisons)
        text += f"{'equal in form' if is_form else 'equal'}, all {len(trial.comparisons)} values"
    if trial.repeats is not None:
        text += "; same bits again" if trial.repeats else "; NOT the same bits when run again"
    return text


def _show_values(trials: tuple[Trial, ...]) -> list[str]:
    """One line per value, unequal ones first; long lists of equal ones are cut short."""
    groups: dict[tuple[str, str], list[tuple[int, Comparison]]] = {}
    for trial in trials:
        for one in trial.comparisons:
            # What is no tensor is shown where it differs: outputs of some libraries are full of it.
            if one.shape is not None or not one.equal:
                groups.setdefault((one.kind, one.path), []).append((trial.replicas, one))
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in groups):
        entries = [entry for (k, _), entry in groups.items() if k == kind]
        entries.sort(key=lambda entry: all(one.equal for _, one in entry))
        lines += [f"  {_show_value(entry)}" for entry in entries[:_MAX_SHOWN]]
        rest = entries[_MAX_SHOWN:]
        if rest:
            unequal = sum(any(not one.equal for _, one in entry) for entry in rest)
            lines.append(f"  and {len(rest)} more of kind {kind}, {unequal} of them not equal")
    return lines or ["  none"]


def _show_value(entry: list[tuple[int, Comparison]]) -> str:
    worst = max((one for _, one in entry), key=lambda one: (not one.equal, one.relative))
    failed = [replicas for replicas, one in entry if not one.equal]
    verdict = f"NOT EQUAL for {_list(failed)}" if failed else "equal"
    if worst.note:
        return f"{worst.name}: {verdict} ({worst.note})"
    numbers = f"off by {worst.deviation:.1e}, relative {worst.relative:.1e}"
    return f"{worst.name}: {verdict} ({numbers}, allowed {worst.allowed:.0e})"


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
