"""``samestep bench``: what is measured, what is advised, and how it is shown."""

import json
import sys

import pytest
import torch
from torch import nn

from samestep import DataParallel, bench, cli, report
from samestep.bench import advise
from samestep.proof import TargetError
from samestep.timing import Ratio

PLAIN, PLAINS = "plain, 1 thread", "plain, 2 threads"
ROWS = [(PLAIN, 2.0, Ratio(1.0, 1.0, 1.0)), ("replicas=2", 1.0, Ratio(2.0, 1.9, 2.2))]


def make():
    """A target: a model and its inputs."""
    return nn.Linear(5, 2), torch.randn(12, 5)


def make_options():
    """A target with everything."""
    return {
        "model": nn.BatchNorm1d(5),
        "inputs": (torch.randn(12, 5),),
        "loss": lambda output: output.sum(),
        "replicas": (2, 3),  # for check
        "sync_batch_norm": True,
    }


def make_uncut():
    """A target whose outputs cannot be joined."""

    class Odd(nn.Linear):
        def forward(self, rows):
            return super().forward(rows), len(rows)

    return Odd(5, 2), torch.randn(13, 5)


@pytest.fixture
def quick(monkeypatch):
    """No processes, and settings for two cores."""
    monkeypatch.setattr(bench, "count_cores", lambda: 2)
    monkeypatch.setattr(bench, "_measure_tuning", lambda *a: {"before": [2.0], bench._TUNED: [1.0]})
    monkeypatch.setattr(bench, "compare", compare_in_a_step)


def compare_in_a_step(steps, **bounds):
    for step in steps.values():
        step()
    return {name: [1.0 + place] * 3 for place, name in enumerate(steps)}


def test_the_baseline_is_plain_at_its_better_setting():
    samples = {PLAIN: [3.0] * 4, PLAINS: [2.0] * 4, "replicas=2": [2.5] * 4}
    advice = advise(samples, {})
    assert advice.baseline == advice.best == PLAINS
    assert advice.lines == (f"use the plain module ({PLAINS}): no replicas were surely faster",)


def test_one_thread_is_advised_where_it_is_the_better_one():
    advice = advise({PLAIN: [1.0] * 4, PLAINS: [2.0] * 4}, {})
    assert "num_threads=1" in advice.lines[1]


def test_replicas_are_advised_only_if_surely_faster():
    fast, unsure = [1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 3.0]
    samples = {PLAIN: [2.0] * 4, "replicas=2": fast, "replicas=4": unsure}
    assert advise(samples, {}).best == "replicas=2"
    assert advise({PLAIN: [2.0] * 4, "replicas=4": unsure}, {}).best == PLAIN


def test_recompute_is_never_the_fastest_setting_but_its_speed_is_said():
    samples = {PLAIN: [2.0] * 3, "replicas=2": [1.0] * 3, "replicas=2, recompute=True": [0.5] * 3}
    advice = advise(samples, {})
    assert advice.best == "replicas=2"
    assert advice.lines[-1].startswith("recompute=True runs at 2.00")


@pytest.mark.parametrize(
    ("after", "word"), [([1.0] * 3, "call"), ([2.0] * 3, "no need for"), ([3.0] * 3, "do not call")]
)
def test_tuning_is_advised_if_surely_faster(after, word):
    advice = advise({PLAIN: [2.0] * 3}, {"before": [2.0] * 3, "after tune_cpu()": after})
    assert advice.lines[-1].startswith(f"{word} samestep.tune_cpu()")


@pytest.mark.slow
def test_every_setting_runs_and_the_threads_are_put_back(quick):
    before = torch.get_num_threads()
    found = bench.bench_target(f"{__name__}:make_options")
    assert list(found.samples) == [
        PLAIN, PLAINS, "replicas=2", "replicas=2, recompute=True"
    ]  # fmt: skip
    assert not found.failures
    assert found.model == "BatchNorm1d"
    assert torch.get_num_threads() == before
    json.dumps(found.as_record())
    assert "call samestep.tune_cpu()" in str(found)


def test_a_setting_that_fails_is_left_out_and_said(quick):
    found = bench.bench_target(f"{__name__}:make_uncut")
    assert "replicas=2" in found.failures
    assert "replicas=2: failed, MergeError" in str(found)


@pytest.mark.parametrize("target", ["no.such:thing", f"{__name__}:ROWS", "nothing"])
def test_a_wrong_target_is_an_error(target):
    with pytest.raises(TargetError):
        bench.bench_target(target)


def make_wrapped():
    return DataParallel(nn.Linear(3, 2), replicas=2), torch.randn(4, 3)


def make_misspelt():
    return {"model": nn.Linear(3, 2), "inputs": (torch.randn(4, 3),), "sync_batchnorm": True}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("make_wrapped", "is wrapped already"),
        ("make_misspelt", "'sync_batchnorm' is no option of DataParallel"),
    ],
)
@pytest.mark.parametrize("command", ["bench --model", "check"])
def test_what_cannot_be_used_is_one_line(command, name, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command.split(), f"{__name__}:{name}"])
    text = capsys.readouterr().err
    assert message in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.spmd
def test_the_command_measures_writes_and_says_what_to_use(capsys, tmp_path):
    path = tmp_path / "found.json"
    words = ["--blocks", "3", "--seconds", "0.1", "--json", str(path)]
    before = torch.get_num_threads()
    assert cli.main(["bench", *words]) == 0
    assert torch.get_num_threads() == before
    assert "use " in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert set(record["tuned"]) == {"before", "after tune_cpu()"}
    assert record["advice"]["best"] in record["samples"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "no.such:thing"], "no module 'no.such'"),
        (["--blocks", "2"], "at least 3"),
    ],
)
def test_wrong_words_end_with_a_message_and_status_2(capsys, words, said):
    with pytest.raises(SystemExit) as error:
        cli.main(["bench", *words])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_the_users_own_error_is_shown_as_it_is(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("the user's")

    monkeypatch.setattr(bench, "bench_target", fail)
    assert cli.main(["bench"]) == 2
    assert "RuntimeError: the user's" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(report, "can_plot", lambda: False)
    with pytest.raises(SystemExit):
        cli.main(["bench", "--plot", "x.png"])
    assert "pip install samestep[plot]" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r"pip install samestep\[plot\]"):
        report.write_plot("x.png", ROWS, PLAIN, "Linear")


@pytest.mark.slow
def test_a_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    report.write_plot(tmp_path / "x.png", ROWS, PLAIN, "Linear")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_lines_default_is_the_modules():
    parser = cli.make_parser()
    assert parser.parse_args(["bench"]).model == bench.DEFAULT_TARGET
