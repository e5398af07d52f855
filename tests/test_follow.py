"""Copying an object graph: one copy per object, and what points into the tree still does."""

import argparse
import functools
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from typing import NamedTuple

import pytest
import torch
from torch import nn

from samestep import DataParallel
from samestep import snapshot as snapshot_module
from samestep.errors import ReplicaError
from samestep.follow import Follower
from samestep.snapshot import Snapshot


class Holder(nn.Module):
    """A child, and whatever a test hangs on it."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(2, 2)

    def method(self):
        return self


class Helper:
    """A user's own object."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("module", "number")

    def __init__(self, module, number):
        self.module, self.number = module, number


def follow(module):
    """Copy it; tensors are copied as they are."""
    return Follower(module, lambda tensor, path: tensor.detach().clone())


def copy_of(value, module=None):
    """What becomes of an attribute; (copied module, copied attribute)."""
    module = Holder() if module is None else module
    module.value = value(module) if callable(value) else value
    copied = follow(module).root
    assert copied is not module
    return copied, copied.value


CONTAINERS = {
    "list": lambda m: [m.child],
    "tuple": lambda m: (m.child, 1),
    "dict": lambda m: {"x": m.child, 2: 3},
    "OrderedDict": lambda m: OrderedDict(b=m.child, a=1),
    "set": lambda m: {m.child},
    "deque": lambda m: deque([m.child], maxlen=3),
    "nested": lambda m: [{"x": (m.child, [m.child])}],
    "object": lambda m: Helper(inner=m.child, more=[m.child]),
}


def modules_in(value):
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, dict):
        return [m for entry in value.values() for m in modules_in(entry)]
    if isinstance(value, list | tuple | set | deque):
        return [m for entry in value for m in modules_in(entry)]
    if isinstance(value, Helper):
        return modules_in(vars(value))
    return []


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_keep_their_type_and_point_into_the_copy(kind):
    source = Holder()
    copied, value = copy_of(CONTAINERS[kind], source)
    assert type(value) is type(source.value)
    assert value is not source.value
    found = modules_in(value)
    assert found
    assert all(module is copied.child for module in found)
    if isinstance(value, deque):
        assert value.maxlen == 3
    if isinstance(value, dict):
        assert list(value) == list(source.value)


@pytest.mark.parametrize(
    "value",
    [1, "text", None, 2.5, (1, 2), b"x", torch.float32, torch.Size([2]), range(3), ...],
    ids=repr,
)
def test_what_cannot_change_is_shared(value):
    assert copy_of(lambda _: value)[1] is value


@pytest.mark.parametrize(
    "make",
    [threading.Lock, lambda: (i for i in range(3)), lambda: open(__file__)],  # noqa: SIM115
    ids=["lock", "generator", "file"],
)
def test_what_cannot_be_copied_is_shared(make):
    value = make()
    assert copy_of(lambda _: value)[1] is value
    getattr(value, "close", lambda: None)()


def test_an_optimizer_or_generator_is_shared():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    generator = torch.Generator()
    assert copy_of(lambda _: optimizer)[1] is optimizer
    assert copy_of(lambda _: generator)[1] is generator


def test_one_object_has_one_copy_and_cycles_close():
    def make(module):
        shared = [1]
        loop = {"shared": shared, "again": shared, "module": module}
        loop["loop"] = loop
        return loop

    copied, value = copy_of(make)
    assert value["shared"] is value["again"]
    assert value["loop"] is value
    assert value["module"] is copied


def test_bound_methods_and_partials_are_bound_to_the_copy():
    copied, value = copy_of(lambda m: [m.method, functools.partial(m.method), m.child.forward])
    assert value[0]() is copied
    assert value[1]() is copied
    assert value[2].__self__ is copied.child


def test_a_closure_over_the_module_is_rebound():
    def make(module):
        def outer():
            return module

        return {"f": outer, "g": lambda m=module: m, "h": lambda *, m=module: m}

    source = Holder()
    copied, value = copy_of(make, source)
    assert all(function() is copied for function in value.values())
    assert all(function() is source for function in source.value.values())
    assert value["f"].__name__ == "outer"


def test_a_closure_over_something_else_is_the_users_own():
    seen = []
    function = copy_of(lambda _: lambda x: seen.append(x))[1]
    function(1)
    assert seen == [1]


def test_a_list_that_a_closure_shares_with_the_user_stays_shared():
    seen = []

    def make(module):
        return lambda: seen.append(module)

    copied, value = copy_of(make)
    value()
    assert len(seen) == 1
    assert seen[0] is copied


def test_a_function_that_reaches_the_module_by_a_global_is_refused_by_name():
    module = Holder()
    scope = {"net": module}
    exec("def use(x):\n    return net(x)", scope)
    module.use = scope["use"]
    with pytest.raises(ReplicaError) as info:
        follow(module)
    assert "attribute 'use' is a function that uses the module" in str(info.value)
    assert "global variable 'net'" in str(info.value)
    assert "lambda x, net=net: ..." in str(info.value)


def test_weak_references_point_to_the_copy():
    copied, value = copy_of(lambda m: {"ref": weakref.ref(m.child)})
    assert value["ref"]() is copied.child


def test_objects_with_slots_and_state_of_their_own_are_copied():
    copied, value = copy_of(lambda m: Slotted(m.child, 3))
    assert value.module is copied.child
    assert value.number == 3


def test_a_namespace_is_followed():
    copied, value = copy_of(lambda m: types.SimpleNamespace(inner=m.child))
    assert value.inner is copied.child


def test_hooks_are_copied_with_their_order_and_modules():
    source, seen = Holder(), []
    source.child.register_forward_hook(lambda m, args, out: seen.append(m))
    copied = follow(source).root
    copied.child(torch.ones(1, 2))
    assert len(seen) == 1
    assert seen[0] is copied.child


def test_originals_are_found_again():
    source = Holder()
    source.value = [source.child]
    follower = follow(source)
    assert follower.original(follower.root) is source
    assert follower.original(follower.root.value) is source.value
    stranger = object()
    assert follower.original(stranger) is stranger


def test_a_cell_is_brought_up_to_date():
    source = Holder()
    source.value = [source.child, 1]
    follower = follow(source)
    source.value.append(source.child)
    source.value[1] = "two"
    index = next(i for i, cell in enumerate(follower.cells) if cell is source.value)
    follower.update(index)
    child = follower.root.child
    assert follower.root.value == [child, "two", child]
    assert follower.paths[index] == ".value"


# --------------------------------------------------------------------------------------------------
# The same graph once more
# --------------------------------------------------------------------------------------------------


def repeat(follower):
    """Copy it again without another walk, the leaves too."""
    tensors = {id(t): t for t in find_tensors(follower)}
    leaves = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    return follower.repeat(follower.pattern(), follower._leaf, {}, leaves)


def find_tensors(follower):
    for cell in follower.cells:
        values = cell.values() if isinstance(cell, dict) else cell
        yield from (value for value in values if isinstance(value, torch.Tensor))


KINDS = {
    **CONTAINERS,
    "weak": lambda m: [weakref.ref(m.child)],
    "tensors": lambda m: {"own": torch.ones(2), "again": [m.child.weight], "in": (m.child.bias,)},
    "keys": lambda m: {1: 2, m.child: "x", (m.child, 1): m},
    "marked": lambda m: mark(OrderedDict(a=m.child), m),
    "strange": lambda m: Odd(a=m.child, b=1),
    "atoms": lambda m: {"n": 1, "t": (1, "x"), "f": len, "d": torch.float32, "g": torch.relu},
    "objects": lambda m: [types.SimpleNamespace(inner=m.child), Helper(own={}, empty=[])],
}


class Odd(dict):
    """A dictionary with a way of its own to set entries."""

    def __setitem__(self, key, value):
        raise AssertionError("called")


def mark(value, module):
    value.mark = module.child
    return value


def describe(value, own, seen):
    """What can be told of a copy: types, order, which module of its tree stands where."""
    if id(value) in seen or id(value) in own:
        return type(value), own.get(id(value), seen.get(id(value)))
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        return type(value), value.tolist()
    if isinstance(value, weakref.ref):
        return "weak", describe(value(), own, seen)
    if isinstance(value, dict):
        inside = [(describe(k, own, seen), describe(v, own, seen)) for k, v in value.items()]
    elif isinstance(value, list | tuple | set | deque):
        inside = [describe(entry, own, seen) for entry in value]
    elif type(value).__module__ in ("types", __name__):
        inside = []
    else:
        return value
    more = describe(vars(value), own, seen) if hasattr(value, "__dict__") else None
    return type(value), inside, more, getattr(value, "maxlen", None)


def describe_copy(follower):
    own = {id(copied): name for name, copied in follower.root.named_modules()}
    return [
        (path, describe(target, own, {}), follower.original(target) is source)
        for path, source, target in zip(
            follower.paths, follower.cells, follower.targets, strict=True
        )
        if type(target) is not dict or target
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_copied_again_as_another_walk_would(kind):
    source = Holder()
    source.value = KINDS[kind](source)
    follower = follow(source)
    other = repeat(follower)
    assert describe_copy(other) == describe_copy(follow(source))
    mine = {id(target) for target in other.targets}
    assert not mine & {id(cell) for cell in follower.cells + follower.targets}
    assert [type(m) for _, m in other.modules] == [type(m) for m, _ in other.modules]
    assert other.root is not follower.root
    # It is followed from then on as any other.
    source.value = {"new": [source.child]}
    other.update(next(i for i, cell in enumerate(other.cells) if cell is vars(source)))
    assert other.root.value["new"][0] is other.root.child


def test_a_device_is_each_copys_own():
    source = Holder()
    source.home, source.both = torch.device("cpu"), (torch.device("cpu"), 1)
    other = follow(source)
    meta = {torch.device("cpu"): torch.device("meta")}
    leaves = {id(t): t for t in find_tensors(other)}
    copied = other.repeat(other.pattern(), other._leaf, meta, leaves).root
    assert copied.home == torch.device("meta")
    assert other.root.home == torch.device("cpu")


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.method,
        lambda m: lambda: m,
        lambda m: functools.partial(m.method),
        lambda m: Slotted(m.child, 3),
    ],
)
def test_what_has_a_way_of_its_own_to_be_copied_needs_another_walk(make):
    source = Holder()
    source.value = [make(source)]
    assert follow(source).pattern() is None


# --------------------------------------------------------------------------------------------------
# Snapshots
# --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["counting", "comparing"])
def counting(request, monkeypatch):
    """Whether dictionaries count how often they were written."""
    if request.param == "comparing":
        monkeypatch.setattr("samestep.snapshot._is_counting", False)
    elif sys.version_info >= (3, 12):
        pytest.skip("dictionaries count no more")
    return request.param == "counting"


def test_a_snapshot_sees_every_kind_of_change(counting):
    ordered = OrderedDict(a=1, b=2)
    cells = [{"x": 1}, [1, 2], {3}, deque([4]), {}, [], ordered]
    snapshot = Snapshot(cells)
    assert snapshot.is_current()
    changes = [
        (0, lambda: cells[0].update(x=2), lambda: cells[0].update(x=1)),
        (0, lambda: cells[0].update(y=2), lambda: cells[0].pop("y")),
        (1, lambda: cells[1].append(3), lambda: cells[1].pop()),
        (1, lambda: cells[1].reverse(), lambda: cells[1].reverse()),
        (2, lambda: cells[2].add(9), lambda: cells[2].remove(9)),
        (3, lambda: cells[3].append(5), lambda: cells[3].pop()),
        (4, lambda: cells[4].update(new=1), lambda: cells[4].clear()),
        (5, lambda: cells[5].append(1), lambda: cells[5].clear()),
        (6, lambda: ordered.move_to_end("a"), lambda: ordered.move_to_end("b")),
    ]
    for index, change, back in changes:
        change()
        assert not snapshot.is_current()
        assert snapshot.changed() == [index]
        back()
        assert snapshot.is_current()
        assert snapshot.changed() == []


def _rename_the_last(cell):
    cell["other"] = cell.pop("b")


def _merge(cell):
    cell |= {"c": 3}


WRITES = {
    "an equal one": lambda cell: cell.update(a=1.0),
    "True for 1": lambda cell: cell.__setitem__("a", True),
    "another name": _rename_the_last,
    "the order": lambda cell: cell.update(a=cell.pop("a")),
    "setdefault": lambda cell: cell.setdefault("c", 3),
    "pop": lambda cell: cell.pop("a"),
    "popitem": lambda cell: cell.popitem(),
    "del": lambda cell: cell.__delitem__("a"),
    "merge": _merge,
    "clear": lambda cell: cell.clear(),
    "clear and fill": lambda cell: (cell.clear(), cell.update({"a": 1, "b": 3})),
}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("is_attributes", [False, True], ids=["entries", "attributes"])
def test_a_snapshot_sees_every_way_to_write_a_dictionary(counting, is_attributes, what):
    holder = types.SimpleNamespace()
    cell = vars(holder) if is_attributes else {}
    cell.update({"a": 1, "b": 2})
    snapshot = Snapshot([{"x": 1}, cell])
    WRITES[what](cell)
    assert snapshot.changed() == [1]
    assert not snapshot.is_current()
    assert snapshot.content(1) == {"a": 1, "b": 2}


def test_a_snapshot_sees_an_attribute_that_is_set_in_a_loop(counting):
    class Plain:
        pass

    def put(value):  # after some calls the interpreter takes short ways of its own
        holder.value = value

    for is_taken_first in (True, False):
        holder = Plain()
        holder.value = 0
        cell = vars(holder) if is_taken_first else None
        for value in range(200):
            put(value)
        cell = vars(holder)
        snapshot = Snapshot([cell])
        for value in range(200, 300):
            put(value)
            assert not snapshot.is_current()
            snapshot.take()
            assert snapshot.is_current()


def test_what_was_put_back_is_compared_once(monkeypatch):
    if sys.version_info >= (3, 12):
        pytest.skip("dictionaries count no more")
    compared = []
    compare = snapshot_module._Part.is_current
    monkeypatch.setattr(
        snapshot_module._Part, "is_current", lambda part: compared.append(1) or compare(part)
    )
    cell = {"a": 1}
    snapshot = Snapshot([cell, {}, {"b": 2}])
    assert snapshot.is_current()
    assert not compared
    cell["a"] = 2
    cell["a"] = 1
    assert snapshot.is_current()
    assert snapshot.is_current()
    assert len(compared) == 1
    cell["a"] = 2
    assert not snapshot.is_current()


def test_a_snapshot_compares_by_identity_and_calls_nothing_of_the_users(counting):
    class Loud:
        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    cell = {"x": Loud(), "t": torch.ones(2)}
    snapshot = Snapshot([cell])
    assert snapshot.is_current()
    cell["x"] = Loud()
    assert not snapshot.is_current()
    assert snapshot.changed() == [0]
    assert [type(tensor) for tensor in snapshot.tensors()] == [torch.Tensor]


class AttrDict(dict):
    """Its entries are its attributes: a common idiom."""

    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


class Held(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        make(self)


def hold_attr_dict(module):
    module.args = AttrDict(scale=2.0)
    module.set = lambda value: setattr(module.args, "scale", value)


def hold_names(module):
    module.args = types.SimpleNamespace(scale=2.0)
    module.config = vars(module.args)


def hold_config_first(module):
    args = argparse.Namespace(scale=2.0)
    module.config = vars(args)
    module.args = args


@pytest.mark.parametrize("hold", [hold_attr_dict, hold_names, hold_config_first])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_dictionary_that_has_two_names_has_them_in_every_replica(hold, replicas):
    class Scaled(Held):
        def forward(self, x):
            entries = self.config if hasattr(self, "config") else self.args
            return self.layer(x) * self.args.scale + entries["scale"]

    module = Scaled(hold)
    if hold is hold_attr_dict:
        del module.set
    model = DataParallel(module, replicas=replicas)
    x = torch.randn(6, 3)
    for scale in (2.0, 3.0, 5.0):
        module.args.scale = scale
        torch.testing.assert_close(model(x), module(x))


def test_slots_beside_a_dictionary_are_copied():
    class Base:
        __slots__ = ("scale",)

    class Both(Base):
        pass

    class Slotted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.both = nn.Linear(3, 3), Both()
            self.both.scale, self.both.shift = 2.0, 1.0

        def forward(self, x):
            return self.layer(x) * self.both.scale + self.both.shift

    module, x = Slotted(), torch.randn(6, 3)
    torch.testing.assert_close(DataParallel(module, replicas=3)(x), module(x))


def test_a_named_tuple_of_buffers_holds_each_replicas_own():
    class Statistics(NamedTuple):
        mean: torch.Tensor
        count: torch.Tensor

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("count", torch.zeros(()))
            self.statistics = Statistics(self.mean, self.count)

        def forward(self, x):
            self.statistics.count.add_(1)
            return x + self.statistics.count

    module = Counting()
    out = DataParallel(module, replicas=3)(torch.zeros(6, 3))
    assert torch.equal(out, torch.ones(6, 3))  # not 1, 2 and 3
    assert isinstance(module.statistics, Statistics)
    assert module.count == 1


def test_what_hangs_on_a_buffer_hangs_on_its_copies():
    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.ones(3))
            self.shift.kind = 2.0

        def forward(self, x):
            return x + self.shift * self.shift.kind

    out = DataParallel(Tagged(), replicas=3)(torch.zeros(6, 3))
    assert torch.equal(out, torch.full((6, 3), 2.0))


def test_a_proxy_of_a_module_is_refused_by_name():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].parent = weakref.proxy(module)
    with pytest.raises(ReplicaError, match=r"parent.*weakref\.proxy"):
        DataParallel(module, replicas=2)(torch.ones(2, 2))
