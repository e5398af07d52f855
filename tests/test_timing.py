"""Interleaved blocks and what their times say."""

import math
import os
import random
import statistics

import pytest
from torch import nn

from samestep import timing
from samestep.timing import Processes, Ratio, compare, describe_machine, median_ratio, ratio


def write_down(log, name):
    """A variant with a clock of its own, which notes its turn."""

    class Variant:
        def time_block(self, seconds):
            log.append(name)
            return float(len(log))

    return Variant()


def test_variants_alternate_and_the_first_blocks_are_dropped():
    log = []
    variants = {name: write_down(log, name) for name in "ABC"}
    samples = compare(variants, num_blocks=4)
    assert "".join(log) == "ABCCBAABCCBA"
    assert samples == {"A": [7, 12], "B": [8, 11], "C": [9, 10]}


def test_a_block_takes_its_time_and_gives_milliseconds_per_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def step():
        now[0] += 0.004

    samples = compare({"a": step}, num_blocks=3, block_seconds=0.01, num_dropped=0)
    assert samples["a"] == pytest.approx([4.0] * 3)  # sums of 0.004 are rounded
    assert now[0] == pytest.approx(3 * 3 * 0.004)


def test_the_bound_on_seconds_leaves_three_blocks(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def step():
        now[0] += 10.0

    assert len(compare({"a": step}, num_blocks=40, max_seconds=1)["a"]) == 3
    assert len(compare({"a": step}, num_blocks=40, max_seconds=95)["a"]) == 8


@pytest.mark.parametrize(("variants", "blocks"), [({}, 5), ({"a": print}, 2)])
def test_nothing_to_measure_is_an_error(variants, blocks):
    with pytest.raises(ValueError, match="nothing would be measured"):
        compare(variants, num_blocks=blocks)


def test_what_disturbs_neighbours_alike_leaves_the_ratio():
    draw = random.Random(1)
    load = [draw.choice([1, 3, 10]) for _ in range(40)]
    samples = {"own": [2.0 * by for by in load], "plain": [3.0 * by for by in load]}
    assert ratio(samples, "own", "plain") == Ratio(1.5, 1.5, 1.5)


@pytest.mark.slow
def test_the_interval_covers_the_median_in_about_95_of_100_trials():
    draw = random.Random(2)
    covered, widths = 0, []
    for _ in range(100):
        pairs = [1.3 * math.exp(draw.gauss(0, 0.1)) for _ in range(38)]
        middle, low, high = median_ratio(pairs)
        assert low <= middle <= high
        covered += low <= 1.3 <= high
        widths.append(high - low)
    assert covered >= 88  # 95 expected, with a standard deviation of 2; the seed is fixed
    # The median of 38 samples with a spread of 0.1 lies within 4 * 1.25 * 0.13 / sqrt(38) or so.
    assert 0.05 < statistics.median(widths) < 0.15


def test_the_same_samples_give_the_same_interval_and_draw_nothing():
    state = random.getstate()
    pairs = [1 + 0.01 * k for k in range(30)]
    assert median_ratio(pairs) == median_ratio(pairs)
    assert random.getstate() == state


def test_the_machine_is_described_with_what_was_stolen_since():
    found = describe_machine()
    assert {"python", "torch", "cores", "load", "steal_frac", "intra_op_threads"} <= found.keys()
    ticks = timing.read_ticks()
    if ticks:
        ticks[7] -= 1000  # as if the host had taken 10 s since
        assert describe_machine(ticks)["steal_frac"] > 0.9


def make_counter(rank, count, start):
    """A step that counts; for the processes below."""
    seen = [start]

    def step():
        seen[0] += 1
        return seen[0] + 100 * rank + 1000 * count

    return step


def make_nothing(rank, count, how):
    def step():
        if how == "raise":
            raise ValueError("no such step")
        os._exit(3)

    return step


@pytest.mark.slow
@pytest.mark.spmd
def test_processes_live_from_block_to_block():
    with Processes(make_counter, 10, count=2) as processes:
        assert [value for _, value in processes.run(3)] == [2013, 2113]
        assert [value for _, value in processes.run(2)] == [2015, 2115]
        assert 0 < processes.time_block(0.01) < 10
        members = processes._processes
    assert [member.exitcode for member in members] == [0, 0]


@pytest.mark.slow
@pytest.mark.spmd
@pytest.mark.parametrize(("how", "said"), [("raise", "no such step"), ("end", "exit status 3")])
def test_what_happens_in_a_process_is_an_error_here(how, said):
    processes = Processes(make_nothing, how)
    with pytest.raises(RuntimeError, match=said):
        processes.run(1)
    processes.close()


def test_a_module_is_not_taken_for_something_with_a_clock():
    assert not isinstance(nn.Linear(1, 1), timing.OwnClock)
