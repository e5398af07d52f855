"""Small models of every kind, each with a way to make batches of any number of rows."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Query:
    """An argument that is a dataclass."""

    keys: Any
    scale: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """An output that is a frozen dataclass."""

    value: Any
    parts: Any


@dataclasses.dataclass
class Case:
    """A model, its batches, and how the wrapper must be told about them.

    ``make_batch(num_rows)`` returns (args, kwargs, the tensors in them that want a gradient).
    """

    make: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple]
    options: dict = dataclasses.field(default_factory=dict)
    min_rows: int = 0


def normal(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 3, 2, stride=2)
        self.head = nn.Linear(3 * 2 * 2, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.avg_pool2d(torch.tanh(self.second(x)), 1).flatten(1))


class Recurrent(nn.Module):
    """A recurrent module that takes its state and returns the next one, rows on dim 1 of it."""

    def __init__(self, kind, batch_first=True):
        super().__init__()
        self.cell = kind(3, 4, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(4, 2)

    def forward(self, x, state=None):
        x, state = self.cell(x, state)
        if isinstance(x, PackedSequence):
            return x._replace(data=self.head(x.data)), state
        return self.head(x), state


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x, mask=None, padding=None):
        return self.head(self.layers(x, mask=mask, src_key_padding_mask=padding))


class Capsules(nn.Module):
    """Capsules with routing by agreement: the couplings are found row by row, in a loop."""

    def __init__(self, num_in=5, num_out=3, size_in=2, size_out=4, num_rounds=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_in, num_out, size_in, size_out) / 2)
        self.bias = nn.Parameter(torch.zeros(num_out, size_out))
        self.num_rounds = num_rounds

    def forward(self, x):
        votes = torch.einsum("bis,iost->biot", x, self.weight)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(self.num_rounds):
            coupling = logits.softmax(2)
            capsules = squash((coupling.unsqueeze(3) * votes).sum(1) + self.bias)
            logits = logits + (votes * capsules.unsqueeze(1)).sum(3)
        return {"capsules": capsules, "length": capsules.norm(dim=2), "coupling": coupling}


def squash(x):
    square = (x * x).sum(-1, keepdim=True)
    return x * square.sqrt() / (1 + square)


class Nested(nn.Module):
    """Containers in, other containers out, beside values that are no tensors."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, batch, query, *, names, shift, flag=True):
        one = self.left(batch["x"]) + self.right(batch["pair"].left).sin()
        two = self.frozen(one) * query.scale + shift + query.keys[0]
        table = defaultdict(list, first=one.exp(), second=[two, batch["pair"].right])
        return OrderedDict(
            answer=Answer(two.sum(1), (one, None, "text")),
            pair=Pair(table, {"flag": flag, "names": [name.upper() for name in names]}),
            ids=batch["ids"] + 1,
            loss=(one * two).mean(),
        )


def make_nested(num_rows):
    x, left, right, keys = (normal(num_rows, size) for size in (3, 2, 5, 4))
    ids = torch.arange(num_rows)
    shift = torch.linspace(-1, 1, 4, dtype=torch.float64)
    batch = {"x": x, "pair": Pair(left, right), "ids": ids}
    names = [f"row {row}" for row in range(num_rows)]
    kwargs = {"names": names, "shift": shift, "flag": False}
    return (batch, Query([keys], 0.5)), kwargs, [x, left, right, keys]


class Loss(nn.Module):
    """Returns its own mean loss and a count, as many models of today do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)

    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "num_labels": 4}


def make_recurrent(kind, num_layers=2):
    def make_batch(num_rows):
        x = normal(num_rows, 3, 3)
        states = [normal(num_layers, num_rows, 4) for _ in range(2 if kind is nn.LSTM else 1)]
        return (x, tuple(states) if kind is nn.LSTM else states[0]), {}, [x, *states]

    return make_batch


def make_time_first(num_rows):
    x, state = normal(3, num_rows, 3), normal(2, num_rows, 4)
    return (x, state), {}, [x, state]


def make_packed(num_rows):
    x = normal(num_rows, 4, 3)
    lengths = torch.tensor([1 + (row * 3) % 4 for row in range(num_rows)])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return (packed,), {}, [x]


def make_encoded(num_rows):
    x = normal(num_rows, 5, 4)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(5) >= 2 + torch.arange(num_rows).unsqueeze(1) % 4
    return (x,), {"mask": mask, "padding": padding}, [x]


def make_labelled(num_rows):
    x = normal(num_rows, 3)
    return (x,), {"labels": torch.arange(num_rows) % 4}, [x]


def make_plain(*shape):
    def make_batch(num_rows):
        x = normal(num_rows, *shape)
        return (x,), {}, [x]

    return make_batch


STATE = {"in_dims": {"state": 1}, "out_dims": [None, 1]}
CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), make_plain(3)),
    "cnn": Case(Convolutional, make_plain(2, 4, 4)),
    "lstm": Case(lambda: Recurrent(nn.LSTM), make_recurrent(nn.LSTM), STATE),
    "gru": Case(lambda: Recurrent(nn.GRU), make_recurrent(nn.GRU), STATE),
    "gru time first": Case(lambda: Recurrent(nn.GRU, False), make_time_first, {"dim": 1}),
    "packed lstm": Case(lambda: Recurrent(nn.LSTM), make_packed, STATE, min_rows=1),
    "packed gru": Case(lambda: Recurrent(nn.GRU), make_packed, STATE, min_rows=1),
    "transformer": Case(Encoder, make_encoded, {"in_dims": {"mask": None}}),
    "capsules": Case(Capsules, make_plain(5, 2)),
    "nested": Case(Nested, make_nested, {"in_dims": {"shift": None}}),
    "own loss": Case(Loss, make_labelled),
}


def make_model(name):
    """The same module every time, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return CASES[name].make().double()


def make_batch(name, num_rows):
    """The same batch every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + num_rows)
        return CASES[name].make_batch(num_rows)
