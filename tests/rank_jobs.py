"""What ranks run in tests: see :mod:`spmd`. The same functions run in the test's own process."""

import contextlib
import copy
import hashlib
import os
import random
import signal
import time
import warnings

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import wires
from samestep.devices import owner_of_slot
from samestep.plan import plan_sizes
from samestep.rendezvous import find_comm

ROWS, FEATURES, CLASSES, STEPS = 29, 12, 4, 20


class Net(nn.Module):
    """BatchNorm, dropout, and its own loss."""

    def __init__(self, drop=0.3):
        super().__init__()
        self.enter = nn.Linear(FEATURES, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(drop)
        self.leave = nn.Linear(32, CLASSES)

    def logits(self, x):
        return self.leave(self.drop(torch.relu(self.norm(self.enter(x)))))

    def forward(self, x, y=None):
        out = self.logits(x)
        return out if y is None else F.cross_entropy(out, y)


def make_data(steps=STEPS, rows=ROWS, seed=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, rows, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (steps, rows), generator=generator)


def own_rows(group, rows, replicas, split="chunk"):
    """This rank's rows of a batch, by the split rule."""
    comm = find_comm(group)
    sizes = plan_sizes(rows, replicas, split)
    owners = [owner_of_slot(k, replicas, comm.num_ranks) for k in range(len(sizes))]
    first, last = (
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner < rank)
        for rank in (comm.rank, comm.rank + 1)
    )
    return slice(first, last)


def digest(*values):
    """A hash of everything in nested values, to the bit."""
    found = hashlib.sha256()

    def feed(value):
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().reshape(-1)
            found.update(value.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, entry in value.items():
                found.update(repr(key).encode())
                feed(entry)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                feed(entry)
        else:
            found.update(repr(value).encode())

    feed(values)
    return found.hexdigest()


def train(
    group=None, *, replicas=8, batch="global", steps=STEPS, drop=0.3, double=False, **options
):
    """Twenty steps; the hash of weights, optimizer, losses and random state."""
    torch.manual_seed(3)
    net = Net(drop)
    x, y = make_data(steps)
    if double:
        net, x = net.double(), x.double()
    options = {"process_group": group, "batch": batch} | options if group is not None else options
    model = samestep.DataParallel(net, replicas=replicas, **options)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rows = own_rows(group, ROWS, replicas) if batch == "local" else slice(None)
    losses = []
    for one, targets in zip(x, y, strict=True):
        optimizer.zero_grad()
        loss = model(one[rows], targets[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return (
        digest(state, optimizer.state_dict(), torch.stack(losses), torch.get_rng_state()),
        state,
        losses,
    )


def train_hash(group, **options):
    return train(group, **options)[0]


# -- Whole outputs ---------------------------------------------------------------------------------


class Everything(nn.Module):
    """Outputs of many kinds, and state of many kinds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, FEATURES))
        self.unused = nn.Parameter(torch.ones(2))
        self.table = nn.Embedding(10, 3, sparse=True)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(FEATURES))
        self.calls = 0
        self.last = None
        self.hidden = None

    def forward(self, x, names, index):
        self.calls += 1
        self.seen += len(x)
        self.level = self.level + x.detach().mean(0)
        self.last = x.detach() * 2
        y = x * self.weight
        self.hidden = y if self.hidden is None else y + self.hidden.detach() * 0.5
        noise = torch.randn_like(y)
        return {
            "rows": y + noise * 0.1,
            "twice": [y, (y.sum(1), None)],
            "names": [name.upper() for name in names],
            "loss": (y**2).mean() + self.table(index).pow(2).mean(),
            "own": self.weight,
            "count": torch.tensor(3),
            "text": "same",
            "whole": (self.hidden * 3).relu(),
        }


def everything(group=None, *, rows=11, replicas=5, steps=3, **options):
    """Outputs, gradients and state after a few calls."""
    torch.manual_seed(1)
    module = Everything()
    if group is not None:
        options["process_group"] = group
    model = samestep.DataParallel(module, replicas=replicas, buffers={"seen": "sum"}, **options)
    found = []
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        x = torch.randn(rows, FEATURES, generator=generator).requires_grad_()
        index = torch.randint(0, 10, (rows,), generator=generator)
        names = [f"row {i}" for i in range(rows)]
        out = model(x * 1.0, names, index)
        assert out["own"] is module.weight
        assert out["names"] == [name.upper() for name in names]
        model.zero_grad()
        twice, sums = out["twice"][0], out["twice"][1][0]
        total = out["loss"] + out["rows"].sum() + (twice * sums[:, None]).mean()
        (total + out["whole"].sum()).backward()
        found.append([out["rows"], out["loss"], out["twice"][1][0], out["text"], out["count"]])
        found.append([x.grad, module.weight.grad, module.table.weight.grad.to_dense()])
        found.append([module.seen, module.level, module.last, module.hidden, module.calls])
    assert module.unused.grad is None
    return digest(found, torch.get_rng_state())


def penalty(group=None, *, replicas=4, **options):
    """A second derivative and a third: gradients of a gradient penalty."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    if group is not None:
        options["process_group"] = group
    model = samestep.DataParallel(module, replicas=replicas, **options)
    x = torch.randn(7, 4, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad((slope**2).sum(), x, create_graph=True)
    ((slope.norm(2, dim=1) - 1) ** 2).mean().add((curve**2).mean()).backward()
    return digest([slope, curve, x.grad, *(p.grad for p in module.parameters())])


class Initialises(nn.Module):
    """Sets its scale from the first batch."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x):
        if not self.is_ready:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            self.is_ready.fill_(True)
        return F.dropout(x * self.scale, 0.5)


class BackwardInside(nn.Module):
    """Accumulates gradients in forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, x):
        with torch.enable_grad():
            (self.layer(x) ** 2).sum().backward()
        return x.detach() + 1


class Meets(nn.Module):
    """Uses all rows inside forward, in two ways."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 6)

    def forward(self, x):
        y = self.layer(x)
        y = y - samestep.all_reduce(y.mean(0), "mean")
        everyone = samestep.all_gather(y)
        shard = samestep.current_shard()
        start = 0 if shard is None else shard.start
        targets = torch.arange(start, start + len(x))
        return F.cross_entropy(y @ everyone.T, targets)


MODULES = {
    "initialises": Initialises,
    "backward inside": BackwardInside,
    "meets": Meets,
    "a meeting in BatchNorm": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)),
    "dropout": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5)),
    "recurrent": lambda: Takes(nn.LSTM(FEATURES, 5, 2, dropout=0.3, batch_first=True)),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(5), nn.ReLU()),
}


class Takes(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:, None])[0]


def three_steps(group=None, name="dropout", rows=(9, 9, 2), *, replicas=4, **options):
    """Train any module on batches of these sizes."""
    torch.manual_seed(1)
    module = MODULES[name]()
    if group is not None:
        options["process_group"] = group
    model = samestep.DataParallel(module, replicas=replicas, **options)
    generator = torch.Generator().manual_seed(2)
    outs, optimizer = [], None
    for count in rows:
        out = model(torch.randn(count, FEATURES, generator=generator))
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
        outs.append(out.detach())
        if out.requires_grad:
            (out**2).sum().backward()
        optimizer.step()
    with torch.no_grad():
        model.eval()
        outs.append(model(torch.randn(5, FEATURES, generator=generator)))
    return digest(outs, model.state_dict(), torch.get_rng_state())


# -- Ranks that differ -----------------------------------------------------------------------------


def loss_of(model, rows=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(rows, FEATURES, generator=generator)).sum()


def differ(group, how, at=3):
    """Go a few steps in which rank 1 does something else at one of them; how long it took to see.

    Returns (seconds, message of the error, whether the next call works).
    """
    comm = find_comm(group)
    torch.manual_seed(1)
    layers = [nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 2)]
    batch = "local" if how == "local" else "global"
    is_odd = comm.rank == 1
    model = samestep.DataParallel(
        nn.Sequential(*layers), replicas=4, process_group=group, batch=batch
    )
    start = time.monotonic()
    try:
        for step in range(8):
            start = time.monotonic()
            odd = is_odd and step == at
            if how == "dies" and odd:
                os._exit(9)
            if how == "parameters" and odd:
                with torch.no_grad():
                    layers[2].bias[1] += 1e-6
            if how == "seed" and odd:
                torch.manual_seed(99)
            if how == "sleeps" and odd:
                time.sleep(8)
            if how == "path" and odd:
                model.eval()
                with torch.no_grad():
                    model(torch.zeros(8, FEATURES))
                model.train()
            if how == "skips" and odd:
                continue
            if how == "loss":
                out = model(torch.ones(8, FEATURES))
                (out.sum() * (2.0 if odd else 1.0)).backward()
                continue
            seed = step + 100 * (how == "batch" and odd)
            loss = loss_of(model, rows=7 if how == "rows" and odd else 8, seed=seed)
            if how != "backward" or not odd:
                loss.backward()
    except samestep.RankError as error:
        seconds = time.monotonic() - start
        if how in ("sleeps", "path", "backward", "dies"):
            return seconds, str(error), None
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        torch.manual_seed(5)
        loss_of(model).backward()
        return seconds, str(error), True
    return None


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        if (x > 100).any():
            raise ZeroDivisionError("a row is too large")
        return self.norm(self.layer(x))


class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if (ctx.saved_tensors[0] > 100).any():
            raise ZeroDivisionError("a row is too large for backward")
        return gradient * 2


def fail(group, where, sync=False):
    """A shard of the last rank fails; state must be as before and the next call must work."""
    torch.manual_seed(1)
    module = Breaks() if where == "forward" else Takes2()
    model = samestep.DataParallel(module, replicas=4, process_group=group, sync_batch_norm=sync)
    x = torch.randn(8, FEATURES)
    model(x).sum().backward()
    before = digest(model.state_dict())
    y = x.clone()
    y[-1] = 1000
    try:
        model(y).sum().backward()
    except Exception as error:
        kind, text, notes = type(error).__name__, str(error), getattr(error, "__notes__", [])
    is_kept = digest(model.state_dict()) == before
    model.zero_grad()
    model(x).sum().backward()
    return kind, text, list(notes), is_kept, digest([p.grad for p in model.parameters()])


class Takes2(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, x):
        return self.layer(BreaksBackward.apply(x * self.layer.weight.sum() ** 0))


# -- Each rank's own rows, and rivals --------------------------------------------------------------


def split_rows(group, rows, how):
    """Which rows each rank passes: by the split rule for 4 slots, or by hand."""
    comm = find_comm(group)
    if how == "rule":
        return own_rows(group, rows, 4)
    counts = {"uneven": [rows - 3, 3, 0, 0], "first has none": [0, 1, rows - 1, 0]}[how]
    start = sum(counts[: comm.rank])
    return slice(start, start + counts[comm.rank])


def plain_steps(batches, *, sync=True):
    """One process, the plain module, whole batches: gradients of every step, and the weights."""
    torch.manual_seed(1)
    net = Net(drop=0.0).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        found.append([p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return found, [value.clone() for value in net.state_dict().values()]


def ragged_batches(rows=(29, 12, 7, 3)):
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(count, FEATURES, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (count,), generator=generator),
        )
        for count in rows
    ]


def local_steps(group, how="rule", rows=(29, 12, 7, 3), reduction="mean", replicas=4):
    """The largest deviation of gradients and weights from the plain module; own rows, own loss."""
    batches = ragged_batches(rows)
    torch.manual_seed(1)
    net = Net(drop=0.0).double()
    model = samestep.DataParallel(
        net,
        replicas=replicas,
        process_group=group,
        batch="local",
        sync_batch_norm=True,
        reduction=reduction,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected, weights = plain_steps(batches)
    worst = 0.0
    for (x, y), gradients in zip(batches, expected, strict=True):
        own = split_rows(group, len(x), how)
        optimizer.zero_grad()
        out = model(x[own])
        assert out.shape == (len(x[own]), CLASSES)
        loss = F.cross_entropy(out, y[own], reduction=reduction)
        if reduction == "sum":
            loss = loss / len(x)
        loss.backward()
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            worst = max(worst, float((parameter.grad - gradient).abs().max()))
        optimizer.step()
    for value, weight in zip(net.state_dict().values(), weights, strict=True):
        worst = max(worst, float((value - weight).abs().max()))
    return worst, digest(net.state_dict())


def ddp_steps(group, rows):
    """How far gradients are from the plain module's, relative to their largest: torch's DDP's and
    ours, where each rank computes the mean loss of its own rows."""
    batches = ragged_batches(rows)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES)).double()
    plain, ours = copy.deepcopy(net), copy.deepcopy(net)
    ddp = nn.parallel.DistributedDataParallel(net, process_group=group)
    model = samestep.DataParallel(ours, replicas=4, process_group=group, batch="local")
    worst = {"ddp": 0.0, "ours": 0.0}
    for x, y in batches:
        own = own_rows(group, len(x), 4)
        F.cross_entropy(plain(x), y).backward()
        F.cross_entropy(ddp(x[own]), y[own]).backward()
        F.cross_entropy(model(x[own]), y[own]).backward()
        for right, theirs, mine in zip(
            plain.parameters(), net.parameters(), ours.parameters(), strict=True
        ):
            scale = float(right.grad.abs().max())
            for name, found in (("ddp", theirs), ("ours", mine)):
                off = float((found.grad - right.grad).abs().max()) / scale
                worst[name] = max(worst[name], off)
        for one in (plain, net, ours):
            one.zero_grad()
    return worst


def upstream(group, replicas=4):
    """Two wrapped models in a row, each rank with its own rows: gradients of both, and of x."""
    torch.manual_seed(1)
    first, second = nn.Linear(FEATURES, 6).double(), nn.Linear(6, 2).double()
    options = {"replicas": replicas, "process_group": group, "batch": "local"}
    one, two = (samestep.DataParallel(module, **options) for module in (first, second))
    x = torch.randn(11, FEATURES, dtype=torch.float64)
    own = own_rows(group, 11, replicas)
    mine = x[own].requires_grad_()
    (two(torch.tanh(one(mine))) ** 2).mean().backward()
    ours = [p.grad.clone() for m in (first, second) for p in m.parameters()]
    for module in (first, second):
        module.zero_grad()
    (second(torch.tanh(first(x))) ** 2).mean().backward()
    theirs = [p.grad.clone() for m in (first, second) for p in m.parameters()]
    # Of its own rows each rank has the gradient of its own loss.
    part = x[own].requires_grad_()
    (second(torch.tanh(first(part))) ** 2).mean().backward()
    off = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    return off, float((mine.grad - part.grad).abs().max())


def few_rows(group=None, rows=(8, 3, 2, 1), batch="local", replicas=4):
    """Batches so small that single rows join their neighbours, and one shard is left at last."""
    torch.manual_seed(1)
    options = {} if group is None else {"process_group": group, "batch": batch}
    net = Net(drop=0.4)
    model = samestep.DataParallel(net, replicas=replicas, **options)
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for count in rows:
        if count == 1:
            model.eval()
        x = torch.randn(count, FEATURES, generator=generator)
        y = torch.randint(0, CLASSES, (count,), generator=generator)
        own = own_rows(group, count, replicas) if options and batch == "local" else slice(None)
        loss = model(x[own], y[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return digest(losses, model.state_dict(), torch.get_rng_state())


def refuse(group, what):
    """What batch="local" cannot do."""
    options = {"replicas": 4, "process_group": group, "batch": "local"}
    x = torch.randn(3, FEATURES)
    if what == "slots":
        samestep.DataParallel(nn.Linear(2, 2), **options | {"replicas": 1})
    if what == "initialises":
        samestep.DataParallel(Initialises(), **options)(x)
    if what == "lazy":
        samestep.DataParallel(nn.LazyLinear(2), **options)(x)
    if what == "no rows":
        samestep.DataParallel(nn.Identity(), **options)(3)
    if what == "no rows anywhere":
        samestep.DataParallel(nn.Linear(FEATURES, 2), **options)(x[:0])
    if what == "second derivative":
        x.requires_grad_()
        out = samestep.DataParallel(nn.Linear(FEATURES, 2), **options)(x)
        torch.autograd.grad((out**2).sum(), x, create_graph=True)


def plain_training(steps=STEPS):
    """Twenty steps of the plain module in one process: weights."""
    torch.manual_seed(3)
    net = Net(drop=0.0).double()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    x, y = make_data(steps)
    for one, targets in zip(x.double(), y, strict=True):
        optimizer.zero_grad()
        net(one, targets).backward()
        optimizer.step()
    return {name: value.clone() for name, value in net.state_dict().items()}


def plain_deviation(group, **options):
    """How far training on ranks is from that."""
    expected = plain_training()
    _, state, _ = train(group, drop=0.0, double=True, sync_batch_norm=True, **options)
    return max(float((state[name] - expected[name]).abs().max()) for name in expected)


# -- Inference -------------------------------------------------------------------------------------


def infer(group=None, drop=0.0, sizes=(4, 3, 5, 2, 6, 1, 4), **options):
    """Outputs of a loader; and what is drawn afterwards."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(drop), nn.Linear(8, 2))
    net.train(drop > 0)
    wrapper = {} if group is None else {"process_group": group}
    model = samestep.DataParallel(net, replicas=4, **wrapper)
    generator = torch.Generator().manual_seed(2)
    loader = [torch.randn(rows, FEATURES, generator=generator) for rows in sizes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(samestep.map_batches(model, loader, **options))
    return [len(out) for out in found], digest(found, torch.get_rng_state())


def infer_and_fail(group, rows=13):
    """One batch in the middle fails."""
    model = samestep.DataParallel(Breaks().eval(), replicas=4, process_group=group)
    batches = [torch.zeros(2, FEATURES) for _ in range(9)]
    batches[4] += 1000
    seen = 0
    try:
        for _ in samestep.map_batches(model, batches):
            seen += 1
    except Exception as error:
        return seen, type(error).__name__, str(error), list(getattr(error, "__notes__", []))
    return None


# -- Backward at once ------------------------------------------------------------------------------


def input_gradients(group, replicas, eager):
    """A hash of the gradients of inputs, one cut and one whole, and of the parameters."""
    torch.manual_seed(3)
    options = {} if group is None else {"process_group": group}
    model = samestep.DataParallel(Net(), replicas=replicas, eager_backward=eager, **options)
    x, y = make_data(1)
    x = x[0].requires_grad_()
    shift = torch.zeros(FEATURES, requires_grad=True)
    model(x + shift, y[0]).backward()
    return digest(x.grad, shift.grad, *(p.grad for p in model.parameters()))


def scale_by_rank(group):
    """Each rank multiplies the loss by another number."""
    model = samestep.DataParallel(Net(), replicas=4, eager_backward=True, process_group=group)
    x, y = make_data(1)
    (model(x[0], y[0]) * (1 + find_comm(group).rank)).backward()


# -- Found by trying to break it -------------------------------------------------------------------


def strided(group=None, kind="channels last", replicas=4):
    """Sums of outputs and gradients whose strides are not those of contiguous tensors."""
    torch.manual_seed(1)
    options = {} if group is None else {"process_group": group}
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)]
    net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    recompute = kind == "one shard"
    model = samestep.DataParallel(net, replicas=replicas, recompute=recompute, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(3):
        x = torch.randn(1 if recompute else 12, 3, 17, 17, generator=generator)
        out = model(x.contiguous(memory_format=torch.channels_last))
        optimizer.zero_grad()
        ((out / out.std() - 1).abs().mean() + out.pow(2).mean().sqrt()).backward()
        size = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        found.append((out.stride(), out.sum(), out.std(), size))
    return digest(found, net.state_dict())


def unaligned(group=None, batch="global", replicas=4):
    """Rows of 20 bytes, so that most shards begin within a line of the cache."""
    torch.manual_seed(0)
    options = {} if group is None else {"process_group": group, "batch": batch}
    data = torch.utils.data.TensorDataset(torch.randn(53, 5), torch.randn(53, 1))
    model = samestep.DataParallel(Squares(), replicas=replicas, **options)
    loader = torch.utils.data.DataLoader(data, batch_size=9, shuffle=True)
    loader = samestep.split_loader(loader, model, process_group=group)
    losses = []
    for x, y in loader:
        losses.append(model(x, y))
        losses[-1].backward()
    return digest(losses, [p.grad for p in model.parameters()], torch.get_rng_state())


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, y):
        return F.mse_loss(self.net(x), y)


class Stores(nn.Module):
    """Leaves features on the module: the output itself, or another tensor."""

    def __init__(self, is_same):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3, dtype=torch.float64)
        self.is_same = is_same
        self.features = self.aux = None

    def forward(self, x):
        y = self.layer(x)
        self.features = y if self.is_same else y * 1
        self.aux = y.pow(2).mean()
        return y


def stored(group, is_same, replicas=4):
    """Deviations from the plain module where a loss is made of what forward left on the module."""
    torch.manual_seed(1)
    module = Stores(is_same)
    plain = copy.deepcopy(module)
    model = samestep.DataParallel(module, replicas=replicas, process_group=group, batch="local")
    x = torch.randn(9, FEATURES, dtype=torch.float64)
    own = own_rows(group, 9, replicas)
    (plain(x).sin().mean() + plain.features.pow(2).mean() + plain.aux).backward()
    out = model(x[own])
    assert out.shape == module.features.shape == (len(x[own]), 3)
    (out.sin().mean() + module.features.pow(2).mean() + module.aux).backward()
    return max(
        float((a.grad - b.grad).abs().max())
        for a, b in zip(module.parameters(), plain.parameters(), strict=True)
    )


class Nests(nn.Module):
    """Containers in containers, all of them written."""

    def __init__(self):
        super().__init__()
        self.nest = [{"count": 0}, [0]]

    def forward(self, x):
        self.nest[0]["count"] += 1
        self.nest[1].append(1)
        self.nest.append(2)
        return x


def nested(group=None, replicas=4):
    options = {} if group is None else {"process_group": group}
    module = Nests()
    inner = module.nest[0]
    model = samestep.DataParallel(module, replicas=replicas, **options)
    for rows in (8, 8, 2, 8, 1, 8):
        model(torch.arange(float(rows)))
    return module.nest, module.nest[0] is inner


def odd_one_out(group, what):
    """Rank 1 is unlike rank 0 in a way that no plain comparison of batches shows."""
    comm = find_comm(group)
    is_odd = comm.rank == 1
    torch.manual_seed(2)
    options = {"replicas": 4, "process_group": group}
    x = torch.randn(256, 64)
    if what == "targets":
        model = samestep.DataParallel(nn.Linear(64, 10), **options)
        y = torch.randint(10, (256,))
        y = y[torch.randperm(256)] if is_odd else y
        F.cross_entropy(model(x), y).backward()
    if what == "nan":
        model = samestep.DataParallel(nn.Linear(64, 10), **options)
        (model(x).sum() * (float("nan") if is_odd else 1.0)).backward()
    if what == "later batch":
        model = samestep.DataParallel(nn.Linear(64, 4), **options)
        for step in range(5):
            x = torch.randn(256, 64)
            x[:, 0] = 0  # as a padding or a corner pixel
            model(x.flip(0) if step == 4 and is_odd else x).sum().backward()
    if what in ("one slot", "one row"):
        replicas, rows = (1, 8) if what == "one slot" else (4, 1)
        model = samestep.DataParallel(nn.Linear(4, 4), **options | {"replicas": replicas})
        model(torch.full((rows, 4), 1.0 + is_odd)).sum().backward()
    if what in ("requires_grad", "asked for"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = samestep.DataParallel(net, **options)
        if what == "requires_grad":
            net[int(is_odd)].weight.requires_grad_(False)
            model(torch.ones(8, 4)).sum().backward()
        else:
            torch.autograd.grad(model(torch.ones(8, 4)).sum(), [net[int(is_odd)].weight])
    if what == "mode":
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        model = samestep.DataParallel(net, **options)
        model(torch.ones(8, 4))
        net[1].train(not is_odd)
        for _ in range(2):
            model(torch.ones(8, 4))
    if what in ("later mode", "later requires_grad", "later parameter"):
        # After the calls in which everything is compared.
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
        model = samestep.DataParallel(net, **options)
        for step in range(6):
            if step == 4 and is_odd:
                if what == "later mode":
                    net[1].eval()
                elif what == "later requires_grad":
                    net[0].bias.requires_grad_(False)
                else:
                    net[0].bias = nn.Parameter(net[0].bias.detach() + 1e-3)
            model(torch.ones(8, 4)).sum().backward()
    if what == "attribute":
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5 if is_odd else 0.1))
        samestep.DataParallel(net, **options)(torch.ones(8, 4))
    if what == "array":
        array = torch.full((8,), 1.0 + is_odd).numpy()
        samestep.DataParallel(TakesTwo(), **options)(torch.ones(8, 4), array)
    if what == "buffers":
        rule = "sum" if is_odd else "first"
        samestep.DataParallel(nn.BatchNorm1d(4), buffers=rule, **options)(torch.ones(8, 4))
    if what == "nothing":
        samestep.DataParallel(TakesTwo(), **options)(torch.ones(8, 4), float("nan"))
    return "no error"


class TakesTwo(nn.Module):
    def forward(self, x, other):
        return x * 2

    def extra_repr(self):
        """What is another text in every process."""
        return f"{object()}, cuda:{os.getpid()}, { {'a', 'b', 'c', 'd', 'e'} }"


def recover(group, how):
    """Rank 1 does something else for once; afterwards all go on."""
    comm = find_comm(group)
    is_odd = comm.rank == 1
    torch.manual_seed(1)
    model = samestep.DataParallel(nn.Linear(4, 2), replicas=4, process_group=group)
    x = torch.ones(8, 4)
    model(x).sum().backward()
    if how == "copy" and is_odd:
        copy.deepcopy(model)
    if how == "interrupt":
        hook = model.module.register_forward_pre_hook(interrupt if is_odd else lambda *_: None)
        try:
            model(x)
        except (KeyboardInterrupt, samestep.RankError) as error:
            kind = type(error).__name__
        assert kind == ("KeyboardInterrupt" if is_odd else "RankError")
        hook.remove()
    if how == "other method":
        with contextlib.suppress(samestep.RankError):
            model.call("forward", x) if is_odd else model(x)
    other = samestep.DataParallel(nn.Linear(4, 2), replicas=4, process_group=group)
    for one in (model, other, model):
        one(x).sum().backward()
    return digest([p.grad for p in (*model.parameters(), *other.parameters())])


def interrupt(*_):
    raise KeyboardInterrupt


def start_apart(group):
    """Each rank with random numbers and weights of its own, until the wrapper is made."""
    rank = find_comm(group).rank
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))
    net[1].running_mean.fill_(rank)
    kept = net[0].weight
    samestep.DataParallel(net, replicas=4, process_group=group)
    assert net[0].weight is kept
    drawn = [torch.rand(2), random.random(), float(numpy.random.rand())]
    return digest(net.state_dict()), digest(drawn)


def speak(group, sizes):
    """Messages of several lengths; which line they took, and whether all came."""
    comm = find_comm(group)
    for number, size in enumerate(sizes):
        own = os.urandom(size - 1) + bytes([comm.rank])
        told = comm.exchange(f"message {number}", own)
        assert told[comm.rank] == own
        assert [(len(one), one[-1]) for one in told] == [(size, r) for r in range(comm.num_ranks)]
    return type(comm._wires).__name__


def speak_without_sockets(group):
    """As where rank 1 may not reach the others' sockets."""
    connect = wires.Wires.connect
    if os.environ["IS_ODD"] == "1" and torch.distributed.get_rank(group) == 1:
        wires.Wires.connect = stay_out
    try:
        return speak(group, [10, 100_000])
    finally:
        wires.Wires.connect = connect


def stay_out(*_):
    raise ConnectionRefusedError("not here")


def interrupted(group):
    """Rank 1 gets Ctrl-C while it waits for rank 0; how long it waited, and what came after."""
    comm = find_comm(group)
    seconds = 0.0
    if comm.rank == 1:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        start = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):
            comm.exchange("waiting", "never heard")
        seconds = time.monotonic() - start
        signal.signal(signal.SIGALRM, before)
    else:
        time.sleep(1.0)
        assert comm.exchange("waiting", comm.rank)[1] == "never heard"
    found = [comm.exchange(f"after {n}", (n, comm.rank)) for n in range(3)]
    assert found == [[(n, r) for r in range(comm.num_ranks)] for n in range(3)]
    return seconds


def children_end(group):
    """A forked child of rank 1 takes its copy of everything down; rank 1 itself goes on."""
    comm = find_comm(group)
    comm.exchange("all are here", None)
    if comm.rank == 1:
        child = os.fork()
        if child == 0:
            comm._wires.close()
            os._exit(0)
        os.waitpid(child, 0)
    return comm.exchange("go on", comm.rank)


def wait_in_vain(comm):
    """Wait for a rank that does not answer: for how long, and what is said of it."""
    start = time.monotonic()
    try:
        comm.exchange("waiting", None)
    except samestep.RankError as error:
        return time.monotonic() - start, str(error)
    return None


def orphan(group):
    """Rank 1 dies, but a child that it forked has its sockets; what the others see, and when."""
    comm = find_comm(group)
    comm.exchange("all are here", None)
    if comm.rank == 1:
        if os.fork() == 0:
            kept = {one.fileno() for one in comm._wires._sockets.values()}
            for descriptor in set(range(3, 256)) - kept:  # the test's own pipe among them
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            time.sleep(8)
        os._exit(9)
    return wait_in_vain(comm)


class Double(nn.Module):
    def forward(self, x):
        return x.double()


class Square(nn.Module):
    def forward(self, x):
        return x.square().mean()


def large_gradients(group=None, *, batch="global", steps=4):
    """Gradients of some megabytes: added by slices. One of them is kept, one accumulates."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(4, 700), nn.Linear(700, 1200), Double(), nn.Linear(1200, 3).double()
    )
    net.append(Square())
    options = {} if group is None else {"process_group": group, "batch": batch}
    model = samestep.DataParallel(net, replicas=5, **options)
    x = torch.randn(steps, 11, 4)
    rows = slice(None) if batch == "global" else own_rows(group, 11, 5)
    kept, found = [], []
    for step in range(steps):
        model(x[step, rows]).backward()
        kept.append(net[1].weight.grad)
        found.append(digest(net[1].weight.grad))
        net[1].zero_grad()
    assert found == [digest(one) for one in kept]  # nobody wrote over what is still in use
    return digest(kept, [p.grad for p in net.parameters()])


class Gappy(nn.Module):
    """Its gradients are expanded, transposed, or have gaps: not as contiguous as their sum."""

    def __init__(self):
        super().__init__()
        self.wide, self.tall, self.part = (nn.Parameter(torch.randn(6, 4)) for _ in range(3))

    def forward(self, x):
        return (
            x @ self.wide.sum(0) + (x @ self.tall.T).sum(1) + x[:, :2] @ self.part[:2, ::2].sum(0)
        )


def gappy_gradients(group=None, batch="global"):
    torch.manual_seed(2)
    net = Gappy()
    options = {} if group is None else {"process_group": group, "batch": batch}
    replicas = 2 if group is None else find_comm(group).num_ranks
    model = samestep.DataParallel(net, replicas=replicas, **options)
    x = torch.randn(8, 4)
    rows = slice(None) if group is None or batch == "global" else own_rows(group, 8, replicas)
    model(x[rows]).square().mean().backward()
    return digest([p.grad for p in net.parameters()])


def call_in_a_child(group):
    """Rank 1 forks a child that calls the wrapper; then all go on."""
    torch.manual_seed(0)
    model = samestep.DataParallel(nn.Linear(4, 2), replicas=2, process_group=group)
    x = torch.randn(4, 4)
    first = model(x)
    said = b""
    if find_comm(group).rank == 1:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                model(x)
            except samestep.RankError as error:
                os.write(theirs, str(error).encode())
            os._exit(0)
        os.close(theirs)
        said = os.read(ours, 1000)
        os.close(ours)
        os.waitpid(child, 0)
    return said.decode(), torch.equal(model(x), first)


def stopped_host(group):
    """Rank 0, whose process has the store, stops for a while; how long rank 1 waits."""
    comm = find_comm(group)
    comm.exchange("all are here", None)
    if comm.rank == 0:
        starter = os.getpid()
        if os.fork() == 0:
            time.sleep(12)
            os.kill(starter, signal.SIGCONT)
            os._exit(0)
        os.kill(starter, signal.SIGSTOP)
        os.wait()
    return wait_in_vain(comm)


def with_a_default_device(group, batch):
    """Steps under a default device on which nothing of ours may lie."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 400), nn.Dropout(), nn.Linear(400, 400))  # sums in slices, too
    model = samestep.DataParallel(net, replicas=4, process_group=group, batch=batch)
    x = torch.randn(3, 5)
    with torch.device("meta"):
        for _ in range(2):
            model(x).sum().backward()
    return digest([parameter.grad for parameter in net.parameters()], torch.get_rng_state())
