"""Two launchers that know each other by an address only, as two machines would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from spmd import find_port

pytestmark = [pytest.mark.spmd, pytest.mark.slow]

ROOT = Path(__file__).parents[1]


def run_on_two(words, folders, workers, env):
    """Run the same command under two agents; their output."""
    port = find_port()
    command = f"{sys.executable} -m samestep run --nnodes 2 --rdzv-endpoint 127.0.0.1:{port}"
    processes = [
        subprocess.Popen(
            [
                *command.split(),
                f"--workers={workers}",
                f"--node-rank={node}",
                f"--log-dir={folder}",
                *map(str, words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=env,
        )
        for node, folder in enumerate(folders)
    ]
    found = [process.communicate(timeout=180) for process in processes]
    for process, (_, errors) in zip(processes, found, strict=True):
        assert process.returncode == 0, errors
    return [out for out, _ in found]


def make_folders(tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.parametrize("workers", [1, 2])
def test_the_digits_train_to_the_same_bits_on_two_machines(tmp_path, workers):
    program = ROOT / "tests" / "programs" / "digits_hash.py"
    alone = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    env = os.environ | {"SAMESTEP_SHARED_MEMORY": "0"}  # which two machines do not have
    first, second = run_on_two([program], make_folders(tmp_path), workers, env)
    assert "hash" in alone.stdout
    assert alone.stdout.splitlines()[-1] in first
    assert "hash" not in second  # rank 0 is on the first machine; the others write to files
    logs = [path.read_text() for path in tmp_path.rglob("rank*.stdout.log")]
    assert len(logs) == 2 * workers
    assert all(alone.stdout.splitlines()[-1] in log for log in logs)


def test_the_unchanged_tutorial_runs_across_two_machines(tmp_path):
    program = ROOT / "examples" / "data_parallel_tutorial.py"
    env = os.environ | {"SAMESTEP_REPLICAS": "3"}
    first, _ = run_on_two([program], make_folders(tmp_path), 1, env)
    outside = [line for line in first.splitlines() if line.startswith("Outside:")]
    sizes = [30, 30, 30, 10]
    assert len(outside) == len(sizes)
    for line, rows in zip(outside, sizes, strict=True):
        assert f"[{rows}, 5]" in line
        assert f"[{rows}, 2]" in line
    inside = [
        line
        for path in tmp_path.rglob("rank*.stdout.log")
        for line in path.read_text().splitlines()
        if "In Model" in line
    ]
    assert sum(f"[{rows}, 5]" in line for line in inside for rows in (10, 4, 2)) == 12
