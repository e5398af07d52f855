"""K08. Which gradients exist, whose they are, and how often they arrive."""

import gc

import pytest
import torch
from compare import assert_close, assert_same_state, check_same, rows, twin
from reports import beyond, report
from torch import nn

from samestep import DataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4).double()
        self.second = nn.Linear(4, 2).double()
        self.hidden_needs_grad = None

    def forward(self, x):
        hidden = self.first(x)
        self.hidden_needs_grad = hidden.requires_grad
        return self.second(hidden.tanh())


@report("P60", "pytorch/pytorch#5041")
def test_a_frozen_layer_records_nothing_and_can_be_thawed():
    module = Net()
    plain = twin(module)
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    for is_thawed in (False, True, False):
        for net in (module, plain):
            net.zero_grad()
            net.first.requires_grad_(is_thawed)
        model(x).sum().backward()
        plain(x).sum().backward()
        assert module.hidden_needs_grad is is_thawed
        assert_same_state(module, plain)


@report("P61", "pytorch/pytorch#5851")
def test_a_call_under_no_grad_changes_nothing_for_later():
    module = Net()
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    assert model(x).requires_grad
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert not model(x).requires_grad
    assert all(parameter.requires_grad for parameter in module.parameters())
    output = model(x)
    output.sum().backward()
    assert module.first.weight.grad is not None


class Two(Net):
    def forward(self, x):
        return self.first(x), self.second(self.first(x))


@report("P62", "pytorch/pytorch#35672", "pytorch/pytorch#16532")
@pytest.mark.parametrize("kept", [0, 1])
def test_an_output_lives_without_the_others_and_without_the_wrapper(kept):
    module = Two()
    plain = twin(module)

    def call(x):
        return DataParallel(module, replicas=3)(x)[kept]

    x = rows(7, 3)
    output = call(x)
    gc.collect()
    output.square().sum().backward()
    plain(x)[kept].square().sum().backward()
    assert_same_state(module, plain)


@report("P62", "pytorch/pytorch#35672", "pytorch/pytorch#16532")
def test_autograd_grad_in_a_helper_function():
    module = Net()
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)

    def gradients(net):
        return torch.autograd.grad(net(x).square().sum(), list(module.parameters()))

    for one, other in zip(gradients(model), gradients(module), strict=True):
        torch.testing.assert_close(one, other)
    assert all(parameter.grad is None for parameter in module.parameters())


@report("P63", "pytorch/pytorch#2573")
def test_inputs_get_their_gradients_wherever_they_are():
    class Nested(Net):
        def forward(self, x, more):
            return self.second(self.first(x) + more["a"][0]) * more["b"]

    more = {"a": [rows(7, 4, grad=True)], "b": rows(2, grad=True)}
    check_same(Nested(), rows(7, 3, grad=True), more=more)


@report("P63", "pytorch/pytorch#2573")
def test_an_input_that_is_not_used_has_no_gradient_and_one_that_is_no_leaf_passes_it_on():
    class Ignoring(Net):
        def forward(self, x, unused):
            return super().forward(x)

    check_same(Ignoring(), rows(7, 3, grad=True), rows(7, 3, grad=True))
    module = Net()
    leaf = rows(7, 3, grad=True)
    DataParallel(module, replicas=3)(leaf * 2).sum().backward()
    (expected,) = torch.autograd.grad(module(leaf * 2).sum(), leaf)
    torch.testing.assert_close(leaf.grad, expected)


@report("P64", "pytorch/pytorch#31768")
def test_backward_and_zero_grad_inside_forward():
    class Saliency(Net):
        def forward(self, x):
            with torch.enable_grad():
                super().forward(x).square().sum(1).mean().backward()
            assert self.first.weight.grad is not None
            weight = self.first.weight.grad.abs().sum() * 0
            self.zero_grad()
            assert self.first.weight.grad is None
            return super().forward(x) + weight

    module = Saliency()
    for _ in range(2):
        module.zero_grad()
        check_same(module, rows(7, 3))


@report("P64", "pytorch/pytorch#31768")
def test_saliency_inside_forward_by_autograd_grad():
    class Saliency(Net):
        def forward(self, x):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                (saliency,) = torch.autograd.grad(super().forward(leaf).square().sum(), leaf)
            return super().forward(x * saliency)

    module = Saliency()
    check_same(module, rows(7, 3))
    with torch.no_grad():
        x = rows(7, 3)
        torch.testing.assert_close(DataParallel(module, replicas=3)(x), module(x))


class Implicit(torch.autograd.Function):
    """Solves in backward with the module's own weights, as fixed-point layers do."""

    @staticmethod
    def forward(ctx, z, module):
        ctx.module = module
        ctx.save_for_backward(z)
        return z.clone()

    @staticmethod
    def backward(ctx, grad):
        (z,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            output = ctx.module.step(leaf)
            (through,) = torch.autograd.grad(output, leaf, grad, retain_graph=True)
            weight_grads = torch.autograd.grad(output, list(ctx.module.second.parameters()), grad)
        assert all(g is not None for g in weight_grads)
        return grad + 0.1 * through, None


@report("P65", "pytorch/pytorch#33800")
def test_a_custom_backward_can_differentiate_the_replicas_own_weights():
    class FixedPoint(Net):
        def __init__(self):
            super().__init__()
            self.second = nn.Linear(4, 4).double()

        def step(self, z):
            return self.second(z).tanh()

        def forward(self, x):
            z = self.step(self.first(x))
            return Implicit.apply(z, self)

    check_same(FixedPoint(), rows(7, 3, grad=True), num_calls=2)


@report("P66")
def test_calls_and_backwards_may_come_in_any_order():
    module = Net()
    plain = twin(module)
    model = DataParallel(module, replicas=3)
    batches = [rows(n, 3) for n in (7, 5, 2)]
    for net in (model, plain):
        outputs = [net(x).square().sum() for x in batches]  # three forwards, then backwards
        outputs[2].backward()
        (outputs[0] - outputs[1]).backward(retain_graph=True)
        outputs[0].backward()
    assert_same_state(module, plain)


@report("P66")
def test_a_module_called_twice_in_one_loss():
    module = Net()
    plain = twin(module)
    model = DataParallel(module, replicas=3)
    real, fake = rows(7, 3), rows(4, 3)
    for net in (model, plain):
        (net(real).mean() - net(fake).mean()).backward()
    assert_same_state(module, plain)


@report("P66")
def test_hooks_on_parameters_fire_once_with_the_sum():
    module = Net()
    plain = twin(module)
    seen = {"mine": [], "plain": []}
    for name, net in (("mine", module), ("plain", plain)):
        net.first.weight.register_hook(lambda g, to=seen[name]: to.append(g.clone()))
        net.first.bias.register_post_accumulate_grad_hook(
            lambda p, to=seen[name]: to.append(p.grad.clone())
        )
    x = rows(7, 3)
    DataParallel(module, replicas=3)(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert len(seen["mine"]) == len(seen["plain"]) == 2
    for one in seen["mine"]:
        assert any(
            one.shape == other.shape and torch.allclose(one, other) for other in seen["plain"]
        )


@report("P66")
def test_tied_weights_get_one_gradient():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False).double()
            self.two = nn.Linear(3, 3, bias=False).double()
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x).tanh())

    module = Tied()
    check_same(module, rows(7, 3), num_calls=2)


@beyond("K08")
def test_a_parameter_that_no_shard_uses_keeps_none_and_one_that_some_use_is_exact():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(3, 2).double() for _ in range(3)])

        def forward(self, x, route):
            output = x.new_zeros(len(x), 2)
            for k, expert in enumerate(self.experts):
                chosen = route == k
                if chosen.any():
                    output = output.index_put((chosen,), expert(x[chosen]))
            return output

    module = Routed()
    check_same(module, rows(7, 3), torch.tensor([0, 0, 0, 0, 0, 0, 1]))
    assert module.experts[2].weight.grad is None
    assert module.experts[1].weight.grad is not None


@beyond("K08")
def test_a_gradient_left_by_backward_inside_forward_is_the_source_modules():
    class Auxiliary(Net):
        def forward(self, x):
            super().forward(x).square().sum().backward()
            return super().forward(x).detach()

    module = Auxiliary()
    plain = twin(module)
    x = rows(7, 3)
    plain(x)
    DataParallel(module, replicas=3)(x)
    assert_same_state(module, plain)


@beyond("K08")
def test_a_second_backward_is_torchs_error_and_retain_graph_allows_it():
    module = Net()
    model = DataParallel(module, replicas=3)
    output = model(rows(7, 3)).sum()
    output.backward(retain_graph=True)
    output.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.backward()


@beyond("K08")
def test_only_some_outputs_and_some_rows_get_a_gradient():
    module = Two()
    plain = twin(module)
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    for net in (model, plain):
        first, second = net(x)
        (first[5].sum() + second[0, 1]).backward()
    assert_same_state(module, plain)


@beyond("K08")
def test_a_forward_that_freezes_a_parameter():
    class Freezing(Net):
        def forward(self, x):
            self.first.weight.requires_grad_(False)
            return super().forward(x)

    module = Freezing()
    check_same(module, rows(7, 3, grad=True), num_calls=2)
    assert module.first.weight.grad is None
    assert not module.first.weight.requires_grad


def use_parameters_of_others(how):
    """A module that uses, in forward, a parameter that is not a replica's; and that parameter."""
    outside, scale = nn.Linear(2, 2).double(), nn.Parameter(rows(2))

    class Using(Net):
        def forward(self, x):
            y = super().forward(x)
            return {"module": outside, "parameter": lambda y: y * scale}.get(how, lambda y: y)(y)

    module = Using()
    watched = {"module": outside.weight, "parameter": scale, "own": module.first.weight}[how]
    if how == "own":
        # The hook's closure holds the source module's own tensor, which no replica has.
        module.register_forward_hook(lambda layer, args, output: output * watched.sum())
    return module, watched


@beyond("K08")
@pytest.mark.parametrize("how", ["module", "parameter", "own"])
def test_parameters_of_others_used_in_forward_get_their_gradients(how):
    module, watched = use_parameters_of_others(how)
    x = rows(7, 3, grad=True)
    found = []
    for net in (DataParallel(module, replicas=3), module):
        for _ in range(2):
            net(x).square().sum().backward()
        found.append((watched.grad, module.second.weight.grad, x.grad))
        watched.grad = x.grad = None
        module.zero_grad()
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@beyond("K08")
@pytest.mark.parametrize("how", ["module", "parameter", "own"])
def test_parameters_of_others_used_in_forward_can_be_differentiated_for(how):
    module, watched = use_parameters_of_others(how)
    x = rows(7, 3, grad=True)
    found = [
        torch.autograd.grad(net(x).square().sum(), [watched, x])
        for net in (DataParallel(module, replicas=3), module)
    ]
    for one, other in zip(*found, strict=True):
        assert_close(one, other)
