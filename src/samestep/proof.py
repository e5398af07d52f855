"""Proof on the user's own model: is the parallel step the plain one?

What it holds: :func:`check`, and :func:`check_target` for the command line. Why: the
library's tests say nothing about a model that they do not know; whether it mixes rows, averages
something ragged or keeps state that cannot be merged is seen by running it both ways.

Guarantees: the model, its gradients and state, the arguments and the global random state are left
as they were: everything runs on copies. What goes wrong in a parallel run is a finding; what goes
wrong in the plain one is raised.
Must not: hold how steps are run, compared, watched or mended; it says in which order.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from samestep.errors import SplitError
from samestep.findings import Report, Trial
from samestep.module import DataParallel
from samestep.observe import Call, copy_module, iter_state, run_step
from samestep.plan import SplitPlan
from samestep.randomness import kept_state
from samestep.remedies import Candidate, Failing, list_candidates, search
from samestep.replica import home_device
from samestep.trials import Trials

__all__ = ["TargetError", "check", "check_target", "find_target", "options_in", "parse_target"]

REPLICAS = (1, 2, 3, 4, 7, 8)


def check(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    replicas: int | Sequence[int] = REPLICAS,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Run a model's step plainly and on several replicas, and say what differs and why.

    Compared are outputs, the loss, the gradients of parameters and inputs, and what forward left in
    parameters, buffers and attributes. Dropout is switched off for it, and other random functions
    of torch return fixed numbers; the module's mode stays what it is.

    Args:
        model: the module itself, not wrapped, in the mode (train or eval) to be checked.
        inputs: the positional arguments of one call, with a batch of a few rows per replica.
        loss: from the output to a 0-dim tensor. Default: the output itself if it is 0-dim and
            floating, else the sum of all floating outputs with fixed random weights.
        replicas: the numbers of replicas to try.
        kwargs: the keyword arguments of the call.
        options: those of :class:`samestep.DataParallel`. Without ``device_ids``, all slots are on
            the model's own device.

    Returns:
        A report: print it; it is true if the batch was cut, and everything is equal. What could
        not be looked at (see ``unproven``) makes it false.

    Raises:
        TypeError: ``model`` is no module, is wrapped already, or cannot be copied; an option is
            unknown; ``loss`` does not return a tensor.
        ValueError: ``replicas`` is empty or holds less than 1; an option's value cannot be met.
        Exception: whatever the plain model or ``loss`` raises.

    Exactness:
        Decided in a float64 copy of the model where it can be made: rounding shrinks there by nine
        digits and a real difference does not. Else by the tolerance of the model's dtype. The
        report says which.

    Example:
        >>> import torch
        >>> report = check(nn.Linear(5, 2), torch.randn(8, 5), replicas=(1, 2, 3))
        >>> report.ok
        True
        >>> report = check(nn.BatchNorm1d(5), torch.randn(8, 5), replicas=2)
        >>> report.mixing
        ('the module itself (BatchNorm1d)',)
        >>> report.advice[0].partition(":")[0]
        'sync_batch_norm=True'
    """
    counts = _check_replicas(replicas)
    _check_arguments(model, options)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the output, got {loss!r}")
    options.setdefault("device_ids", [home_device(model)])
    call = Call(inputs, dict(kwargs or {}), loss)
    with kept_state():
        if any(is_lazy(parameter) for parameter in model.parameters()):
            # The first batch gives the parameters their shapes, in the wrapper as in the module.
            model = copy_module(model)
            run_step(model, call)
            model = copy_module(model)
        for count in counts:
            _explain_arguments(model, call, count, options)  # raises for a wrong option
        return _look(Trials(model, call), counts, options)


def _look(trials: Trials, counts: Sequence[int], options: dict[str, Any]) -> Report:
    found = [trials.try_replicas(count, options) for count in counts]
    failed = [trial for trial in found if trial.error or trial.unequal]
    advice = [t for trial in found for t in trial.warnings if t.startswith("DrawWarning")]
    best, left = options, frozenset[tuple[str, str]]()
    if failed:
        texts, best, left = _mend(trials, failed, options)
        advice += texts
    # With arguments that are cut by mistake the plain module may not run on a part of the rows.
    mixing = trials.find_mixing(best)
    advice += _explain(left, trials, mixing)
    is_foreign = any("'s random" in text for text in trials.drawing)
    if is_foreign or any(trial.repeats is False for trial in found):
        advice.append(
            "draw with torch's functions inside forward: Python's and numpy's generators are "
            "shared by all replicas, and which replica draws first is chance"
        )
    return Report(
        model=type(trials.model).__name__,
        arguments=_explain_arguments(trials.model, trials.call, counts[-1], options),
        decided=trials.decided,
        trials=tuple(found),
        mixing=tuple(map(trials.name, mixing)),
        drawing=tuple(trials.drawing),
        advice=tuple(dict.fromkeys(advice)),
        comparable=not trials.forms_only,
        notes=tuple(_list_notes(trials, found)),
        unproven=tuple(_list_unproven(trials, found)),
    )


_UNCUT = "the batch was never cut, so this proves nothing"


def _list_unproven(trials: Trials, found: Sequence[Trial]) -> list[str]:
    """Why a report in which all is equal is no proof."""
    reasons = list(trials.unproven)
    if trials.untold:
        names = ", ".join(sorted(trials.untold)[:4])
        reasons.append(f"which rows random numbers are for cannot be told: {names}")
    if any(trial.error or len(trial.sizes) > 1 for trial in found):
        return reasons
    return [_UNCUT, *reasons]


def _list_notes(trials: Trials, found: Sequence[Trial]) -> list[str]:
    notes = list(trials.notes)
    if _UNCUT in _list_unproven(trials, found):
        notes.insert(0, f"{_UNCUT}: give check more rows, and replicas of more than 1")
    flags = [
        path
        for (kind, path), value in trials.plain.values.items()
        if kind == "output" and _is_flag(value)
    ]
    if flags:
        notes.append(
            f"{', '.join(flags[:4])}: one flag or whole number for all rows, which may have been "
            f"equal by chance; where shards do not agree, a call raises MergeError (see out_dims)"
        )
    return notes


def _is_flag(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.dim() and not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int)  # bool, too


def _mend(
    trials: Trials, failed: Sequence[Trial], options: dict[str, Any]
) -> tuple[list[str], dict[str, Any], frozenset[tuple[str, str]]]:
    """Search for options that help; return advice, the options, and what is unequal still."""
    first = failed[0]
    failing: Failing = None
    if not first.error:
        failing = frozenset((one.kind, one.path) for one in first.unequal)
    outputs = {p: v for (kind, p), v in trials.plain.values.items() if kind == "output"}
    names = trials.parameter_names()
    try:
        plan = trials.plan(first.replicas, options)
    except SplitError:  # the user's own in_dims cannot be met: nothing to add to them
        plan = SplitPlan(None, (), (0,), ())

    def list_for(failing: Failing) -> list[Candidate]:
        call = trials.call
        return list_candidates(trials.model, call.args, call.kwargs, names, plan, outputs, failing)

    def attempt(changed: Mapping[str, Any]) -> Failing:
        return trials.attempt(first.replicas, changed)

    chosen, best, left = search(attempt, list_for, options, failing)
    advice = [str(one) for one in chosen]
    if left is None:
        reason = _find_leftovers(trials.model, plan.num_rows) or "no option helps"
        return [*advice, f"{reason} against this error: {first.error}"], best, frozenset()
    if chosen and not left:
        still = [t.replicas for t in failed if trials.attempt(t.replicas, best) != frozenset()]
        but = f", but not for replicas {', '.join(map(str, still))}" if still else ""
        advice.append(f"with this, everything was equal when tried{but}")
    return advice, best, left


class TargetError(ValueError):
    """The command line names a function that is not there, or one that returns something else."""


def find_target(target: str) -> Callable[[], Any]:
    """Find the function that the command line names.

    Args:
        target: ``"module:function"``; the module is imported as from the current directory.

    Raises:
        TargetError: the text is of another form, or there is no such module or function.
        Exception: whatever importing the module raises.
    """
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise TargetError(f"{target!r} is not of the form module:function")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the user's module imports
        raise TargetError(f"there is no module {name!r} in {here} or installed") from error
    finally:
        if here in sys.path:
            sys.path.remove(here)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise TargetError(f"module {name!r} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]  # what it takes and returns is seen later


def check_target(make: Callable[[], Any], replicas: Sequence[int] | None = None) -> Report:
    """Check what a function returns; for the command line.

    Args:
        make: returns ``(model, *inputs)``, or a dict of check's arguments:
            ``{"model": ..., "inputs": (...), "loss": ..., ...}``.
        replicas: instead of what the function says.

    Raises:
        TargetError: it returns something else.
        Exception: as :func:`check`.
    """
    rest = parse_target(make())
    model, inputs = rest.pop("model"), rest.pop("inputs", ())
    if replicas is not None:
        rest["replicas"] = replicas
    return check(model, *inputs, **rest)


def parse_target(given: Any) -> dict[str, Any]:
    """Read what a function that the command line names has returned.

    Raises:
        TargetError: it is neither ``(model, *inputs)`` nor a dict with ``"model"`` in it, the model
            is none or is wrapped already, or an option is unknown.
    """
    if isinstance(given, tuple) and given:
        given = {"model": given[0], "inputs": given[1:]}
    elif not isinstance(given, Mapping) or "model" not in given:
        raise TargetError(
            f"the function returned a {type(given).__name__}; it must return (model, *inputs), or "
            f"a dict with 'model', 'inputs' and whatever else check takes"
        )
    try:
        _check_arguments(given["model"], options_in(given))
    except TypeError as error:
        raise TargetError(f"what the function returned cannot be used: {error}") from error
    return dict(given)


def options_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``DataParallel`` among what such a function has returned."""
    others = ("model", "inputs", "kwargs", "loss", "replicas")
    return {key: value for key, value in given.items() if key not in others}


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _explain(left: frozenset[tuple[str, str]], trials: Trials, mixing: Sequence[str]) -> list[str]:
    """What to do about what no option mends."""
    advice = []
    for kind, path in sorted(left):
        if kind == "attribute":
            advice.append(
                f"{path}: forward writes it, and no rule gives what one plain call leaves there; "
                f"return it from forward, or make it a buffer with a rule in buffers="
            )
        elif kind in ("buffer", "parameter"):
            advice.append(
                f"{path}: forward writes it, and no rule of buffers= gives what one plain call "
                f"leaves there; return the numbers from forward and update it outside"
            )
        elif kind == "output" and not getattr(trials.plain.values.get((kind, path)), "shape", ()):
            advice.append(
                f"{path} is neither a mean nor a sum over rows: a mean over what rows have "
                f"different amounts of (tokens, ignored targets), or rows compared with rows. "
                f"Compute it outside the wrapper, or return sums and counts with out_dims 'sum' "
                f"and divide outside"
            )
    if any(kind in ("output", "gradient", "input gradient") for kind, _ in left):
        modules = dict(trials.model.named_modules())
        for name in mixing:
            if isinstance(modules[name], _BatchNorm):
                way = "sync_batch_norm=True lets it see the whole batch"
            else:
                way = "call that part outside the wrapper, where the whole batch is"
            advice.append(
                f"{trials.name(name)} mixes rows, and a replica sees its own rows only; {way}"
            )
    if left and not advice:
        names = ", ".join(path for _, path in sorted(left)[:4])
        advice.append(
            f"no option makes {names} equal; look at the arguments above: is one cut that should "
            f"be whole, or the other way round?"
        )
    return advice


def _find_leftovers(model: nn.Module, num_rows: int | None) -> str:
    """What to do about state with a row for each of the batch: replicas get it whole."""
    found = [
        f"{path} {list(value.shape)}"
        for kind, path, value in iter_state(model)
        if kind in ("attribute", "buffer") and isinstance(value, Tensor)
        if num_rows and num_rows in value.shape
    ]
    if not found:
        return ""
    return (
        f"{', '.join(found[:4])}: it may hold the rows of an earlier call, and every replica gets "
        f"it whole; reset this state or check a fresh module, which may help"
    )


def _explain_arguments(model: nn.Module, call: Call, count: int, options: dict[str, Any]) -> str:
    """What a call would do with its arguments; one that cannot be cut is a finding, too."""
    wrapper = DataParallel(model, replicas=count, **options)
    try:
        return wrapper.explain(*call.args, **call.kwargs)
    except SplitError as error:
        return f"SplitError: {error}"


def _check_replicas(replicas: int | Sequence[int]) -> list[int]:
    counts = [replicas] if isinstance(replicas, int) else list(replicas)
    if not counts:
        raise ValueError("replicas is empty; name at least one number of replicas")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"replicas must be whole numbers, got {count!r}")
        if count < 1:
            raise ValueError(f"replicas must be at least 1, got {count}")
    return sorted(set(counts))


def _check_arguments(model: Any, options: Mapping[str, Any]) -> None:
    if isinstance(model, DataParallel):
        raise TypeError(
            "model is wrapped already; pass model.module, and the wrapper's options as keywords"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    known = list(inspect.signature(DataParallel).parameters)
    unknown = [name for name in options if name not in known or name == "module"]
    if unknown:
        raise TypeError(
            f"{unknown[0]!r} is no option of DataParallel (they are {', '.join(known[1:])}); "
            f"keyword arguments of the model go into kwargs="
        )
