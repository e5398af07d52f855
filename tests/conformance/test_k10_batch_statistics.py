"""K10. BatchNorm: running statistics, and what each shard is normalised by."""

import pytest
import torch
from compare import assert_same, check_same, rows, twin
from reports import beyond, report
from torch import nn

from samestep import DataParallel


@report("P70", "pytorch/pytorch#1051")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("num_rows", [8, 11])
def test_running_statistics_are_the_whole_batchs(momentum, num_rows):
    module = nn.BatchNorm1d(3, momentum=momentum).double()
    plain = twin(module)
    model = DataParallel(module, replicas=2)
    for _ in range(3):
        x = rows(num_rows, 3) * 2 + 5
        model(x)
        plain(x)
        assert_same(dict(module.state_dict()), dict(plain.state_dict()))
    module.eval()
    plain.eval()
    check_same(module, rows(num_rows, 3), plain=plain)


@report("P71", "pytorch/pytorch#24391")
def test_each_shard_is_normalised_by_its_own_rows_unless_synchronised():
    module = nn.BatchNorm1d(3).double()
    plain = twin(module)
    x = rows(8, 3)
    expected = torch.cat([twin(plain)(part) for part in x.split(4)])
    torch.testing.assert_close(DataParallel(module, replicas=2)(x), expected)
    synced = twin(plain)
    torch.testing.assert_close(
        DataParallel(synced, replicas=2, sync_batch_norm=True)(x), twin(plain)(x)
    )


def make_network(norm, conv, num_dims):
    kernel = {"kernel_size": 1}
    return nn.Sequential(
        conv(3, 4, **(kernel if num_dims else {})), norm(4), nn.Tanh(), norm(4, affine=False)
    ).double()


@report("P72", "pytorch/pytorch#38940", "pytorch/pytorch#2584", "pytorch/pytorch#12198")
@pytest.mark.parametrize(
    ("norm", "conv", "num_dims"),
    [
        (nn.BatchNorm1d, nn.Linear, 0),
        (nn.BatchNorm1d, nn.Conv1d, 1),
        (nn.BatchNorm2d, nn.Conv2d, 2),
        (nn.BatchNorm3d, nn.Conv3d, 3),
    ],
)
@pytest.mark.parametrize("num_replicas", [2, 5])
def test_synchronised_batchnorm_is_the_plain_one_forward_and_backward(
    norm, conv, num_dims, num_replicas
):
    module = make_network(norm, conv, num_dims)
    x = rows(11, 3, *(2,) * num_dims, grad=True)
    check_same(module, x, replicas=num_replicas, num_calls=2, options={"sync_batch_norm": True})


@report("P72", "pytorch/pytorch#38940")
def test_a_converted_sync_batchnorm_runs_on_cpu_replicas():
    plain = make_network(nn.BatchNorm2d, nn.Conv2d, 2)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(twin(plain))
    x = rows(11, 3, 2, 2, grad=True)
    check_same(module, x, plain=plain, options={"sync_batch_norm": True})


@beyond("K10")
def test_second_derivatives_through_synchronised_batchnorm():
    module = make_network(nn.BatchNorm1d, nn.Linear, 0)
    plain = twin(module)
    model = DataParallel(module, replicas=3, sync_batch_norm=True)
    x = rows(11, 3, grad=True)

    def penalty_gradients(net):
        (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, *net.parameters()])

    for one, other in zip(penalty_gradients(model), penalty_gradients(plain), strict=True):
        torch.testing.assert_close(one, other)


@beyond("K10")
def test_a_norm_called_twice_and_one_without_tracking():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()
            self.untracked = nn.BatchNorm1d(3, track_running_stats=False).double()

        def forward(self, x):
            return self.untracked(self.norm(self.norm(x) * 2 + 1))

    check_same(Twice(), rows(11, 3, grad=True), options={"sync_batch_norm": True}, num_calls=2)
    module = Twice()
    plain = twin(module)
    x = rows(8, 3)
    DataParallel(module, replicas=2)(x)
    # The second call sees what the first made of its own shard, so only the first is the plain one.
    plain.norm(x)
    assert module.norm.num_batches_tracked == 2


@beyond("K10")
def test_a_frozen_norm_and_instance_and_group_norm_do_not_mix_rows():
    net = nn.Sequential(
        nn.BatchNorm2d(4).eval(), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm(2)
    ).double()
    check_same(net, rows(7, 4, 2, 2, grad=True))
    tracked = nn.InstanceNorm2d(4, track_running_stats=True).double()
    check_same(tracked, rows(8, 4, 2, 2), replicas=2)


@beyond("K10")
def test_a_gradient_that_reaches_some_shards_only_passes_through_a_synchronised_norm():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.BatchNorm1d(3).double()
            self.b = nn.BatchNorm1d(3).double()

        def forward(self, x):
            return self.a(x), self.b(2 * x)

    module = Two()
    plain = twin(module)
    model = DataParallel(module, replicas=3, sync_batch_norm=True)
    gradients = []
    x = rows(9, 3, grad=True)
    for net in (model, plain):
        first, second = net(x)
        (first[:2].square().sum() + second[7, 0]).backward()
        gradients.append(x.grad)
        x.grad = None
    torch.testing.assert_close(*gradients)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
