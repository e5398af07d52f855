"""Inference on several ranks: every rank gets every output, in order."""

import pytest
import rank_jobs

pytestmark = [pytest.mark.spmd, pytest.mark.slow]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_outputs_are_those_of_one_process_in_order(ranks, count, drop):
    expected = rank_jobs.infer(drop=drop)
    assert expected[0] == [4, 3, 5, 2, 6, 1, 4]
    assert ranks.ask(count, "infer", drop) == [expected] * count


@pytest.mark.parametrize("sizes", [(), (3,), (3, 2)])
def test_fewer_batches_than_ranks_leave_some_idle(ranks, sizes):
    expected = rank_jobs.infer(drop=0.5, sizes=sizes)
    assert ranks.ask(4, "infer", 0.5, sizes) == [expected] * 4


def test_rows_are_regrouped_before_they_are_shared_out(ranks):
    expected = rank_jobs.infer(batch_size=4)
    assert expected[0] == [4, 4, 4, 4, 4, 4, 1]
    assert ranks.ask(3, "infer", options={"batch_size": 4}) == [expected] * 3


def test_a_batch_that_fails_ends_it_in_every_rank(ranks):
    found = ranks.ask(3, "infer_and_fail")
    assert found[1] == (3, "ZeroDivisionError", "a row is too large", found[1][3])
    assert "in batch 4" in found[1][3][0]
    for rank in (0, 2):
        seen, kind, text, _ = found[rank]
        assert (seen, kind) == (3, "RankError")
        assert "rank 1 failed at 'outputs of batches 3-5 of map_batches" in text
