"""K12. Weights that are computed: weight norm, spectral norm, parametrizations."""

import copy

import pytest
import torch
from compare import assert_same_state, check_same, rows, twin
from reports import beyond, report
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from samestep import DataParallel


@report("P77", "pytorch/pytorch#11476")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("spectral_norm", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_the_power_iteration_of_spectral_norm_moves_as_in_a_plain_call(spectral_norm):
    plain = nn.Sequential(spectral_norm(nn.Linear(3, 4).double()), nn.Tanh())
    module = nn.Sequential(spectral_norm(nn.Linear(3, 4).double()), nn.Tanh())
    module.load_state_dict(plain.state_dict())
    check_same(module, rows(7, 3), num_calls=3, plain=plain)
    module.eval()
    plain.eval()
    check_same(module, rows(7, 3), plain=plain)


class ZeroDim(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("offset", torch.tensor(3.0, dtype=torch.float64))

    def forward(self, x):
        return x * self.scale + self.offset


@report("P79", "pytorch/pytorch#7568")
def test_a_zero_dim_parameter_and_buffer_are_replicated():
    check_same(ZeroDim(), rows(7, 3, grad=True))
    plain = parametrizations.weight_norm(nn.Linear(3, 2).double(), dim=None)
    module = parametrizations.weight_norm(nn.Linear(3, 2).double(), dim=None)
    module.load_state_dict(plain.state_dict())
    check_same(module, rows(7, 3), plain=plain)


@report("P80", "pytorch/pytorch#2720")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("weight_norm", [nn.utils.weight_norm, parametrizations.weight_norm])
def test_weight_norm_trains_as_the_plain_module(weight_norm):
    def make():
        return nn.Sequential(
            weight_norm(nn.Linear(3, 4).double()), nn.Tanh(), weight_norm(nn.Linear(4, 2).double())
        )

    module, plain = make(), make()
    module.load_state_dict(plain.state_dict())
    model = DataParallel(module, replicas=3)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
    for _ in range(3):
        x = rows(7, 3)
        outputs = []
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(net(x))
            outputs[-1].square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(outputs[0], outputs[1])
        assert_same_state(module, plain)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


@beyond("K12")
def test_parametrizations_of_ones_own_and_orthogonal_and_cached():
    module = nn.Linear(3, 3).double()
    parametrize.register_parametrization(module, "weight", Symmetric())
    plain = nn.Linear(3, 3).double()
    parametrize.register_parametrization(plain, "weight", Symmetric())
    plain.load_state_dict(module.state_dict())
    check_same(module, rows(7, 3), plain=plain)
    model = DataParallel(module, replicas=3)
    with parametrize.cached():
        x = rows(7, 3)
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model(x), plain(x))
    orthogonal = parametrizations.orthogonal(nn.Linear(3, 3).double())
    x = rows(7, 3)
    torch.testing.assert_close(DataParallel(orthogonal, replicas=3)(x), orthogonal(x))


@beyond("K12")
def test_a_cached_weight_is_shared_by_two_uses_in_one_forward():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3).double()
            parametrize.register_parametrization(self.fc, "weight", Symmetric())

        def forward(self, x):
            with parametrize.cached():
                return self.fc(self.fc(x))

    plain, module = Twice(), Twice()
    module.load_state_dict(plain.state_dict())
    check_same(module, rows(7, 3), plain=plain, num_calls=2)


@beyond("K12")
def test_pruning_masks_and_parametrizations_removed_between_calls():
    module = nn.Sequential(nn.Linear(3, 4).double(), nn.Tanh(), nn.Linear(4, 2).double())
    prune.random_unstructured(module[0], "weight", amount=5)
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    output = model(x)
    torch.testing.assert_close(output, module(x))
    output.sum().backward()
    gradient = module[0].weight_orig.grad.clone()
    assert (gradient == 0).sum() >= 5
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(module[0].weight_orig.grad, gradient)
    prune.remove(module[0], "weight")
    torch.testing.assert_close(model(x), module(x))
    parametrizations.weight_norm(module[2])
    torch.testing.assert_close(model(x), module(x))
    parametrize.remove_parametrizations(module[2], "weight")
    torch.testing.assert_close(model(x), module(x))


@report("P82", "pytorch/pytorch#33785")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("weight_norm", [nn.utils.weight_norm, parametrizations.weight_norm])
def test_a_module_with_weight_norm_can_be_copied_before_any_call_and_in_a_replica(weight_norm):
    class Copying(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = weight_norm(nn.Linear(3, 2).double())
            self.head(torch.zeros(1, 3, dtype=torch.float64))

        def forward(self, x):
            with torch.no_grad():
                teacher = copy.deepcopy(self.head) if self.copies else self.head
            return self.head(x) + teacher(x).detach()

    module = Copying()
    # The older function keeps the computed weight, which torch itself refuses to copy outside of
    # no_grad calls; copying is asked for where the plain module can do it.
    module.copies = weight_norm is parametrizations.weight_norm
    x = rows(7, 3)
    torch.testing.assert_close(DataParallel(module, replicas=3)(x), module(x))


@beyond("K12")
def test_a_weight_computed_in_forward_from_a_hypernetwork():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.code = nn.Parameter(rows(4))
            self.make = nn.Linear(4, 6).double()
            self.inner = nn.Linear(3, 2, bias=False).double()
            del self.inner.weight

        def forward(self, x):
            self.inner.weight = self.make(self.code).view(2, 3)
            output = self.inner(x)
            del self.inner.weight
            return output

    module = Hyper()
    plain = twin(module)
    check_same(module, rows(7, 3), plain=plain)
    assert_same_state(module, plain)
