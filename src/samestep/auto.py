"""Which number of replicas is fastest: what ``replicas="auto"`` chooses, and why.

What it holds: :func:`choose_replicas`, which measures training steps on throw-away copies of the
module; :func:`pick`, the rule that turns their times into a :class:`Choice`. Why: for a small model
any wrapper costs more than it gives, and where the border lies depends on the machine.

Guarantees: the module, its gradients and all random generators are as before; in doubt the plain
module is chosen, as it is whenever something cannot be measured.
Must not: choose twice, or change what a wrapper with the same numbers written out would do.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from samestep.context import current_shard, must_run_plainly, use_num_threads
from samestep.devices import count_cores, plan_slots
from samestep.errors import describe_error
from samestep.options import Options
from samestep.randomness import kept_state
from samestep.replica import home_device
from samestep.runtime import Runtime
from samestep.tie import find_tensors, map_tensors
from samestep.timing import Ratio, Step, compare, ratio
from samestep.tree import iter_leaves

__all__ = [
    "Choice",
    "Setting",
    "apply_setting",
    "can_choose",
    "choose_replicas",
    "list_settings",
    "pick",
]

_logger = logging.getLogger("samestep")

# A measurement takes about so long, or a handful of steps of each setting if that is more.
_SECONDS = 2.0
_NUM_BLOCKS = 16
_NUM_WARMUPS = 2  # the first call of a wrapper is watched, the second builds what stays
_BLOCK_S = 0.02
_PLAIN, _ALONE = "plain", "plain, 1 thread"


@dataclass(frozen=True)
class Setting:
    """One way to run: so many replicas, so many intra-op threads each."""

    replicas: int
    threads_per_replica: int

    def __str__(self) -> str:
        text = f"replicas={self.replicas}"
        if self.threads_per_replica != 1:
            text += f", threads_per_replica={self.threads_per_replica}"
        return text


@dataclass(frozen=True)
class Choice:
    """What ``replicas="auto"`` chose. ``str(choice)`` says it in a line.

    Attributes:
        setting: the numbers to write to get the same bits elsewhere.
        ratio: how many times as fast it is as the plain module; None: not measured.
        reason: why it was taken, in words.
        measured: per setting that was tried, how many times as fast it was, or why it failed.
    """

    setting: Setting
    ratio: Ratio | None
    reason: str
    measured: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.setting}: {self.reason}"


def can_choose(module: nn.Module) -> bool:
    """Whether a call now is one of training, from a thread of the user's own."""
    if not module.training or not torch.is_grad_enabled():
        return False
    return current_shard() is None and not must_run_plainly()


def choose_replicas(
    module: nn.Module, options: Options, buffers: str | Mapping[str, str], args: Any, kwargs: Any
) -> Choice:
    """Measure a few training steps on copies of the module, and choose.

    Args:
        module: the source module; it does not run.
        options, buffers: what was said to the wrapper.
        args, kwargs: of the call that waits for the choice.
    """
    try:
        # Whatever the trials have to warn of, the real call says again.
        with kept_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            choice = _measure(module, options, buffers, args, kwargs)
    except Exception as error:
        choice = _stay_plain(f"it could not be measured ({describe_error(error)})")
    _logger.info("replicas='auto': %s; to get the same bits, write DataParallel(..., %s)",
                 choice, choice.setting)  # fmt: skip
    return choice


def list_settings(num_cores: int, threads: int | None = None) -> list[Setting]:
    """The settings to try on the CPU: powers of two and all cores, with the cores shared out.

    Args:
        num_cores: that this process may use.
        threads: intra-op threads of a replica if they are given; None: as many as there are cores
            for each.

    Example:
        >>> [str(setting) for setting in list_settings(4)]
        ['replicas=2, threads_per_replica=2', 'replicas=4']
    """
    counts = {1 << power for power in range(1, num_cores.bit_length())} | {num_cores}
    found = [Setting(k, threads or num_cores // k) for k in sorted(counts) if 1 < k <= num_cores]
    return [one for one in found if one.replicas * one.threads_per_replica <= num_cores]


def pick(
    samples: Mapping[Setting, Sequence[float]],
    plain: Sequence[float],
    failures: Mapping[Setting, str] | None = None,
) -> Choice:
    """Turn times into a choice: the fastest of those that are surely faster than plain.

    Args:
        samples: milliseconds per step of each setting, block by block.
        plain: of the plain module, run in turn with them.
        failures: why other settings could not be measured.

    Example:
        >>> pick({Setting(2, 1): [1.0, 1.1, 1.0]}, [2.0, 2.2, 2.0]).setting
        Setting(replicas=2, threads_per_replica=1)
        >>> pick({Setting(2, 1): [1.0, 2.2, 1.0]}, [1.0, 1.1, 1.0]).setting
        Setting(replicas=1, threads_per_replica=1)
    """
    found = {
        setting: ratio({"own": times, _PLAIN: plain}, "own", _PLAIN)
        for setting, times in samples.items()
    }
    measured = [(str(setting), f"{times} times plain") for setting, times in found.items()]
    measured += [(str(setting), why) for setting, why in (failures or {}).items()]
    # The whole interval must lie above 1: a setting that may be slower is not taken.
    surely = {setting: times for setting, times in found.items() if times.low > 1}
    if surely:
        best = max(surely, key=lambda setting: surely[setting].middle)
        reason = f"{surely[best]} times as fast as the plain module"
        return Choice(best, surely[best], reason, tuple(measured))
    said = "; ".join(f"{name}: {what}" for name, what in measured) or "there was nothing to try"
    return Choice(Setting(1, 1), None, f"nothing was surely faster ({said})", tuple(measured))


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _measure(module: nn.Module, options: Options, buffers: Any, args: Any, kwargs: Any) -> Choice:
    settings = _list_for(module, options)
    if not settings:
        return _stay_plain("there is one core or accelerator only")
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        return _stay_plain("the module gets its shapes from this batch")
    if any(isinstance(leaf, Iterator) for _, leaf in iter_leaves((args, kwargs))):
        return _stay_plain("an argument is an iterator, which can be read only once")
    copied = copy.deepcopy(module)
    plain = _make_step(copied, copied, args, kwargs)
    _warm_up(plain)
    steps: dict[Setting, Step] = {}
    failures: dict[Setting, str] = {}
    for setting in settings:
        try:
            steps[setting] = _try_setting(module, setting, options, buffers, args, kwargs)
        except Exception as error:
            failures[setting] = describe_error(error)
    if not steps:
        return pick({}, [], failures)
    named = {_PLAIN: plain} | {str(setting): step for setting, step in steps.items()}
    if torch.get_num_threads() > 1:
        named[_ALONE] = partial(_run_alone, plain)
    times = compare(
        named,
        num_blocks=_NUM_BLOCKS,
        max_seconds=_SECONDS,
        block_seconds=_BLOCK_S,
        num_dropped=1,
    )
    choice = pick({setting: times[str(setting)] for setting in steps}, times[_PLAIN], failures)
    return _add_hint(choice, times)


def _run_alone(step: Step) -> None:
    with use_num_threads(1):
        step()


def _add_hint(choice: Choice, times: Mapping[str, Sequence[float]]) -> Choice:
    """Say it when the plain module is best on one thread: that is the script's to set."""
    if _ALONE not in times:
        return choice
    chosen = _PLAIN if choice.ratio is None else str(choice.setting)
    measured = (*choice.measured, (_ALONE, f"{ratio(times, _ALONE, _PLAIN)} times plain"))
    reason = choice.reason
    if ratio(times, _ALONE, chosen).low > 1:
        reason += "; replicas=1 with torch.set_num_threads(1) would be faster still"
    return replace(choice, reason=reason, measured=measured)


def _list_for(module: nn.Module, options: Options) -> list[Setting]:
    home = home_device(module)
    threads = None if options.threads_per_replica == 1 else options.threads_per_replica
    if home.type == "cpu":
        return list_settings(count_cores(), threads)
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    return [Setting(count, options.threads_per_replica)] if count > 1 else []


def _try_setting(
    module: nn.Module, setting: Setting, options: Options, buffers: Any, args: Any, kwargs: Any
) -> Step:
    """A step on replicas of a copy, warmed up."""
    runtime = Runtime(apply_setting(options, setting, home_device(module)), buffers)
    copied = copy.deepcopy(module)
    num_shards = runtime.plan(copied, None, args, kwargs).num_shards
    if num_shards < 2:
        raise ValueError("the batch has no rows to cut")
    step = _make_step(lambda *a, **k: runtime.run(copied, None, a, k), copied, args, kwargs)
    _warm_up(step)
    return step


def apply_setting(options: Options, setting: Setting, home: torch.device) -> Options:
    """The options of a wrapper to which the setting is said outright."""
    device_ids = ["cpu"] * setting.replicas if home.type == "cpu" else None
    return replace(
        options,
        slots=plan_slots(device_ids, setting.replicas),
        threads_per_replica=setting.threads_per_replica,
    )


def _make_step(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Step:
    home = home_device(module)

    def step() -> None:
        # Fresh leaves each time: forward may write into its arguments, and the user's graph ends
        # where they begin.
        own_args, own_kwargs = map_tensors(_renew, (args, kwargs))
        outputs = [t for t in find_tensors(call(*own_args, **own_kwargs)) if t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        module.zero_grad()
        if home.type != "cpu":
            torch.accelerator.synchronize()

    return step


def _renew(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _warm_up(step: Step) -> None:
    for _ in range(_NUM_WARMUPS):
        step()


def _stay_plain(why: str) -> Choice:
    return Choice(Setting(1, 1), None, why)
