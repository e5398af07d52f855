"""What only an accelerator can show: several slots on one, copies on another, streams, autocast.

One device is enough for all but the tests that say otherwise. ``pytest tests/gpu`` runs them.
"""

import copy

import pytest
import torch
from torch import nn

from samestep import DataParallel, all_reduce, current_shard, load, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="torch sees no accelerator on this machine"
    ),
]


def device(index=0):
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type, index)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)
    ).double()


def take_steps(model, where, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(7, 3, 8, 8, dtype=torch.float64, generator=generator).to(where)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


@pytest.mark.parametrize("num_slots", [2, 3])
def test_several_slots_on_one_device_train_as_the_plain_module(num_slots):
    net = make_net().to(device())
    plain = copy.deepcopy(net)
    model = DataParallel(net, device_ids=[0] * num_slots, sync_batch_norm=True)
    torch.testing.assert_close(take_steps(model, device()), take_steps(plain, device()))
    for one, other in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


def test_slots_of_two_kinds_hold_copies_that_follow_the_source():
    net = make_net()
    plain = copy.deepcopy(net)
    model = DataParallel(net, device_ids=["cpu", device()], sync_batch_norm=True)
    torch.testing.assert_close(take_steps(model, "cpu"), take_steps(plain, "cpu"))
    assert all(p.grad.device.type == "cpu" for p in net.parameters())


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_two_devices_train_as_one():
    net = make_net().to(device())
    plain = copy.deepcopy(net)
    model = DataParallel(net, device_ids=[0, 1], sync_batch_norm=True)
    torch.testing.assert_close(take_steps(model, device()), take_steps(plain, device()))


def test_dropout_is_ruled_by_the_callers_seed_and_differs_between_shards():
    model = DataParallel(nn.Dropout(0.5).to(device()), device_ids=[0, 0])
    x = torch.ones(8, 64, device=device())
    torch.manual_seed(3)
    first = model(x)
    torch.manual_seed(3)
    assert torch.equal(first, model(x))
    assert not torch.equal(first[:4], first[4:])


def test_inputs_on_the_cpu_are_moved_and_outputs_land_where_asked():
    net = nn.Linear(3, 2).to(device())
    model = DataParallel(net, device_ids=[0, 0], output_device="cpu")
    assert model(torch.randn(5, 3)).device.type == "cpu"
    single = DataParallel(net, device_ids=[0])
    assert single(torch.randn(5, 3)).device == device()


def test_autocast_and_stream_of_the_caller_hold_in_every_shard():
    seen = []

    class Look(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            seen.append(torch.accelerator.current_stream())
            return self.fc(x)

    model = DataParallel(Look().to(device()), device_ids=[0, 0])
    stream = torch.Stream(device())
    with stream, torch.autocast(device().type, dtype=torch.bfloat16):
        out = model(torch.randn(4, 3, device=device()))
    assert out.dtype == torch.bfloat16
    assert set(seen) == {stream}


def test_a_module_moved_between_calls_is_followed():
    model = DataParallel(nn.Linear(3, 2), device_ids=[0, 0])
    x = torch.randn(4, 3)
    before = model(x).cpu()
    model.to(device())
    torch.testing.assert_close(model(x.to(device())).cpu(), before)


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_opens_without_an_accelerator_and_goes_on_with_one(tmp_path, background):
    path, model = tmp_path / "last.pt", make_net().to(device())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3, 8, 8, dtype=torch.float64, device=device())).sum().backward()
    optimizer.step()
    pending = save(path, model=model, optimizer=optimizer, background=background)
    expected = [value.cpu() for value in model.state_dict().values()]
    numbers = torch.rand(3, device=device())
    if pending is not None:
        pending.wait()
    found = torch.load(path, weights_only=True)["objects"]["model"].values()
    assert all(map(torch.equal, found, expected))
    other = make_net().to(device())
    load(path, model=other, optimizer=torch.optim.Adam(other.parameters()))
    assert all(map(torch.equal, other.cpu().state_dict().values(), expected))
    assert torch.equal(torch.rand(3, device=device()), numbers)


def test_a_shards_backward_runs_in_the_shards_own_thread():
    seen = []

    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            y = self.layer(x)
            y.register_hook(lambda gradient: seen.append(current_shard()))
            return y

    model = DataParallel(Noted().to(device()), device_ids=[0, 0])
    model(torch.randn(4, 3, device=device())).sum().backward()
    assert sorted(shard.index for shard in seen) == [0, 1]


@pytest.mark.parametrize("recompute", [False, True])
def test_shards_that_meet_in_backward_do_not_wait_for_ever(recompute):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            y = self.layer(x)
            return y - all_reduce(y.sum(0)) / 4

    net = Centred().to(device())
    model = DataParallel(net, device_ids=[0, 0], recompute=recompute)
    x = torch.randn(4, 3, device=device(), requires_grad=True)
    model(x).square().sum().backward()
    plain = net.layer(x.detach())
    plain = (plain - plain.mean(0)).square().sum()
    expected = torch.autograd.grad(plain, net.layer.weight)[0]
    torch.testing.assert_close(net.layer.weight.grad, expected)
