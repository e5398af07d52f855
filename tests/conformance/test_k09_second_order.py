"""K09. Derivatives of derivatives."""

import pytest
import torch
from compare import assert_same_state, rows, twin
from reports import beyond, report
from torch import nn
from torch.autograd import forward_ad

from samestep import DataParallel


def make_critic():
    return nn.Sequential(
        nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)
    ).double()


def penalty(critic, x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gradient.norm(2, 1) - 1).square().mean()


@report("P67", "pytorch/pytorch#2467")
def test_a_gradient_penalty_has_the_plain_modules_gradients():
    module = make_critic()
    plain = twin(module)
    x = rows(7, 3)
    loss, expected = penalty(DataParallel(module, replicas=2), x), penalty(plain, x)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_same_state(module, plain)


@report("P68", "pytorch/pytorch#19024")
def test_five_steps_of_a_critic_with_penalty_follow_the_plain_module():
    module = make_critic()
    plain = twin(module)
    model = DataParallel(module, replicas=3)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (model, plain)]
    for _ in range(5):
        real, fake = rows(7, 3), rows(7, 3)
        losses = []
        for critic, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            mixed = 0.3 * real + 0.7 * fake
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, mixed)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
        assert_same_state(module, plain)


@beyond("K09")
def test_hessian_vector_products_over_parameters():
    module = make_critic()
    plain = twin(module)
    x = rows(7, 3)

    def product(net):
        parameters = list(net.parameters())
        gradients = torch.autograd.grad(net(x).square().mean(), parameters, create_graph=True)
        dot = sum((g * torch.ones_like(g)).sum() for g in gradients)
        return torch.autograd.grad(dot, parameters, allow_unused=True, materialize_grads=True)

    for one, other in zip(product(DataParallel(module, replicas=3)), product(plain), strict=True):
        torch.testing.assert_close(one, other)


@beyond("K09")
def test_a_step_of_meta_learning_differentiates_through_the_inner_update():
    class Learner(nn.Module):
        """Takes its weights as arguments: whole to every shard, differentiable."""

        def forward(self, x, weight, bias):
            return torch.tanh(x @ weight.T + bias)

    weight, bias = rows(2, 3, grad=True), rows(2, grad=True)
    x, z = rows(7, 3), rows(5, 3)

    def outer(net):
        inner = torch.autograd.grad(
            net(x, weight, bias).square().mean(), (weight, bias), create_graph=True
        )
        fast = [p - 0.1 * g for p, g in zip((weight, bias), inner, strict=True)]
        return torch.autograd.grad(net(z, *fast).square().mean(), (weight, bias))

    for one, other in zip(
        outer(DataParallel(Learner(), replicas=3)), outer(Learner()), strict=True
    ):
        torch.testing.assert_close(one, other)


@beyond("K09")
def test_gradcheck_of_first_and_second_order():
    model = DataParallel(make_critic(), replicas=2)
    x = rows(3, 3, grad=True)
    assert torch.autograd.gradcheck(model, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(model, (x,), fast_mode=True)


@beyond("K09")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_derivatives():
    module = make_critic()
    model = DataParallel(module, replicas=3)
    x, direction = rows(7, 3), rows(7, 3)
    tangents = []
    for net in (model, module):
        with forward_ad.dual_level():
            output = net(forward_ad.make_dual(x, direction))
            tangents.append(forward_ad.unpack_dual(output).tangent)
        tangents.append(torch.func.jvp(net, (x,), (direction,))[1])
    for tangent in tangents:
        torch.testing.assert_close(tangent, tangents[-1])


@beyond("K09")
def test_jacobians_by_every_road():
    module = make_critic()
    model = DataParallel(module, replicas=3)
    x = rows(4, 3)
    expected = torch.func.jacrev(module)(x)
    torch.testing.assert_close(torch.func.jacrev(model)(x), expected)
    for is_vectorized in (False, True):
        found = torch.autograd.functional.jacobian(model, x, vectorize=is_vectorized)
        torch.testing.assert_close(found, expected)
