"""A measurement as a table, a file and a plot.

What it holds: :func:`format_table`, :func:`write_json`, :func:`write_plot`. Why apart: who measures
need not know how it is shown, and a plot needs a library that nothing else does.
Guarantees: matplotlib is imported when a plot is written, and not before.
Must not: measure, or say what a figure means.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.timing import Ratio

__all__ = ["can_plot", "format_table", "write_json", "write_plot"]

Row = tuple[str, float, Ratio]  # a setting, milliseconds per step, times plain


def format_table(rows: Sequence[Row], baseline: str) -> str:
    """Lay the settings out, one a line.

    Example:
        >>> print(format_table([("replicas=2", 5.0, Ratio(1.5, 1.4, 1.6))], "plain, 1 thread"))
        setting     ms per step  times plain, 1 thread [95 %]
        replicas=2         5.00  1.50 [1.40, 1.60]
    """
    width = max(len("setting"), *(len(name) for name, _, _ in rows))
    lines = [f"{'setting':<{width}}  ms per step  times {baseline} [95 %]"]
    lines += [f"{name:<{width}}  {ms:11.2f}  {times}" for name, ms, times in rows]
    return "\n".join(lines)


def write_json(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write a record, raw samples included."""
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plot(path: str | Path, rows: Sequence[Row], baseline: str, title: str) -> None:
    """Draw each setting's ratio with its interval; the suffix of ``path`` says the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a suffix that matplotlib does not know.
    """
    try:
        # Not pyplot: no window, no global state.
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install samestep[plot]") from error
    figure = figures.Figure(figsize=(7, 1 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (_, _, times) in enumerate(reversed(rows)):
        below, above = times.middle - times.low, times.high - times.middle
        axes.errorbar(times.middle, place, xerr=[[below], [above]], fmt="o", capsize=3, color="C0")
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    axes.set_xlabel(f"times as fast as {baseline} (median and 95 % interval)")
    axes.set_title(title)
    figure.savefig(path)
