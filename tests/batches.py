"""Nested batches of every kind, for tests that cut, merge or walk them."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

Pair = namedtuple("Pair", "left right")


class Tagged(dict):
    """A dict with an attribute."""


class Items(list):
    """A list with an attribute."""


@dataclasses.dataclass
class Plain:
    first: Any
    second: Any = None
    derived: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    first: Any
    second: Any = None


@dataclasses.dataclass
class Output(OrderedDict):
    """Both a dataclass and a dict, None left out of the keys, as model libraries return them."""

    first: Any = None
    second: Any = None
    third: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Registered:
    """Known to torch's pytree only."""

    def __init__(self, first, second):
        self.first, self.second = first, second


_pytree.register_pytree_node(
    Registered, lambda r: ([r.first, r.second], None), lambda c, _: Registered(*c)
)


def make_default_dict(one, two):
    return defaultdict(list, one=one, two=two)


def make_tagged(one, two):
    tagged = Tagged(one=one, two=two)
    tagged.tag = "kept"
    return tagged


# Longer than any shard of a test, so that no rule takes their items for rows.
PADDING = [3] * 18

CONTAINERS = {
    "dict": lambda one, two: {"one": one, 2: two},
    "OrderedDict": lambda one, two: OrderedDict(two=one, one=two),
    "defaultdict": make_default_dict,
    "dict subclass": make_tagged,
    "UserDict": lambda one, two: UserDict(one=one, two=two),
    "list": lambda one, two: [one, two, *PADDING],
    "list subclass": lambda one, two: Items([one, two, *PADDING]),
    "tuple": lambda one, two: (one, two),
    "namedtuple": Pair,
    "deque": lambda one, two: deque([one, two], maxlen=3),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "dict-dataclass": Output,
    "pytree type": Registered,
}


def leaves(num_rows):
    """Values of a batch of ``num_rows`` rows: per row, and whole."""
    rows, other = range(num_rows), num_rows + 20
    return st.sampled_from(
        [
            lambda: torch.randn(num_rows, 3),
            lambda: torch.arange(num_rows * 4).view(num_rows, 2, 2),
            lambda: torch.randn(num_rows, 2, 3, 4).to(memory_format=torch.channels_last),
            lambda: torch.randn(num_rows, dtype=torch.complex64),
            lambda: torch.randn(num_rows, 2).relu().to_sparse(),
            lambda: np.arange(num_rows * 2.0).reshape(num_rows, 2),
            lambda: [f"row {row}" for row in rows],
            lambda: tuple(f"row {row}" for row in rows),
            lambda: [{"id": row} for row in rows],
            lambda: [torch.randn(other + row % 2, 4) for row in rows] or ["no rows"],
            lambda: (
                pack_sequence([torch.randn(1 + row % 3, 2) for row in rows], False)
                if num_rows
                else 0
            ),
            lambda: torch.randn(other, 2),
            lambda: torch.tensor(2.5),
            lambda: (3, 4),
            lambda: "text",
            lambda: 7,
            lambda: None,
        ]
    ).map(lambda make: make())


def trees(num_rows):
    """Containers of every kind over such leaves, three levels deep at most."""
    return st.recursive(
        leaves(num_rows),
        lambda inner: st.builds(
            lambda make, one, two: make(one, two),
            st.sampled_from(list(CONTAINERS.values())),
            inner,
            inner,
        ),
        max_leaves=6,
    )


def assert_same(one, other):
    """Equal bit for bit, with the same types, all the way down."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.layout == other.layout
        one, other = (x.to_dense() if x.is_sparse else x for x in (one, other))
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
        assert one.shape == other.shape
    elif isinstance(one, Registered) or dataclasses.is_dataclass(one):
        for name in getattr(one, "__dict__", None) or ("first", "second"):
            assert_same(getattr(one, name), getattr(other, name))
        if isinstance(one, dict):
            assert_same(dict(one), dict(other))
    elif isinstance(one, dict | UserDict):
        assert list(one) == list(other)
        assert getattr(one, "tag", None) == getattr(other, "tag", None)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other
