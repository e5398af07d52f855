"""``samestep bench``: which setting trains a model of the user's fastest on this machine.

What it holds: :func:`bench_target`, which times a training step plainly, on replicas, with
``recompute=True`` and after ``tune_cpu()``; :class:`Bench`, what came of it; :func:`advise`, the
rule that turns times into advice.

Guarantees: settings run interleaved, each on a copy of its own, from the same weights and inputs.
Must not: be imported by anything that trains, or know how a measurement is timed (``timing``).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.auto import list_settings
from samestep.devices import count_cores
from samestep.errors import describe_error
from samestep.module import DataParallel
from samestep.proof import find_target, options_in, parse_target
from samestep.report import format_table
from samestep.tie import find_tensors
from samestep.timing import (
    Processes,
    Ratio,
    Step,
    compare,
    describe_machine,
    ratio,
    read_ticks,
)
from samestep.tune import tune_cpu

__all__ = ["DEFAULT_TARGET", "Advice", "Bench", "advise", "bench_target", "make_default"]

DEFAULT_TARGET = "samestep.bench:make_default"
_RECOMPUTE = ", recompute=True"
_TUNED = "after tune_cpu()"


@dataclass(frozen=True)
class Advice:
    """Which setting to use.

    Attributes:
        baseline: the plain module at its better number of threads.
        best: the fastest setting that is surely faster than the baseline, or the baseline.
        ratio: how many times as fast as the baseline.
        tuning: how many times as fast the best is after ``tune_cpu()``; None: not measured.
        lines: what to write, and what it gives.
    """

    baseline: str
    best: str
    ratio: Ratio
    tuning: Ratio | None
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """What was measured; print it.

    Attributes:
        model: its class.
        samples: milliseconds per step of each setting, block by block.
        tuned: of the best setting, in processes of its own, before and after ``tune_cpu()``.
        failures: settings that could not run, and why.
    """

    model: str
    samples: dict[str, list[float]]
    tuned: dict[str, list[float]]
    failures: dict[str, str]
    machine: dict[str, object]

    @property
    def advice(self) -> Advice:
        """Which setting to use."""
        return advise(self.samples, self.tuned)

    @property
    def rows(self) -> list[tuple[str, float, Ratio]]:
        """Each setting with its time and its ratio to the plain module."""
        baseline = self.advice.baseline
        return [
            (name, statistics.median(times), ratio(self.samples, name, baseline))
            for name, times in self.samples.items()
        ]

    def as_record(self) -> dict[str, Any]:
        """Everything, as what JSON can hold."""
        return asdict(self) | {"advice": asdict(self.advice)}

    def __str__(self) -> str:
        machine = self.machine
        text = f"{self.model} on {machine['cores']} cores, torch {machine['torch']}\n\n"
        text += format_table(self.rows, self.advice.baseline)
        text += "".join(f"\n{name}: failed, {why}" for name, why in self.failures.items())
        return text + "\n\n" + "\n".join(self.advice.lines)


def bench_target(
    target: str = DEFAULT_TARGET, *, num_blocks: int = 24, max_seconds: float = 60.0
) -> Bench:
    """Measure what a function returns.

    Args:
        target: ``"module:function"``, where the function returns ``(model, *inputs)`` or a dict of
            check's arguments, options of ``DataParallel`` included.
        num_blocks: blocks of at least 50 ms per setting.
        max_seconds: of the comparison, apart from a handful of steps of each setting.

    Raises:
        TargetError: there is no such function, or it returns something else.
        Exception: what the plain module raises.
    """
    ticks = read_ticks()
    threads = torch.get_num_threads()
    steps, failures = _make_steps(target)
    bounds = {"num_blocks": num_blocks, "max_seconds": max_seconds}
    try:
        samples = compare(steps, **bounds)  # type: ignore[arg-type]  # an int and a float
    finally:
        torch.set_num_threads(threads)
    best = advise(samples, {}).best
    tuned = _measure_tuning(target, best, num_blocks, max_seconds / 2)
    name = type(_load(target)["model"]).__name__
    return Bench(name, samples, tuned, failures, describe_machine(ticks))


def advise(samples: Mapping[str, Sequence[float]], tuned: Mapping[str, Sequence[float]]) -> Advice:
    """Turn times into advice.

    Args:
        samples: of each setting; names begin with ``"plain"`` or ``"replicas="``.
        tuned: of the best setting, before and after ``tune_cpu()``; empty: not measured.

    Example:
        >>> times = {"plain, 1 thread": [2.0, 2.1], "replicas=2": [1.0, 1.0]}
        >>> advise(times, {}).lines[0]
        'use DataParallel(model, replicas=2): 2.05 [2.00, 2.10] times plain, 1 thread'
    """
    middles = {name: statistics.median(times) for name, times in samples.items()}
    plains = [name for name in samples if name.startswith("plain")]
    baseline = min(plains, key=lambda name: middles[name])
    found = {
        name: ratio(samples, name, baseline)
        for name in samples
        if name not in plains and not name.endswith(_RECOMPUTE)
    }
    sure = {name: times for name, times in found.items() if times.low > 1}
    if sure:
        best = max(sure, key=lambda name: sure[name].middle)
        lines = [f"use DataParallel(model, {best}): {sure[best]} times {baseline}"]
    else:
        best = baseline
        lines = [f"use the plain module ({baseline}): no replicas were surely faster"]
        if baseline == "plain, 1 thread" and len(plains) > 1:
            lines.append("with torch.set_num_threads(1), or samestep.tune_cpu(num_threads=1)")
    tuning = ratio(tuned, _TUNED, "before") if tuned else None
    if tuning is not None:
        says = "call" if tuning.low > 1 else "do not call" if tuning.high < 1 else "no need for"
        lines.append(f"{says} samestep.tune_cpu() at the top: {tuning} times as fast after it")
    for name in samples:
        if name.endswith(_RECOMPUTE):
            kept = name.removesuffix(_RECOMPUTE)
            lines.append(
                f"recompute=True runs at {ratio(samples, name, kept)} of the speed of {kept}: for "
                f"batches that do not fit otherwise"
            )
    return Advice(baseline, best, ratio(samples, best, baseline), tuning, tuple(lines))


def make_default() -> tuple[nn.Module, Tensor]:
    """The model that is measured if none is named: LeNet-5 on a batch of 128 digits."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
    return model, torch.randn(128, 1, 28, 28)


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _load(target: str) -> dict[str, Any]:
    return parse_target(find_target(target)())


def _make_steps(target: str) -> tuple[dict[str, Step], dict[str, str]]:
    given = _load(target)
    cores, threads = count_cores(), torch.get_num_threads()
    plain = {"plain, 1 thread": 1}
    if max(cores, threads) > 1:
        plain[f"plain, {max(cores, threads)} threads"] = max(cores, threads)
    steps: dict[str, Step] = {}
    for name, count in plain.items():
        steps[name] = _make_step(given, copy.deepcopy(given["model"]), count)
        steps[name]()  # the user's own model: what it raises is raised
    failures: dict[str, str] = {}
    names = [str(setting) for setting in list_settings(cores)]
    for name in [*names, *(name + _RECOMPUTE for name in names[-1:])]:
        try:
            step = _make_wrapped(given, name, threads)
            step()
            steps[name] = step
        except Exception as error:
            failures[name] = describe_error(error)
    return steps, failures


def _make_wrapped(given: Mapping[str, Any], name: str, threads: int) -> Step:
    """A step of a setting by its name, which is how its arguments are written."""
    options = options_in(given)
    words = dict(word.split("=") for word in name.split(", "))
    options |= {key: True if value == "True" else int(value) for key, value in words.items()}
    options.setdefault("device_ids", ["cpu"] * options["replicas"])
    return _make_step(given, DataParallel(copy.deepcopy(given["model"]), **options), threads)


def _make_step(given: Mapping[str, Any], model: nn.Module, num_threads: int) -> Step:
    inputs, kwargs = given.get("inputs", ()), given.get("kwargs") or {}
    loss: Callable[[Any], Tensor] = given.get("loss") or _score
    model.train()

    def step() -> None:
        torch.set_num_threads(num_threads)
        model.zero_grad()
        loss(model(*inputs, **kwargs)).backward()  # type: ignore[no-untyped-call]  # torch's

    return step


def _score(output: Any) -> Tensor:
    """A loss for any output."""
    found = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
    return torch.stack([tensor.square().mean() for tensor in found]).sum()


def _measure_tuning(target: str, name: str, num_blocks: int, max_seconds: float) -> Any:
    """The same setting in two processes; only one calls ``tune_cpu``, which cannot be undone."""
    start = partial(Processes, _make_in_process, target, name)
    with start(False) as before, start(True) as after:
        variants = {"before": before, _TUNED: after}
        return compare(variants, num_blocks=num_blocks, max_seconds=max_seconds)


def _make_in_process(rank: int, count: int, target: str, name: str, is_tuned: bool) -> Step:
    """In a process of its own: a step of one setting."""
    if is_tuned:
        tune_cpu()
    given = _load(target)
    if not name.startswith("plain"):
        return _make_wrapped(given, name, torch.get_num_threads())
    return _make_step(given, given["model"], int(name.split(" ")[1]))
