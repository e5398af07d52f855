"""What ranks run in tests: see :mod:`spmd`. The same functions run in the test's own process."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

import samestep
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


def train_hash(group, options):
    return train(group, **options)[0]


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
