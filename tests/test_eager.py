"""eager_backward=True: backward follows forward shard by shard, and nothing else is different."""

import weakref

import pytest
import rank_jobs
import torch
from helpers import use_workers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import samestep
from samestep import DataParallel, RankError
from samestep.eager import EagerBackward


class Net(nn.Module):
    """Dropout, BatchNorm, an unused and a frozen part, and its own loss."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 2)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x, y):
        hidden = self.drop(self.norm(self.enter(x)).tanh())
        return F.mse_loss(self.frozen(self.leave(hidden)), y)


class Checkpointed(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x, y):
        return checkpoint(super().forward, x, y, use_reentrant=self.reentrant)


class Returns(nn.Module):
    """Returns what a function makes of its layer's output."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3), function

    def forward(self, x):
        return self.function(self.layer(x))


def make(kind=Net, seed=0, **options):
    torch.manual_seed(seed)
    options = {"replicas": 4, "eager_backward": True} | options
    return DataParallel(kind(), **options)


def make_batch(rows=13):
    torch.manual_seed(3)
    return torch.randn(rows, 6, requires_grad=True), torch.randn(rows, 2)


def take_steps(model, scale=1.0, optimizer=torch.optim.Adam):
    """Everything that three steps leave: losses, gradients, parameters, buffers, generator."""
    optimizer = optimizer(model.parameters(), lr=0.05)
    x, y = make_batch()
    torch.manual_seed(5)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x, y)
        (loss * scale).backward()
        optimizer.step()
        gradients = [x.grad, *(p.grad for p in model.parameters())]
        found += [loss.detach(), *(None if g is None else g.clone() for g in gradients)]
        x.grad = None
    return [*found, *model.parameters(), *model.buffers(), torch.get_rng_state()]


def assert_same_bits(one, other):
    for left, right in zip(one, other, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


# -- The same step --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0], ids=["one", "a power of two"])
@pytest.mark.parametrize("sync", [False, True], ids=["shard statistics", "synchronised"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_bits_are_those_of_two_passes(workers, sync, scale):
    options = {"sync_batch_norm": sync}
    twice = take_steps(make(eager_backward=False, **options), scale)
    assert_same_bits(take_steps(make(workers=workers, **options), scale), twice)


def test_the_bits_are_those_of_two_passes_shard_by_shard(monkeypatch):
    twice = take_steps(make(eager_backward=False))
    monkeypatch.setenv("SAMESTEP_SERIAL", "1")
    assert_same_bits(take_steps(make()), twice)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_the_module_are_run_again_with_the_same_numbers(reentrant):
    def kind():
        return Checkpointed(reentrant)

    assert_same_bits(take_steps(make(kind)), take_steps(make(kind, eager_backward=False)))


def test_any_other_factor_is_one_more_rounding():
    twice = take_steps(make(eager_backward=False), 0.3, torch.optim.SGD)
    once = take_steps(make(), 0.3, torch.optim.SGD)
    assert not all(a is None or torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    for one, other in zip(once, twice, strict=True):
        # Roundings of float32 (6e-8 of a value each), some of sums that nearly cancel.
        assert one is None or torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-6)


def test_large_gradients_are_added_by_slices_to_the_same_bits():
    def kind():
        return nn.Sequential(nn.Linear(4, 600), nn.Linear(600, 1200), Total())

    found = []
    for options in ({"workers": 1}, {"workers": 3}, {"eager_backward": False}):
        model = make(kind, replicas=5, **options)
        model(torch.ones(9, 4).cumsum(0)).backward()
        found.append([p.grad for p in model.parameters()])
    assert_same_bits(found[0], found[2])
    assert_same_bits(found[1], found[2])


class Total(nn.Module):
    def forward(self, x):
        return x.sin().mean()


def test_the_shards_run_once_per_step(monkeypatch):
    model, (x, y) = make(), make_batch()
    engine = use_workers(model, 2)._samestep_runtime.threads
    runs = []
    plain = engine._run
    monkeypatch.setattr(engine, "_run", lambda *args: (runs.append(1), plain(*args)))
    model(x, y)
    runs.clear()
    model(x, y).backward()
    assert len(runs) == 1


class Watched(nn.Module):
    """Notes how many activations live whenever it makes one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.alive, self.counts = [], []

    def forward(self, x):
        hidden = self.first(x).tanh()
        ALIVE.append(weakref.ref(hidden))
        COUNTS.append(sum(ref() is not None for ref in ALIVE))
        return self.second(hidden).sin().mean()


ALIVE: list = []
COUNTS: list = []


@pytest.mark.parametrize(("eager", "most"), [(False, 8), (True, 1)])
def test_the_activations_of_one_shard_exist_at_a_time(eager, most):
    ALIVE.clear()
    COUNTS.clear()
    loss = make(Watched, replicas=8, workers=1, eager_backward=eager)(torch.randn(16, 4))
    assert sum(ref() is not None for ref in ALIVE) == (0 if eager else 8)
    assert max(COUNTS) == most
    loss.backward()


# -- What is accepted ------------------------------------------------------------------------------

TREES = {
    "mean": (lambda h: h.square().mean(), None, "mean"),
    "sum": (lambda h: h.square().sum(), None, "sum"),
    "several": (lambda h: {"a": h.mean(), "b": [h.square().mean(), h[0, 0]]}, None, "mean"),
    "one object twice": (lambda h: (lambda loss: (loss, [loss]))(h.square().mean()), None, "mean"),
    "words": (
        lambda h: {
            "mean": h.mean(),
            "sum": h.square().sum(),
            "one": h[0, 1],
            "aux": {"x": h.sin().sum()},
        },
        {"sum": "sum", "one": "first", "aux/x": "sum"},
        "mean",
    ),
    "a word for all": (lambda h: (h.mean(), h.square().sum()), "sum", "mean"),
    "a word for all, twice": (lambda h: (lambda loss: (loss, loss))(h.mean()), "mean", "sum"),
    "first of all": (lambda h: {"a": (h.mean(), h.square().sum())}, {"a": "first"}, "mean"),
    "beside other things": (
        lambda h: (h.mean(), h.detach(), h.argmax(1), "text", None, 3, h.detach().sum()),
        None,
        "mean",
    ),
    "a vector of losses joined": (lambda h: tuple(h.mean(0)), None, "mean"),
}


def add_up(output):
    return sum(t for t in samestep.tie.find_tensors(output) if t.requires_grad)


@pytest.mark.parametrize("name", TREES)
def test_every_loss_weighs_what_joining_makes_it_weigh(name):
    function, out_dims, reduction = TREES[name]
    x = torch.randn(7, 4)
    found = []
    for eager in (False, True):
        model = make(
            lambda: Returns(function),
            replicas=3,
            out_dims=out_dims,
            reduction=reduction,
            eager_backward=eager,
        )
        output = model(x)
        add_up(output).backward()
        leaves = [t.detach() for t in samestep.tie.find_tensors(output)]
        found.append([*leaves, *(p.grad for p in model.parameters())])
    assert_same_bits(*found)


def test_a_parameter_that_forward_returns_is_the_modules_own():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return (x * self.scale).mean(), self.scale

    model = make(Scaled, replicas=2)
    loss, scale = model(torch.ones(4, 2))
    assert scale is model.module.scale
    loss.backward()
    assert scale.grad == 1


def test_one_slot_and_other_methods_are_as_ever():
    x = torch.randn(4, 4)
    assert make(lambda: Returns(lambda h: h), replicas=1)(x).shape == (4, 3)
    model = make(lambda: Returns(lambda h: h.mean()), replicas=2)
    model.call("layer", x).sum().backward()
    assert model.module.layer.weight.grad is not None


def test_without_grad_mode_it_is_a_plain_forward(monkeypatch):
    monkeypatch.setattr(EagerBackward, "run", None)
    model = make(lambda: Returns(lambda h: h), replicas=2)
    with torch.no_grad():
        assert model(torch.randn(4, 4)).shape == (4, 3)


def test_a_frozen_module_gives_a_loss_without_a_graph():
    model = make(lambda: Returns(lambda h: h.mean()).requires_grad_(False), replicas=2)
    assert not model(torch.randn(4, 4)).requires_grad


def test_parameters_and_graphs_of_the_users_own_get_their_gradient():
    base = torch.randn(3, requires_grad=True)
    found = []
    for eager in (False, True):
        base.grad = None
        own = base * 2  # a graph of the caller's, which every shard walks
        model = make(lambda own=own: Returns(lambda h: (h * own).mean()), eager_backward=eager)
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(1))).backward()
        found.append([base.grad.clone(), *(p.grad for p in model.parameters())])
    assert_same_bits(*found)


def test_derivatives_inside_forward():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = self.layer(x).sin().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force.square().mean()

    x = torch.randn(6, 4)
    found = []
    for eager in (False, True):
        model = make(Forces, replicas=3, eager_backward=eager)
        model(x).backward()
        found.append([p.grad for p in model.parameters()])
    assert_same_bits(*found)


# -- What comes after ------------------------------------------------------------------------------


def test_hooks_of_a_parameter_see_the_sum_once():
    model, (x, y) = make(), make_batch()
    seen = []
    model.module.enter.weight.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])
    model(x, y).backward()
    assert len(seen) == 1
    assert torch.equal(model.module.enter.weight.grad, seen[0] * 2)


def test_gradients_accumulate_over_batches():
    found = []
    for eager in (False, True):
        model = make(eager_backward=eager)
        torch.manual_seed(5)
        for rows in (13, 9):
            (model(*make_batch(rows)) / 2).backward()
        found.append([p.grad for p in model.parameters()])
    assert_same_bits(*found)


def test_two_losses_of_two_calls_may_have_different_gradients():
    found = []
    for eager in (False, True):
        model = make(eager_backward=eager)
        torch.manual_seed(5)
        (model(*make_batch(13)) + 0.25 * model(*make_batch(9))).backward()
        found.append([p.grad for p in model.parameters()])
    assert_same_bits(*found)


def test_grad_of_some_parameters_only():
    model, (x, y) = make(), make_batch()
    torch.manual_seed(5)
    (gradient,) = torch.autograd.grad(model(x, y), model.module.leave.weight)
    assert model.module.leave.weight.grad is None
    other = make()
    torch.manual_seed(5)
    other(x, y).backward()
    assert torch.equal(gradient, other.module.leave.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grad_scaler_and_clipping_see_what_they_always_see(dtype):
    x, y = make_batch()
    found = []
    for eager in (False, True):
        model = make(eager_backward=eager)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = model(x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        found.append([norm, *(p.grad for p in model.parameters()), *model.parameters()])
    assert_same_bits(*found)


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        NOTED.append(torch.is_autocast_enabled("cpu"))
        return gradient


NOTED: list = []


@pytest.mark.parametrize("workers", [1, 2])
def test_the_backward_is_outside_of_autocast_as_the_users_own(workers):
    NOTED.clear()
    model = make(lambda: Returns(lambda h: Noting.apply(h).mean()), workers=workers)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(8, 4))
        assert torch.is_autocast_enabled("cpu")
    assert NOTED == [False] * len(NOTED) != []


def test_a_kept_graph_is_walked_again_and_a_freed_one_is_an_error():
    model, (x, y) = make(), make_batch()
    loss = model(x, y)
    weight = model.module.enter.weight
    weight.register_hook(lambda g: g.mul_(3))  # must not reach what is kept
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, once + once)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_an_attempt_that_is_repeated_leaves_one_gradient():
    class Late(nn.Module):
        """Begins to draw in a later call, in its backward."""

        def __init__(self):
            super().__init__()
            self.layer, self.noisy = nn.Linear(4, 1), False

        def forward(self, x):
            out = self.layer(x)
            if self.noisy and out.requires_grad:
                out.register_hook(lambda g: g + torch.rand_like(g))
            return out.mean()

    def run(workers):
        model = make(Late, workers=workers)
        model(torch.ones(8, 4))
        model.module.noisy = True
        torch.manual_seed(9)
        model(torch.ones(8, 4)).backward()
        return [p.grad for p in model.parameters()]

    assert_same_bits(run(1), run(3))


# -- What is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "options", "text"),
    [
        (lambda h: h, {}, r"shape \(2, 3\) and dtype torch.float32 needs a gradient"),
        (lambda h: (h.mean(), h), {}, "return it detached, or use eager_backward=False"),
        (lambda h: h.mean().to(torch.complex64), {}, "dtype torch.complex64"),
        (lambda h: h.mean(), {"out_dims": "list"}, "out_dims='list' makes one per shard"),
    ],
)
def test_what_is_no_loss_is_refused(function, options, text):
    model = make(lambda: Returns(function), **options)
    with pytest.raises(ValueError, match=text) as caught:
        model(torch.randn(8, 4))
    assert "in shard 0 of 4" in caught.value.__notes__[0]


def test_a_list_of_one_loss_per_row_is_refused():
    with pytest.raises(ValueError, match="as many losses as the shard has rows"):
        make(lambda: Returns(lambda h: list(h.mean(1))))(torch.randn(7, 4))


def test_a_loss_left_on_the_module_is_refused():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.aux = nn.Linear(4, 1), None

        def forward(self, x):
            out = self.layer(x).mean()
            self.aux = out * 2
            return out

    model = make(Leaves)
    model.module.aux = torch.zeros(())
    with pytest.raises(ValueError, match=r"left a tensor that needs a gradient .*'aux'"):
        model(torch.randn(8, 4))
    assert torch.equal(model.module.aux, torch.zeros(()))


def test_a_hooked_tensor_of_the_users_own_is_refused():
    own = torch.ones(3, requires_grad=True)
    own.register_hook(lambda g: g)
    with pytest.raises(ValueError, match="has a gradient hook and is not part of the module"):
        make(lambda: Returns(lambda h: (h * own).mean()))(torch.randn(8, 4))


@pytest.mark.parametrize("combine", [lambda a, b: a + 0.5 * b, lambda a, b: a])
def test_losses_that_get_different_gradients_are_refused(combine):
    model = make(lambda: Returns(lambda h: (h.mean(), h.square().mean())))
    with pytest.raises(RuntimeError, match=r"arrive at the 2 losses differ \(1, (0.5|none)\)"):
        combine(*model(torch.randn(8, 4))).backward()
    assert all(p.grad is None for p in model.parameters())


def test_derivatives_of_the_gradient_are_refused():
    model, (x, y) = make(), make_batch()
    with pytest.raises(RuntimeError, match="create_graph=True is not there for eager_backward"):
        torch.autograd.grad(model(x, y), model.module.enter.weight, create_graph=True)


def test_float16_autocast_is_refused():
    model, (x, y) = make(), make_batch()
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ValueError, match=r"autocast to float16.*use bfloat16"),
    ):
        model(x, y)


def test_both_ways_to_save_memory_are_refused():
    with pytest.raises(ValueError, match="both keep the activations of one shard at a time"):
        make(recompute=True)


def test_the_option_is_checked():
    with pytest.raises(TypeError, match="eager_backward must be True or False, got 1"):
        make(eager_backward=1)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_bad):
        ctx.is_bad = is_bad
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if ctx.is_bad:
            raise ZeroDivisionError("in backward")
        return gradient, None


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_backward_says_where_and_leaves_nothing(workers):
    def breaking(h):
        shard = samestep.current_shard()
        return Breaks.apply(h, bool(BAD) and shard.index == 2).mean()

    model = make(lambda: nn.Sequential(nn.BatchNorm1d(4), Returns(breaking)), workers=workers)
    x = torch.randn(8, 4)
    BAD.append(1)
    before = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(ZeroDivisionError) as caught:
        model(x)
    assert "in shard 2 of 4 (rows 4-5 of 8, cpu)" in caught.value.__notes__
    assert all(p.grad is None for p in model.parameters())
    assert_same_bits(before, model.buffers())
    BAD.clear()
    model(x).backward()
    assert model.module[1].layer.weight.grad is not None


BAD: list = []


# -- Several ranks ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.spmd
@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_number_of_ranks_trains_to_the_same_bits(ranks, count, batch):
    alone = rank_jobs.train(workers=2)[0]
    found = ranks.ask(count, "train_hash", options={"batch": batch, "eager_backward": True})
    assert found == [alone] * count


@pytest.mark.slow
@pytest.mark.spmd
@pytest.mark.parametrize("replicas", [4, 2])  # with 2, the last rank has no shard
def test_ranks_share_the_gradients_of_inputs(ranks, replicas):
    alone = rank_jobs.input_gradients(None, replicas, False)
    assert ranks.ask(3, "input_gradients", replicas, True) == [alone] * 3


@pytest.mark.slow
@pytest.mark.spmd
def test_ranks_that_scale_differently_are_told(ranks):
    for found in ranks.run(2, "scale_by_rank"):
        assert found.kind == RankError.__name__
        assert "rank 1 computes another loss than rank 0" in found.text


def test_shards_that_meet_and_take_turns_are_refused_before_they_wait_for_ever():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(lambda y: self.norm(self.layer(y)), x, use_reentrant=True).mean()

    model = DataParallel(Checkpointed(), replicas=2, eager_backward=True, sync_batch_norm=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        model(torch.randn(8, 4, requires_grad=True))
