"""K16. torch.compile, TorchScript, activation checkpointing, observers, lazy modules."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_state, check_same, rows, twin
from reports import beyond, report
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from samestep import DataParallel

# Of torch itself: plain modules have them too.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*torch.ao.quantization.*:DeprecationWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    """Code compiled by one test must not serve another."""
    torch.compiler.reset()


def make_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@report("P104", "pytorch/pytorch#94636", "pytorch/pytorch#101605", "pytorch/pytorch#136833")
@pytest.mark.slow
def test_compile_then_wrap():
    net = make_net()
    plain = twin(net)
    model = DataParallel(torch.compile(net, backend="eager"), replicas=3)
    x = rows(7, 3)
    for module in (model, plain):
        module(x).square().sum().backward()
        module(x).square().sum().backward()
    torch.testing.assert_close(model(x), plain(x))
    assert_same_state(net, plain)


@report("P104", "pytorch/pytorch#94636", "pytorch/pytorch#126024")
def test_wrap_then_compile():
    net = make_net()
    plain = twin(net)
    model = torch.compile(DataParallel(net, replicas=3), backend="eager")
    x = rows(7, 3)
    for module in (model, plain):
        module(x).square().sum().backward()
    torch.testing.assert_close(model(x), plain(x))
    assert_same_state(net, plain)


@report("P104", "pytorch/pytorch#94636", "pytorch/pytorch#101605")
def test_compiled_code_is_compiled_once_for_all_replicas():
    counter = torch._dynamo.testing.CompileCounter()
    model = DataParallel(torch.compile(make_net(), backend=counter), replicas=3)
    for _ in range(4):
        model(rows(9, 3))
    assert counter.frame_count == 1


@report("P105", "pytorch/pytorch#15421", "pytorch/pytorch#30635", "pytorch/pytorch#12875")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_and_traced_modules(how):
    net = make_net()
    plain = twin(net)
    module = torch.jit.script(net) if how == "script" else torch.jit.trace(net, rows(2, 3))
    model = DataParallel(module, replicas=3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        x = rows(7, 3)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(model(x), plain(x))
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@report("P105", "pytorch/pytorch#15421", "pytorch/pytorch#34513")
def test_a_scripted_child_and_a_scripted_method_in_a_python_module():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.jit.script(nn.BatchNorm1d(3).double())
            self.net = torch.jit.script(make_net())

        def forward(self, x):
            return self.net(self.norm(x))

    module = Mixed().eval()
    x = rows(7, 3)
    model = DataParallel(module, replicas=3)
    output, expected = model(x), module(x)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    mine = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    expected.square().sum().backward()
    for gradient, parameter in zip(mine, module.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant, dropout=0.0, function=checkpoint):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 50), nn.Dropout(dropout), nn.Tanh(), nn.Linear(50, 2)
        ).double()
        self.use_reentrant = use_reentrant
        self.is_on = True

    def forward(self, x):
        if not self.is_on:
            return self.net(x)
        return checkpoint(self.net, x, use_reentrant=self.use_reentrant)


@report("P106", "pytorch/pytorch#13234")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_gradients_are_the_plain_modules(use_reentrant):
    check_same(Checkpointed(use_reentrant), rows(7, 3, grad=True))


@report("P106", "pytorch/pytorch#13234")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_dropout_draws_the_same_masks_again(use_reentrant):
    module = Checkpointed(use_reentrant, dropout=0.5)
    model = DataParallel(module, replicas=3)
    x = rows(7, 3, grad=True)
    gradients = []
    for is_on in (True, False):
        module.is_on = is_on
        module.zero_grad()
        x.grad = None
        torch.manual_seed(0)
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()] + [x.grad.clone()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@report("P106", "pytorch/pytorch#13234")
def test_checkpoint_sequential_inside_forward():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*make_net(), *nn.Sequential(nn.Linear(2, 2).double()))

        def forward(self, x):
            return checkpoint_sequential(self.net, 2, x, use_reentrant=False)

    check_same(Inside(), rows(7, 3, grad=True))


@report("P106", "pytorch/pytorch#13234")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_around_the_wrapped_module(use_reentrant):
    net = make_net()
    plain = twin(net)
    model = DataParallel(net, replicas=3)
    x = rows(7, 3, grad=True)
    for _ in range(2):
        checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
        plain(x).square().sum().backward()
        assert_same_state(net, plain)
    y = checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant)
    y.square().sum().backward()
    plain(x).square().sum().backward()
    assert_same_state(net, plain)


@report("P107", "pytorch/pytorch#7801")
def test_checkpointing_touches_only_the_shards_own_stream():
    module = Checkpointed(False, dropout=0.5)
    model = DataParallel(module, replicas=3)
    model(rows(7, 3)).sum().backward()
    torch.manual_seed(0)
    output = model(rows(7, 3))
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@report("P108", "pytorch/pytorch#45970")
def test_a_histogram_observer_and_a_min_max_observer_run():
    class Observed(nn.Module):
        def __init__(self, observer):
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.observer = observer

        def forward(self, x):
            return self.observer(self.fc(x))

    x = torch.randn(7, 3)
    module = Observed(torch.ao.quantization.MinMaxObserver())
    plain = twin(module)
    options = {"buffers": {"observer.min_val": "min", "observer.max_val": "max"}}
    for _ in range(2):
        torch.testing.assert_close(DataParallel(module, replicas=3, **options)(x), plain(x))
        plain_range = (plain.observer.min_val, plain.observer.max_val)
        assert (module.observer.min_val, module.observer.max_val) == plain_range
    module = Observed(torch.ao.quantization.HistogramObserver(bins=8))
    model = DataParallel(module, replicas=3, buffers="first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(model(x), module.fc(x))


@report("P109")
def test_lazy_modules_get_their_shape_from_the_first_batch():
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    model = DataParallel(module, replicas=2)
    x = torch.randn(7, 3)
    assert model(x).shape == (7, 2)
    assert module[0].weight.shape == (4, 3)
    model(x).sum().backward()
    assert module[2].bias.grad.tolist() == pytest.approx([7.0, 7.0])


@beyond("K16")
@pytest.mark.slow
def test_compiled_with_a_graph_break_and_new_shapes_from_several_shards():
    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, x):
            y = self.fc(x)
            torch._dynamo.graph_break()
            return torch.tanh(y)

    module = Breaking()
    model = DataParallel(torch.compile(module, backend="eager"), replicas=3)
    for num_rows in (7, 4, 9, 30):
        x = rows(num_rows, 3)
        torch.testing.assert_close(model(x), module(x))


@beyond("K16")
def test_a_child_compiled_in_place_and_a_compiled_function():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()
            self.net.compile(backend="eager")
            self.scale = torch.compile(lambda y: y * 2, backend="eager")

        def forward(self, x):
            return self.scale(self.net(x))

    module = Parts()
    x = rows(7, 3)
    output = DataParallel(module, replicas=3)(x)
    torch.testing.assert_close(output, module(x))
    output.sum().backward()
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@beyond("K16")
def test_transforms_of_torch_func_over_the_wrapper_and_inside():
    class PerSample(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, x):
            def energy(row):
                return self.fc(row).square().sum()

            return torch.func.vmap(torch.func.grad(energy))(x)

    module = PerSample()
    check_same(module, rows(7, 3))
    net = make_net()
    model = DataParallel(net, replicas=3)
    parameters = dict(net.named_parameters())
    x = rows(7, 3)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    def plain_loss(parameters):
        return torch.func.functional_call(net, parameters, (x,)).square().sum()

    found, expected = torch.func.grad(loss)(parameters), torch.func.grad(plain_loss)(parameters)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@beyond("K16")
def test_quantised_linear_layers_and_fake_quantisation_run():
    class Fake(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            weight = torch.fake_quantize_per_tensor_affine(self.fc.weight, 0.1, 0, -128, 127)
            return F.linear(x, weight, self.fc.bias)

    check_same(Fake(), torch.randn(7, 3))
    dynamic = torch.ao.quantization.quantize_dynamic(Fake().fc.eval().requires_grad_(False))
    assert type(dynamic) is nn.Linear  # a bare layer has no name, so torch leaves it as it is
    net = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 2)).eval())
    x = torch.randn(7, 3)
    assert DataParallel(net, replicas=3)(x).shape == net(x).shape


@beyond("K16")
def test_fx_graph_modules_and_exported_programs():
    net = make_net()
    traced = torch.fx.symbolic_trace(net)
    x = rows(7, 3)
    output = DataParallel(traced, replicas=3)(x)
    torch.testing.assert_close(output, net(x))
    output.sum().backward()
    assert net[0].weight.grad is not None
    rows_of = torch.export.Dim("rows")
    program = torch.export.export(net, (rows(4, 3),), dynamic_shapes=({0: rows_of},))
    torch.testing.assert_close(DataParallel(program.module(), replicas=3)(x), net(x))


@beyond("K16")
def test_the_wrapper_can_be_traced_and_exported():
    net = make_net()
    model = DataParallel(net, replicas=3)
    x = rows(7, 3)
    model(x)
    traced = torch.jit.trace(model, x)
    assert traced(rows(4, 3)).shape == (4, 2)
    torch.testing.assert_close(traced(x), net(x))
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), net(x))
