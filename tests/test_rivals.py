"""Agreement with other ways to do the same: a loop written out by hand, and torch's own DDP."""

import copy
import multiprocessing
import os
import socket

import pytest
import torch
import torch.distributed as dist
from helpers import ATOL, assert_alike, score
from models import CASES, make_batch, make_model, normal
from torch import nn

from samestep import DataParallel

STEPS = 4


def written_out_step(module, x, sizes):
    """Data parallelism by hand: run each piece, put the outputs together, walk the one graph."""
    return torch.cat([module(piece) for piece in x.split(sizes)])


@pytest.mark.parametrize(("num_replicas", "sizes"), [(2, [4, 3]), (3, [3, 3, 1]), (7, [1] * 7)])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_step_is_that_of_the_loop_written_out(name, num_replicas, sizes):
    module = make_model(name)
    twin = copy.deepcopy(module)
    model = DataParallel(module, replicas=num_replicas)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, twin)]
    for step in range(STEPS):
        _, _, (x,) = make_batch(name, 7)
        outputs = model(x), written_out_step(twin, x, sizes)
        # At first the very same operations on the very same numbers; gradients are then added in
        # another order by the loop.
        assert_alike(*outputs, atol=ATOL if step else 0)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            score(output).backward()
            optimizer.step()
    assert_alike(dict(model.state_dict()), dict(twin.state_dict()))


def test_batch_statistics_normalise_as_the_loop_does():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    twin, x = copy.deepcopy(module), normal(8, 3)
    output = DataParallel(module, replicas=4)(x)
    assert torch.equal(output, written_out_step(twin, x, [2] * 4))


@pytest.mark.parametrize("num_replicas", [5, 8])
def test_gradients_are_added_in_the_tree_and_not_from_left_to_right(num_replicas):
    module = nn.Linear(3, 2, bias=False)
    x = torch.randn(8 * num_replicas, 3) * 10.0 ** torch.randint(-3, 4, (8 * num_replicas, 1))
    twin = copy.deepcopy(module)
    DataParallel(module, replicas=num_replicas)(x).pow(2).sum().backward()
    parts = []
    for piece in x.split(8):
        twin.zero_grad()
        twin(piece).pow(2).sum().backward()
        parts.append(twin.weight.grad.clone())
    if num_replicas == 5:
        tree = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    else:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        tree = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    assert torch.equal(module.weight.grad, tree)


# --------------------------------------------------------------------------------------------------
# torch.nn.parallel.DistributedDataParallel
# --------------------------------------------------------------------------------------------------


def find_free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def make_pair(name):
    """A module and the batches of a short training, the same in every process."""
    torch.manual_seed(11)
    module = make_model(name)
    return module, [CASES[name].make_batch(8)[2][0].detach() for _ in range(STEPS)]


def train(module, batches, optimizer):
    """A mean loss over rows, so that averaging over ranks and summing over shards agree."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def run_rank(rank, port, name, results):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    module, batches = make_pair(name)
    wrapped = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    mine = [batch.chunk(2)[rank] for batch in batches]
    losses = torch.stack(train(wrapped, mine, optimizer))
    dist.all_reduce(losses)
    if rank == 0:
        # Plain lists: tensors would be passed as shared memory of a process that ends.
        state = {key: value.tolist() for key, value in module.state_dict().items()}
        results.put(((losses / 2).tolist(), state))
    results.close()
    results.join_thread()
    dist.barrier()
    dist.destroy_process_group()
    # All is done. Now and then torch's threads abort a process that takes its interpreter down
    # (seen in one of twenty: "terminate called without an active exception").
    os._exit(0)


@pytest.mark.spmd
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_training_is_that_of_ddp_on_two_ranks(name):
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), find_free_port()
    ranks = [context.Process(target=run_rank, args=(k, port, name, results)) for k in range(2)]
    for rank in ranks:
        rank.start()
    losses, state = results.get(timeout=120)
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    results.close()
    results.join_thread()

    module, batches = make_pair(name)
    model = DataParallel(module, replicas=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = train(model, batches, optimizer)
    assert_alike(torch.stack(found), torch.tensor(losses, dtype=torch.float64))
    expected = {key: torch.tensor(value, dtype=torch.float64) for key, value in state.items()}
    assert_alike(dict(model.state_dict()), expected)
