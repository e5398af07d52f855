"""``replicas="auto"``: what is chosen from which times, and that choosing leaves no trace."""

import copy
import logging
import pickle
import random

import pytest
import torch
from helpers import tensors_of
from torch import nn

from samestep import DataParallel, auto
from samestep.auto import Choice, Setting, list_settings, pick

TWO, FOUR = Setting(2, 1), Setting(4, 1)
PLAIN = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0]


@pytest.fixture
def fake(monkeypatch):
    """Times by name instead of measured ones; each step still runs once per call of this."""
    monkeypatch.setattr(auto, "count_cores", lambda: 4)

    def use(**ms):
        def compare(variants, **options):
            for step in variants.values():
                step()
            named = {"plain": ms["plain"], "plain, 1 thread": ms.get("alone", ms["plain"])}
            named |= {f"replicas={k}": ms.get(f"k{k}", 100.0) for k in (2, 4)}
            named["replicas=2, threads_per_replica=2"] = named["replicas=2"]
            return {name: [named[name]] * 5 for name in variants}

        monkeypatch.setattr(auto, "compare", compare)

    return use


class Everything(nn.Module):
    """State of every kind that a trial could leave something in."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout()
        self.num_calls, self.seen = 0, []

    def forward(self, rows, table=None):
        self.num_calls += 1
        return self.drop(self.norm(self.layer(rows + random.random())))


def read(module):
    """The state of the module and of the generators, by value."""
    tensors = [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
    grads = [p.grad.clone() for p in module.parameters()]
    plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return tensors, grads, copy.deepcopy(plain), torch.get_rng_state(), random.getstate()


def assert_same(one, other):
    lefts, rights = ([*state[0], *state[1], state[3]] for state in (one, other))
    assert all(torch.equal(left, right) for left, right in zip(lefts, rights, strict=True))
    assert one[2] == other[2]
    assert one[4] == other[4]


# ---------------------------------------------------------------------------
# The rule
# ---------------------------------------------------------------------------


def test_the_fastest_of_those_that_are_surely_faster_is_taken():
    choice = pick({TWO: [t / 1.5 for t in PLAIN], FOUR: [t / 1.8 for t in PLAIN]}, PLAIN)
    assert choice.setting == FOUR
    assert choice.ratio.middle == pytest.approx(1.8)
    assert str(choice).startswith("replicas=4: 1.80 [1.80, 1.80] times as fast")
    assert [name for name, _ in choice.measured] == ["replicas=2", "replicas=4"]


@pytest.mark.parametrize("by", [0.5, 0.98, 1.0])
def test_what_is_not_faster_is_not_taken(by):
    choice = pick({TWO: [t / by for t in PLAIN]}, PLAIN)
    assert choice.setting == Setting(1, 1)
    assert choice.ratio is None
    assert "nothing was surely faster" in str(choice)


def test_in_doubt_the_plain_module_is_taken():
    own = [
        0.5,
        0.5,
        2.0,
        2.0,
        0.5,
        0.5,
    ]  # faster in the median, and slower in a third of the blocks
    assert pick({TWO: own}, [1.0] * 6).setting == Setting(1, 1)


def test_an_unsure_setting_does_not_hide_a_sure_one():
    own = [0.1, 0.1, 3.0, 0.1, 3.0, 0.1]
    assert pick({FOUR: own, TWO: [0.8] * 6}, [1.0] * 6).setting == TWO


def test_what_failed_is_listed_with_its_reason():
    choice = pick({}, [], {TWO: "MergeError: no"})
    assert choice.setting == Setting(1, 1)
    assert choice.measured == (("replicas=2", "MergeError: no"),)
    assert "MergeError: no" in choice.reason


@pytest.mark.parametrize(
    ("cores", "threads", "found"),
    [
        (1, None, []),
        (2, None, [(2, 1)]),
        (6, None, [(2, 3), (4, 1), (6, 1)]),
        (8, None, [(2, 4), (4, 2), (8, 1)]),
        (8, 3, [(2, 3)]),
    ],
)
def test_settings_share_the_cores_out(cores, threads, found):
    assert list_settings(cores, threads) == [Setting(*one) for one in found]


# ---------------------------------------------------------------------------
# The wrapper
# ---------------------------------------------------------------------------


def test_what_was_chosen_is_what_its_numbers_written_out_do(fake, caplog):
    fake(plain=2.0, k4=1.0)
    caplog.set_level(logging.INFO, logger="samestep")
    source = nn.Sequential(nn.Linear(5, 5), nn.Dropout(), nn.Linear(5, 2))
    model, rows = DataParallel(source, replicas="auto"), torch.randn(30, 5)
    written = DataParallel(copy.deepcopy(source), replicas=4)
    outputs = []
    for one in (model, written):
        torch.manual_seed(3)
        for _ in range(2):
            output = one(rows)
            output.square().mean().backward()
        outputs.append(output)
    assert torch.equal(*outputs)
    for left, right in zip(model.parameters(), written.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    assert model.num_replicas == 4
    assert model.choice.setting == Setting(4, 1)
    assert "write DataParallel(..., replicas=4)" in caplog.text
    assert "chosen: replicas=4: 2.00" in repr(model)


def test_choosing_leaves_module_generators_and_arguments_as_they_were(fake):
    fake(plain=1.0)
    source = Everything()
    model, rows = DataParallel(source, replicas="auto"), torch.randn(12, 5, requires_grad=True)
    (source(rows).sum() + 1).backward()
    rows.grad = None
    before, twin = read(source), copy.deepcopy(source)
    for own, other in zip(source.parameters(), twin.parameters(), strict=True):
        other.grad = own.grad.clone()  # which copying leaves behind
    auto.choose_replicas(source, model._samestep_options, "merge", (rows,), {})
    assert_same(read(source), before)
    assert rows.grad is None
    assert model(rows).shape == (12, 5)  # and the call itself is one plain call
    state = read(source)
    torch.set_rng_state(before[3])
    random.setstate(before[4])
    twin(rows)
    assert_same(read(twin), state)


def test_plain_is_a_pass_through(fake):
    fake(plain=1.0)
    source = nn.Linear(5, 2)
    model = DataParallel(source, replicas="auto")
    rows = torch.randn(6, 5)
    assert torch.equal(model(rows), source(rows))
    assert model.num_replicas == 1
    assert model._samestep_is_single


def test_the_choice_waits_for_a_call_in_training_and_is_made_once(fake, monkeypatch):
    fake(plain=2.0, k2=1.0)
    times = []
    choose = auto.choose_replicas
    monkeypatch.setattr(
        "samestep.auto.choose_replicas", lambda *a: (times.append(1), choose(*a))[1]
    )
    model, rows = DataParallel(nn.Linear(5, 2), replicas="auto"), torch.randn(6, 5)
    with torch.no_grad():
        model(rows)
    model.eval()
    model(rows)
    model.call("forward", rows)
    assert model.choice is None
    assert "replicas='auto'" in repr(model)
    assert not times
    model.train()
    for size in (6, 1, 12):
        assert model(torch.randn(size, 5)).shape == (size, 2)
    assert len(times) == 1
    assert model.num_replicas == 2


def test_a_batch_that_cannot_be_cut_stays_plain_with_the_reason(fake):
    fake(plain=1.0, k2=0.1)
    model = DataParallel(nn.Linear(5, 2), replicas="auto")
    assert model(torch.randn(5)).shape == (2,)
    model = DataParallel(nn.Linear(5, 2), replicas="auto")
    assert model(torch.randn(1, 5)).shape == (1, 2)
    assert model.choice.setting == Setting(1, 1)
    assert "no rows to cut" in model.choice.reason


def test_a_module_that_cannot_be_copied_stays_plain_with_the_reason(fake):
    class Locked(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("not this one")

    fake(plain=1.0, k2=0.1)
    model = DataParallel(Locked(5, 2), replicas="auto")
    assert model(torch.randn(6, 5)).shape == (6, 2)
    assert "TypeError: not this one" in model.choice.reason


def test_an_iterator_is_not_read_by_the_trials(fake):
    class Reads(nn.Linear):
        def forward(self, rows, numbers):
            return super().forward(rows) * next(numbers)

    fake(plain=1.0, k2=0.1)
    model = DataParallel(Reads(5, 2), replicas="auto")
    numbers = iter([2.0])
    model(torch.randn(6, 5), numbers)
    assert "iterator" in model.choice.reason
    assert list(numbers) == []


def test_a_lazy_module_stays_plain(fake):
    fake(plain=1.0, k2=0.1)
    model = DataParallel(nn.LazyLinear(2), replicas="auto")
    assert model(torch.randn(6, 5)).shape == (6, 2)
    assert "shapes" in model.choice.reason


def test_the_users_error_is_the_users(fake):
    fake(plain=1.0, k2=0.1)
    model = DataParallel(nn.Linear(5, 2), replicas="auto")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(6, 7))
    assert model(torch.randn(6, 5)).shape == (6, 2)


def test_a_plain_module_that_is_best_on_one_thread_is_a_hint(fake):
    fake(plain=4.0, k2=3.0, alone=1.0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = DataParallel(nn.Linear(5, 2), replicas="auto")
        model(torch.randn(6, 5))
    finally:
        torch.set_num_threads(before)
    assert model.choice.setting == Setting(2, 2)
    assert "torch.set_num_threads(1) would be faster still" in model.choice.reason


def test_copies_and_pickles_keep_the_choice_and_an_open_one_stays_open(fake):
    fake(plain=2.0, k4=1.0)
    model = DataParallel(nn.Linear(5, 2), replicas="auto")
    assert copy.deepcopy(model).choice is None
    model(torch.randn(8, 5))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.choice == model.choice
        assert twin.num_replicas == 4
        assert len(tensors_of(twin(torch.randn(8, 5)))) == 1


def test_devices_and_auto_exclude_each_other():
    with pytest.raises(ValueError, match="leave one of the two out"):
        DataParallel(nn.Linear(5, 2), ["cpu"], replicas="auto")


def test_recomputing_and_auto_exclude_each_other():
    with pytest.raises(ValueError, match=r"gives time for memory; write the number"):
        DataParallel(nn.Linear(3, 2), replicas="auto", recompute=True)


def test_several_ranks_are_told_to_write_the_number(monkeypatch):
    class Comm:
        rank, num_ranks = 0, 2

    monkeypatch.setattr("samestep.module.find_comm", lambda group: Comm())
    with pytest.raises(ValueError, match=r"write the number.*replicas=2"):
        DataParallel(nn.Linear(5, 2), replicas="auto")


def test_another_word_is_an_error():
    with pytest.raises(TypeError, match="'all'"):
        DataParallel(nn.Linear(5, 2), replicas="all")


@pytest.mark.slow
def test_with_real_times_a_tiny_module_stays_plain():
    model = DataParallel(nn.Linear(5, 2), replicas="auto")
    model(torch.randn(30, 5))
    assert isinstance(model.choice, Choice)
    assert model.num_replicas == 1
