"""K13. What belongs to a thread: grad mode, autocast, modes, random numbers."""

import contextlib
import contextvars

import pytest
import torch
import torch.nn.functional as F
from compare import rows
from reports import beyond, report
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from samestep import DataParallel, DrawWarning, current_shard


class Asking(nn.Module):
    """Asks a question in every replica; ``answers`` are those of the last call."""

    def __init__(self, question):
        super().__init__()
        self.question = question
        self.tell = None

    def forward(self, x):
        self.tell(self.question())
        return x


def ask(question, contexts=()):
    """The answers of three replicas to ``question``, asked under ``contexts``."""
    module = Asking(question)
    model = DataParallel(module, replicas=3)
    answers = []
    module.tell = answers.append
    model(torch.ones(7, 3))  # the first call also tries things out
    answers.clear()
    x = torch.ones(7, 3)
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        model(x)
    assert len(answers) == 3
    return answers


@report("P83", "pytorch/pytorch#20528")
def test_grad_mode_and_inference_mode_reach_every_replica():
    assert ask(torch.is_grad_enabled) == [True] * 3
    assert ask(torch.is_grad_enabled, [torch.no_grad()]) == [False] * 3
    assert ask(torch.is_grad_enabled, [torch.no_grad(), torch.set_grad_enabled(True)]) == [True] * 3
    assert ask(torch.is_inference_mode_enabled, [torch.inference_mode()]) == [True] * 3
    assert ask(torch.is_inference_mode_enabled) == [False] * 3


@report("P84", "pytorch/pytorch#60540", "pytorch/pytorch#50170", "pytorch/pytorch#54912")
def test_autocast_reaches_every_replica_with_its_dtype_and_cache():
    def state():
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )

    context = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    assert ask(state, [context]) == [(True, torch.bfloat16, False)] * 3
    context = torch.autocast("cpu", dtype=torch.float16)
    assert ask(state, [context]) == [(True, torch.float16, True)] * 3
    module = nn.Linear(3, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = DataParallel(module, replicas=3)(torch.ones(7, 3))
        assert torch.equal(output, module(torch.ones(7, 3)))
    assert output.dtype == torch.bfloat16


@report("P84", "pytorch/pytorch#60540")
def test_autocast_switched_off_inside_stays_off():
    contexts = [torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False)]
    assert ask(lambda: torch.is_autocast_enabled("cpu"), contexts) == [False] * 3


@report("P85", "pytorch/pytorch#125186")
def test_recomputation_in_backward_has_the_autocast_of_the_forward():
    seen = []

    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def block(self, x):
            # First, because recomputation stops as soon as backward has what it needs.
            seen.append((x @ x.T).dtype)
            return self.fc(x)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    model = DataParallel(Recomputing(), replicas=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.ones(7, 3))
    seen.clear()
    output.float().sum().backward()
    assert seen == [torch.bfloat16] * 3


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += "addmm" in str(func)
        return func(*args, **(kwargs or {}))


@report("P86", "pytorch/pytorch#103719")
def test_a_dispatch_mode_sees_every_replicas_operations():
    module = nn.Linear(3, 2)
    model = DataParallel(module, replicas=3)
    model(torch.ones(7, 3))
    with Counting() as mode:
        output = model(torch.ones(7, 3))
    assert mode.num_calls == 3
    assert torch.equal(output, module(torch.ones(7, 3)))


@report("P86", "pytorch/pytorch#103719")
def test_a_function_mode_sees_every_replicas_operations():
    class Functions(torch.overrides.TorchFunctionMode):
        num_calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.num_calls += func is F.linear
            return func(*args, **(kwargs or {}))

    model = DataParallel(nn.Linear(3, 2), replicas=3)
    model(torch.ones(7, 3))
    with Functions() as mode:
        model(torch.ones(7, 3))
    assert mode.num_calls == 3


@report("P86", "pytorch/pytorch#103719")
def test_saved_tensor_hooks_default_device_and_context_variables_reach_every_replica():
    packed = []
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    model = DataParallel(module, replicas=3)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.shape) or t, lambda t: t
    ):
        output = model(torch.ones(7, 3))
    output.sum().backward()
    assert packed.count(torch.Size([3, 2])) >= 2  # the tanh of two shards of three rows

    assert ask(lambda: torch.empty(1).device.type, [torch.device("meta")]) == ["meta"] * 3
    variable = contextvars.ContextVar("variable", default="unset")
    token = variable.set("set")
    assert ask(variable.get) == ["set"] * 3
    variable.reset(token)


@report("P88", "pytorch/pytorch#28370", "pytorch/pytorch#28980", "pytorch/pytorch#56794")
def test_with_more_intra_op_threads_the_context_and_the_numbers_stay():
    module = nn.Sequential(
        nn.Embedding(50, 64, max_norm=1.0), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    model = DataParallel(module, replicas=2, threads_per_replica=2)
    index = torch.arange(7)
    with torch.no_grad():
        module[0](torch.arange(50))  # normalise once: then the forward writes nothing
        torch.testing.assert_close(model(index), module(index))
    seen = []
    asking = Asking(torch.get_num_threads)
    asking.tell = seen.append
    DataParallel(asking, replicas=2, threads_per_replica=2)(torch.ones(7, 3))
    assert set(seen) == {2}


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 50)

    def forward(self, x):
        return F.dropout(torch.ones_like(self.fc(x)), 0.5, self.training)


@report("P89")
def test_a_seed_rules_every_replicas_random_numbers_and_replicas_differ():
    model = DataParallel(Dropping(), replicas=4)
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        found.append((model(torch.ones(8, 3)), model(torch.ones(8, 3)), torch.rand(3)))
    for first, second, after in found[1:]:
        assert torch.equal(first, found[0][0])
        assert torch.equal(second, found[0][1])
        assert torch.equal(after, found[0][2])
    first, second, _ = found[0]
    assert not torch.equal(first, second)
    shards = first.split(2)
    assert all(not torch.equal(shards[0], other) for other in shards[1:])


@report("P89")
def test_the_callers_generator_moves_by_one_draw_and_not_at_all_without_need():
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.rand(3)
    model = DataParallel(Dropping(), replicas=4)
    torch.manual_seed(0)
    model(torch.ones(8, 3))
    assert torch.equal(torch.rand(3), expected)
    model.eval()
    torch.manual_seed(0)
    before = torch.rand(3)
    torch.manual_seed(0)
    model(torch.ones(8, 3))
    assert torch.equal(torch.rand(3), before)


DRAWS = {
    "rand": lambda x: torch.rand(len(x), 5),
    "randn_like": lambda x: torch.randn_like(x),
    "randperm": lambda x: torch.randperm(50)[: len(x)],
    "normal_": lambda x: torch.empty(len(x), 5).normal_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full((len(x), 20), 0.5)),
    "multinomial": lambda x: torch.multinomial(torch.ones(len(x), 9), 5),
    "gumbel_softmax": lambda x: (
        F.gumbel_softmax(x.expand(-1, 3), hard=True) + torch.rand(len(x), 1)
    ),
    "alpha_dropout": lambda x: F.alpha_dropout(torch.ones(len(x), 20), 0.5, True),
    "rrelu": lambda x: F.rrelu(-torch.ones(len(x), 5), training=True),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[torch.ones(len(x), 1, 4, 2)] * 2, torch.randn(len(x), 1, 4, 2), dropout_p=0.5
    ),
    "distribution": lambda x: torch.distributions.Normal(torch.zeros(len(x), 3), 1.0).sample(),
    "gamma": lambda x: torch.distributions.Gamma(torch.ones(len(x), 3), 1.0).rsample(),
}


@beyond("K13")
@pytest.mark.parametrize("name", DRAWS)
def test_every_way_to_draw_is_reproducible_and_differs_between_replicas(name):
    class Drawing(nn.Module):
        def forward(self, x):
            return DRAWS[name](x)

    model = DataParallel(Drawing(), replicas=3)
    torch.manual_seed(0)
    first = model(torch.ones(6, 3))
    torch.manual_seed(0)
    again = model(torch.ones(6, 3))
    assert torch.equal(first, again)
    shards = first.split(2)
    assert not torch.equal(shards[0], shards[1])
    assert not torch.equal(shards[1], shards[2])


@beyond("K13")
def test_inner_dropout_of_an_lstm_and_a_transformer_layer_are_reproducible():
    lstm = nn.LSTM(3, 8, num_layers=2, dropout=0.5, batch_first=True)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    for module, x in ((lstm, torch.ones(6, 4, 3)), (layer, torch.ones(6, 4, 8))):
        model = DataParallel(module, replicas=3)
        torch.manual_seed(0)
        first = model(x)
        torch.manual_seed(0)
        again = model(x)
        first, again = (y[0] if isinstance(y, tuple) else y for y in (first, again))
        assert torch.equal(first, again)
        assert not torch.equal(first[:2], first[2:4])


@beyond("K13")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_draws_that_cannot_be_intercepted_are_still_reproducible_after_one_warning():
    @torch.jit.script
    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.rand([x.shape[0], 5])

    class Scripted(nn.Module):
        def forward(self, x):
            return draw(x)

    model = DataParallel(Scripted(), replicas=3)
    torch.manual_seed(0)
    with pytest.warns(DrawWarning, match="one at a time"):
        first = model(torch.ones(6, 3))
    torch.manual_seed(0)
    assert torch.equal(model(torch.ones(6, 3)), first)
    assert not torch.equal(first[:2], first[2:4])


@beyond("K13")
def test_default_dtype_reaches_every_replica():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = Asking(lambda: torch.zeros(1).dtype)
        answers = []
        module.tell = answers.append
        DataParallel(module, replicas=3)(rows(7, 3))
        assert answers == [torch.float64] * 3
    finally:
        torch.set_default_dtype(before)


@beyond("K13")
def test_the_current_shard_is_known_in_forward_and_in_backward():
    seen = []

    class Telling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", current_shard().index))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(("backward", current_shard().index))
            return grad

    class Module(nn.Module):
        def forward(self, x):
            return Telling.apply(x)

    DataParallel(Module(), replicas=3)(torch.ones(7, 3, requires_grad=True)).sum().backward()
    assert sorted(seen) == sorted((when, k) for when in ("forward", "backward") for k in range(3))
    assert current_shard() is None


@beyond("K13")
def test_draws_in_backward_are_reproducible():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.rand_like(grad)

    class Module(nn.Module):
        def forward(self, x):
            return Noisy.apply(x)

    model = DataParallel(Module(), replicas=3)
    gradients = []
    for _ in range(5):
        x = torch.ones(6, 30, requires_grad=True)
        torch.manual_seed(0)
        model(x).sum().backward()
        gradients.append(x.grad)
    assert not torch.equal(gradients[0][:2], gradients[0][2:4])
    for gradient in gradients[1:]:
        assert torch.equal(gradient, gradients[0])


@beyond("K13")
def test_gradients_that_forward_enables_for_itself_under_no_grad_end_with_it():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1).double()

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.fc(x).square()
                (force,) = torch.autograd.grad(energy.sum(), x)
            return energy, -force

    module = Forces()
    x = rows(7, 3)
    with torch.no_grad():
        (energy, force), expected = DataParallel(module, replicas=3)(x), module(x)
    torch.testing.assert_close(energy, expected[0].detach())
    torch.testing.assert_close(force, expected[1])
    assert not energy.requires_grad
