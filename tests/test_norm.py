"""Batch statistics: pooled into the source's as if one forward had seen the whole batch."""

import copy

import pytest
import torch
from helpers import assert_alike, score, train_step
from models import normal
from torch import nn

from samestep import DataParallel
from samestep.norm import CallStatistics, NormRecord, has_batch_norm, merge_statistics

KINDS = {
    "1d": (lambda **o: nn.BatchNorm1d(3, **o), (3,)),
    "1d in time": (lambda **o: nn.BatchNorm1d(3, **o), (3, 4)),
    "2d": (lambda **o: nn.BatchNorm2d(3, **o), (3, 2, 2)),
    "3d": (lambda **o: nn.BatchNorm3d(3, **o), (3, 2, 1, 2)),
}


def make(kind="1d", **options):
    module = KINDS[kind][0](**options).double()
    if module.weight is not None:
        with torch.no_grad():
            module.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
            module.bias.copy_(torch.tensor([1.0, 0.0, 3.0]))
    return module


def rows(num_rows, kind="1d"):
    x = normal(num_rows, *KINDS[kind][1], grad=False)
    # Shards whose means lie far apart: an average of variances would be far off.
    return (x + 10 * torch.arange(num_rows).view(-1, *[1] * (x.dim() - 1))).requires_grad_()


def statistics(module):
    return dict(module.named_buffers())


# --------------------------------------------------------------------------------------------------
# Pooling
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 0.7, 1.0, None])
@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_are_those_of_the_whole_batch(kind, momentum):
    plain = make(kind, momentum=momentum)
    model = DataParallel(copy.deepcopy(plain), replicas=3)
    for num_rows in (9, 11, 6, 17):
        x = rows(num_rows, kind)
        plain(x)
        model(x)
        assert_alike(statistics(model.module), statistics(plain))


def test_statistics_of_a_mixed_precision_module_are_the_plain_ones():
    plain = nn.BatchNorm1d(3)
    model = DataParallel(copy.deepcopy(plain), replicas=4)
    x = rows(17).detach().float()
    plain(x)
    model(x)
    assert_alike(statistics(model.module), statistics(plain), atol=2e-4)  # float32, values to 1e4


def test_a_module_called_twice_in_one_forward_is_pooled_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = make()

        def forward(self, x):
            return self.norm(x) + self.norm(x * 3)

    plain = Twice()
    model = DataParallel(copy.deepcopy(plain), replicas=3)
    for _ in range(3):
        x = rows(9)
        plain(x)
        model(x)
    assert_alike(statistics(model.module), statistics(plain))
    assert plain.norm.num_batches_tracked == 6


def test_normalising_itself_is_per_shard_without_synchronisation():
    plain, x = make(), rows(9)
    out = DataParallel(plain, replicas=3)(x)
    pieces = torch.cat([copy.deepcopy(plain)(piece) for piece in x.split(3)])
    assert_alike(out, pieces)
    assert not torch.allclose(out, copy.deepcopy(plain)(x))


def test_evaluation_changes_nothing_and_is_exact():
    plain = make().eval()
    model, before = DataParallel(plain, replicas=3), copy.deepcopy(statistics(plain))
    x = rows(7)
    assert torch.equal(model(x), plain(x))
    assert_alike(statistics(plain), before, atol=0)


def test_the_first_evaluation_after_training_uses_the_new_statistics():
    plain = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), make())
    model, x = DataParallel(plain, replicas=3), rows(7)
    for _ in range(3):
        model.train()
        model(rows(9)).sum().backward()
        model.eval()
        assert_alike(model(x), plain(x))


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"affine": False}])
def test_modules_without_statistics_or_weights_run(options):
    plain = make(**options)
    model = DataParallel(copy.deepcopy(plain), replicas=3)
    x = rows(9)
    plain(x)
    model(x)
    assert_alike(statistics(model.module), statistics(plain))


def test_a_last_shard_of_one_row_joins_its_neighbour():
    plain = make()
    model = DataParallel(copy.deepcopy(plain), replicas=3)
    x = rows(7)  # 3, 3 and 1
    model(x)
    plain(x)
    assert_alike(statistics(model.module), statistics(plain))
    assert model.num_batches_tracked == 1


def test_one_row_in_all_is_refused_as_by_the_plain_module():
    errors = []
    for one in (make(), DataParallel(make(), replicas=3)):
        with pytest.raises(ValueError, match="more than 1 value per channel") as info:
            one(rows(1))
        errors.append(str(info.value))
    assert errors[0] == errors[1]


def test_an_error_of_the_same_kind_elsewhere_is_not_swallowed():
    class Refuses(nn.Module):
        calls = 0

        def forward(self, x):
            Refuses.calls += 1
            raise ValueError("more than 1 value per channel, says somebody else")

    with pytest.raises(ValueError, match="says somebody else"):
        DataParallel(Refuses(), replicas=3)(rows(7))
    assert Refuses.calls <= 5  # three shards, then two


# --------------------------------------------------------------------------------------------------
# Synchronised
# --------------------------------------------------------------------------------------------------


class Synchronised(nn.Module):
    def __init__(self, kind="2d"):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 1)
        self.norm = make(kind)
        self.second = nn.Conv2d(3, 3, 1)
        self.again = make(kind)

    def forward(self, x):
        return self.again(self.second(self.norm(self.first(x)).relu()))


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_a_synchronised_step_is_the_plain_modules_step(num_replicas):
    plain = Synchronised().double()
    model = DataParallel(copy.deepcopy(plain), replicas=num_replicas, sync_batch_norm=True)
    for num_rows in (8, 5, 3, 17):
        x = normal(num_rows, 2, 2, 2)
        steps = []
        for one in (plain, model):
            x.grad = None
            steps.append(train_step(one, (x,), {}, [x]))
        assert_alike(*steps)
        assert_alike(statistics(model.module), statistics(plain))


def test_synchronised_shards_of_one_row_are_fine():
    plain, x = make(), rows(3)
    model = DataParallel(copy.deepcopy(plain), replicas=3, sync_batch_norm=True)
    assert_alike(model(x), plain(x))


def test_synchronised_second_derivatives_are_the_plain_ones():
    plain, found = make(), []
    for one in (plain, DataParallel(copy.deepcopy(plain), replicas=3, sync_batch_norm=True)):
        torch.manual_seed(4)
        x = normal(6, 3)
        wanted = [x, *one.parameters()]
        first = torch.autograd.grad(score(one(x).tanh()), wanted, create_graph=True)
        found.append((first, torch.autograd.grad(score(first), wanted)))
    assert_alike(*found)


def test_gradcheck_of_synchronised_shards():
    model = DataParallel(make(), replicas=2, sync_batch_norm=True)
    assert torch.autograd.gradcheck(model, (normal(5, 3),))


def test_serial_running_synchronises_with_the_same_bits(monkeypatch):
    x, found = rows(9), []
    for serial in ("0", "1"):
        monkeypatch.setenv("SAMESTEP_SERIAL", serial)
        model = DataParallel(make(), replicas=4, sync_batch_norm=True)
        found.append((model(x), statistics(model.module)))
    assert_alike(*found, atol=0)


def test_synchronised_evaluation_uses_the_running_statistics():
    plain, x = make().eval(), rows(7)
    assert torch.equal(DataParallel(plain, replicas=3, sync_batch_norm=True)(x), plain(x))


def test_a_wrong_number_of_dims_is_refused_when_synchronised_too():
    model = DataParallel(make("2d"), replicas=2, sync_batch_norm=True)
    with pytest.raises(ValueError, match="expected 4D input"):
        model(rows(6))


# --------------------------------------------------------------------------------------------------
# The formulas
# --------------------------------------------------------------------------------------------------


def make_record(module, *pieces, factor=0.1):
    calls, before = [], torch.stack([module.running_mean, module.running_var])
    for piece in pieces:
        seen = torch.stack([piece.mean(0), piece.var(0)])
        after = (1 - factor) * before + factor * seen
        calls.append(CallStatistics(len(piece), factor, before, after))
        before = after
    return NormRecord(module, 0, calls)


def find_merged(module, merged):
    """By name, the new values of a module's buffers."""
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    return {names[id(buffer)]: value for buffer, value in merged if id(buffer) in names}


def test_pooling_two_unequal_shards_by_hand():
    module, x = make(), rows(5).detach()
    shards = [make_record(module, x[:4]), make_record(module, x[4:].repeat(2, 1))]
    merged = find_merged(module, merge_statistics([shards]))
    whole = torch.cat([x, x[4:]])
    torch.testing.assert_close(merged["running_mean"], 0.1 * whole.mean(0))
    torch.testing.assert_close(merged["running_var"], 0.9 + 0.1 * whole.var(0))
    assert merged["num_batches_tracked"] == 1
    assert module.num_batches_tracked == 0  # nothing is written here


def test_modules_pooled_together_get_the_bits_of_each_by_itself():
    """Of other sizes, calls, factors and rows per shard, in any order."""
    torch.manual_seed(0)
    shapes = [(3, (4, 2), 0.1, 1), (5, (4, 2), 0.1, 1), (2, (4, 2), 0.3, 1), (4, (3, 3), 0.1, 1)]
    shapes += [(3, (4, 2), 0.1, 2), (6, (4, 2), 0.1, 2)]
    modules, shards = [], []
    for num_channels, sizes, factor, num_calls in shapes:
        module = nn.BatchNorm1d(num_channels)
        module.running_mean.normal_()
        modules.append(module)
        pieces = [[torch.randn(size, num_channels) for _ in range(num_calls)] for size in sizes]
        shards.append([make_record(module, *each, factor=factor) for each in pieces])
    together = merge_statistics(shards)
    assert len(together) == 3 * len(modules)
    for module, own in zip(modules, shards, strict=True):
        by_itself = find_merged(module, merge_statistics([own]))
        found = find_merged(module, together)
        assert found.keys() == {"running_mean", "running_var", "num_batches_tracked"}
        for name, value in found.items():
            assert torch.equal(value, by_itself[name]), name
            assert value.dtype == getattr(module, name).dtype


def test_shards_that_called_it_unequally_often_are_not_pooled():
    module, x = make(), rows(6).detach()
    unequal = [make_record(module, x[:3], x[:3]), make_record(module, x[3:])]
    uncalled = [NormRecord(module, 0), NormRecord(module, 0)]
    assert merge_statistics([unequal, uncalled]) == []
    assert len(merge_statistics([unequal, [make_record(module, x)], uncalled])) == 3


def test_modules_that_normalise_a_batch_are_known():
    assert has_batch_norm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert has_batch_norm(nn.SyncBatchNorm(2))
    assert not has_batch_norm(nn.Sequential(nn.LayerNorm(2), nn.GroupNorm(1, 2)))
