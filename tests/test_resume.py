"""Killed at a random step, gone on with on another number of ranks: the bits of never stopping."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spmd, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "resume.py"
KILLS = 10  # of each kind


def start(folder, count, batch):
    """The training on this many ranks; with one, without any launcher."""
    words = [str(PROGRAM), str(folder), batch]
    if count > 1:
        words = ["-m", "samestep", "run", "--workers", str(count), "--log-dir", str(folder), *words]
    for name in folder.glob("*.pid"):
        name.unlink()
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def read_step(folder):
    path = folder / "step.txt"
    text = path.read_text() if path.exists() else ""
    return int(text or 0)


def wait_for(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "the training does not get on"
        time.sleep(0.005)


def finish(process):
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The hash of a training that nobody stops."""
    folder = tmp_path_factory.mktemp("alone")
    finish(start(folder, 1, "global"))
    return (folder / "0.hash").read_text()


@pytest.mark.parametrize("batch", ["global", "local"])
def test_kills_at_random_steps_change_no_bit(tmp_path, expected, batch):
    chance = random.Random(batch)
    num_kills, rounds = 0, 0
    while num_kills < KILLS:
        folder = tmp_path / str(rounds)
        folder.mkdir()
        rounds += 1
        while not (folder / "0.hash").exists():
            count = chance.choice([1, 2, 3, 4])
            process = start(folder, count, batch)
            victim = chance.randrange(count)
            # Somewhere in the next steps, also between two files or two messages.
            goal = read_step(folder) + chance.randrange(1, 8)
            wait_for(lambda goal=goal, folder=folder: read_step(folder) >= goal, process)
            time.sleep(chance.random() * 0.02)
            if process.poll() is not None or num_kills == KILLS:
                finish(process)
                continue
            os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL)
            num_kills += 1
            _, errors = process.communicate(timeout=60)
            if count > 1 and process.returncode:
                assert f"rank {victim}" in errors
        hashes = {path.read_text() for path in folder.glob("*.hash")}
        assert hashes == {expected}
