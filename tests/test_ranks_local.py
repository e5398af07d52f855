"""Each rank passes its own rows; and torch's DDP beside it."""

import pytest
import rank_jobs

pytestmark = [pytest.mark.spmd, pytest.mark.slow]

# float64: the order of additions differs from the plain module's; entries are of size 1.
ROUNDING = 1e-13


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("count", "how"),
    [(2, "rule"), (3, "rule"), (4, "rule"), (2, "uneven"), (4, "uneven"), (3, "first has none")],
)
def test_ragged_batches_give_the_plain_modules_gradients(ranks, count, how, reduction):
    found = ranks.ask(count, "local_steps", how, options={"reduction": reduction})
    assert max(worst for worst, _ in found) < ROUNDING
    assert len({weights for _, weights in found}) == 1


@pytest.mark.parametrize("count", [2, 3])
def test_models_in_a_row_and_inputs_get_their_gradients(ranks, count):
    for off, off_input in ranks.ask(count, "upstream"):
        assert off < ROUNDING
        assert off_input < ROUNDING


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("batch", ["global", "local"])
def test_batches_of_few_rows_draw_and_join_as_in_one_process(ranks, count, batch):
    # Where each rank has its own rows, a single one cannot join another rank's.
    rows = (8, 3, 2, 1) if batch == "global" else (8, 2, 1) if count == 2 else (8, 8, 1)
    expected = rank_jobs.few_rows(rows=rows)
    found = ranks.ask(count, "few_rows", options={"rows": rows, "batch": batch})
    assert found == [expected] * count


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("slots", "ValueError", "batch='local' needs a slot in every rank (slots: 1, ranks: 2)"),
        ("initialises", "RankError", "run one whole batch through the module before it is wrapped"),
        ("lazy", "RankError", "run one whole batch through the module before it is wrapped"),
        ("no rows", "SplitError", "nothing in the arguments counts rows"),
        ("no rows anywhere", "SplitError", "no rank has a row in this batch"),
        ("second derivative", "RuntimeError", "use batch='global'"),
    ],
)
def test_what_own_rows_cannot_do_is_refused(ranks, what, kind, words):
    for raised in ranks.run(2, "refuse", what):
        assert raised.kind == kind
        assert words in raised.text


@pytest.mark.parametrize("count", [2, 4])
def test_ddp_agrees_on_even_batches(ranks, count):
    for worst in ranks.ask(count, "ddp_steps", (8, 16)):
        assert worst["ddp"] < ROUNDING
        assert worst["ours"] < ROUNDING


def test_ddp_is_wrong_on_ragged_batches_and_we_are_not(ranks):
    for worst in ranks.ask(2, "ddp_steps", (9, 5)):
        assert worst["ddp"] > 0.01
        assert worst["ours"] < ROUNDING


def test_training_is_the_plain_modules_with_synchronised_batch_norm(ranks):
    for options in ({}, {"batch": "local"}):
        found = ranks.ask(3, "plain_deviation", options=options)
        # Twenty steps of Adam in float64. It divides by the root of a mean of squares: where a
        # gradient is near zero, its rounding error is a large part of it, and of the step.
        assert max(found) < 1e-8
