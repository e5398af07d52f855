"""recompute=True: no activations are kept, and nothing else is different."""

import contextvars
import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from samestep import DataParallel


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        parametrizations.spectral_norm(nn.Linear(8, 8)),  # its buffers move in every forward
        nn.Tanh(),
        nn.Linear(8, 2),
    ).double()


def take_steps(net, x, **options):
    """Everything that three steps leave: output, gradients, parameters, buffers, generator."""
    model = DataParallel(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(5)
    for _ in range(3):
        output = model(x)
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
    gradient, x.grad = x.grad, None
    return [output, gradient, *net.parameters(), *net.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("sync", [False, True], ids=["shard statistics", "synchronised"])
@pytest.mark.parametrize("serial", ["0", "1"], ids=["threads", "serial"])
def test_the_bits_are_those_of_a_run_that_keeps_activations(sync, serial, monkeypatch):
    monkeypatch.setenv("SAMESTEP_SERIAL", serial)
    x = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    options = {"replicas": 4, "sync_batch_norm": sync}
    kept = take_steps(make_net(), x, **options)
    again = take_steps(make_net(), x, recompute=True, **options)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_one_slot_keeps_no_activations_either():
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for recompute in (False, True):
        ALIVE.clear()
        torch.manual_seed(0)
        model = DataParallel(Watched().double(), recompute=recompute)
        output = model(x)
        assert sum(ref() is not None for ref in ALIVE) == (0 if recompute else 1)
        output.square().sum().backward()
        found.append([output, x.grad, *(p.grad for p in model.parameters())])
        x.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_one_slot_runs_on_the_callers_threads():
    seen, before = [], torch.get_num_threads()
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    module.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(before + 1)
    try:
        DataParallel(module, replicas=1, recompute=True)(torch.randn(4, 3)).sum().backward()
    finally:
        torch.set_num_threads(before)
    assert seen == [before + 1] * 2


class Watched(nn.Module):
    """Notes how many activations live whenever it makes one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x).tanh()
        ALIVE.append(weakref.ref(hidden))
        COUNTS.append(sum(ref() is not None for ref in ALIVE))
        return self.second(hidden).sin()


ALIVE: list = []
COUNTS: list = []


@pytest.mark.parametrize(("recompute", "most"), [(False, 8), (True, 1)])
def test_the_activations_of_one_shard_exist_at_a_time(recompute, most, monkeypatch):
    monkeypatch.setenv("SAMESTEP_SERIAL", "1")
    ALIVE.clear()
    COUNTS.clear()
    output = DataParallel(Watched(), replicas=8, recompute=recompute)(torch.randn(16, 4))
    assert sum(ref() is not None for ref in ALIVE) == (0 if recompute else 8)
    output.square().mean().backward()
    assert max(COUNTS) == most


def test_any_order_of_derivative():
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    model = DataParallel(Watched().double(), replicas=2, recompute=True)
    assert torch.autograd.gradgradcheck(model, (x,))


def test_a_loss_over_the_whole_batch_outside():
    plain = make_net().eval()
    model = DataParallel(copy.deepcopy(plain), replicas=4, recompute=True)
    x = torch.randn(9, 6, dtype=torch.float64)
    losses = []
    for net in (plain, model):
        rows = nn.functional.normalize(net(x))
        loss = nn.functional.cross_entropy(rows @ rows.T, torch.arange(9))
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_without_gradients_nothing_runs_twice():
    ALIVE.clear()
    with torch.no_grad():
        DataParallel(Watched(), replicas=2, recompute=True)(torch.randn(4, 4))
    assert len(ALIVE) <= 2


def test_a_parameter_that_was_stepped_before_backward_is_an_error():
    model = DataParallel(nn.Linear(4, 4), replicas=2, recompute=True)
    output = model(torch.randn(4, 4)).sin()
    with torch.no_grad():
        model.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"between the forward and its backward; with recompute"):
        output.sum().backward()


def test_another_mode_before_backward_changes_nothing():
    x, found = torch.randn(8, 6, dtype=torch.float64), []
    for recompute in (False, True):
        net = make_net()
        model = DataParallel(net, replicas=2, recompute=recompute)
        torch.manual_seed(1)
        output = model(x)
        model.eval()
        model(x)
        output.sum().backward()
        assert not any(child.training for child in net.modules())
        found.append([*(p.grad for p in net.parameters()), *net.buffers(), model(x)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_option_is_checked():
    with pytest.raises(TypeError, match="recompute must be True or False, got 1"):
        DataParallel(nn.Linear(2, 2), replicas=2, recompute=1)


# -- Forwards that do more than compute -----------------------------------------------------------


class Two(nn.Module):
    """Two layers and some state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("average", torch.ones(6))
        self.count, self.hidden = 0, None


class BackwardInside(Two):
    def forward(self, x):
        self.one(x).tanh().sum().backward()
        return self.two(x).tanh()


class SlopeInside(Two):
    def forward(self, x):
        self.count += 1
        y = self.norm(self.one(x)).tanh()
        (slope,) = torch.autograd.grad(y.square().sum(), self.one.weight, create_graph=True)
        return y * slope.square().sum()


class BufferInPlace(Two):
    def forward(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.one(x).mean(0), alpha=0.1)
        return self.one(x).tanh() * self.average


class BufferAssigned(Two):
    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * self.one(x).detach().mean(0)
        return self.one(x).tanh() * self.average


class Counts(Two):
    def forward(self, x):
        self.count += 1
        return self.one(x).tanh() * torch.tensor(float(self.count))


class Remembers(Two):
    def forward(self, x):
        y = self.one(x) if self.hidden is None else self.one(x) + self.two(self.hidden)
        self.hidden = y.tanh().detach()
        return y.tanh() * self.hidden


class Translates(Two):
    def forward(self, x):
        try:
            return self.one(x).tanh()
        except Exception as error:
            raise RuntimeError("a layer failed") from error


STATEFUL = [
    BackwardInside,
    SlopeInside,
    BufferInPlace,
    BufferAssigned,
    Counts,
    Remembers,
    Translates,
]


@pytest.mark.parametrize("kind", STATEFUL)
def test_what_forward_leaves_is_left_once_and_the_second_run_sees_what_the_first_saw(kind):
    found = []
    for recompute in (False, True):
        net = kind()
        model = DataParallel(net, replicas=2, recompute=recompute)
        x = torch.linspace(-1, 1, 48).view(8, 6)
        left = []
        for _ in range(3):
            net.zero_grad()
            output = model(x)
            output.square().sum().backward()
            left += [output, *(p.grad for p in net.parameters() if p.grad is not None)]
            left += [buffer.clone() for buffer in net.buffers()] + [torch.tensor(net.count)]
        found.append(left)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class ReadsOrWrites(Two):
    """Computes with its state, and in some calls changes it first."""

    def __init__(self):
        super().__init__()
        self.table, self.levels = {"level": 1.0}, [1.0]
        self.register_buffer("large", torch.ones(300_000))

    def forward(self, x, kind=None):
        if kind == "buffer":
            self.average.mul_(3.0)
        elif kind == "large buffer":
            self.large.mul_(3.0)
        elif kind == "assigned buffer":
            self.average = self.average * 3
        elif kind == "attribute":
            self.count += 1
        elif kind == "dict":
            self.table["level"] = 3.0
        elif kind == "list":
            self.levels.append(3.0)
        state = self.average + self.large[:6] + self.count + self.table["level"] + sum(self.levels)
        return self.one(x).tanh() * state.clone()


def change_outside(net, kind):
    with torch.no_grad():
        net.average.mul_(5.0)
    net.table["level"] = 5.0
    net.levels[0] = 5.0
    net.count = 7
    if kind == "module":
        net.one = nn.Linear(6, 6)


@pytest.mark.parametrize("order", [(False, True), (True, False), (False, True, False)])
@pytest.mark.parametrize(
    "kind", ["buffer", "large buffer", "assigned buffer", "attribute", "dict", "list"]
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_other_calls_write_before_the_backward_is_not_seen(order, kind, replicas):
    found = []
    for recompute in (False, True):
        net, x = ReadsOrWrites(), torch.linspace(-1, 1, 48).view(8, 6)
        model = DataParallel(net, replicas=replicas, recompute=recompute)
        outputs = [model(x, kind if is_write else None) for is_write in order]
        sum(output.square().sum() for output in outputs).backward()
        after = model(x).detach()  # what the second runs put back is there again
        found.append([net.one.weight.grad, after, net.average, torch.tensor(net.count)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["state", "module"])
@pytest.mark.parametrize("is_called", [False, True])
def test_what_the_user_changes_before_the_backward_is_not_seen(kind, is_called):
    found = []
    for recompute in (False, True):
        net, x = ReadsOrWrites(), torch.linspace(-1, 1, 48).view(8, 6)
        model, weight = DataParallel(net, replicas=3, recompute=recompute), net.one.weight
        with torch.no_grad():
            weight.mul_(0.5).mul_(2)  # versions that the other module's parameters do not have
        output = model(x)
        torch.manual_seed(2)
        change_outside(net, kind)
        if is_called:
            model(x)
        output.square().sum().backward()
        found.append([weight.grad, model(x).detach()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_arguments_that_forward_takes_apart_are_whole_again():
    class Pops(Two):
        def forward(self, batch):
            return self.one(batch.pop("x")).tanh()

    found = []
    for recompute in (False, True):
        net = Pops()
        model = DataParallel(net, replicas=2, recompute=recompute)
        model({"x": torch.ones(4, 6)}).sum().backward()
        found.append(net.one.weight.grad)
    assert torch.equal(*found)


def test_context_variables_are_those_of_the_forward():
    scale = contextvars.ContextVar("scale", default=1.0)

    class Scaled(Two):
        def forward(self, x):
            return self.one(x).tanh() * scale.get()

    found = []
    for recompute in (False, True):
        net = Scaled()
        model = DataParallel(net, replicas=2, recompute=recompute)
        token = scale.set(2.0)
        output = model(torch.ones(4, 6))
        scale.reset(token)
        output.sum().backward()
        found.append(net.one.weight.grad)
    assert torch.equal(*found)


def test_a_saved_tensor_that_forward_overwrites_is_an_error():
    class Overwrites(Two):
        def forward(self, x):
            y = self.one(x).exp()
            z = y * self.two(x)
            y.zero_()
            return z * self.one(x)

    model = DataParallel(Overwrites(), replicas=2, recompute=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(4, 6)).sum().backward()


def test_a_penalty_on_the_slope_of_one_call_beside_another_call():
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()).double()
        model = DataParallel(net, replicas=2, recompute=recompute)
        x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.square().sum() + model(x).sum()).backward()
        found.append(net[0].weight.grad)
    assert torch.equal(*found)
