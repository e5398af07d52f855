"""The models of docs/performance.md, and one training step of each, alone or as ranks."""

import os
import tempfile
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from samestep import DataParallel


class Block(nn.Module):
    """A residual block of two 3x3 convolutions."""

    def __init__(self, num_in, num_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        same = stride == 1 and num_in == num_out
        self.skip = nn.Identity() if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class Recurrent(nn.Module):
    """A word-level language model: two LSTM layers of 200."""

    def __init__(self, vocabulary=10_000, width=200):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0]).flatten(1)


class SmallGPT(nn.Module):
    """A character-level transformer: 4 layers, 4 heads, width 128, context 64."""

    def __init__(self, vocabulary=65, width=128, context=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens) + self.place, mask=mask)).flatten(1)


class Capsules(nn.Module):
    """CapsNet for 28x28 images: 1,152 capsules of 8, ten of 16, three routings."""

    def __init__(self):
        super().__init__()
        self.conv, self.primary = nn.Conv2d(1, 256, 9), nn.Conv2d(256, 256, 9, stride=2)
        self.votes = nn.Parameter(0.1 * torch.randn(1152, 10, 8, 16))

    def forward(self, images):
        features = self.primary(self.conv(images).relu())
        primary = squash(features.flatten(1).unflatten(1, (-1, 8)))
        votes = torch.einsum("bip,icpd->bicd", primary, self.votes)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            digits = squash(torch.einsum("bic,bicd->bcd", logits.softmax(2), votes))
            logits = logits + torch.einsum("bicd,bcd->bic", votes, digits)
        return (digits.square().sum(-1) + 1e-9).sqrt()


class GraphNet(nn.Module):
    """Two graph convolutions; the batch holds features on one random sparse graph."""

    def __init__(self, num_nodes=300, num_features=1433):
        super().__init__()
        links = torch.randint(num_nodes, (2, 6 * num_nodes)).unbind()
        graph = torch.zeros(num_nodes, num_nodes).index_put(links, torch.tensor(1 / 6))
        self.graph = graph.to_sparse()  # no buffer: DDP cannot broadcast a sparse one
        self.first, self.second = nn.Linear(num_features, 16), nn.Linear(16, 7)

    def spread(self, x):
        rows, nodes, width = x.shape
        flat = x.transpose(0, 1).reshape(nodes, rows * width)
        return torch.sparse.mm(self.graph, flat).view(nodes, rows, width).transpose(0, 1)

    def forward(self, x):
        return self.spread(self.second(self.spread(self.first(x)).relu())).flatten(1)


class Many(nn.Module):
    """3,000 tensors of 3,500 floats: what costs something per tensor shows here."""

    def __init__(self, count=3000, size=3500):
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(size) for _ in range(count))

    def forward(self, x):
        for scale in self.scales:
            x = torch.addcmul(x, x, scale, value=1e-3)
        return x


def squash(vectors):
    """Scale each vector to a length below one."""
    square = vectors.square().sum(-1, keepdim=True)
    return vectors * square / (1 + square) / (square + 1e-9).sqrt()


def make_lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def make_res20():
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(a, b, 2 if b > a else 1) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*stem, *blocks, *head)


def make_layers(*sizes):
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


MODELS = {
    "mlp": lambda: (make_layers(64, 256, 256, 10), torch.randn(256, 64)),
    "lenet": lambda: (make_lenet(), torch.randn(128, 1, 28, 28)),
    "res20": lambda: (make_res20(), torch.randn(64, 3, 32, 32)),
    "lstm": lambda: (Recurrent(), torch.randint(10_000, (20, 35))),
    "gpt": lambda: (SmallGPT(), torch.randint(65, (12, 64))),
    "caps": lambda: (Capsules(), torch.randn(8, 1, 28, 28)),
    "ppo": lambda: (make_layers(4, 64, 64, 2), torch.randn(8, 4)),
    "gcn": lambda: (GraphNet(), torch.randn(16, 300, 1433)),
    "wide": lambda: (make_layers(*[4096] * 7), torch.randn(32, 4096)),
    "many": lambda: (Many(), torch.randn(8, 3500)),
}


def make(name):
    """The same weights and the same batch in every process."""
    torch.manual_seed(0)
    return MODELS[name]()


def make_step(name, model, x, num_threads):
    """A training step without an optimizer, so that the loss stays the same; returns the loss."""

    def step():
        torch.set_num_threads(num_threads)
        model.zero_grad()
        rows = roll_out(model, x) if name == "ppo" else x
        loss = model(rows).square().mean()
        loss.backward()
        return loss.item()

    return step


def roll_out(model, states, num_moves=16):
    """Play in Python: act, move, remember. One observation per environment and move."""
    seen = []
    with torch.no_grad():
        for _ in range(num_moves):
            seen.append(states)
            actions = model(states).argmax(1).tolist()
            states = torch.tensor(
                [move(*s, a) for s, a in zip(states.tolist(), actions, strict=True)]
            )
    return torch.stack(seen, 1).flatten(0, 1)  # environment by environment: rows cut as they are


def move(place, speed, angle, spin, action):
    """A pole on a cart, roughly."""
    push = 0.1 if action else -0.1
    spin = 0.9 * spin + 0.2 * angle - push
    return place + 0.02 * speed, 0.9 * speed + push, angle + 0.02 * spin, spin


# ---------------------------------------------------------------------------
# Ranks
# ---------------------------------------------------------------------------


def make_meeting_place():
    """A file that does not exist yet, where the ranks of a group find each other."""
    return os.path.join(tempfile.mkdtemp(prefix="bench-"), "ranks")


def make_apart(rank, count, name):
    """A process with its share of the rows that exchanges nothing: what the cores can give."""
    torch.set_num_threads(1)
    net, x = make(name)
    return make_step(name, net, x.chunk(count)[rank], 1)


def _join(rank, count, place):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=count)


def make_ddp(rank, count, name, place):
    """A rank of torch's own DistributedDataParallel with its share of the rows."""
    _join(rank, count, place)
    net, x = make(name)
    model = nn.parallel.DistributedDataParallel(net)
    return make_step(name, model, x.chunk(count)[rank], 1)


def make_rank(rank, count, name, place):
    """A rank of ours with its share of the rows."""
    _join(rank, count, place)
    net, x = make(name)
    model = DataParallel(net, replicas=count, batch="local")
    return make_step(name, model, x.chunk(count)[rank], 1)
