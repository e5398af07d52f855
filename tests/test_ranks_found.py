"""Faults of several ranks that somebody found by trying; each with its symptom."""

import pytest
import rank_jobs
from spmd import Raised

pytestmark = [pytest.mark.spmd, pytest.mark.slow]


@pytest.mark.parametrize("kind", ["channels last", "one shard"])
def test_strides_are_those_of_one_process(ranks, kind):
    # What came from other ranks was contiguous, so sums over outputs and gradients in
    # channels_last were rounded in another way than in one process.
    expected = rank_jobs.strided(None, kind)
    assert ranks.ask(2, "strided", kind) == [expected] * 2


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_own_rows_left_on_the_module_have_their_gradients(ranks, count, is_same):
    # An output that was also left on the module came back with all ranks' rows, and a loss on what
    # was left there was not weighted. An attribute that went from None to a 0-dim tensor was
    # refused.
    assert max(ranks.ask(count, "stored", is_same)) < 1e-13  # float64, entries of size 1


@pytest.mark.parametrize("count", [2, 4])
def test_containers_in_containers_stay_the_modules_own(ranks, count):
    # The inner container was replaced by a copy in each rank, and written apart from it.
    expected = rank_jobs.nested()
    assert expected[0][0] == {"count": 6}
    assert expected[1]
    assert ranks.ask(count, "nested") == [expected] * count


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("targets", "rank 1 computes another loss"),  # rows of the gradient sum to zero
        ("nan", "rank 1 computes another loss"),
        ("later batch", "args[0] differs between rank 0 and rank 1"),  # one column is the same
        ("one slot", "args[0] differs between rank 0 and rank 1"),
        ("one row", "args[0] differs between rank 0 and rank 1"),
        ("requires_grad", "the requires_grad differ between rank 0 and rank 1"),
        ("asked for", "want gradients of other parameters"),
        ("mode", "the modes of submodules differ between rank 0 and rank 1"),
        ("later mode", "the modes of submodules differ between rank 0 and rank 1"),
        ("later requires_grad", "the requires_grad differ between rank 0 and rank 1"),
        ("later parameter", "'0.bias' of the module differs between rank 0 and rank 1"),
        ("attribute", "the submodules and their settings differ between rank 0 and rank 1"),
        ("array", "args[1] differs between rank 0 and rank 1"),
        ("buffers", "rank 1 has other arguments of DataParallel than rank 0"),
    ],
)
def test_a_rank_that_is_unlike_is_noticed(ranks, what, words):
    for raised in ranks.run(2, "odd_one_out", what):
        assert isinstance(raised, Raised), raised
        assert raised.kind == "RankError"
        assert words in raised.text


def test_nan_is_like_nan(ranks):
    # An argument that was NaN in every rank was called different.
    assert ranks.ask(2, "odd_one_out", "nothing") == ["no error"] * 2


@pytest.mark.parametrize("how", ["copy", "interrupt", "other method"])
def test_after_one_rank_did_something_else_all_go_on(ranks, how):
    # A copy made in one rank, or a call that was made there only, put all later calls out of step.
    found = ranks.ask(2, "recover", how)
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("batch", ["global", "local"])
def test_rows_that_begin_anywhere_in_memory_have_the_same_bits(ranks, count, batch):
    # A matrix product may depend on where its rows begin within 64 bytes; a rank's own rows began
    # at 0, where in the whole batch they did not.
    expected = rank_jobs.unaligned()
    assert ranks.ask(count, "unaligned", batch) == [expected] * count


@pytest.mark.parametrize("batch", ["global", "local"])
def test_gradients_with_gaps_are_added_as_in_one_process(ranks, batch):
    # Written to shared memory as if each were as contiguous as the sum of all.
    expected = rank_jobs.gappy_gradients()
    assert ranks.ask(2, "gappy_gradients", batch) == [expected] * 2


def test_a_forked_child_that_calls_the_wrapper_is_told_and_its_parent_goes_on(ranks):
    # Its messages were taken for its parent's: the ranks that were left called each other dead.
    silent, told = ranks.ask(2, "call_in_a_child")
    assert silent == ("", True)
    assert "forked from a rank" in told[0]
    assert told[1]


@pytest.mark.parametrize("shared", ["0", "1"])
@pytest.mark.parametrize("batch", ["global", "local"])
def test_a_default_device_is_for_the_script_not_for_what_ranks_tell_each_other(
    ranks, batch, shared
):
    # Memory for messages was made on it.
    found = ranks.ask(2, "with_a_default_device", batch, env={"SAMESTEP_SHARED_MEMORY": shared})
    assert found[0] == found[1]
