"""The command line, and the tutorial that it runs."""

import subprocess
import sys
import threading
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import samestep
from samestep import tutorial
from samestep.cli import main

PYTHON = Path(sys.executable)


def run_tutorial(replicas, **options):
    lines = []
    tutorial.run(replicas, echo=lines.append, **options)
    return lines


def split_by_batch(lines):
    """For each batch, the rows that reached a replica each and the rows seen outside."""
    batches, shards = [], []
    for line in lines:
        if line.startswith("\tIn Model:"):
            shards.append(line)
        elif line.startswith("Outside:"):
            batches.append((Counter(shards), line))
            shards = []
    assert not shards, "a replica spoke after the last batch"
    return batches


def expected(shards_by_batch):
    return [
        (
            Counter(
                f"\tIn Model: input size torch.Size([{rows}, 5]) "
                f"output size torch.Size([{rows}, 2])"
                for rows in shards
            ),
            f"Outside: input size torch.Size([{sum(shards)}, 5]) "
            f"output_size torch.Size([{sum(shards)}, 2])",
        )
        for shards in shards_by_batch
    ]


@pytest.mark.parametrize(
    ("replicas", "full", "last"),
    [
        (1, [30], [10]),
        (2, [15, 15], [5, 5]),
        (3, [10, 10, 10], [4, 4, 2]),
        (8, [4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2]),
    ],
)
def test_each_replica_sees_its_rows_and_the_script_the_whole_batch(replicas, full, last):
    assert split_by_batch(run_tutorial(replicas)) == expected([full, full, full, last])


def test_rows_and_batch_can_be_chosen():
    lines = run_tutorial(2, rows=7, batch=4)
    assert split_by_batch(lines) == expected([[2, 2], [2, 1]])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what a machine without one does")
def test_several_replicas_are_named_and_one_is_not():
    assert run_tutorial(8)[0] == "Let's use 8 replicas on cpu!"
    assert not any("Let's use" in line for line in run_tutorial(1))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what a machine without one does")
def test_the_first_facts_about_moving_are_those_of_this_device():
    assert run_tutorial(2)[1:5] == [
        "model.to('cpu'): the model itself is there now, nothing to assign",
        "tensor.to('cpu'): was there already, so this is the same tensor",
        "tensor.to(torch.float64): a copy, the tensor itself stays torch.float32",
        "so write: tensor = tensor.to(...)",
    ]


def test_moving_to_another_device_is_told_as_a_copy():
    lines = []
    tutorial.show_moves(torch.nn.Linear(1, 1), torch.device("meta"), lines.append)
    assert lines[0] == "model.to('meta'): the model itself is there now, nothing to assign"
    assert lines[1] == "tensor.to('meta'): a copy, the tensor itself stays on cpu"


def test_the_environment_gives_the_number_of_replicas(monkeypatch):
    monkeypatch.setenv("SAMESTEP_REPLICAS", "3")
    assert split_by_batch(run_tutorial(None)) == expected([[10, 10, 10]] * 3 + [[4, 4, 2]])


@pytest.mark.parametrize("name", ["rows", "batch"])
def test_a_count_below_one_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name} must be at least 1 \({name}: 0\)"):
        run_tutorial(2, **{name: 0})


def test_a_line_is_one_write(monkeypatch):
    class Recorder:
        def __init__(self):
            self.writes, self.lock = [], threading.Lock()

        def write(self, text):
            with self.lock:
                self.writes.append(text)

    recorder = Recorder()
    monkeypatch.setattr(sys, "stdout", recorder)
    tutorial.run(8)
    assert len(recorder.writes) > 3 * 8
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in recorder.writes)


def test_the_command_prints_what_the_function_says(capsys):
    assert main(["tutorial", "--replicas", "2", "--rows", "7", "--batch", "4"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert Counter(printed) == Counter(run_tutorial(2, rows=7, batch=4))


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"samestep {samestep.__version__}\n"
    assert version("samestep") == samestep.__version__


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: COMMAND"),
        (["teach"], "invalid choice: 'teach'"),
        (["tutorial", "--replicas", "0"], "--replicas: '0' is not a whole number of at least 1"),
        (["tutorial", "--replicas", "two"], "--replicas: 'two' is not a whole number"),
        (["tutorial", "--rows", "-1"], "--rows: '-1' is not a whole number of at least 1"),
        (["tutorial", "--batch", "1.5"], "--batch: '1.5' is not a whole number of at least 1"),
        (["tutorial", "--gpus", "2"], "unrecognized arguments: --gpus 2"),
    ],
)
def test_wrong_words_end_with_a_message_and_status_2(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_wrong_environment_ends_with_a_message_and_status_2(monkeypatch, capsys):
    monkeypatch.setenv("SAMESTEP_REPLICAS", "many")
    with pytest.raises(SystemExit) as stop:
        main(["tutorial"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "SAMESTEP_REPLICAS" in error
    assert "many" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [[PYTHON.with_name("samestep")], [PYTHON, "-m", "samestep"]],
    ids=["script", "module"],
)
def test_the_program_starts_from_a_shell(program):
    words = [*program, "tutorial", "--replicas", "2", "--rows", "4", "--batch", "4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert split_by_batch(done.stdout.splitlines()) == expected([[2, 2]])
    assert done.stderr == ""
