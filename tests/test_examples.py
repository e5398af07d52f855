"""Every script in examples/ does what it says, run the way a user runs it."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import nbclient
import nbformat
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))

WITH_OPTIONS = ["capsule", "contrastive", "digits", "gan_penalty", "rnn_packed"]

pytestmark = pytest.mark.examples

TUTORIAL_ROWS = {  # shards of a batch of 30 and of the last one of 10
    1: ([30], [10]),
    2: ([15, 15], [5, 5]),
    3: ([10, 10, 10], [4, 4, 2]),
    8: ([4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2]),
}


def run_script(name, *words, **environment):
    """Run an example in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bars where nobody watches
    return done.stdout


def load_script(name):
    """An example as a module, its main not called."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(name, *words, monkeypatch):
    """Call the main of an example in this process: quick, for words that end it at once."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with mock.patch.dict(os.environ):  # scikit-learn sets some variables when it is imported
        load_script(name).main()


def find_numbers(pattern, text):
    """The numbers in the one place of the text that fits the pattern."""
    found = list(re.finditer(pattern, text))
    assert len(found) == 1, f"{pattern!r} is there {len(found)} times in:\n{text}"
    return [float(number) for number in found[0].groups()]


def check_agreement(text):
    """The script's own last word: its numbers are those of the plain module."""
    deviation, tolerance = find_numbers(
        r"largest deviation from the plain module: (\S+) \(tolerance (\S+)\)", text
    )
    assert tolerance <= 1e-9
    assert deviation <= tolerance


def check_tutorial_lines(lines, replicas):
    full, last = TUTORIAL_ROWS[replicas]
    assert Counter(line for line in lines if "In Model" in line) == Counter(
        f"\tIn Model: input size torch.Size([{rows}, 5]) output size torch.Size([{rows}, 2])"
        for rows in [*full * 3, *last]
    )
    assert [line for line in lines if "Outside" in line] == [
        f"Outside: input size torch.Size([{rows}, 5]) output_size torch.Size([{rows}, 2])"
        for rows in (30, 30, 30, 10)
    ]
    greeted = any(line.startswith(f"Let's use {replicas} replicas on ") for line in lines)
    assert greeted == (replicas > 1)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", ["rnn_packed", "capsule", "gan_penalty", "contrastive"])
def test_training_is_that_of_the_plain_module_and_learns(name, replicas):
    text = run_script(f"{name}.py", "--steps", "15", "--replicas", str(replicas))
    assert f"replicas: {replicas}\n" in text
    check_agreement(text)
    first, last = find_numbers(r"(?:loss|points off the circle by): (\S+) -> (\S+)\n", text)
    assert last < 0.9 * first


def test_contrastive_shows_that_negatives_of_the_whole_batch_matter():
    text = run_script("contrastive.py", "--steps", "5", "--replicas", "4")
    (whole,) = find_numbers(r"negatives of all 64 rows: (\S+)\n", text)
    (own,) = find_numbers(r"own shard only: (\S+)\n", text)
    assert own < 0.8 * whole
    assert "of one row" not in text


def test_contrastive_says_that_a_single_row_has_no_negatives():
    text = run_script("contrastive.py", "--steps", "1", "--replicas", "64")
    assert find_numbers(r"own shard only: (\S+)\n", text) == [0]
    assert "(shards of one row: 64 of 64; without negatives their loss is 0)" in text


def test_a_large_batch_takes_the_memory_of_a_small_one():
    text = run_script("large_batch.py", "--steps", "5")
    assert "batch: 128\n" in text
    assert "gradients of both equal to the last bit: yes\n" in text
    (kept,) = find_numbers(r"activations kept: .* MB, (\S+) times the memory", text)
    (again,) = find_numbers(r"run again in backward: .* MB, (\S+) times the memory", text)
    assert again <= 1.0
    assert kept > 20
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)\n", text)]
    assert losses[4] < losses[0]


def test_a_large_batch_needs_a_step(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run_main("large_batch", "--steps", "0", monkeypatch=monkeypatch)
    assert stop.value.code == 2
    assert "--steps must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--steps", "0"), ("--steps", "-3"), ("--replicas", "0")])
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_a_count_below_one_is_an_error_of_usage(name, words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run_main(name, *words, monkeypatch=monkeypatch)
    assert stop.value.code == 2
    assert "--steps and --replicas must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_help_says_what_each_option_is_and_its_default(name, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run_main(name, "--help", monkeypatch=monkeypatch)
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--steps STEPS [\w ;]*steps [\w ;]+\(default: \d+\)", text)
    assert "--replicas REPLICAS replicas that share each batch (default: 2)" in text


def test_embeddings_are_the_plain_modules_to_the_last_bit():
    text = run_script("embed.py", "--texts", "150", "--replicas", "3")
    check_agreement(text)
    assert "replicas: 3\n" in text
    assert "texts: 150, embeddings: [150, 128]\n" in text


@pytest.mark.parametrize("words", [("--texts", "0"), ("--replicas", "-1")])
def test_no_texts_are_an_error_of_usage(words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run_main("embed", *words, monkeypatch=monkeypatch)
    assert stop.value.code == 2
    assert "--texts and --replicas must be at least 1" in capsys.readouterr().err


def test_the_script_without_options_says_so():
    assert "takes no # arguments" in " ".join(
        (EXAMPLES / "data_parallel_tutorial.py").read_text().split()
    )


def test_digits_agrees_and_learns_to_read():
    text = run_script("digits.py", "--steps", "60", "--replicas", "3")
    check_agreement(text)
    assert "Training on 3 replicas" in text
    assert "they may differ: dropout draws other cells, and BatchNorm normalises" in text
    ours, plain = find_numbers(r"held-out rows: (\S+)%   \(plain: (\S+)%\)", text)
    assert min(ours, plain) > 90  # of a hundred; ten classes, so a guess is right ten times
    ratio, ours_ms, plain_ms = find_numbers(r"Speed: (\S+) times .* \((\S+) and (\S+) ms", text)
    assert ratio == pytest.approx(plain_ms / ours_ms, rel=0.05)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_the_tutorial_script_needs_no_change_for_several_replicas(replicas):
    text = run_script("data_parallel_tutorial.py", SAMESTEP_REPLICAS=str(replicas))
    check_tutorial_lines(text.splitlines(), replicas)


def test_the_notebook_is_the_one_made_from_the_script():
    maker = load_script("make_notebook")
    stored = nbformat.read(maker.NOTEBOOK, as_version=4)
    assert stored == maker.make_notebook(maker.SCRIPT.read_text()), "run: make notebook"


def test_the_notebook_runs(monkeypatch):
    monkeypatch.setenv("SAMESTEP_REPLICAS", "2")
    notebook = nbformat.read(EXAMPLES / "data_parallel_tutorial.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    check_tutorial_lines("".join(output.text for output in outputs).splitlines(), 2)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_stays_short(path):
    assert len(path.read_text().splitlines()) <= 125


@pytest.mark.parametrize(
    "path", [p for p in SCRIPTS if p.stem != "make_notebook"], ids=lambda path: path.stem
)
def test_one_marked_line_wraps_the_model(path):
    marked = [line for line in path.read_text().splitlines() if "# <- the one line" in line]
    assert len(marked) == 1
    assert re.fullmatch(r"(\w+) = DataParallel\(\1.*\)", marked[0].partition("#")[0].strip())
