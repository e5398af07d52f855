"""The same step on several processes."""

import pytest
import rank_jobs

pytestmark = [pytest.mark.spmd, pytest.mark.slow]

RANKS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def alone():
    """The hash of a training in this process, on two workers."""
    return rank_jobs.train(workers=2)[0]


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_any_number_of_workers_trains_to_the_same_bits(alone, workers):
    assert rank_jobs.train(workers=workers)[0] == alone


@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_any_number_of_ranks_and_workers_trains_to_the_same_bits(
    ranks, alone, count, workers, batch
):
    found = ranks.ask(count, "train_hash", {"workers": workers, "batch": batch})
    assert found == [alone] * count
