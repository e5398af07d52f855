"""``check`` finds what is planted in a model, and finds nothing where nothing is."""

import copy
import dataclasses
import itertools
import random
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import check
from samestep.cli import main
from samestep.observe import Call, copy_module, run_step
from samestep.remedies import Candidate, search

FEW = (2, 3)


def advice_of(report):
    return "\n".join(report.advice)


def unequal(report):
    """The names of all values that differ for some number of replicas."""
    return {one.name for trial in report.trials for one in trial.unequal}


# ---------------------------------------------------------------------------
# Where nothing is wrong
# ---------------------------------------------------------------------------


def make_cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def make_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


GOOD = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        lambda: torch.randn(13, 4),
        {},
    ),
    "lstm": (
        lambda: nn.LSTM(4, 5, 2, batch_first=True, dropout=0.3),
        lambda: torch.randn(13, 6, 4),
        {"out_dims": (0, 1)},
    ),
    "transformer with dropout": (make_encoder, lambda: torch.randn(11, 5, 8), {}),
    "cnn in evaluation": (lambda: make_cnn().eval(), lambda: torch.randn(13, 2, 6, 6), {}),
    "cnn, synchronised": (make_cnn, lambda: torch.randn(13, 2, 6, 6), {"sync_batch_norm": True}),
    "bfloat16": (lambda: nn.Linear(4, 2).bfloat16(), lambda: torch.randn(13, 4).bfloat16(), {}),
    "lazy": (lambda: nn.LazyLinear(3), lambda: torch.randn(13, 4), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_a_model_that_treats_each_row_by_itself_is_equal(name):
    make, make_input, options = GOOD[name]
    report = check(make(), make_input(), **options)
    assert report.ok, report
    assert [trial.replicas for trial in report.trials] == [1, 2, 3, 4, 7, 8]
    assert all(trial.comparisons and trial.repeats for trial in report.trials)
    assert report.advice == ()
    assert f"{report.model}: the same step" in str(report)


def test_all_kinds_of_values_are_compared():
    class Everything(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("highest", torch.zeros(2))
            self.calls = 0

        def forward(self, rows):
            self.calls += 1
            self.highest = self.highest + 1
            return {"y": self.layer(rows), "ids": rows.argmax(1)}

    report = check(Everything(), torch.randn(7, 3), replicas=2, loss=lambda out: out["y"].mean())
    assert report.ok, report
    assert {one.name for one in report.trials[0].comparisons} == {
        "output['y']",
        "output['ids']",
        "loss",
        "gradient layer.weight",
        "gradient layer.bias",
        "input gradient args[0]",
        "buffer highest",
        "attribute calls",
    }


def test_large_integers_are_compared_exactly():
    class Hash(nn.Module):
        def forward(self, rows):  # another number of rows, another hash, by less than a float tells
            return rows.long() * 0 + 2**60 + len(rows)

    report = check(Hash(), torch.randn(8, 3), replicas=2)
    assert not report.ok
    assert report.trials[0].comparisons[0].deviation >= 1


# ---------------------------------------------------------------------------
# What is planted is found, and the remedy holds
# ---------------------------------------------------------------------------


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, rows, table, scale=None):
        return self.layer(rows) * table.sum()


class MaskFirst(nn.Module):
    def forward(self, mask, rows):
        return rows * mask.sum()


class TakesDict(nn.Module):
    def forward(self, batch):
        return batch["rows"] * batch["prices"].sum()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 6)

    def forward(self, rows, target, weight):
        return F.cross_entropy(self.layer(rows), target, weight, reduction="none")


class Loss(nn.Module):
    def __init__(self, reduction="mean"):
        super().__init__()
        self.layer, self.reduction = nn.Linear(5, 3), reduction

    def forward(self, rows, target):
        return F.cross_entropy(self.layer(rows), target, reduction=self.reduction)


class Counts(nn.Module):
    def forward(self, rows):
        return {"rows": rows * 2, "count": len(rows)}


class Peak(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("peak", torch.zeros(3))

    def forward(self, rows):
        self.peak = torch.maximum(self.peak, rows.detach().amax(0))
        return rows * 2


REMEDIES = {
    "a table as long as the batch": (
        WithTable,
        lambda: (torch.randn(6, 6), torch.randn(6, 6)),
        {"in_dims": {"table": None}},
    ),
    "a mask before the batch": (
        MaskFirst,
        lambda: (torch.randn(7, 7), torch.randn(10, 3)),
        {"in_dims": {"mask": None}},
    ),
    "prices in the batch's dict": (
        TakesDict,
        lambda: ({"rows": torch.randn(5, 2), "prices": torch.rand(5)},),
        {"in_dims": {"batch": {"prices": None}}},
    ),
    "class weights, as many classes as rows": (
        Classifier,
        lambda: (torch.randn(6, 5), torch.randint(6, (6,)), torch.rand(6)),
        {"in_dims": {"weight": None}},
    ),
    "a state with its rows on dim 1": (
        lambda: nn.GRU(3, 4, 2, batch_first=True),
        lambda: (torch.randn(7, 3, 3), torch.randn(2, 7, 4)),
        {"in_dims": {"hx": 1}},
    ),
    "a sum of losses": (
        lambda: Loss("sum"),
        lambda: (torch.randn(12, 5), torch.randint(3, (12,))),
        {"reduction": "sum"},
    ),
    "a count of rows": (Counts, lambda: (torch.randn(7, 2),), {"out_dims": {"count": "sum"}}),
    "a highest value": (Peak, lambda: (torch.randn(7, 3),), {"buffers": {"peak": "max"}}),
    "a norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        lambda: (torch.randn(9, 3),),
        {"sync_batch_norm": True},
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_the_remedy_is_named_and_it_holds(name):
    make, make_inputs, remedy = REMEDIES[name]
    model, inputs = make(), make_inputs()
    report = check(model, *inputs, replicas=FEW)
    assert not report.ok
    assert not report
    (option, value) = next(iter(remedy.items()))
    assert report.advice[0].startswith(f"{option}={value!r}:"), report
    assert report.advice[1:] == ("with this, everything was equal when tried",)
    assert check(model, *inputs, replicas=FEW, **remedy)


def test_two_arguments_cut_by_accident_are_found_together():
    class Two(nn.Module):
        def forward(self, rows, one, two):
            return rows @ one @ two

    report = check(Two(), torch.randn(5, 5), torch.randn(5, 5), torch.randn(5, 5), replicas=2)
    assert "in_dims={'one': None}" in advice_of(report)
    assert "in_dims={'two': None}" in advice_of(report)
    assert report.advice[-1] == "with this, everything was equal when tried"


def test_an_option_that_makes_something_else_unequal_is_no_remedy():
    candidates = [Candidate("reduction", "sum", "mends one, spoils the other")]
    failing = frozenset({("output", "one"), ("output", "other")})
    spoilt = frozenset({("output", "third")})
    chosen, options, left = search(lambda _: spoilt, lambda _: candidates, {}, failing)
    assert (chosen, options, left) == ([], {}, failing)


def test_an_option_of_the_user_is_not_taken_back():
    table = torch.randn(6, 6)
    report = check(WithTable(), torch.randn(6, 6), table, replicas=2, in_dims={"table": 0})
    assert not report.ok
    assert "with this" not in advice_of(report)


def test_a_mean_over_tokens_is_no_mean_over_rows():
    target = torch.randint(3, (12,))
    target[:4] = -100
    report = check(Loss(), torch.randn(12, 5), target, replicas=FEW)
    assert {"output", "gradient layer.weight"} <= unequal(report)
    assert "output is neither a mean nor a sum over rows" in advice_of(report)
    assert "with this" not in advice_of(report)


def test_a_loss_that_compares_rows_is_found():
    class Contrast(nn.Module):
        def forward(self, rows):
            return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    report = check(Contrast(), torch.randn(12, 5), replicas=FEW)
    assert "output" in unequal(report)
    assert "rows compared with rows" in advice_of(report)


def test_state_in_a_numpy_array_is_lost_and_named():
    class Lost(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = np.zeros(3)

        def forward(self, rows):
            self.mean = self.mean + rows.detach().numpy().mean(0)
            return rows * 2

    report = check(Lost(), torch.randn(7, 3), replicas=FEW)
    assert unequal(report) == {"attribute mean"}
    assert "mean: forward writes it" in advice_of(report)
    assert "return it from forward" in advice_of(report)


def test_state_in_an_object_of_the_users_is_looked_into():
    @dataclasses.dataclass
    class Meter:
        total: float = 0.0

    class Metered(nn.Module):
        def __init__(self):
            super().__init__()
            self.meter = Meter()

        def forward(self, rows):
            self.meter.total += float(rows.sum())
            return rows * 2

    report = check(Metered(), torch.randn(7, 3), replicas=2)
    assert unequal(report) == {"attribute meter.total"}


def test_a_count_is_wrong_from_the_second_call_on_and_found():
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, rows):
            self.seen += len(rows)  # looks like a flag that is set in the first call
            return rows * 2

    report = check(Seen(), torch.randn(6, 3), replicas=2)
    assert not report.ok
    assert report.advice[0].startswith("buffers={'seen': 'sum'}")


def test_a_standard_deviation_kept_in_a_buffer_has_no_rule():
    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("spread", torch.zeros(3))

        def forward(self, rows):
            self.spread = rows.detach().std(0)
            return rows * 2

    report = check(Spread(), torch.randn(9, 3), replicas=2)
    assert unequal(report) == {"buffer spread"}
    assert "no rule of buffers= gives" in advice_of(report)


def test_what_a_parallel_run_raises_is_a_finding():
    class Square(nn.Module):
        def forward(self, rows):
            assert len(rows) == 6, "six rows or none"
            return rows

    report = check(Square(), torch.randn(6, 2), replicas=(1, 2))
    assert [trial.error for trial in report.trials] == ["", "AssertionError: six rows or none"]
    assert not report.ok
    assert "no option helps against this error" in advice_of(report)


def test_what_cannot_be_cut_is_a_finding():
    report = check(WithTable(), torch.randn(6, 6), torch.randn(4), replicas=2, in_dims={"table": 0})
    assert "SplitError" in report.trials[0].error
    assert "SplitError" in report.arguments


# ---------------------------------------------------------------------------
# Who mixes rows
# ---------------------------------------------------------------------------


class Center(nn.Module):
    def forward(self, rows):
        return rows - rows.mean(0)


class Batchwise(nn.Module):
    def forward(self, rows):
        return rows.softmax(0)


class TimeFirst(nn.Module):
    """Mixes nothing, though rows are the inner index of a flattened dim inside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, rows):
        steps = rows.transpose(0, 1)
        return self.layer(steps.flatten(0, 1)).view(steps.shape).transpose(0, 1)


class Packing(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, rows, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            rows, lengths, batch_first=True, enforce_sorted=False
        )
        return nn.utils.rnn.pad_packed_sequence(
            self.gru(packed)[0], batch_first=True, total_length=rows.shape[1]
        )[0]


def test_modules_that_mix_rows_are_named_in_the_order_they_run():
    model = nn.Sequential(
        nn.Linear(4, 4), Center(), nn.ReLU(), nn.BatchNorm1d(4), nn.Sequential(Batchwise())
    )
    report = check(model, torch.randn(9, 4), replicas=2)
    assert report.mixing == ("1 (Center)", "3 (BatchNorm1d)", "4.0 (Batchwise)")
    assert "1 (Center) mixes rows" in advice_of(report)
    assert "call that part outside the wrapper" in advice_of(report)


def test_code_of_the_module_itself_mixes():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, rows):
            rows = self.first(rows)
            return self.second(rows - rows.mean(0))

    report = check(Own(), torch.randn(8, 3), replicas=2)
    assert report.mixing == ("the module itself (Own)",)


@pytest.mark.parametrize("make", [TimeFirst, lambda: nn.BatchNorm1d(3).eval()])
def test_what_only_looks_like_mixing_is_not_named(make):
    rows = torch.randn(8, 5, 3) if make is TimeFirst else torch.randn(8, 3)
    report = check(make(), rows, replicas=2)
    assert report.ok, report
    assert report.mixing == ()


def test_packed_rows_are_not_taken_for_mixed_ones():
    lengths = torch.tensor([1, 4, 2, 3, 3, 1, 2])
    report = check(Packing(), torch.randn(7, 4, 3), lengths, replicas=FEW)
    assert report.ok, report
    assert report.mixing == ()
    assert report.notes == ()


def test_a_mean_that_nobody_uses_for_rows_is_no_mixing():
    class Penalised(nn.Module):
        def forward(self, rows):
            return rows * 2, rows.pow(2).mean()

    report = check(Penalised(), torch.randn(8, 3), replicas=FEW)
    assert report.ok, report
    assert report.mixing == ()


def test_a_norm_is_named_though_a_remedy_for_arguments_comes_first():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, rows, table):
            return self.norm(rows) @ table

    report = check(Both(), torch.randn(5, 5), torch.randn(5, 5), replicas=2)
    assert report.mixing == ("norm (BatchNorm1d)",)
    assert "in_dims={'table': None}" in advice_of(report)
    assert "sync_batch_norm=True" in advice_of(report)


# ---------------------------------------------------------------------------
# Random numbers
# ---------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws in its own forward, whatever its mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows):
        rows = self.layer(F.dropout(rows, 0.4))
        rows = torch.distributions.Normal(rows, 1.0).rsample() + torch.randn_like(rows)
        return rows * torch.bernoulli(torch.full_like(rows, 0.3))


def test_a_model_that_draws_is_compared_with_drawing_switched_off():
    report = check(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(7, 4), replicas=FEW)
    assert report.ok, report
    assert report.drawing == ("0 (Dropout), from torch; switched off for comparing",)


def test_a_forward_that_draws_by_itself_is_compared_with_fixed_numbers():
    report = check(Noisy(), torch.randn(7, 4), replicas=FEW)
    assert report.ok, report
    assert report.comparable
    assert "fixed numbers in place of random ones" in report.drawing[0]


def test_fixed_numbers_do_not_hide_a_difference():
    class NoisyTable(Noisy):
        def forward(self, rows, table):
            return super().forward(rows) * table.sum()

    report = check(NoisyTable(), torch.randn(7, 4), torch.rand(7), replicas=2)
    assert report.advice[0].startswith("in_dims={'table': None}")


def test_numbers_from_numpy_leave_the_step_unproven():
    class Foreign(nn.Module):
        def forward(self, rows):
            return rows + torch.as_tensor(np.random.rand(*rows.shape)).to(rows)

    report = check(Foreign(), torch.randn(7, 4), replicas=2)
    assert not report.ok
    assert not report.comparable
    assert "numpy's random" in report.drawing[0]
    assert "draw with torch's functions" in advice_of(report)
    assert "only the forms" in report.notes[0]


def test_a_run_that_does_not_repeat_is_not_ok():
    ticks = itertools.count()

    class Ticks(nn.Module):
        def forward(self, rows):
            return rows + next(ticks)

    report = check(Ticks(), torch.randn(7, 4), replicas=2)
    assert report.trials[0].repeats is False
    assert "NOT the same bits when run again" in str(report)


# ---------------------------------------------------------------------------
# What a check must not miss
# ---------------------------------------------------------------------------


class NormAndDropout(nn.Module):
    def forward(self, rows):
        rows = F.batch_norm(rows, None, None, training=self.training)
        return F.dropout(rows, 0.1, self.training)


class GateWithNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)

    def forward(self, rows):
        scores = self.gate(rows)
        balance = rows.new_zeros(())
        if self.training:
            scores = scores + torch.randn_like(scores)
            balance = scores.softmax(1).mean(0).square().sum()
        return scores.softmax(1), balance


class CountsInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, rows):
        if self.training:
            self.seen += len(rows)
        return F.dropout(rows, 0.1, self.training)


class CentresInTraining(nn.Module):
    def forward(self, rows):
        rows = F.dropout(rows, 0.1, self.training)
        return rows - rows.mean(0) if self.training else rows


@pytest.mark.parametrize(
    "make", [NormAndDropout, GateWithNoise, CountsInTraining, CentresInTraining]
)
@pytest.mark.parametrize("is_drawing_apart", [False, True])
def test_what_a_drawing_module_does_in_training_only_is_looked_at(make, is_drawing_apart):
    model = nn.Sequential(nn.Dropout(0.2), make()) if is_drawing_apart else make()
    report = check(model, torch.randn(8, 4), replicas=FEW)
    assert not report.ok
    assert unequal(report), report


class Shuffled(nn.Module):
    def forward(self, rows):
        return rows + rows[torch.randperm(len(rows))]


class SortedByChance(nn.Module):
    def forward(self, rows):
        return rows[torch.rand(len(rows)).argsort()]


class CentredNoise(nn.Module):
    def forward(self, rows):
        noise = torch.randn(len(rows), 4)
        return rows + (noise - noise.mean(0)).to(rows)


class CentredMask(nn.Module):
    def forward(self, rows):
        mask = torch.bernoulli(torch.full((len(rows), 1), 0.1, dtype=rows.dtype))
        return rows * (mask - mask.mean(0))


class Sampled(nn.Module):
    def forward(self, rows):
        return rows[torch.multinomial(torch.ones(len(rows)), len(rows), replacement=True)]


MIXING_BY_CHANCE = [Shuffled, SortedByChance, CentredNoise, CentredMask, Sampled]


@pytest.mark.parametrize("make", MIXING_BY_CHANCE)
def test_rows_that_are_mixed_through_random_numbers_are_seen(make):
    report = check(make(), torch.randn(8, 4), replicas=FEW)
    assert not report.ok
    assert "output" in unequal(report), report


class Draws(nn.Module):
    """Draws in many ways, for each row by itself."""

    def forward(self, rows):
        positive = rows.abs() + 1
        rows = rows + F.gumbel_softmax(rows) + F.gumbel_softmax(rows, hard=True)
        rows = rows + torch.poisson(positive) + torch.normal(rows, positive)
        rows = rows + torch.distributions.Gamma(positive, positive).rsample()
        rows = rows + torch.distributions.Dirichlet(positive).rsample()
        rows = rows + torch.distributions.Binomial(3, rows.sigmoid()).sample()
        rows = rows + torch.multinomial(positive, 4, replacement=True)
        rows = rows + torch.multinomial(positive, 4) + torch.randint(3, 9, (len(rows), 4))
        rows = rows + torch.empty_like(rows).exponential_() + torch.randint_like(rows, 5)
        rows = rows * torch.empty(len(rows), 1, dtype=rows.dtype).bernoulli_(0.8) / 0.8
        rows = F.rrelu(F.alpha_dropout(F.dropout(rows), 0.3, training=True), training=True)
        rows = rows + torch.rand(1) + torch.rand(()) + torch.randn(4)  # one for all rows
        return rows[:, torch.randperm(4)]


@pytest.mark.slow
def test_numbers_drawn_for_each_row_are_the_rows_own():
    report = check(Draws(), torch.randn(7, 4), replicas=FEW)
    assert report.ok, report
    assert report.mixing == ()


class Tokens(nn.Module):
    """Draws for a dim that is made of rows and time."""

    def __init__(self, is_time_first):
        super().__init__()
        self.is_time_first = is_time_first

    def forward(self, rows):
        steps = rows.transpose(0, 1) if self.is_time_first else rows
        noisy = steps.flatten(0, 1)
        noisy = (noisy + torch.randn_like(noisy)).view(steps.shape)
        return noisy.transpose(0, 1) if self.is_time_first else noisy


def test_rows_are_found_in_a_dim_that_is_made_of_two():
    report = check(Tokens(is_time_first=False), torch.randn(7, 3, 4), replicas=FEW)
    assert report.ok, report
    report = check(Tokens(is_time_first=True), torch.randn(7, 3, 4), replicas=FEW)
    assert not report.ok
    assert "as if rows were the outer" in "\n".join(report.notes)


def test_numbers_that_no_row_can_be_told_for_leave_the_step_unproven():
    class Chosen(nn.Module):
        def forward(self, rows):
            chosen = rows[rows[:, 0] > 0]
            return rows * 2 + 0 * torch.randn(len(chosen), 4).sum().to(rows)

    rows = torch.randn(8, 4)
    rows[:, 0] = torch.tensor([1.0, 1, 1, -1, 1, -1, -1, 1])
    report = check(Chosen(), rows, replicas=2)
    assert not report.ok
    assert not unequal(report)
    assert "cannot be told" in report.unproven[0]
    assert "Chosen: NOT PROVEN" in str(report)


def test_dropout_on_rows_that_data_chooses_is_no_obstacle():
    class Experts(nn.Module):
        def forward(self, rows):
            output = torch.zeros_like(rows)
            for chosen in (rows[:, 0] > 0, rows[:, 0] <= 0):
                output[chosen] = F.dropout(rows[chosen] * 2, 0.3, self.training)
            return output

    report = check(Experts(), torch.randn(9, 4), replicas=FEW)
    assert report.ok, report


@pytest.mark.filterwarnings("ignore")  # torch.jit is on its way out
def test_a_scripted_module_that_draws_is_compared_with_fixed_numbers():
    model = torch.jit.script(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)))
    report = check(model, torch.randn(7, 4), replicas=FEW)
    assert report.ok, report
    assert "fixed numbers" in report.drawing[0]


def test_a_loss_that_draws_draws_the_same_for_all():
    loss = lambda output: (output * torch.randn_like(output)).sum()  # noqa: E731
    report = check(nn.Sequential(nn.Dropout(0.5)), torch.randn(7, 4), replicas=FEW, loss=loss)
    assert report.ok, report


@pytest.mark.slow
def test_activations_that_are_computed_again_draw_the_same_again():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, rows):
            def inner(rows):
                return F.dropout(self.layer(rows)).square()

            return torch.utils.checkpoint.checkpoint(inner, rows, use_reentrant=False)

    for options in ({}, {"recompute": True}):
        report = check(Again(), torch.randn(7, 4), replicas=FEW, **options)
        assert report.ok, report


def test_a_foreign_generator_is_not_trusted_though_its_numbers_had_no_effect():
    class Skips(nn.Module):
        def forward(self, rows):
            return rows * 2 if random.random() < 2 else rows

    report = check(Skips(), torch.randn(7, 4), replicas=2)
    assert not report.ok
    assert "the module itself (Skips) draws from Python's random" in report.unproven


@pytest.mark.parametrize(("num_rows", "replicas"), [(1, FEW), (8, 1), (8, (1,))])
def test_a_batch_that_is_never_cut_is_no_proof(num_rows, replicas):
    report = check(nn.Linear(3, 2), torch.randn(num_rows, 3), replicas=replicas)
    assert not report.ok
    assert "proves nothing" in report.notes[0]
    assert "Linear: NOT PROVEN: the batch was never cut" in str(report)


def test_state_in_slots_is_looked_into():
    class Base:
        __slots__ = ("total",)

    class Meter(Base):
        __slots__ = ("__hidden", "other")

        def __init__(self):
            self.total = self.__hidden = 0.0

        def keep(self, value):
            self.total = self.__hidden = value

    class Metered(nn.Module):
        def __init__(self):
            super().__init__()
            self.meter = Meter()

        def forward(self, rows):
            self.meter.keep(float(rows.mean()))
            return rows * 2

    report = check(Metered(), torch.randn(7, 3), replicas=2)
    assert unequal(report) == {"attribute meter.total", "attribute meter.__hidden"}


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-12])
def test_small_values_are_measured_by_their_own_size(size):
    class Small(nn.Module):
        def forward(self, rows):
            return rows + 1e-5 * rows.mean(0)

    assert "output" in unequal(check(Small(), size * torch.randn(8, 3), replicas=2))


def test_a_small_output_of_ordinary_arguments_is_measured_by_its_own_size():
    class Small(nn.Module):
        def forward(self, rows):
            return 1e-10 * (rows + 1e-3 * rows.mean(0))

    assert "output" in unequal(check(Small(), torch.randn(8, 3), replicas=2))


def test_a_small_column_beside_a_large_one_is_measured_by_itself():
    class Columns(nn.Module):
        def forward(self, rows):
            mean = rows.mean(0)
            return torch.cat([1e4 * rows, rows + 1e-6 * mean], 1)

    loss = lambda output: output[:, 0].sum()  # noqa: E731  # so that gradients tell nothing
    report = check(Columns(), torch.randn(8, 1), replicas=2, loss=loss)
    assert unequal(report) == {"output"}


def test_one_flag_for_all_rows_is_said_to_be_equal_by_chance():
    class Flags(nn.Module):
        def forward(self, rows):
            return rows * 2, (rows > 0).any()

    report = check(Flags(), torch.ones(8, 3), replicas=2)
    assert report.ok, report
    assert "output[1]: one flag or whole number for all rows" in report.notes[0]


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.hidden = None

    def forward(self, rows):
        self.hidden = self.cell(rows, self.hidden).detach()
        return self.hidden * 2


def test_state_with_rows_of_an_earlier_call_is_named():
    model, rows = Remembers(), torch.randn(8, 3)
    assert check(model, rows, replicas=2)
    model(rows)
    report = check(model, rows, replicas=2)
    assert "hidden [8, 4]: it may hold the rows of an earlier call" in advice_of(report)
    assert "check a fresh module" in advice_of(report)
    model.hidden = None
    assert check(model, rows, replicas=2)


# ---------------------------------------------------------------------------
# Rounding or a difference
# ---------------------------------------------------------------------------


def test_a_small_difference_is_seen_where_float32_would_call_it_rounding():
    class Small(nn.Module):
        def forward(self, rows):
            return rows + 1e-6 * rows.mean()

    rows = torch.randn(8, 3)
    report = check(Small(), rows, replicas=2)
    assert "output" in unequal(report)
    assert "float64 copy" in report.decided
    assert report.trials[0].unequal[0].relative < 1e-4  # float32's tolerance


def test_a_model_that_computes_in_float32_inside_gets_its_tolerance():
    class Normed(nn.Module):
        def forward(self, rows):
            short = rows.float()
            return (short / short.norm(dim=1, keepdim=True)).to(rows.dtype)

    report = check(Normed(), torch.randn(8, 3), replicas=2)
    assert report.ok, report
    assert "computes in float32 inside" in report.decided
    assert report.trials[0].comparisons[0].allowed == 1e-4


def test_a_model_that_cannot_be_cast_is_compared_in_its_own_dtype():
    class Only(nn.Module):
        def forward(self, rows):
            if rows.dtype is not torch.float32:
                raise TypeError("float32 only")
            return rows * 2

    report = check(Only(), torch.randn(8, 3), replicas=2)
    assert report.ok, report
    assert report.decided.startswith("in float32")
    assert "float32 only" in report.decided


def test_numbers_made_in_forward_do_not_narrow_the_float64_copy():
    class Positions(nn.Module):
        def forward(self, rows):
            return rows * torch.linspace(0, 1, rows.shape[1])

    report = check(Positions(), torch.randn(8, 3), replicas=2)
    assert report.ok, report
    assert "inside" not in report.decided


@pytest.mark.parametrize(("shift", "is_ok"), [(1e-3, True), (1.0, False)])
def test_what_differs_in_the_models_own_dtype_only_is_told_or_not_equal(shift, is_ok):
    class Unsteady(nn.Module):
        def forward(self, rows):
            return rows + (shift * len(rows) if rows.dtype is torch.float32 else 0)

    report = check(Unsteady(), torch.randn(8, 3), replicas=2)
    assert report.ok is is_ok
    if is_ok:
        assert "rounding grows in this model" in report.notes[0]
    else:
        assert "in float32 only" in report.trials[0].unequal[0].note


def test_a_gradient_that_is_zero_but_for_rounding_is_equal():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # the bias has no effect
    report = check(model, torch.randn(9, 3), replicas=FEW, sync_batch_norm=True)
    assert report.ok, report


# ---------------------------------------------------------------------------
# Nothing of the caller's is touched; what is wrong is refused
# ---------------------------------------------------------------------------


def test_the_model_its_gradients_the_inputs_and_all_generators_are_untouched():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
            self.calls = 0

        def forward(self, rows):
            self.calls += 1
            rows.mul_(1.0)
            self.hidden = self.norm(self.layer(F.dropout(rows)))
            return self.hidden + random.random()

    model, rows = Writes(), torch.randn(8, 3)
    model(rows.clone()).sum().backward()  # leaves gradients, and a tensor of a graph
    before = copy.deepcopy((dict(model.state_dict()), [p.grad for p in model.parameters()], rows))
    hidden, calls, version = model.hidden, model.calls, rows._version
    np.random.seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    check(model, rows, replicas=2)
    after = (dict(model.state_dict()), [p.grad for p in model.parameters()], rows)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert (model.hidden, model.calls, rows._version) == (hidden, calls, version)
    assert rows.grad is None
    assert not rows.requires_grad
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_what_the_plain_model_raises_is_raised():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        check(nn.Linear(3, 2), torch.randn(4, 5), replicas=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"replicas": ()}, ValueError, "replicas is empty"),
        ({"replicas": 0}, ValueError, "at least 1, got 0"),
        ({"replicas": "23"}, TypeError, "whole numbers, got '2'"),
        ({"colour": 1}, TypeError, "'colour' is no option of DataParallel"),
        ({"reduction": "max"}, ValueError, "reduction is 'max'"),
        ({"in_dims": {"foo": None}}, ValueError, "in_dims speaks about 'foo'"),
        ({"loss": lambda out: out}, ValueError, r"it returned one of shape \[7, 2\]"),
        ({"loss": lambda out: 1.0}, TypeError, "it returned a float"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        check(nn.Linear(3, 2), torch.randn(7, 3), **{"replicas": 2, **arguments})


def test_a_wrapped_model_and_what_is_no_module_are_refused():
    with pytest.raises(TypeError, match=r"pass model\.module"):
        check(samestep.DataParallel(nn.Linear(3, 2), replicas=2), torch.randn(7, 3))
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got type"):
        check(nn.ReLU, torch.randn(7, 3))


def test_a_loss_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="loss must be a function of the output, got 'mse'"):
        check(nn.Linear(3, 2), torch.randn(7, 3), loss="mse")


def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Linear(3, 2)
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match="Linear cannot be copied"):
        check(model, torch.randn(7, 3))


@pytest.mark.slow
def test_a_compiled_model_is_watched_uncompiled():
    model = torch.compile(nn.Sequential(nn.Dropout(0.5), Center()), backend="eager")
    report = check(model, torch.randn(6, 3), replicas=2)
    assert report.drawing == ("_orig_mod.0 (Dropout), from torch; switched off for comparing",)
    assert report.mixing == ("_orig_mod.1 (Center)",)
    assert "attribute" not in str(report)


def test_keyword_arguments_of_the_model_are_passed():
    report = check(WithTable(), kwargs={"rows": torch.randn(9, 6), "table": torch.ones(2)})
    assert report.ok, report
    assert "kwargs['table'] float32 [2]: whole" in report.arguments


def test_a_forward_that_writes_into_its_input_is_checked():
    report = check(nn.ReLU(inplace=True), torch.randn(7, 3), replicas=2)
    assert report.ok, report
    assert "gradients of the inputs" in report.notes[0]


def test_the_step_that_is_compared_is_that_of_a_plain_script():
    model, rows = nn.Linear(3, 2), torch.randn(7, 3)
    model.weight.grad = torch.ones(2, 3)  # of a step before; it is not part of this one
    record = run_step(copy_module(model), Call((rows,), {}, lambda out: out.square().mean()))
    expected = torch.autograd.grad(model(rows).square().mean(), list(model.parameters()))
    found = [record.values["gradient", name] for name in ("weight", "bias")]
    torch.testing.assert_close(found, list(expected), rtol=0, atol=0)


# ---------------------------------------------------------------------------
# The report and the command
# ---------------------------------------------------------------------------


def test_the_report_shows_numbers_verdicts_and_causes():
    report = check(nn.BatchNorm1d(3), torch.randn(9, 3), replicas=FEW)
    text = str(report)
    for part in (
        "BatchNorm1d: NOT the same step for replicas 2, 3",
        "decided in a float64 copy of the float32 model",
        "args[0] float32 [9, 3]: cut on dim 0 into 3 3 3",
        "2 (5 4): not equal",
        "output: NOT EQUAL for 2, 3 (off by ",
        "buffer running_mean: equal (off by ",
        "allowed 1e-09)",
        "mixes rows, the first first\n  - the module itself (BatchNorm1d)",
        "what to change\n  - sync_batch_norm=True",
    ):
        assert part in text


def test_long_lists_of_equal_values_are_cut_short_and_unequal_ones_come_first():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(10)], nn.BatchNorm1d(3))
    text = str(check(model, torch.randn(9, 3), replicas=2))
    assert "more of kind gradient" in text
    lines = [line for line in text.splitlines() if line.startswith("  gradient")]
    verdicts = ["NOT EQUAL" in line for line in lines]
    assert verdicts == sorted(verdicts, reverse=True)


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A module in the current directory, as a user of the command has it."""
    (tmp_path / "targets.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def good():\n    return nn.Linear(3, 2), torch.randn(7, 3)\n"
        "def bad():\n    return {'model': nn.BatchNorm1d(3), 'inputs': (torch.randn(7, 3),)}\n"
        "def synced():\n    return {**bad(), 'sync_batch_norm': True}\n"
        "def single():\n    return nn.Linear(3, 2), torch.randn(1, 3)\n"
        "def broken():\n    return nn.Linear(3, 2), torch.randn(7, 4)\n"
        "def wrong():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    yield "targets"
    sys.modules.pop("targets", None)


@pytest.mark.parametrize(
    ("function", "status", "shown"),
    [
        ("good", 0, "Linear: the same step"),
        ("bad", 1, "sync_batch_norm=True"),
        ("synced", 0, "BatchNorm1d: the same step"),
        ("single", 1, "Linear: NOT PROVEN: the batch was never cut"),
    ],
)
def test_the_commands_status_says_whether_the_step_is_the_same(
    target, capsys, function, status, shown
):
    assert main(["check", f"{target}:{function}", "--replicas", "1,2"]) == status
    printed = capsys.readouterr().out
    assert shown in printed
    assert "1 (not cut)" in printed
    assert "3 (" not in printed


def test_a_model_that_fails_by_itself_ends_the_command_with_2(target, capsys):
    assert main(["check", f"{target}:broken"]) == 2
    assert "shapes cannot be multiplied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing:here"], "there is no module 'nothing'"),
        (["targets:nothing"], "module 'targets' has no function 'nothing'"),
        (["targets"], "'targets' is not of the form module:function"),
        (["targets:wrong"], "returned a int; it must return (model, *inputs)"),
        (["targets:good", "--replicas", "1,x"], "'x' is not a whole number of at least 1"),
    ],
)
def test_wrong_words_after_check_end_with_a_message_and_status_2(target, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        main(["check", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
