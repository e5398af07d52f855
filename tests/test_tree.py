"""Opening and rebuilding of containers."""

import copy
import dataclasses
import subprocess
import sys
from collections import OrderedDict, UserDict, defaultdict, deque

import pytest
import torch
from batches import CONTAINERS, Frozen, Items, Output, Pair, Plain, Registered, Tagged, assert_same
from torch import nn

from samestep import errors, tree


def double(leaf):
    return leaf * 2 if isinstance(leaf, torch.Tensor) else leaf


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_in_which_nothing_changes_is_itself(kind):
    value = CONTAINERS[kind](torch.ones(2), [torch.ones(3), "text"])
    assert tree.map_leaves(lambda leaf: leaf, value) is value


@pytest.mark.parametrize("kind", CONTAINERS)
def test_rebuilding_keeps_the_type_and_the_original(kind):
    value = CONTAINERS[kind](torch.ones(2), [torch.ones(3), "text"])
    expected = CONTAINERS[kind](torch.full((2,), 2.0), [torch.full((3,), 2.0), "text"])
    before = copy.deepcopy(value)
    assert_same(tree.map_leaves(double, value), expected)
    assert_same(value, before)


def test_a_default_dict_keeps_its_factory():
    value = tree.map_leaves(double, defaultdict(list, a=torch.ones(1)))
    assert value["missing"] == []


def test_a_deque_keeps_its_maximal_length():
    value = tree.map_leaves(double, deque([torch.ones(1)], maxlen=4))
    assert value.maxlen == 4


def test_attributes_beside_the_content_are_kept():
    items, tagged = Items([torch.ones(1)]), Tagged(a=torch.ones(1))
    items.tag = tagged.tag = "kept"
    assert tree.map_leaves(double, items).tag == "kept"
    assert tree.map_leaves(double, tagged).tag == "kept"


def test_a_dict_with_mirrored_attributes_stays_in_step():
    class Mirror(dict):
        def __setitem__(self, key, value):
            raise AssertionError("the class's own methods are not run")

    value = Mirror(a=torch.ones(1), b=3)
    value.__dict__.update(a=value["a"], b=3, c="other")
    doubled = tree.map_leaves(double, value)
    assert doubled.a is doubled["a"]
    assert doubled.a == 2
    assert doubled.c == "other"
    assert value.a == 1


def test_a_dict_dataclass_keeps_keys_attributes_and_fields_that_are_none():
    doubled = tree.map_leaves(double, Output(first=torch.ones(1), third=torch.ones(2)))
    assert list(doubled) == ["first", "third"]
    assert doubled.first is doubled["first"]
    assert doubled.first == 2
    assert doubled.second is None
    assert tree.open_container(doubled).items[0][0] == "['first']"


def test_a_frozen_dataclass_with_a_field_outside_init():
    @dataclasses.dataclass(frozen=True)
    class Sample:
        x: torch.Tensor
        unset: int = dataclasses.field(init=False)
        size: int = dataclasses.field(init=False, default=0)

        def __post_init__(self):
            object.__setattr__(self, "size", 99)

    sample = Sample(torch.ones(1))
    object.__setattr__(sample, "note", "kept")
    doubled = tree.map_leaves(double, sample)
    assert (doubled.x.item(), doubled.size, doubled.note) == (2, 99, "kept")
    assert not hasattr(doubled, "unset")


def test_a_named_tuple_with_its_own_constructor():
    class Point(Pair):
        def __new__(cls, both):
            return super().__new__(cls, both, both)

    doubled = tree.map_leaves(double, Point(torch.ones(1)))
    assert type(doubled) is Point
    assert doubled.left == doubled.right == 2


def test_the_return_types_of_torch_keep_type_and_names():
    value = torch.max(torch.ones(2, 3), 1)
    doubled = tree.map_leaves(double, value)
    assert type(doubled) is type(value)
    assert doubled.values.tolist() == [2, 2]
    assert [text for text, _ in tree.open_container(value).items] == [".values", ".indices"]


def test_a_size_is_rebuilt_as_a_size():
    opened = tree.open_container(torch.Size([2, 3]))
    assert type(opened.rebuild([4, 5])) is torch.Size


def test_paths_are_written_as_in_code():
    value = {"a": [1, Plain(2, 3)], 4: Pair(5, UserDict(b=6))}
    assert dict(tree.iter_leaves(value, "args[0]")) == {
        "args[0]['a'][0]": 1,
        "args[0]['a'][1].first": 2,
        "args[0]['a'][1].second": 3,
        "args[0]['a'][1].derived": None,
        "args[0][4].left": 5,
        "args[0][4].right['b']": 6,
    }


@pytest.mark.parametrize("value", [nn.Linear(1, 1), Plain, "text", None, torch.ones(2), {1, 2}, 3])
def test_what_is_no_container(value):
    assert tree.open_container(value) is None


def test_a_container_that_holds_itself_is_an_error():
    value = [torch.ones(1)]
    value.append({"again": value})
    with pytest.raises(ValueError, match="more than 100 levels deep: does it hold itself"):
        tree.map_leaves(double, value)
    with pytest.raises(ValueError, match=r"batch\[1\]\['again'\].* does it hold itself"):
        list(tree.iter_leaves(value, "batch"))


def test_rows_of_a_sequence_keep_its_type():
    assert tree.slice_rows([1, 2, 3], 1, 3) == [2, 3]
    assert_same(tree.slice_rows(Items([1, 2, 3]), 0, 2), Items([1, 2]))
    assert_same(tree.slice_rows(deque([1, 2, 3], 3), 0, 1), deque([1], 3))


# --------------------------------------------------------------------------------------------------
# Registered batch types
# --------------------------------------------------------------------------------------------------


class Bag:
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(tree, "_batch_types", {})


def register(cls, **functions):
    functions = {"split": lambda bag, sizes: [], "merge": lambda bags: bags[0]} | functions
    tree.register_batch_type(cls, **functions)


@pytest.mark.usefixtures("registry")
def test_the_nearest_registered_class_counts_and_the_last_registration():
    class SubBag(Bag):
        pass

    register(Bag)
    assert tree.find_batch_type(SubBag([1])).cls is Bag
    register(SubBag, rows=lambda bag: 7)
    assert tree.find_batch_type(SubBag([1])).rows(None) == 7
    assert tree.find_batch_type(Bag([1, 2])).rows(Bag([1, 2])) == 2
    register(Bag, rows=lambda bag: 5)
    assert tree.find_batch_type(Bag([1])).rows(None) == 5
    assert tree.find_batch_type([1]) is None


@pytest.mark.usefixtures("registry")
def test_a_registered_batch_is_opened_by_its_attributes():
    bag = Bag(torch.ones(2))
    assert tree.open_container(bag) is None
    register(Bag)
    doubled = tree.map_leaves(double, bag)
    assert type(doubled) is Bag
    assert doubled.x.tolist() == [2, 2]
    assert bag.x.tolist() == [1, 1]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("cls", "functions", "message"),
    [
        ("Bag", {}, "needs a class"),
        (dict, {}, "dict has fixed rules"),
        (torch.Tensor, {}, "Tensor has fixed rules"),
        (Bag, {"split": 3}, "split must be a function"),
        (Bag, {"merge": None}, "merge must be a function"),
        (Bag, {"rows": "len"}, "rows must be a function"),
    ],
)
def test_a_bad_registration_is_refused(cls, functions, message):
    with pytest.raises(TypeError, match=message):
        register(cls, **functions)


# --------------------------------------------------------------------------------------------------
# Errors and imports
# --------------------------------------------------------------------------------------------------


def test_every_error_is_a_value_error_and_every_warning_a_user_warning():
    for name in ("SplitError", "MergeError", "ReplicaError"):
        assert issubclass(getattr(errors, name), ValueError)
    for name in ("StateWarning", "DrawWarning"):
        assert issubclass(getattr(errors, name), UserWarning)


def test_a_note_is_added_once():
    error = KeyError("a")
    for text in ("in shard 1 of 2", "in shard 1 of 2", "in rank 0"):
        errors.note_shard(error, text)
    assert error.__notes__ == ["in shard 1 of 2", "in rank 0"]


@pytest.mark.slow
def test_importing_adds_nothing_heavy():
    code = (
        "import sys, torch; before = set(sys.modules);"
        "import samestep.split, samestep.merge;"
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('samestep')))"
    )
    added = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [m for m in added.stdout.split() if m.startswith(("torch._dynamo", "numpy"))]


def test_every_kind_of_container_is_covered():
    kinds = {type(make(1, 2)) for make in CONTAINERS.values()}
    assert {dict, OrderedDict, defaultdict, deque, Output, Frozen, Registered} <= kinds
