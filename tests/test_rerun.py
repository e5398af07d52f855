"""A second run in place of saved tensors: what it sees, what it keeps, when it refuses."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from samestep import DataParallel
from samestep.intercept import StreamMode
from samestep.rerun import Rerun
from samestep.rng import Draws, Stream, use_stream

CPU = torch.device("cpu")


def make_input():
    return torch.linspace(-1, 2, 12, dtype=torch.float64).view(3, 4).requires_grad_()


def differentiate(function, order=2):
    """The value and its derivatives; the graph is kept, and walked once more at the end."""
    x = make_input()
    found = [function(x)]
    for _ in range(order):
        found += torch.autograd.grad(found[-1].square().sum(), x, create_graph=True)
    return found + list(torch.autograd.grad(found[1].sum(), x))


def simple(x):
    return (x.sin() * x.exp()).tanh()


def checkpointed(x):
    return checkpoint(simple, checkpoint(torch.cos, x, use_reentrant=False), use_reentrant=False)


def gradient_inside(x):
    x = x * 2
    (slope,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    (other,) = torch.autograd.grad(x.exp().sum(), x)
    return slope.sin() * other * x.exp()


def catches(x):
    try:
        return simple(x) * 3
    except Exception:
        return x.exp().exp().exp()


class Twice(torch.autograd.Function):
    """Asks twice for what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


@pytest.mark.parametrize(
    "function", [simple, checkpointed, gradient_inside, catches, Twice.apply, torch.clone]
)
def test_any_order_of_derivative_and_any_number_of_backwards(function):
    expected = differentiate(function)
    found = differentiate(lambda x: Rerun(function, CPU)(x))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_inside_of_a_checkpoint_and_of_another_second_run():
    expected = differentiate(simple)
    outer = differentiate(
        lambda x: checkpoint(lambda y: Rerun(simple, CPU)(y), x, use_reentrant=False)
    )
    twice = differentiate(lambda x: Rerun(lambda y: Rerun(simple, CPU)(y), CPU)(x))
    for one, other, third in zip(expected, outer, twice, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


class Activations:
    """A function that notes whether what it computes lives."""

    def __init__(self):
        self.num_runs, self.refs = 0, []

    def __call__(self, x):
        self.num_runs += 1
        hidden = x.sin().exp()  # saved, as the result of exp
        self.refs.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden.exp()

    def count(self):
        return sum(not ref.expired() for ref in self.refs)


def test_nothing_is_kept_between_the_runs_nor_by_a_graph_that_is_kept():
    function, x = Activations(), make_input()
    out = Rerun(function, CPU)(x).sum()
    assert (function.num_runs, function.count()) == (1, 0)
    for num_runs in (2, 3):
        torch.autograd.grad(out, x, retain_graph=True)
        assert (function.num_runs, function.count()) == (num_runs, 0)


@pytest.mark.parametrize(
    ("num_columns", "expected"), [(4, ["middle", "end"] * 2), (4000, ["middle", "end"])]
)
def test_the_second_run_ends_with_the_last_tensor_that_was_saved(num_columns, expected):
    """Unless little is returned: then to go on is faster than an exception."""
    seen, x = [], torch.ones(3, num_columns, requires_grad=True)

    def function(x):
        x = x.sin()
        seen.append("middle")
        x = x + 1
        seen.append("end")
        return x

    Rerun(function, CPU)(x).sum().backward()
    assert seen == expected  # the sine saves its input: nothing later is needed


def test_no_cycle_is_left():
    gc.collect()
    gc.disable()
    try:
        function, x = Activations(), make_input()
        rerun = Rerun(function, CPU)
        alive = weakref.ref(rerun)
        out = rerun(x)
        out.sum().backward(retain_graph=True)
        del rerun, out
        assert alive() is None
    finally:
        gc.enable()


def test_two_backwards_that_take_turns_on_one_graph():
    function, x = Activations(), make_input()
    out = Rerun(function, CPU)(x)
    total, inner = out.sum(), []

    def begin_another(*_):
        inner.append(None)
        if len(inner) == 1:
            inner[0] = torch.autograd.grad(total, x, retain_graph=True)[0]

    out.grad_fn.register_hook(begin_another)  # between the last node and the one before
    (gradient,) = torch.autograd.grad(total, x)
    assert function.num_runs == 4  # the outer backward's tensors made place for the inner one's
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(gradient, expected)
    assert torch.equal(inner[0], expected)


def test_what_a_graph_saved_can_be_looked_at():
    x = make_input()
    out = Rerun(torch.exp, CPU)(x)
    assert torch.equal(out.grad_fn._saved_result, x.exp())
    out.sum().backward()
    assert torch.equal(x.grad, x.exp())


# --------------------------------------------------------------------------------------------------
# What the second run sees
# --------------------------------------------------------------------------------------------------


def differentiate_once(out, x):
    return torch.autograd.grad(out.sum(), x, retain_graph=True)[0]


def draw(x, generator):
    x = F.dropout(x, 0.5) * torch.rand(4, dtype=x.dtype)
    return x * torch.rand(4, dtype=x.dtype, generator=generator)


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("is_late", [False, True], ids=["in the shard", "after it"])
def test_random_numbers_are_those_of_the_first_run_and_go_on_behind_it(num_before, is_late):
    x = torch.ones(3, 4, requires_grad=True)  # else the gradient is rounded in another order
    stream, generator = Stream(Draws(), 2), torch.Generator().manual_seed(3)
    with use_stream(stream, intercept=True):
        for _ in range(num_before):
            torch.rand(3)
        out = Rerun(draw, CPU)(x, generator=generator)
        after = stream.copy()
        if not is_late:
            (gradient,) = torch.autograd.grad(out.sum(), x)
            rest = torch.rand(4)
    if is_late:
        state = torch.get_rng_state()
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gradient, out)
    assert out.unique().numel() > 4
    if not is_late:
        with use_stream(after, intercept=True):
            assert torch.equal(rest, torch.rand(4))


def seeded(x):
    torch.manual_seed(9)
    return x * torch.rand(3, 4)


@pytest.mark.parametrize("function", [lambda x: x * torch.rand(3, 4), seeded])
@pytest.mark.parametrize("modes", [[], [StreamMode(Stream(Draws(), 5))]], ids=["bare", "modes"])
def test_random_numbers_are_those_of_the_first_run_in_another_thread(modes, function):
    # A thread of torch's backward has the modes of the one that called it, but no current stream.
    with use_stream(Stream(Draws(), 1), intercept=True):
        out = Rerun(function, CPU)(torch.ones(3, 4, requires_grad=True))

    def look():
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            found.extend(out.grad_fn._saved_other for _ in range(2))

    found, state = [], torch.get_rng_state()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert len(found) == 2
    assert all(torch.equal(one, out) for one in found)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_numbers_where_no_shard_runs_are_the_callers():
    x = make_input()
    torch.manual_seed(1)
    out = Rerun(F.dropout, CPU)(x)
    expected = torch.get_rng_state()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient * x, out)
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("draws", [False, True])
def test_the_callers_generator_moves_as_it_does_with_activations_kept(draws):
    states = []
    for recompute in (False, True):
        layers = [nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5 if draws else 0.0)]
        model = DataParallel(nn.Sequential(*layers), replicas=2, recompute=recompute)
        torch.manual_seed(4)
        for _ in range(3):
            model(torch.ones(4, 4)).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_generator_of_the_users_own_draws_the_same_again():
    generator = torch.Generator()

    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh() * torch.rand(x.shape, generator=generator)

    module, gradients = Masked(4, 4), []
    for recompute in (False, True):
        model = DataParallel(module, replicas=2, recompute=recompute)
        model.zero_grad()
        generator.manual_seed(7)
        for _ in range(2):
            model(torch.ones(4, 4)).sum().backward()
        gradients.append(module.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_autocast_is_that_of_the_first_run(forward, backward):
    seen, layer = [], nn.Linear(4, 4)

    def function(x):
        out = layer(x)
        seen.append((out.dtype, torch.is_autocast_cache_enabled()))
        return out.exp()

    with torch.autocast("cpu", enabled=forward, cache_enabled=False):
        out = Rerun(function, CPU)(torch.ones(2, 4))
    with torch.autocast("cpu", enabled=backward):
        out.sum().backward()
    assert seen[0] == seen[1]
    assert seen[0][0] is (torch.bfloat16 if forward else torch.float32)


@pytest.mark.parametrize("devices", [("meta", None), (None, "meta"), ("cpu", "meta")])
def test_the_default_device_is_that_of_the_first_run(devices):
    seen = []

    def function(x):
        seen.append(torch.ones(1).device)
        return x.exp()

    forward, backward = (torch.device(device or "cpu") for device in devices)
    x = make_input()
    with forward:
        out = Rerun(function, CPU)(x)
    with backward:
        out.backward(torch.ones(3, 4, device="cpu", dtype=torch.float64))
    assert seen == [forward, forward]


# --------------------------------------------------------------------------------------------------
# What it refuses
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["argument", "keyword", "nested"])
def test_an_argument_that_was_written_in_place_is_an_error(where):
    x, scale = make_input(), torch.ones(4)
    rerun = Rerun(lambda x, s=None, *, t=None: x.exp() * (s[0] if isinstance(s, list) else x), CPU)
    given = {"argument": ((x, scale), {}), "keyword": ((x,), {"t": scale})}
    args, kwargs = given.get(where, ((x, [scale]), {}))
    out = rerun(*args, **kwargs)
    scale.add_(1)
    with pytest.raises(RuntimeError, match=r"argument .* modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: x[:2].exp(), r"tensor 0: .*3, 4\], then .*2, 4\]"),
        (lambda x: x.float().exp(), r"tensor 0: .*float64.*float32"),
        (lambda x: x + 1, "1 tensors, then 0"),
        (lambda x: x.exp().exp(), "1 tensors, then 2"),
    ],
    ids=["shape", "dtype", "fewer", "more"],
)
def test_a_second_run_that_saves_other_tensors_is_an_error(other, message):
    functions = [torch.exp, other]
    out = Rerun(lambda x: functions.pop(0)(x), CPU)(make_input())
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


def test_an_error_in_the_second_run_comes_through_and_leaves_no_hooks_behind():
    def function(x):
        if torch._C._current_graph_task_id() != -1:
            raise KeyError("again")
        return x.exp()

    out = Rerun(function, CPU)(make_input())
    with pytest.raises(KeyError, match="again"):
        out.sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
