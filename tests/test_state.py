"""What forwards write comes back to the source module as one plain call would have left it."""

import copy
import re
from collections import OrderedDict, deque
from typing import NamedTuple

import pytest
import torch
from helpers import assert_alike
from torch import nn

from samestep import DataParallel, MergeError, StateWarning, current_shard
from samestep.changes import Changes, Entry
from samestep.tree import iter_leaves

X = torch.arange(14.0).view(7, 2)


class Writer(nn.Module):
    """Calls ``write(self, x)`` in forward."""

    def __init__(self, write, **buffers):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.write = write
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        self.write(self, x)
        return x * self.scale


def run(write, *, buffers="merge", calls=1, before=None, num_replicas=3, **values):
    """The source module after some calls."""
    model = DataParallel(Writer(write, **values), replicas=num_replicas, buffers=buffers)
    if before:
        before(model.module)
    for _ in range(calls):
        model(X)
    return model.module


def shard():
    return current_shard().index


# --------------------------------------------------------------------------------------------------
# Buffers
# --------------------------------------------------------------------------------------------------


def rebind(m, value):
    m.b = value


def write_in_place(m, value):
    m.b.copy_(value)


@pytest.mark.parametrize("put", [rebind, write_in_place])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("merge", (0 * 3 + 1 * 3 + 2 * 1) / 7),
        ("mean", (0 * 3 + 1 * 3 + 2 * 1) / 7),
        ("first", 0.0),
        ("max", 2.0),
        ("min", 0.0),
        ("sum", 10.0 + (0 - 10) + (1 - 10) + (2 - 10)),
    ],
)
def test_floating_buffers_follow_the_rule(put, rule, expected):
    module = run(
        lambda m, x: put(m, torch.full((2,), float(shard()))),
        buffers=rule,
        b=torch.full((2,), 10.0),
    )
    torch.testing.assert_close(module.b, torch.full((2,), expected))


def test_a_rule_may_be_given_per_buffer():
    def write(m, x):
        m.one += shard()
        m.two += shard()

    module = run(write, buffers={"one": "max"}, one=torch.ones(1), two=torch.ones(1))
    assert module.one.item() == 3
    torch.testing.assert_close(module.two, torch.tensor([1 + (3 + 2) / 7]))


def test_a_sum_is_right_for_counters_of_rows():
    module = run(
        lambda m, x: m.seen.add_(len(x)), buffers={"seen": "sum"}, calls=4, seen=torch.tensor(100)
    )
    assert module.seen.item() == 128


def test_integers_that_agree_stay():
    module = run(lambda m, x: m.count.add_(1), calls=5, count=torch.tensor(0))
    # The first call sees a counter leave zero: it may be a flag, so it runs whole.
    assert module.count.item() == 5
    assert module.count.dtype == torch.int64


@pytest.mark.parametrize("calls", [1, 3])
def test_integers_that_differ_are_refused_with_the_remedy_and_change_nothing(calls):
    def write(m, x):
        m.early.add_(1)
        m.n.add_(len(x))
        m.late = m.late + 1
        m.calls = 1

    module = Writer(write, early=torch.ones(1), n=torch.tensor(5), late=torch.ones(1))
    model = DataParallel(module, replicas=3)
    for _ in range(calls):
        with pytest.raises(MergeError, match=re.escape("buffers={'n': 'sum'}")) as info:
            model(X)
        assert "'n' differs between the shards" in str(info.value)
        assert [module.early.item(), module.n.item(), module.late.item()] == [1, 5, 1]
        assert not hasattr(module, "calls")


def test_the_buffer_object_stays_the_users_own():
    module = Writer(lambda m, x: m.b.add_(1), b=torch.ones(2))
    kept = module.b
    DataParallel(module, replicas=3)(X)
    assert module.b is kept
    assert torch.equal(kept, torch.full((2,), 2.0))


def test_an_integer_mean_is_refused():
    with pytest.raises(MergeError, match="'n' differs"):
        run(lambda m, x: m.n.add_(len(x)), buffers="mean", n=torch.tensor(5))


def test_buffers_of_children_are_named_by_their_path():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Writer(lambda m, x: m.n.add_(len(x)), n=torch.tensor(5))

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(MergeError, match=r"'inner\.n'"):
        DataParallel(Outer(), replicas=3)(X)
    model = DataParallel(Outer(), replicas=3, buffers={"inner.n": "sum"})
    model(X)
    assert model.inner.n.item() == 12


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ("average", ValueError, "buffers holds 'average'; the rules are merge, mean, sum, first"),
        ({"x": "median"}, ValueError, "buffers holds 'median'"),
        ({"x": None}, ValueError, "buffers holds None"),
        (None, TypeError, "buffers must be a rule or a dict of rules by name, got None"),
        (3, TypeError, "buffers must be a rule or a dict of rules by name, got 3"),
    ],
)
def test_a_bad_rule_is_refused_at_once(rule, error, message):
    with pytest.raises(error, match=message):
        DataParallel(nn.Linear(2, 2), replicas=2, buffers=rule)


# --------------------------------------------------------------------------------------------------
# Attributes
# --------------------------------------------------------------------------------------------------


def set_attribute(make):
    def write(m, x):
        m.note = make(m, x)

    return write


@pytest.mark.parametrize(
    "value", [1, 2.5, "text", None, True, (1, "x"), [1, 2], {"a": 1}], ids=repr
)
def test_what_every_shard_writes_alike_is_written_back(value):
    module = run(set_attribute(lambda m, x: value))
    assert_alike(module.note, value)


def test_a_counter_counts_calls_not_shards():
    def write(m, x):
        m.calls += 1
        m.history.append(m.calls)

    def before(m):
        m.calls, m.history = 0, []

    module = run(write, calls=4, before=before)
    assert module.calls == 4
    assert module.history == [1, 2, 3, 4]


def test_tensors_with_rows_are_gathered_with_their_graph():
    module = run(set_attribute(lambda m, x: x * m.scale), calls=2)
    assert torch.equal(module.note, X)
    module.note.sum().backward()
    assert torch.equal(module.scale.grad, X.sum(0))


def test_nested_state_is_gathered():
    module = run(set_attribute(lambda m, x: {"rows": [x + 1], "k": ("same",)}))
    assert_alike(module.note, {"rows": [X + 1], "k": ("same",)})


def test_what_differs_is_kept_out_with_one_warning_that_names_it():
    def before(m):
        m.note = "old"

    with pytest.warns(StateWarning) as caught:
        module = run(set_attribute(lambda m, x: len(x)), calls=3, before=before)
    assert module.note == "old"
    assert len(caught) == 1
    assert "forward wrote 'note' and the shards disagree" in str(caught[0].message)


def test_an_attribute_that_some_shards_lack_is_kept_out():
    def write(m, x):
        if shard() == 1:
            m.extra = 1

    with pytest.warns(StateWarning, match="'extra'.*only some of the shards have it"):
        module = run(write)
    assert not hasattr(module, "extra")


def test_a_removed_attribute_is_removed():
    def before(m):
        m.note = 1

    module = run(lambda m, x: m.__dict__.pop("note"), before=before)
    assert "note" not in module.__dict__


def test_a_submodule_stored_elsewhere_is_the_users_own():
    def before(m):
        m.child = nn.Linear(2, 2)

    def write(m, x):
        m.note = [m.child, m.scale, m]

    module = run(write, before=before)
    assert module.note[0] is module.child
    assert module.note[1] is module.scale
    assert module.note[2] is module


class Held(NamedTuple):
    parts: tuple
    number: int


CONTAINERS = {
    "list": lambda one: [one],
    "dict": lambda one: {"a": one},
    "named tuple": lambda one: Held((one,), 1),
    "OrderedDict": lambda one: OrderedDict(a=one),
    "deque": lambda one: deque([one]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_is_kept_in_any_container_is_the_users_own(kind):
    # In all but plain lists, tuples and dicts, the replica's parameter was left.
    class Keeps(nn.Linear):
        kept = None

        def forward(self, x):
            self.kept = CONTAINERS[kind](self.weight)
            return super().forward(x)

    module = Keeps(3, 2)
    model = DataParallel(module, replicas=2)
    for _ in range(2):
        model(torch.ones(4, 3))
        [found] = [leaf for _, leaf in iter_leaves(module.kept) if isinstance(leaf, torch.Tensor)]
        assert found is module.weight
        assert type(module.kept) is type(CONTAINERS[kind](0))


def test_tensors_that_a_first_call_sets_are_compared_where_one_of_them_is(monkeypatch):
    # Stands in for two accelerators, whose tensors torch.equal refuses to compare.
    def equal(one, other):
        assert one.device == other.device
        return True

    monkeypatch.setattr(torch, "equal", equal)
    values = [torch.ones(5, device="meta"), torch.ones(5)]
    entry = Entry({"scale": None}, "scale", "", values, is_buffer=False)
    changes = Changes([entry], [], [], [], [], [])
    assert not changes.is_flagged([2, 1])


def test_state_inside_helper_objects_comes_back():
    class Meter:
        def __init__(self):
            self.calls, self.rows = 0, None

    def before(m):
        m.meter = Meter()

    def write(m, x):
        m.meter.calls += 1
        m.meter.rows = x

    module = run(write, calls=3, before=before)
    assert module.meter.calls == 3
    assert torch.equal(module.meter.rows, X)


def test_a_stored_hidden_state_is_used_by_the_next_call():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(2, 4)
            self.state = None

        def forward(self, x):
            self.state = self.cell(x, self.state)
            return self.state

    plain = Recurrent()
    model = DataParallel(Recurrent(), replicas=3)
    model.load_state_dict(plain.state_dict())
    for _ in range(4):
        torch.testing.assert_close(model(X), plain(X))
    torch.testing.assert_close(model.state, plain.state)
    found = []
    for one in (plain, model):
        one.state.sum().backward()  # through all four calls
        found.append([p.grad for p in one.parameters()])
    assert_alike(*found, atol=1e-5)  # float32


# --------------------------------------------------------------------------------------------------
# Forwards that initialise themselves
# --------------------------------------------------------------------------------------------------


class ActNorm(nn.Module):
    """Sets its parameters from the first batch that it sees."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))
        self.done = False

    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
            self.done = True
        return x + self.shift


class FlaggedNorm(ActNorm):
    """The same, with a buffer for a flag and a write through ``.data``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x):
        if not self.ready:
            self.shift.data = -x.mean(0)
            self.ready.fill_(1)
        return x + self.shift


class Building(nn.Module):
    """Makes its layer when it sees the first batch."""

    def __init__(self):
        super().__init__()
        self.layer = None

    def forward(self, x):
        if self.layer is None:
            self.layer = nn.Linear(x.shape[1], 2)
        return self.layer(x)


@pytest.mark.parametrize("make", [ActNorm, FlaggedNorm])
def test_a_first_call_that_initialises_runs_on_the_whole_batch(make):
    model, plain = DataParallel(make(), replicas=3), make()
    for x in (X, X * 2, X + 1):
        torch.testing.assert_close(model(x), plain(x))
        model.zero_grad()
        model(x).sum().backward()
        assert torch.equal(model.shift.grad, torch.full((2,), 7.0))
    torch.testing.assert_close(model.shift, plain.shift)


def test_a_module_that_builds_itself_is_built_once():
    model = DataParallel(Building(), replicas=3)
    torch.manual_seed(0)
    first = model(X)
    torch.manual_seed(0)
    assert torch.equal(first, Building()(X))
    assert torch.equal(model(X), model.module(X))
    model(X).sum().backward()
    assert model.layer.weight.grad is not None


def test_a_lazy_module_gets_its_shapes_from_the_first_batch():
    model = DataParallel(nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(1)), replicas=3)
    assert model(X).shape == (7, 1)
    assert model.module[0].weight.shape == (3, 2)
    assert model(X).shape == (7, 1)


def test_a_parameter_moved_in_every_forward_is_merged():
    class Momentum(nn.Module):
        """A second set of weights that follows the first, as in contrastive learning."""

        def __init__(self):
            super().__init__()
            self.fast = nn.Parameter(torch.ones(2))
            self.slow = nn.Parameter(torch.zeros(2), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.slow.mul_(0.9).add_(self.fast, alpha=0.1)
            return x * self.fast + self.slow

    model, plain = DataParallel(Momentum(), replicas=3), Momentum()
    for _ in range(4):
        torch.testing.assert_close(model(X), plain(X))
        torch.testing.assert_close(model.slow, plain.slow)


# -- Gradients that a forward adds itself ----------------------------------------------------------


class TrainsItself(nn.Module):
    """Calls ``backward()`` in its forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.p = nn.Linear(5, 1), 0.0
        self.has_flag = self.is_ready = self.is_bad = False

    def forward(self, rows):
        if self.has_flag:
            self.is_ready = True
        loss = nn.functional.dropout(self.layer(rows), self.p).sum()
        loss = loss + 0 * nn.functional.dropout(loss, self.p)
        loss.backward()
        shard = current_shard()
        if self.is_bad and shard is not None and shard.index == 1:
            raise LookupError("after the backward")
        return loss.detach()


@pytest.fixture
def self_trained():
    torch.manual_seed(0)
    net = TrainsItself()
    return net, copy.deepcopy(net), torch.randn(8, 5)


def gradient_once(net, plain, rows):
    """The plain module's gradient of one call."""
    plain.zero_grad()
    plain(rows)
    return torch.allclose(net.layer.weight.grad, plain.layer.weight.grad)


def test_gradients_of_an_attempt_that_did_not_stand_are_not_added(self_trained):
    net, plain, rows = self_trained
    net.has_flag = True  # set in the first call, which then runs on the whole batch
    DataParallel(net, replicas=2, reduction="sum")(rows)
    assert net.is_ready
    assert gradient_once(net, plain, rows)


def test_gradients_of_a_call_that_is_repeated_are_added_once(self_trained):
    net, plain, rows = self_trained
    model = DataParallel(net, replicas=2, reduction="sum")
    with torch.no_grad():
        net.layer.weight.zero_()
        net.layer.bias.zero_()
    with torch.enable_grad():
        model(rows)
        model(rows)
        assert model._samestep_runtime.habits.drawing == "watch"
        net.zero_grad()
        net.p = 1e-12  # begins to draw, and drops nothing
        model(rows)
    assert model._samestep_runtime.habits.drawing == "intercept"
    assert gradient_once(net, plain, rows)


@pytest.mark.parametrize("failure", ["a shard", "merging"])
def test_gradients_of_a_call_that_failed_are_not_added_then_or_later(
    self_trained, failure, monkeypatch
):
    net, plain, rows = self_trained
    model = DataParallel(net, replicas=2, reduction="sum")
    if failure == "a shard":
        net.is_bad = True
    else:
        monkeypatch.setattr("samestep.runtime.gather", lambda *args, **options: 1 / 0)
    with pytest.raises((LookupError, ZeroDivisionError)):
        model(rows)
    assert net.layer.weight.grad is None
    net.is_bad = False
    monkeypatch.undo()
    model(rows)
    assert gradient_once(net, plain, rows)
    model(rows)  # and added to what was there
    assert torch.allclose(net.layer.weight.grad, 2 * plain.layer.weight.grad)


def test_hooks_see_a_gradient_that_forward_adds_itself(self_trained):
    net, plain, rows = self_trained
    seen = []
    for module in (net, plain):
        module.layer.bias.register_hook(lambda gradient: gradient * 0)
        module.layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    DataParallel(net, replicas=2, reduction="sum")(rows)
    plain(rows)
    assert net.layer.bias.grad.item() == plain.layer.bias.grad.item() == 0
    torch.testing.assert_close(*seen)


class Says(dict):
    """A dictionary that says of itself that it is empty."""

    def __bool__(self):
        return False

    def __len__(self):
        return 0


class Keeps(nn.Module):
    def __init__(self, kept, write):
        super().__init__()
        self.kept, self.write = kept, write

    def forward(self, x):
        self.write(self.kept)
        return x + sum(dict.values(self.kept))


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: {"a": 1.0}, lambda kept: kept.update({None: 3.0})),
        (lambda: {None: 1.0, "b": 2.0}, lambda kept: kept.update({None: 3.0})),
        (lambda: {None: 1.0, "b": 2.0}, lambda kept: kept.pop(None, 0)),
        (lambda: Says(a=1.0), lambda kept: None),
        (lambda: Says(a=1.0), lambda kept: kept.update(a=4.0)),
        (lambda: Says(a=1.0), lambda kept: kept.update(b=4.0)),
    ],
)
def test_any_dictionary_and_any_key_is_kept(make, write):
    plain, net = Keeps(make(), write), Keeps(make(), write)
    model = DataParallel(net, replicas=2)
    for _ in range(2):
        assert torch.equal(model(torch.ones(4, 1)), plain(torch.ones(4, 1)))
        assert list(dict.items(net.kept)) == list(dict.items(plain.kept))
    for module in (net, plain):
        dict.update(module.kept, c=5.0)
    assert torch.equal(model(torch.ones(4, 1)), plain(torch.ones(4, 1)))
