"""The table of targets says what the raw results say, and every benchmark tells its method."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "benchmarks"
FOLDERS = sorted(path.parent for path in HERE.glob("*/README.md"))
HEADINGS = ["Question", "Result", "Environment", "Method", "To reproduce", "What it does not show"]


@pytest.fixture(scope="module")
def summary():
    spec = importlib.util.spec_from_file_location("summary", HERE / "summary.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_finding(low, high, goal=">= 1.0", what="a model", target=2):
    middle = (low + high) / 2
    fields = {"low": low, "middle": middle, "high": high, "unit": "times"}
    return {"target": target, "what": what, "goal": goal} | fields


def write_runs(folder, *runs):
    (folder / "training" / "results").mkdir(parents=True)
    for number, findings in enumerate(runs):
        path = folder / "training" / "results" / f"2026-01-01_run{number}.json"
        machine = {"load": [0.1], "steal_frac": 0.0}
        path.write_text(json.dumps({"machine": machine, "findings": findings}))
        os.utime(path, (number, number))


@pytest.mark.parametrize(
    ("low", "high", "goal", "reached"),
    [
        (1.0, 1.2, ">= 1.0", True),
        (0.99, 1.2, ">= 1.0", False),
        (1.0, 5.0, "<= 5", True),
        (1.0, 5.1, "<= 5", False),
        (1.0, 5.1, None, None),
    ],
)
def test_the_whole_interval_must_be_on_the_right_side(summary, low, high, goal, reached):
    assert summary.is_reached(make_finding(low, high, goal)) is reached


@pytest.mark.parametrize(
    ("lows", "said"),
    [
        ([1.1, 1.2, 1.3], "| reached |"),
        ([1.1, 1.2], "| in 2 of 3 runs |"),
        ([1.1, 0.9, 1.2], "| no (2 of 3 runs) |"),
    ],
)
def test_a_target_is_reached_in_three_runs(summary, tmp_path, lows, said):
    write_runs(tmp_path, *[[make_finding(low, 2.0)] for low in lows])
    lines = summary.make_lines(summary.read_runs(folder=tmp_path)[0])
    assert next(line for line in lines if "a model" in line).endswith(said)
    assert "| 5 | everything changed: separate copies | | | not measured |" in lines


def test_the_newest_three_runs_count_or_those_that_are_named(summary, tmp_path):
    write_runs(tmp_path, *[[make_finding(low, 2.0)] for low in (0.5, 1.1, 1.2, 1.3)])
    assert len(summary.read_runs(folder=tmp_path)[0]) == 3
    assert summary.judge([run[2, "a model"] for run in summary.read_runs(folder=tmp_path)[0]]) == (
        "reached"
    )
    named, _ = summary.read_runs(["run0"], folder=tmp_path)
    assert [run[2, "a model"]["low"] for run in named] == [0.5]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_benchmark_tells_its_question_method_and_limits(folder):
    lines = (folder / "README.md").read_text().splitlines()
    assert [line[3:] for line in lines if line.startswith("## ")] == HEADINGS
    assert (folder / "run.py").exists()
