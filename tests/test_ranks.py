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
    found = ranks.ask(count, "train_hash", options={"workers": workers, "batch": batch})
    assert found == [alone] * count


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("replicas", [2, 5])  # 2: some ranks have no slot at all
def test_outputs_gradients_and_state_are_those_of_one_process(ranks, count, replicas):
    expected = rank_jobs.everything(replicas=replicas)
    assert ranks.ask(count, "everything", options={"replicas": replicas}) == [expected] * count


def test_messages_through_sockets_carry_the_same(ranks):
    expected = rank_jobs.everything()
    found = ranks.ask(3, "everything", env={"SAMESTEP_SHARED_MEMORY": "0"})
    assert found == [expected] * 3


@pytest.mark.parametrize("count", [2, 4])
def test_second_and_third_derivatives_are_those_of_one_process(ranks, count):
    assert ranks.ask(count, "penalty") == [rank_jobs.penalty()] * count


@pytest.mark.parametrize("name", rank_jobs.MODULES)
@pytest.mark.parametrize("count", [2, 3])
def test_every_kind_of_module_trains_as_in_one_process(ranks, count, name):
    options = {"sync_batch_norm": name == "a meeting in BatchNorm"}
    expected = rank_jobs.three_steps(None, name, **options)
    assert ranks.ask(count, "three_steps", name, (9, 9, 2), options=options) == [expected] * count


@pytest.mark.parametrize("recompute", [False, True])
def test_more_ranks_than_shards_leave_some_without(ranks, recompute):
    options = {"recompute": recompute}
    expected = rank_jobs.three_steps(None, "meets", (3, 2, 1), **options)
    found = ranks.ask(4, "three_steps", "meets", (3, 2, 1), options=options)
    assert found == [expected] * 4


def test_a_wrapper_starts_from_rank_0s_values_and_random_states(ranks):
    alone = ranks.ask(1, "start_apart")
    assert ranks.ask(3, "start_apart") == alone * 3
