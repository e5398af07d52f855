"""K01. A replica must be a real module: parameters that are there, and are parameters."""

import torch
from compare import check_same, rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel


class Outer(nn.Module):
    """Looks at itself in forward: ``look(self)`` is kept per shard in ``seen``."""

    def __init__(self, look, seen):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.double()
        self.eval()
        self.look = look
        self.seen = seen

    def forward(self, x):
        self.seen(self.look(self))
        return self.norm(self.fc(x))


def look_in_every_replica(look):
    """What ``look`` returns on the source module, and what it returned in each replica."""
    found = []
    module = Outer(look, found.append)
    check_same(module, rows(7, 3))
    found.clear()
    DataParallel(module, replicas=3)(rows(7, 3))
    return look(module), found


@report("P01", "pytorch/pytorch#40457", "pytorch/pytorch#49828")
def test_first_parameter_gives_dtype_and_device():
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, x):
            first = next(self.parameters())
            return self.fc(x.to(first.dtype).to(first.device))

    module = Casting()
    _, output = check_same(module, torch.randn(7, 3))
    assert output.dtype == torch.float64


@report("P01", "pytorch/pytorch#40457", "pytorch/pytorch#49828")
def test_names_and_order_of_parameters_buffers_and_state_are_the_source_modules():
    def look(module):
        return (
            [name for name, _ in module.named_parameters()],
            [name for name, _ in module.named_buffers()],
            list(module.state_dict()),
            [name for name, _ in module.named_modules()],
            [type(parameter) for parameter in module.parameters()],
            [parameter.shape for parameter in module.parameters()],
        )

    expected, found = look_in_every_replica(look)
    assert found == [expected] * 3


@report("P03", "pytorch/pytorch#36035", "pytorch/pytorch#42327")
def test_parameter_list_and_dict_keep_their_entries():
    class Containers(nn.Module):
        def __init__(self):
            super().__init__()
            self.some = nn.ParameterList([nn.Parameter(rows(3)) for _ in range(3)])
            self.named = nn.ParameterDict({"a": rows(3), "b": rows(3)})

        def forward(self, x):
            assert len(self.some) == len(list(self.some.parameters())) == 3
            assert all(type(p) is nn.Parameter for p in self.some)
            assert list(self.named) == ["a", "b"]
            total = torch.stack(list(self.some.parameters())).sum()
            return x * self.some[0] * self.named["b"] + total + sum(self.named.values()).sum()

    check_same(Containers(), rows(7, 3))


@report("P04", "tristandeleu/pytorch-meta#86")
def test_tags_on_a_parameter_are_on_the_replicas_parameter():
    class Fast(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()
            self.fc.weight.tag = 1
            self.fc.weight.fast = None

        def forward(self, x):
            weights = dict(self.fc.named_parameters())
            assert weights["weight"].tag == 1
            assert weights["weight"].fast is None
            return nn.functional.linear(x, weights["weight"], weights["bias"])

    check_same(Fast(), rows(7, 3))


@report("P04", "tristandeleu/pytorch-meta#86")
def test_a_subclass_of_parameter_stays_one():
    class Quantity(nn.Parameter):
        pass

    class Typed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = Quantity(rows(3))

        def forward(self, x):
            assert type(self.w) is Quantity
            assert self.w.is_leaf
            return x * torch.Tensor(self.w.data) * self.w.as_subclass(torch.Tensor)

    check_same(Typed(), rows(7, 3))


@report("P05", "Lightning-AI/pytorch-lightning#1649")
def test_parameters_can_be_chosen_by_a_flag_on_them():
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()
            self.fc.bias.kind = "bias"

        def forward(self, x):
            chosen = [q for q in self.parameters() if getattr(q, "kind", None) == "bias"]
            assert len(chosen) == 1
            return self.fc(x) + chosen[0].square().sum()

    check_same(Penalised(), rows(7, 3))


@beyond("K01")
def test_tied_parameters_are_one_parameter_in_a_replica():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3).double()
            self.head = nn.Linear(3, 5, bias=False).double()
            self.head.weight = self.embed.weight

        def forward(self, x):
            assert self.head.weight is self.embed.weight
            assert len(list(self.parameters())) == 1
            return self.head(self.embed(x))

    check_same(Tied(), torch.randint(5, (7,)))


@beyond("K01")
def test_modules_can_be_searched_and_applied_to_in_forward():
    class Searching(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).double()

        def forward(self, x):
            linears = [m for m in self.modules() if isinstance(m, nn.Linear)]
            assert self.get_submodule("net.2") is linears[1]
            assert self.get_parameter("net.0.weight") is linears[0].weight
            counted = []
            self.apply(lambda m: counted.append(type(m)))
            assert len(counted) == 5
            for linear in linears:
                x = linear(x)
            return x

    check_same(Searching(), rows(7, 3))


@beyond("K01")
def test_functional_call_in_forward_takes_the_replicas_own_parameters():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2).double()

        def forward(self, x):
            doubled = {name: 2 * p for name, p in self.net.named_parameters()}
            return torch.func.functional_call(self.net, doubled, (x,))

    check_same(Functional(), rows(7, 3))


@beyond("K01")
def test_a_class_exchanged_between_calls_is_seen():
    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    module = nn.Sequential(nn.Linear(3, 2).double())
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    model(x)
    before = model(x)
    module[0].__class__ = Doubling
    torch.testing.assert_close(model(x), 2 * before)
