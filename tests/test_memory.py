"""What a step takes of the memory: a replica costs no parameters, and calls leave nothing behind.

Each measure runs in a process of its own; the functions are those of benchmarks/memory.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "benchmarks" / "memory" / "run.py"
MB = 1_000_000

pytestmark = pytest.mark.slow


@functools.cache
def measure(name, argument):
    done = subprocess.run(
        [sys.executable, RUN, "--one", name, str(argument)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_one_more_replica_has_no_parameters_of_its_own():
    assert measure("rest", 3)["peak"] == measure("rest", 2)["peak"]


def test_one_more_replica_takes_its_gradients_at_most():
    two, eight = (measure("replica", number) for number in (2, 8))
    gradients = two["parameters"]  # of the same size
    assert eight["peak"] - two["peak"] <= 6 * (gradients + MB)


@pytest.mark.parametrize("name", ["recompute", "eager"])
def test_many_shards_take_the_memory_of_one(name):
    one, many, kept = (measure("conv", which) for which in ("one shard", name, "kept"))
    assert many["left"] == kept["left"]  # dropout and BatchNorm included
    assert many["peak"] <= 1.2 * one["peak"]
    assert kept["peak"] > 20 * one["peak"]  # else nothing was shown


@pytest.mark.parametrize("name", ["kept", "eager", "recompute"])
def test_memory_is_flat_over_a_thousand_calls_without_the_garbage_collector(name):
    grown = measure("flat", name)
    # An activation that stays would be 51 kB a call; malloc alone moves by a few MB.
    assert grown["bytes"] < 16 * MB
    assert grown["objects"] < 100
