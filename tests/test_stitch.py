"""The shards' graphs and the caller's are one: autograd works as without the wrapper."""

import gc
import threading
import time
import warnings
import weakref

import pytest
import torch
from helpers import assert_alike, score, tensors_of
from models import CASES, make_batch, make_model, normal
from torch import nn
from torch.utils.checkpoint import checkpoint

from samestep import DataParallel
from samestep.backward import Backward
from samestep.context import make_shards
from samestep.engine import SerialEngine, ThreadEngine
from samestep.errors import StateWarning
from samestep.functional import make_runner
from samestep.graphs import make_edge
from samestep.stitch import ShardGraphs, stitch

CPU = torch.device("cpu")


class Bilinear(nn.Module):
    """Smooth, with mixed second derivatives between rows, parameters and themselves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(3, 2, grad=False))
        self.bias = nn.Parameter(normal(2, grad=False))

    def forward(self, x):
        return (x @ self.weight).tanh() * (x * x).sum(1, keepdim=True) + self.bias.exp() * x[:, :2]


class Tied(nn.Module):
    """Decodes with the very weights that it encodes with."""

    def __init__(self):
        super().__init__()
        self.code = nn.Linear(3, 3, dtype=torch.float64)
        self.decode = nn.Linear(3, 3, dtype=torch.float64)
        self.decode.weight = self.code.weight

    def forward(self, x):
        return self.decode(self.code(x).tanh())


def make_mlp(num_replicas=3, **options):
    return DataParallel(make_model("mlp"), replicas=num_replicas, **options)


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


def mix(tensor):
    """One number in which each entry has a weight of its own."""
    return (tensor * torch.arange(tensor.numel()).double().cos().view(tensor.shape)).sum()


def of_parameters(model):
    """The wrapped module as a function of its inputs and its parameters, for gradcheck."""
    places = [
        (module, name) for module in model.module.modules() for name in dict(module._parameters)
    ]

    def call(x, *parameters):
        for (module, name), value in zip(places, parameters, strict=True):
            setattr(module, name, value)
        return model(x)

    return call, [getattr(module, name) for module, name in places]


# --------------------------------------------------------------------------------------------------
# Any order of derivative
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_gradients_are_right_to_second_order_over_inputs_and_parameters(num_replicas):
    call, parameters = of_parameters(DataParallel(Bilinear(), replicas=num_replicas))
    inputs = (normal(4, 3), *parameters)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("name", ["mlp", "capsules", "gru time first"])
def test_second_derivatives_of_real_models_are_the_plain_ones(name):
    found = []
    for one in (
        make_model(name),
        DataParallel(make_model(name), replicas=3, **CASES[name].options),
    ):
        args, kwargs, leaves = make_batch(name, 5)
        wanted = [*leaves, *one.parameters()]
        first = torch.autograd.grad(score(one(*args, **kwargs)), wanted, create_graph=True)
        second = torch.autograd.grad(score(first), wanted, allow_unused=True)
        found.append((first, second))
    assert_alike(*found)


def test_a_third_derivative_is_the_plain_one():
    plain, found = Bilinear(), []
    x = normal(5, 3)
    for one in (plain, DataParallel(plain, replicas=2), DataParallel(plain, replicas=5)):
        wanted, row = [x, plain.weight, plain.bias], []
        value = mix(one(x))
        for _ in range(3):
            gradients = torch.autograd.grad(value, wanted, create_graph=True)
            row.append(gradients)
            value = sum(mix(gradient) for gradient in gradients)
        value.backward()
        row.append([leaf.grad.clone() for leaf in wanted])
        for leaf in wanted:
            leaf.grad = None
        found.append(row)
    assert_alike(found[1], found[0])
    assert_alike(found[2], found[0])


def test_a_gradient_penalty_trains_as_the_plain_one():
    found = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(1)
        x = normal(7, 3)
        (slope,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        (one(x).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()
        found.append((x.grad, grads_of(one)))
    assert_alike(*found)


@pytest.mark.parametrize("keep", [False, True])
def test_a_loss_and_a_penalty_on_its_own_slope_share_one_forward(keep):
    found = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(21)
        x = normal(7, 3)
        loss = score(one(x))
        slope, *weights = torch.autograd.grad(loss, [x, one[0].weight], create_graph=True)
        total = loss + slope.pow(2).sum() + weights[0].pow(2).sum()
        total.backward(retain_graph=keep)
        if keep:
            total.backward()
        found.append((x.grad, grads_of(one)))
    assert_alike(*found)


def test_a_hessian_product_through_the_gradient_argument():
    found = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(2)
        x, vector = normal(6, 3), normal(6, 2)
        out = one(x)
        (first,) = torch.autograd.grad(out, x, vector, create_graph=True)
        second = torch.autograd.grad(
            first.pow(2).sum(), [x, vector, *one.parameters()], allow_unused=True
        )
        found.append((first, second))
    assert_alike(*found)


# --------------------------------------------------------------------------------------------------
# Who keeps the graph
# --------------------------------------------------------------------------------------------------


def test_a_kept_graph_can_be_walked_twice():
    model, x = make_mlp(), normal(7, 3)
    loss = score(model(x))
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for first, p in zip(once, model.parameters(), strict=True):
        assert torch.equal(2 * first, p.grad)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_second_backward_is_refused_as_torch_refuses_it(create_graph):
    messages = []
    for one in (make_model("mlp"), make_mlp()):
        x = normal(7, 3)
        loss = one(x).tanh().sum()
        if create_graph:
            torch.autograd.grad(loss, x, create_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time") as info:
            loss.backward()
        messages.append(str(info.value))
    assert messages[0] == messages[1]


def test_a_loss_that_saves_nothing_of_its_own_is_refused_too():
    messages = []
    for one in (make_model("mlp"), make_mlp()):
        loss = one(normal(7, 3)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time") as info:
            loss.backward()
        messages.append(str(info.value))
    assert messages[0] == messages[1]


def test_memory_of_the_shards_goes_with_the_first_backward():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x).exp()
            seen.append(weakref.ref(y))
            return y * y

    model = DataParallel(Watched(3, 2), replicas=3)
    out = model(torch.randn(6, 3))
    gc.disable()
    try:
        assert all(ref() is not None for ref in seen)
        out.sum().backward()
        assert len(seen) == 3
        assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()
    assert out.grad_fn is not None


def test_a_kept_second_order_graph_can_be_walked_again():
    found = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(3)
        x = normal(7, 3)
        (slope,) = torch.autograd.grad(score(one(x)), x, create_graph=True)
        penalty = slope.pow(2).sum()
        penalty.backward(retain_graph=True)
        penalty.backward()
        found.append((x.grad, grads_of(one)))
    assert_alike(*found)


# --------------------------------------------------------------------------------------------------
# Several passes
# --------------------------------------------------------------------------------------------------


def test_several_forwards_before_one_backward():
    found = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(4)
        batches = [normal(rows, 3) for rows in (7, 2, 5)]
        sum(score(one(x)) for x in batches).backward()
        found.append(([x.grad for x in batches], grads_of(one)))
    assert_alike(*found)


def test_a_forward_may_use_the_output_of_another():
    found = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(5)
        x = normal(7, 3)
        again = torch.cat([one(x), x[:, :1]], 1)
        score(one(again)).backward()
        found.append((x.grad, grads_of(one)))
    assert_alike(*found)


def test_two_losses_of_one_forward_are_walked_one_after_the_other():
    found = []
    for one in (make_model("capsules"), DataParallel(make_model("capsules"), replicas=3)):
        args, _, (x,) = make_batch("capsules", 7)
        out = one(*args)
        out["length"].sum().backward(retain_graph=True)
        out["coupling"].pow(2).sum().backward()
        found.append((x.grad, grads_of(one)))
    assert_alike(*found)


def test_an_evaluation_between_forward_and_backward_changes_nothing():
    model, x = make_mlp(), normal(7, 3)
    expected = torch.autograd.grad(score(model(x)), list(model.parameters()))
    out = model(x)
    with torch.no_grad():
        model.eval()
        model(normal(11, 3))
        model.train()
    assert_alike(torch.autograd.grad(score(out), list(model.parameters())), expected)


def test_gradients_accumulate_over_batches():
    found = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(6)
        for rows in (7, 1, 4, 9):
            (score(one(normal(rows, 3))) / 4).backward()
        found.append(grads_of(one))
    assert_alike(*found)


def test_backward_may_run_in_another_thread():
    model, x = make_mlp(), normal(7, 3)
    expected = torch.autograd.grad(score(model(x)), [x, *model.parameters()])
    loss = score(model(x))
    thread = threading.Thread(target=loss.backward, name="elsewhere")
    thread.start()
    thread.join()
    assert_alike([x.grad, *(p.grad for p in model.parameters())], list(expected))


def test_two_threads_may_train_with_one_wrapper():
    model, plain, failures = make_mlp(), make_model("mlp"), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(10):
            x = torch.randn(5, 3, dtype=torch.float64, generator=generator)
            found = torch.autograd.grad(score(model(x)), list(model.parameters()))
            expected = torch.autograd.grad(score(plain(x)), list(plain.parameters()))
            try:
                assert_alike(found, expected)
            except AssertionError as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_two_threads_may_accumulate_into_the_same_parameters():
    class Slow(nn.Module):
        """Each shard waits in backward, so that two backwards would be inside it at once."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            early = x * self.weight
            late = checkpoint(lambda t: t * 1, x * self.weight, use_reentrant=True)
            # The later half of a leaf's gradient: long enough for another shard to come between.
            late.register_hook(lambda _: time.sleep(0.002))
            return early + late

    model, seen = DataParallel(Slow(), replicas=3), []
    model.weight.register_hook(lambda gradient: seen.append(float(gradient[0])))
    losses = [model(torch.full((6, 2), float(n), dtype=torch.float64)).sum() for n in range(8)]

    def work(mine):
        for loss in mine:
            loss.backward()

    threads = [threading.Thread(target=work, args=(losses[k::2],)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [12.0 * n for n in range(8)]  # each its own, none of the other's
    assert torch.equal(model.weight.grad, torch.full((2,), 12.0 * sum(range(8))).double())


# --------------------------------------------------------------------------------------------------
# Parameters
# --------------------------------------------------------------------------------------------------


def test_a_parameters_hook_sees_the_summed_gradient_once():
    plain, model, seen = make_model("mlp"), make_mlp(), []
    args = (normal(8, 3),)
    for one in (plain, model):
        parameter = next(one.parameters())
        handle = parameter.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1])
        score(one(*args)).backward()
        handle.remove()
    assert len(seen) == 2
    assert_alike(seen[1], seen[0])
    assert_alike(grads_of(model), grads_of(plain))


def test_a_post_accumulate_hook_runs_once_with_the_whole_gradient():
    model, seen = make_mlp(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append((p, p.grad.clone())))
    score(model(normal(8, 3))).backward()
    assert len(seen) == len(list(model.parameters()))
    assert {id(p) for p, _ in seen} == {id(p) for p in model.parameters()}
    assert all(torch.equal(p.grad, gradient) for p, gradient in seen)


def test_a_hook_may_step_the_parameter_during_backward():
    found = []
    for one in (make_model("mlp"), make_mlp()):

        def step(p):
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for parameter in one.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        torch.manual_seed(8)
        for rows in (7, 3, 5):
            score(one(normal(rows, 3))).backward()
        found.append(dict(one.state_dict()))
    assert_alike(*found)


def test_gradients_of_some_parameters_only():
    model, plain, x = make_mlp(), make_model("mlp"), normal(8, 3, grad=False)
    pairs = []
    for one in (plain, model):
        first, *_, last = one.parameters()
        pairs.append(torch.autograd.grad(score(one(x)), [last, first]))
    assert_alike(pairs[1], pairs[0])
    assert all(p.grad is None for p in model.parameters())


def test_frozen_and_unused_parameters_get_no_gradient():
    case = CASES["nested"]
    model = DataParallel(make_model("nested"), replicas=3, **case.options)
    args, kwargs, _ = make_batch("nested", 7)
    score(model(*args, **kwargs)).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {"unused.weight", "unused.bias", "frozen.weight", "frozen.bias"}


def test_a_parameter_that_one_shard_uses_has_that_shards_gradient():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always = nn.Linear(3, 1, dtype=torch.float64)
            self.rare = nn.Linear(3, 1, dtype=torch.float64)

        def forward(self, x):
            y = self.always(x)
            return y + self.rare(x) * 2 if bool((x > 50).any()) else y

    plain, x = Sometimes(), normal(6, 3, grad=False)
    model = DataParallel(plain, replicas=3)
    model(x).sum().backward()
    assert plain.rare.weight.grad is None
    x[5] = 100.0
    model.zero_grad()
    model(x).sum().backward()
    # Rows 4 and 5 are one shard: it alone used the module.
    assert_alike(plain.rare.weight.grad, 2 * x[4:].sum(0, keepdim=True))
    assert_alike(plain.always.weight.grad, x.sum(0, keepdim=True))


def test_freezing_and_thawing_between_calls_is_followed():
    model, plain = make_mlp(), make_model("mlp")
    for frozen in (True, False):
        for one in (model, plain):
            one.zero_grad()
            one[0].weight.requires_grad_(not frozen)
            torch.manual_seed(9)
            score(one(normal(7, 3))).backward()
        assert (model[0].weight.grad is None) == frozen
        assert_alike(grads_of(model), grads_of(plain))


def test_tied_weights_get_both_gradients():
    plain, x = Tied(), normal(7, 3, grad=False)
    expected = torch.autograd.grad(score(plain(x)), list(plain.parameters()))
    model = DataParallel(plain, replicas=3)
    assert len(list(model.parameters())) == 3
    assert_alike(torch.autograd.grad(score(model(x)), list(model.parameters())), expected)


def test_a_frozen_model_passes_gradients_to_its_inputs():
    model, plain, x = make_mlp(), make_model("mlp"), normal(7, 3)
    expected = torch.autograd.grad(score(plain(x)), x)
    model.requires_grad_(False)
    out = model(x)
    assert out.requires_grad
    assert_alike(torch.autograd.grad(score(out), x), expected)


def test_nothing_that_needs_a_gradient_gives_no_graph():
    model = make_mlp().requires_grad_(False)
    out = model(normal(7, 3, grad=False))
    assert (out.requires_grad, out.grad_fn) == (False, None)


def test_no_graph_is_built_without_grad_mode(monkeypatch):
    def refuse(*_):
        raise AssertionError("a node was made")

    monkeypatch.setattr("samestep.stitch._Stitch.apply", refuse)
    with torch.no_grad():
        assert not make_mlp()(normal(7, 3)).requires_grad


# --------------------------------------------------------------------------------------------------
# Inputs and outputs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [["answer"], ["loss"], ["pair"], ["pair", "loss"]])
def test_outputs_may_be_left_unused(used):
    found = []
    for one in (
        make_model("nested"),
        DataParallel(make_model("nested"), replicas=3, **CASES["nested"].options),
    ):
        args, kwargs, leaves = make_batch("nested", 7)
        out = one(*args, **kwargs)
        score([out[name] for name in used]).backward()
        found.append((grads_of(one), [leaf.grad for leaf in leaves]))
    assert_alike(*found)


def test_only_some_rows_of_the_output_are_used():
    found = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(10)
        x = normal(9, 3)
        score(one(x)[2:5]).backward()
        found.append((x.grad, grads_of(one)))
    assert_alike(*found)


def test_an_argument_given_whole_gets_the_sum_of_the_shards_gradients():
    class Shifted(nn.Module):
        def forward(self, x, shift):
            return (x * shift).tanh()

    found = []
    for one in (Shifted(), DataParallel(Shifted(), replicas=3)):
        torch.manual_seed(11)
        x, shift = normal(7, 3), normal(1, 3)
        score(one(x, shift)).backward()
        found.append((x.grad, shift.grad))
    assert_alike(*found)


def test_one_tensor_passed_twice_gets_both_gradients():
    class Product(nn.Module):
        def forward(self, x, y):
            return x.sin() * y

    x = normal(7, 3)
    expected = torch.autograd.grad(score(Product()(x, x)), x)
    assert_alike(torch.autograd.grad(score(DataParallel(Product(), replicas=3)(x, x)), x), expected)


def test_inputs_from_a_graph_of_the_callers_pass_the_gradient_on():
    found = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(12)
        x = normal(7, 3)
        score(one(x.sin() * 2)).backward()
        found.append(x.grad)
    assert_alike(*found)


def test_a_forward_may_work_in_place_on_what_the_caller_computed():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2).sin()

    plain, model = InPlace(), DataParallel(InPlace(), replicas=3)
    torch.manual_seed(13)
    x = normal(7, 3)
    score(plain(x * 3)).backward()
    expected, x.grad = x.grad, None
    with pytest.warns(StateWarning, match="the caller's tensor keeps its old values"):
        score(model(x * 3)).backward()
    assert_alike(x.grad, expected)


def test_a_parameter_returned_as_an_output_is_the_users_own():
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return x * self.weight, self.weight

    model = DataParallel(Shows(), replicas=3)
    out, weight = model(normal(7, 3))
    assert weight is model.module.weight
    (out.sum() + weight.pow(2).sum()).backward()
    assert weight.grad is not None


def test_the_same_tensor_returned_twice_is_the_same_again():
    class Twice(nn.Module):
        def forward(self, x):
            y = x.sin()
            return y, {"again": y}

    found = []
    for one in (Twice(), DataParallel(Twice(), replicas=3)):
        torch.manual_seed(14)
        x = normal(7, 3)
        out, more = one(x)
        score([out, more["again"] * 2]).backward()
        found.append(x.grad)
    assert_alike(*found)


def test_saved_tensors_hooks_see_what_the_shards_save():
    class Square(nn.Module):
        def forward(self, x):
            return x.exp() * x

    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor

    def unpack(tensor):
        unpacked.append(tuple(tensor.shape))
        return tensor

    x = normal(7, 3)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = DataParallel(Square(), replicas=3)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert {shape[0] for shape in packed} == {3, 1}  # shards of 3, 3 and 1 rows
    assert len(packed) == len(unpacked) == 9
    assert_alike(gradient, torch.autograd.grad(Square()(x).sum(), x)[0])


def test_tensors_saved_on_disk_or_elsewhere_still_give_the_gradient():
    x = normal(7, 3)
    model = make_mlp()
    expected = torch.autograd.grad(score(model(x)), [x, *model.parameters()])
    with torch.autograd.graph.save_on_cpu():
        out = model(x)
    assert_alike(torch.autograd.grad(score(out), [x, *model.parameters()]), expected)


def test_what_a_shard_saved_and_the_caller_overwrote_is_refused():
    model, x = make_mlp(), normal(7, 3, grad=False)
    out = model(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        score(out).backward()


# --------------------------------------------------------------------------------------------------
# What training scripts do
# --------------------------------------------------------------------------------------------------


def test_a_gradient_scaler_scales_checks_and_steps():
    found = []
    for one in (make_model("mlp").float(), DataParallel(make_model("mlp").float(), replicas=3)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        torch.manual_seed(15)
        for poison in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            x = torch.randn(7, 3)
            scaler.scale(one(x).pow(2).mean() * poison).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        found.append((dict(one.state_dict()), scaler.get_scale()))
    assert_alike(*found, atol=1e-6)  # float32
    assert found[0][1] == 128.0  # one step was skipped


def test_clipping_sees_the_norm_of_the_whole_batch():
    norms = []
    for one in (make_model("mlp"), make_mlp()):
        torch.manual_seed(16)
        score(one(normal(7, 3))).backward()
        norms.append((nn.utils.clip_grad_norm_(one.parameters(), 0.1), grads_of(one)))
    assert_alike(*norms)


class Blocks(nn.Module):
    """Two blocks with dropout; ``mode`` says how they are checkpointed."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.first, self.second = (
            nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.4), nn.Tanh()).double() for _ in range(2)
        )

    def forward(self, x):
        if self.mode == "none":
            return self.second(self.first(x))
        use_reentrant = self.mode == "reentrant"
        x = checkpoint(self.first, x, use_reentrant=use_reentrant)
        return checkpoint(self.second, x, use_reentrant=use_reentrant)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("mode", ["reentrant", "not reentrant"])
def test_checkpointing_draws_the_same_dropout_again(mode, num_replicas):
    found = []
    for kind in ("none", mode):
        torch.manual_seed(17)
        model, x = DataParallel(Blocks(kind), replicas=num_replicas), normal(8, 3)
        row = []
        for _ in range(3):  # the first call, the one after it, a settled one
            model.zero_grad()
            x.grad = None
            out = model(x)
            out.sum().backward()
            row.append(
                [out.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
            )
        found.append((row, torch.get_rng_state()))
    assert_alike(found[1], found[0], atol=0)
    assert len({int((row[0] == 0).sum()) for row in found[0][0]} | {0}) > 1  # it does drop


def test_checkpointing_may_begin_by_an_argument_in_a_later_call():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x, again):
            if again:
                return checkpoint(self.body, x, use_reentrant=True).tanh()
            return self.body(x).tanh()

    plain, x = Chosen(), normal(7, 3)
    model = DataParallel(plain, replicas=3)
    for again in (False, False, True, True, False):
        found = []
        for one in (plain, model):
            one.zero_grad()
            x.grad = None
            score(one(x, again)).backward()
            found.append((x.grad.clone(), grads_of(one)))
        assert_alike(*found)


def test_the_gradient_flows_only_through_what_was_not_detached():
    class Half(nn.Module):
        def forward(self, x, y):
            return x.detach() * y, x * 2

    x, y = normal(7, 3), normal(7, 3)
    one, _ = DataParallel(Half(), replicas=3)(x, y)
    _, two = DataParallel(Half(), replicas=3)(x, y)
    assert_alike(torch.autograd.grad(one.sum(), y)[0], x.detach())
    assert_alike(torch.autograd.grad(two.sum(), x)[0], torch.full_like(x, 2).detach())
    assert_alike(torch.autograd.grad(two.sum(), y, allow_unused=True), (None,))


def test_outputs_with_graphs_of_their_own_may_be_walked_one_by_one():
    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = (nn.Linear(3, n, dtype=torch.float64) for n in (2, 1))

        def forward(self, x):
            return self.actor(x), self.critic(x)

    plain, x = ActorCritic(), normal(7, 3, grad=False)
    found = []
    for one in (plain, DataParallel(plain, replicas=3)):
        one.zero_grad()
        policy, value = one(x)
        score(policy).backward()
        score(value).backward()
        found.append(grads_of(one))
        with pytest.raises(RuntimeError, match="a second time"):
            policy.pow(2).sum().backward()
    assert_alike(*found)


def test_a_failing_hook_in_backward_reaches_the_caller_with_its_shard():
    class Hooked(nn.Module):
        def forward(self, x):
            y = x * 2
            if bool((x == 5).any()):
                y.register_hook(self.fail)
            return y

        def fail(self, gradient):
            raise LookupError("no such gradient")

    x = torch.arange(6.0).unsqueeze(1).requires_grad_()
    out = DataParallel(Hooked(), replicas=3)(x)
    with pytest.raises(LookupError, match="no such gradient") as info:
        out.sum().backward()
    assert any("in shard 2 of 3" in note for note in info.value.__notes__)


def test_anomaly_mode_names_the_operation():
    class Root(nn.Module):
        def forward(self, x):
            return x.sqrt()

    model = DataParallel(Root(), replicas=2)
    x = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError) as info:
            model(x).sum().backward()
    assert "returned nan values" in str(info.value)
    assert any("in shard 1 of 2" in note for note in info.value.__notes__)
    assert any("Error detected in SqrtBackward0" in str(w.message) for w in caught)


# --------------------------------------------------------------------------------------------------
# The node by itself
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [SerialEngine(1), ThreadEngine(1)], ids=["serial", "threads"])
def test_placements_replicated_inputs_sum_and_local_ones_stay(engine):
    weight = normal(3)
    rows = [normal(3) for _ in range(3)]
    copies = [weight.detach().requires_grad_() for _ in rows]
    leaves = [row.detach().requires_grad_() for row in rows]
    outputs = [[(c * x).sum()] for c, x in zip(copies, leaves, strict=True)]
    edges = [[make_edge(output) for output in row] for row in outputs]
    shards = make_shards([CPU] * 3, [1] * 3)
    runner = make_runner(engine, shards, drawing="watch", together=False)
    graphs = ShardGraphs(runner, [[c] for c in copies], [[x] for x in leaves], edges, [[], [], []])
    tied = [row[0] for row in stitch(graphs, outputs, [weight], [[row] for row in rows])]
    assert_alike([t.detach() for t in tied], [row[0].detach() for row in outputs])
    factors = [1.0, 10.0, 100.0]
    total = sum(f * t for f, t in zip(factors, tied, strict=True))
    gradient, *others = torch.autograd.grad(total, [weight, *rows])
    expected = sum(f * row.detach() for f, row in zip(factors, rows, strict=True))
    assert_alike(gradient, expected)
    for found, factor in zip(others, factors, strict=True):
        assert_alike(found, factor * weight.detach())


def test_all_shards_make_one_node_in_the_callers_graph():
    out = make_mlp(4)(normal(8, 3))
    nodes = {function for function, _ in out.grad_fn.next_functions}
    assert len(out.grad_fn.next_functions) == 4
    assert {type(node).__name__ for node in nodes} == {"_StitchBackward"}
    assert len(nodes) == 1
    assert tensors_of(out) == [out]


@pytest.mark.parametrize(("device", "is_shared"), [("cpu", True), ("meta", False)])
def test_gradients_on_an_accelerator_are_not_added_by_threads_without_its_streams(
    device, is_shared
):
    """Outputs on the CPU, parameters elsewhere (``meta`` stands in)."""
    shards = make_shards([torch.device("cpu")] * 2, [1, 1])
    runner = make_runner(ThreadEngine(num_workers=2), shards, drawing="watch", together=False)
    leaf = torch.ones(2, device=device, requires_grad=True)
    out = [torch.ones(1, requires_grad=True) for _ in range(2)]
    graphs = ShardGraphs(
        runner=runner,
        replicated=[[leaf], [leaf]],
        local=[[], []],
        outputs=[[make_edge(tensor)] for tensor in out],
        partials=[[], []],
    )
    found = Backward(graphs, [leaf], [torch.ones(1), torch.ones(1)], [True])
    assert found._may_share_work() is is_shared
