"""One call of one model, run plainly and on K replicas, as often as is needed.

What it holds: :class:`Trials`, which settles once how the two are to be compared (with which
gradients, in which dtype, with drawing stopped) and then compares them for any number of replicas
and any options. Why: whoever searches for a remedy runs the same comparison with other options.

Guarantees: every run starts from a fresh copy of the model and of the arguments.
Must not: say what a difference means.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from samestep.drawing import NoDraws, find_drawing, stop_drawing
from samestep.errors import DrawWarning, SplitError, StateWarning, describe_error, first_line
from samestep.findings import Comparison, Trial, compare, get_allowed
from samestep.mixing import find_mixing
from samestep.module import DataParallel
from samestep.observe import (
    Call,
    DtypeWatch,
    Record,
    copy_module,
    find_dtype,
    iter_state,
    run_step,
    seed_all,
    use_default_dtype,
)
from samestep.plan import SplitPlan
from samestep.replica import home_device
from samestep.split import cut, plan_split

__all__ = ["Trials"]

Options = Mapping[str, Any]
_UNRELATED = 0.1  # relative deviation that no rounding explains, whatever float64 says


class Trials:
    """Runs and compares.

    Args:
        model: the user's module; only copies of it run.
        call: the arguments and the loss.

    Attributes:
        drawing: the modules that draw, in words.
        forms_only: drawing cannot be stopped, so numbers cannot be compared.
        decided: how equality is decided, in words.
        plain: the plain step.
        notes: what could not be done.
        unproven: why an equal result is no proof.
        untold: random numbers of which it cannot be told which rows they are for.

    Raises:
        Exception: whatever the plain step raises.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model = model
        self.call = call
        self.notes: list[str] = []
        self.unproven: list[str] = []
        self._asked: dict[str, set[tuple[int, ...]]] = {}  # random numbers that plain runs drew
        self._guessed: set[str] = set()
        self.untold: set[str] = set()
        run_step(copy_module(model), self._given())  # the user's own step: what it raises is raised
        with _quiet():
            self._settle_gradients()
            self._settle_drawing()
            self._settle_dtype()

    # -- How to compare ----------------------------------------------------------------------

    def _given(self) -> Call:
        return Call(self.call.args, self.call.kwargs, self.call.loss, wants_gradients=False)

    def _settle_gradients(self) -> None:
        """Ask for gradients of all floating arguments, unless forward writes into one in place."""
        try:
            run_step(copy_module(self.model), self.call)
        except Exception:
            self.call = self._given()
            self.notes.append("gradients of the inputs are compared only where they ask for one")

    def _settle_drawing(self) -> None:
        self.silent: list[str] = []  # modules that may have a setting to switch off
        self.is_still = self.forms_only = False
        self.drawing: list[str] = []
        found = find_drawing(copy_module(self.model), lambda model: run_step(model, self.call))
        if not found:
            return
        self.silent = list(found)
        left = find_drawing(self._copy(), lambda model: run_step(model, self.call))
        if left:
            self.is_still = True
            one, two = (self._run(self._copy(), seed=seed) for seed in (0, 1))
            self.forms_only = any(c.deviation for c in compare(one, two, {}, torch.float64))
            self.is_still = not self.forms_only
        for name, sources in found.items():
            how = "switched off for comparing"
            is_foreign = "'s random" in sources
            if name in left:
                how = "fixed numbers in place of random ones"
                if self.forms_only or is_foreign:
                    how = "NOT stopped"
            self.drawing.append(f"{self.name(name)}, from {sources}; {how}")
            if is_foreign and not self.forms_only:
                self.unproven.append(f"{self.name(name)} draws from {sources}")
        if self.forms_only:
            who = ", ".join(map(self.name, left))
            self.unproven.append(f"{who} draws numbers, and only forms could be compared")
            self.notes.append(
                "replicas draw other numbers than one device, and drawing cannot be stopped here: "
                "compared were only the forms of outputs, gradients and state, and whether a run "
                "repeats; which modules mix rows cannot be seen either"
            )

    def _settle_dtype(self) -> None:
        self.own = self.dtype = self.tolerance = find_dtype(self.model, self.call)
        self.plain = self.plain_own = self._run(self._copy())
        why = f"in {_show(self.own)}, the model's dtype"
        if self.own is not torch.float64:
            watch = DtypeWatch()  # type: ignore[no-untyped-call]  # torch's
            try:
                self.plain = self._run(self._copy(torch.float64), torch.float64, watch)
            except Exception as error:
                why += f", as a float64 copy cannot run ({first_line(error)})"
            else:
                self.dtype, self.tolerance = torch.float64, watch.narrowest
                why = f"in a float64 copy of the {_show(self.own)} model"
                if watch.narrowest is not torch.float64:
                    why += f", which computes in {_show(watch.narrowest)} inside"
        allowed = get_allowed(self.tolerance)
        self.decided = f"{why}; a relative deviation of {allowed:.0e} counts as rounding"

    # -- Running -----------------------------------------------------------------------------

    def try_replicas(self, count: int, options: Options) -> Trial:
        """Run and compare with ``count`` replicas. What a parallel run raises is in the trial."""
        sizes: tuple[int, ...] = ()
        caught: list[str] = []
        try:
            sizes = self.plan(count, options).sizes
            with _caught(caught):
                decisive = self.compare(count, options)
                own = decisive
                if self.dtype is not self.own:
                    found = self._run(self._wrap(self._copy(), count, options))
                    own = self._compare(self.plain_own, found, None, self.own, count)
                repeats = self._repeats(count, options)
        except Exception as error:
            text = describe_error(error)
            return Trial(count, sizes, (), text, warnings=tuple(dict.fromkeys(caught)))
        comparisons = self._join(decisive, own, count)
        rounding = max((one.relative for one in own if one.equal), default=0.0)
        warned = tuple(dict.fromkeys(caught))
        return Trial(count, sizes, comparisons, "", repeats, rounding, warned)

    def compare(self, count: int, options: Options) -> tuple[Comparison, ...]:
        """Compare in the dtype that decides.

        Raises:
            Exception: whatever the parallel step raises.
        """
        found = self._run(self._wrap(self._copy(self._cast), count, options), self._cast)
        return self._compare(self.plain, found, self._cast, self.tolerance, count)

    def attempt(self, count: int, options: Options) -> frozenset[tuple[str, str]] | None:
        """What is unequal with these options; None where they raise or leave the batch whole."""
        try:
            if self.plan(count, options).num_shards < 2:
                return None
            with _quiet():
                comparisons = self.compare(count, options)
        except Exception:
            return None
        return frozenset((one.kind, one.path) for one in comparisons if not one.equal)

    def plan(self, count: int, options: Options) -> SplitPlan:
        """How the call is cut."""
        model = self._wrap(self.model, count, options)
        return model._samestep_runtime.plan(
            model.module, None, self.call.args, dict(self.call.kwargs)
        )

    def find_mixing(self, options: Options) -> list[str]:
        """The names of the modules that mix rows."""
        if self.forms_only:
            return []
        args, kwargs, _ = self.call.copy(self._cast)
        try:
            plan = plan_split(
                args,
                kwargs,
                num_slots=2,
                dim=options.get("dim", 0),
                in_dims=options.get("in_dims"),
                parameter_names=self.parameter_names(),
            )
        except SplitError:
            return []  # said already
        if plan.num_shards < 2:
            return []  # said by whoever sees all trials

        def run(model: nn.Module, *, part: bool) -> None:
            args, kwargs, _ = self.call.copy(self._cast)  # a forward may write into them
            if part:
                (args, kwargs), _ = cut(plan, args, kwargs)
            model(*args, **kwargs)

        def make() -> nn.Module:
            model = self._copy(self._cast)
            run(model, part=False)  # a first call may initialise it from the rows that it sees
            return model

        try:
            with (
                _quiet(),
                NoDraws() if self.is_still else contextlib.nullcontext(),
                use_default_dtype(self._cast),
            ):
                seed_all()
                return find_mixing(
                    make,
                    partial(run, part=False),
                    partial(run, part=True),
                    plan.sizes[0],
                    get_allowed(self.tolerance),
                )
        except Exception as error:
            self.notes.append(
                f"which modules mix rows cannot be seen: the plain module does not run on the "
                f"first {plan.sizes[0]} rows alone ({first_line(error)})"
            )
            return []

    def parameter_names(self) -> list[str]:
        """The names of forward's positional parameters."""
        model = self._wrap(self.model, 1, {})
        return model._samestep_runtime.parameter_names(model.module, None)

    def name(self, name: str) -> str:
        """A submodule in words."""
        module = dict(self.model.named_modules())[name]
        return f"{name or 'the module itself'} ({type(module).__name__})"

    # -- Helpers -----------------------------------------------------------------------------

    @property
    def _cast(self) -> torch.dtype | None:
        return None if self.dtype is self.own else self.dtype

    def _copy(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A copy that does not draw, as far as its settings allow it."""
        copied = copy_module(self.model, dtype)
        stop_drawing(copied, self.silent)
        return copied

    def _run(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        watch: DtypeWatch | None = None,
        seed: int = 0,
    ) -> Record:
        with self._stillness():
            return run_step(model, self.call, dtype, watch, seed)

    @contextlib.contextmanager
    def _stillness(self) -> Iterator[None]:
        """Fixed numbers in place of random ones, if the model draws still."""
        if not self.is_still:
            yield
            return
        with NoDraws(self._asked) as still:
            yield
        self.untold |= still.untold
        for text in sorted(still.guessed - self._guessed):
            self._guessed.add(text)
            self.notes.append(
                f"the numbers of {text} are compared as if rows were the outer of the two indices "
                f"that one dim is made of; if they are the inner one, they differ"
            )

    def _wrap(self, model: nn.Module, count: int, options: Options) -> DataParallel:
        return DataParallel(model, replicas=count, **options)

    def _compare(
        self,
        plain: Record,
        found: Record,
        cast: torch.dtype | None,
        tolerance: torch.dtype,
        count: int,
    ) -> tuple[Comparison, ...]:
        forms_only = self.forms_only and count > 1
        return compare(plain, found, self._state(cast), tolerance, forms_only=forms_only)

    def _state(self, dtype: torch.dtype | None = None) -> Mapping[tuple[str, str], Any]:
        """The module's state before a step."""
        return {(kind, path): value for kind, path, value in iter_state(self._copy(dtype))}

    def _join(
        self, decisive: tuple[Comparison, ...], own: tuple[Comparison, ...], count: int
    ) -> tuple[Comparison, ...]:
        """What float64 says, except where the model's own dtype gives something unrelated."""
        found = {(one.kind, one.path): one for one in decisive}
        grown = []
        for one in own:
            key = one.kind, one.path
            if one.equal or (key in found and not found[key].equal):
                continue
            is_number = one.deviation < math.inf
            if not is_number or (one.allowed and one.relative > max(_UNRELATED, 10 * one.allowed)):
                note = (
                    f"off by {one.relative:.0e} in {_show(self.own)} only"
                    if is_number
                    else one.note
                )
                found[key] = replace(one, note=note)
            else:
                grown.append(f"{one.name} by {one.relative:.0e}")
        if grown:
            self.notes.append(
                f"rounding grows in this model: with {count} replicas, {_show(self.own)} values "
                f"deviate though the float64 ones are equal ({', '.join(grown[:4])})"
            )
        return tuple(found.values())

    def _repeats(self, count: int, options: Options) -> bool | None:
        """Whether two parallel steps from one seed, drawing as the model does, have equal bits."""
        is_cpu = home_device(self.model).type == "cpu"
        if not is_cpu and not torch.are_deterministic_algorithms_enabled():
            return None
        one, two = (
            run_step(self._wrap(copy_module(self.model), count, options), self.call)
            for _ in range(2)
        )
        return all(c.deviation == 0 for c in compare(one, two, self._state(), self.own))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The plain step has run once already: what it warns of has been said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _caught(texts: list[str]) -> Iterator[None]:
    """Collect what the wrapper warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for entry in caught:
                if issubclass(entry.category, (StateWarning, DrawWarning)):
                    texts.append(f"{entry.category.__name__}: {entry.message}")


def _show(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
