"""Ranks that differ, fail or die: an error within seconds that names them, never silence."""

import pytest
from spmd import Ranks

pytestmark = [pytest.mark.spmd, pytest.mark.slow]

SECONDS = 5.0  # within which an error must come; the time-out is set to 3


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("batch", "args[0] differs between rank 0 and rank 1 in call 4 of Sequential"),
        ("rows", "on 7 rows (2 2 2 1)"),
        ("parameters", "of the module differs between rank 0 and rank 1"),
        ("seed", "rank 1 draws other random numbers than rank 0 in call"),
        ("loss", "rank 1 computes another loss than rank 0"),
        ("path", "the ranks are at different places: ranks 0, 2 at"),
        ("skips", "args[0] differs between rank 0 and rank 1 in call 4"),
        ("backward", "the ranks are at different places"),
    ],
)
def test_a_rank_that_differs_is_an_error_in_every_rank(ranks, how, words):
    found = ranks.ask(3, "differ", how, env={"SAMESTEP_TIMEOUT": "3"})
    for seconds, text, goes_on in found:
        assert words in text
        assert seconds < SECONDS
        assert goes_on in (True, None)


def test_a_rank_that_is_silent_is_named_after_the_time_out(ranks):
    found = ranks.ask(3, "differ", "sleeps", env={"SAMESTEP_TIMEOUT": "3"})
    for rank in (0, 2):
        seconds, text, _ = found[rank]
        assert "rank 1 did not answer within 3 s (SAMESTEP_TIMEOUT sets this)" in text
        assert 2.9 < seconds < 3 + SECONDS
    assert "the other ranks had given up waiting for this one" in found[1][1]


def test_a_rank_that_dies_is_named_at_once():
    ranks = Ranks()
    try:
        found = ranks.run(3, "differ", "dies", env={"SAMESTEP_TIMEOUT": "30"})
        assert found[1] is None
        for rank in (0, 2):
            seconds, text, _ = found[rank]
            assert "rank 1 ended or died; its own output has the reason" in text
            assert "forward of Sequential (wrapper 0) on 8 rows (2 2 2 2)' (call 4)" in text
            assert seconds < SECONDS
    finally:
        ranks.close()


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_an_error_in_a_shard_of_one_rank_ends_the_call_in_all(ranks, count, sync):
    found = ranks.ask(count, "fail", "forward", sync)
    kind, text, notes, is_kept, _ = found[-1]
    assert (kind, text) == ("ZeroDivisionError", "a row is too large")
    assert notes == ["in shard 3 of 4 (rows 6-7 of 8, cpu)"]
    assert is_kept
    for kind, text, _, is_kept, _ in found[:-1]:
        assert kind == "RankError"
        assert f"rank {count - 1} failed" in text
        assert "ZeroDivisionError: a row is too large" in text
        assert is_kept
    assert len({gradients for *_, gradients in found}) == 1


def test_an_error_in_a_backward_of_one_rank_ends_it_in_all(ranks):
    found = ranks.ask(3, "fail", "backward")
    assert found[2][0] == "ZeroDivisionError"
    assert found[2][2] == ["in shard 3 of 4 (rows 6-7 of 8, cpu)"]
    for kind, text, *_ in found[:2]:
        assert kind == "RankError"
        assert "rank 2 failed at 'backward of Takes2 (wrapper 0)" in text
    assert len({gradients for *_, gradients in found}) == 1


def test_a_stopped_process_that_has_the_store_is_not_waited_for(ranks):
    # Who is missing was asked of the store, and the store did not answer until it went on.
    found = ranks.ask(2, "stopped_host", env={"SAMESTEP_TIMEOUT": "3"})
    seconds, text = found[1]
    assert seconds < 3 + 5
    assert "rank 0 did not answer within 3 s" in text
