"""K03. References inside the module must point into the replica, not at the source module."""

import functools
import weakref

import pytest
import torch
from compare import check_same, pair, rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel, ReplicaError, current_shard


class Base(nn.Module):
    """One linear layer, and the id of every object that a shard ran on."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2).double()


@report("P13", "pytorch/pytorch#8637")
def test_a_stored_method_runs_on_the_replica():
    class Stored(Base):
        def __init__(self):
            super().__init__()
            self.op = self.helper
            self.child_op = self.fc.forward

        def helper(self, x):
            return self.fc(x)

        def forward(self, x):
            assert self.op.__self__ is self
            assert self.child_op.__self__ is self.fc
            return self.op(x) + self.child_op(x)

    check_same(Stored(), rows(7, 3))


@report("P14", "pytorch/pytorch#30324", "karpathy/minGPT#87")
def test_a_lambda_over_self_uses_the_replica():
    class Closed(Base):
        def __init__(self):
            super().__init__()
            self.first = lambda rows_: self.fc(rows_)
            self.owner = lambda: self
            self.g = lambda x, layer=self.fc: layer(x)

        def forward(self, x):
            assert self.owner() is self
            return self.first(x) + self.g(x)

    module, plain = pair(Closed)
    check_same(module, rows(7, 3), plain=plain)


@report("P14", "pytorch/pytorch#30324", "karpathy/minGPT#87")
def test_a_function_that_finds_the_module_in_a_global_is_refused_by_name():
    module = Base()
    scope = {"net": module}
    exec("def f(x): return net.fc(x)", scope)
    module.f = scope["f"]
    module.forward = lambda x: module.f(x)
    with pytest.raises(
        ReplicaError, match=r"'f' is a function that uses the module through .*'net'"
    ):
        DataParallel(module, replicas=2)(rows(7, 3))


@report("P15", "pytorch/pytorch#3174", "allenai/allennlp#2780")
def test_a_list_beside_add_module_holds_the_replicas_children():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(3, 3).double(), nn.Linear(3, 3).double()]
            self.table = {"first": self.layers[0], "pair": (self.layers[1], 5)}
            self.add_module("one", self.layers[0])
            self.add_module("two", self.layers[1])

        def forward(self, x):
            assert self.one is self.layers[0]
            assert self.table["first"] is self.one
            assert self.table["pair"][0] is self.two
            return self.table["pair"][0](self.layers[0](x))

    check_same(Listed(), rows(7, 3))


class Helper:
    def __init__(self, owner):
        self.owner = owner


class SlotHelper:
    __slots__ = ("owner",)

    def __init__(self, owner):
        self.owner = owner


@report("P17", "junyanz/BicycleGAN#40")
@pytest.mark.parametrize("make", [Helper, SlotHelper])
def test_a_helper_object_that_holds_the_module_holds_the_replica(make):
    class Helped(Base):
        def __init__(self):
            super().__init__()
            self.helper = make(self)

        def forward(self, x):
            assert self.helper.owner is self
            return self.helper.owner.fc(x)

    check_same(Helped(), rows(7, 3))


@report("P19", "pytorch/pytorch#22670", "rusty1s/pytorch_sparse#340")
def test_tensors_kept_as_plain_attributes_are_there_and_private():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.s = (torch.eye(3, dtype=torch.float64) * 2).to_sparse()
            self.scale = torch.ones(3, dtype=torch.float64)
            self.scratch = torch.zeros(3, dtype=torch.float64)

        def forward(self, x):
            # Work space, written by every shard at once.
            self.scratch.copy_(x.sum(0))
            return torch.sparse.mm(self.s, x.T).T * self.scale + self.scratch - x.sum(0)

    check_same(Graph(), rows(7, 3), options={"buffers": "first"})


@report("P19", "pytorch/pytorch#22670", "rusty1s/pytorch_sparse#340")
def test_tensors_kept_as_plain_attributes_go_to_the_slots_device():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = {"eye": torch.eye(3)}

        def forward(self, x):
            return x @ self.table["eye"]

    output = DataParallel(Plain(), device_ids=["meta", "meta"])(torch.ones(7, 3))
    assert output.device.type == "meta"
    assert output.shape == (7, 3)


@report("P20", "Lightning-AI/pytorch-lightning#6413", "pytorch/vision#1659", "kornia/kornia#130")
def test_a_cache_keyed_by_shape_is_per_replica_and_survives():
    class Anchors(nn.Module):
        def __init__(self):
            super().__init__()
            self.grids = {}
            self.num_made = 0

        def forward(self, x):
            width = x.shape[1]
            if width not in self.grids:
                self.num_made += 1
                self.grids[width] = torch.arange(width, dtype=x.dtype, device=x.device)
            return x * self.grids[width]

    module = Anchors()
    check_same(module, rows(7, 3), num_calls=3)
    assert module.num_made == 1
    assert list(module.grids) == [3]


@report("P20", "Lightning-AI/pytorch-lightning#6413", "pytorch/vision#1659", "kornia/kornia#130")
def test_a_device_kept_as_an_attribute_is_the_slots():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.device = torch.device("cpu")

        def forward(self, x):
            return self.fc(x) + torch.ones(2, device=self.device)

    output = DataParallel(Kept(), device_ids=["meta", "meta"])(torch.ones(7, 3))
    assert output.device.type == "meta"


class Stash:
    """Keeps what its forward saw on itself, as people do instead of on ``ctx``."""

    x = None


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stash):
        stash.x = x
        ctx.stash = stash
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.stash.x * grad, None


@report("P21", "pytorch/pytorch#16947", "pytorch/pytorch#821")
def test_an_object_in_which_a_function_keeps_its_input_is_per_replica():
    class Stashing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()
            self.stash = Stash()

        def forward(self, x):
            return Square.apply(self.fc(x), self.stash)

    module = Stashing()
    check_same(module, rows(7, 3, grad=True))
    assert module.stash.x.shape == (7, 2)


@beyond("K03")
def test_partials_and_weak_references_point_into_the_replica():
    class Wrapped(Base):
        def __init__(self):
            super().__init__()
            self.bound = functools.partial(self.scaled, scale=2.0)
            self.parent = weakref.ref(self)
            self.children_of = [weakref.ref(self.fc)]

        def scaled(self, x, scale):
            return self.fc(x) * scale

        def forward(self, x):
            assert self.bound.func.__self__ is self
            assert self.parent() is self
            assert self.children_of[0]() is self.fc
            return self.bound(x)

    module = Wrapped()
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    torch.testing.assert_close(model(x), module.fc(x) * 2)


@beyond("K03")
def test_a_child_that_knows_its_parent_and_a_decorated_forward_find_the_replica():
    class Child(nn.Module):
        def __init__(self, parent):
            super().__init__()
            object.__setattr__(self, "parent", parent)

        def forward(self, x):
            return self.parent.fc(x)

    class Parent(Base):
        def __init__(self):
            super().__init__()
            self.child = Child(self)
            original = self.forward

            @functools.wraps(original)
            def patched(x):
                return original(x) + 1

            self.forward = patched

        def forward(self, x):
            assert self.child.parent is self
            assert self.fc.weight.is_leaf
            return self.child(x)

    module = Parent()
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    torch.testing.assert_close(model(x), module.fc(x) + 1)
    model(x).sum().backward()
    torch.testing.assert_close(module.fc.weight.grad, x.sum(0).expand(2, 3))


@beyond("K03")
def test_a_dispatch_table_of_lambdas_made_in_a_loop_finds_each_replicas_layer():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3).double() for _ in range(3)])
            self.steps = [lambda x, i=i: self.layers[i](x) for i in range(3)]
            self.shards = set()

        def forward(self, x):
            assert current_shard() is None or current_shard().num_shards == 3
            for step in self.steps:
                x = step(x)
            return x

    module = Table()
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    torch.testing.assert_close(model(x), module(x))
