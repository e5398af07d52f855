"""Gradients are added in place where nobody else has their memory, and nowhere else."""

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from samestep import DataParallel, reduce
from samestep.holders import _count_of_sole, find_sole
from samestep.reduce import absorb, sum_lists, sum_slices

SIZE = 256  # of a square matrix that is worth asking for


def is_sole(values, index):
    return find_sole(values, [index]) == [index]


def make_pair():
    return [torch.randn(SIZE, SIZE)], [torch.randn(SIZE, SIZE)]


def differentiate_linear():
    """The gradient of a linear layer's weight: a view of what was computed."""
    layer = nn.Linear(SIZE, SIZE, bias=False)
    loss = layer(torch.randn(3, SIZE)).square().sum()
    return list(torch.autograd.grad(loss, [layer.weight]))


@pytest.mark.parametrize("make", [lambda: [torch.ones(3)], differentiate_linear])
def test_what_a_list_alone_holds_is_sole(make):
    values = make()
    assert is_sole(values, 0)
    held = values[0]
    assert not is_sole(values, 0)
    del held
    assert is_sole(values, 0)
    twice = [values[0]]
    assert not is_sole(twice, 0)


@pytest.mark.parametrize(
    "hold",
    [
        torch.Tensor.detach,
        lambda tensor: tensor.view(-1),
        lambda tensor: tensor[0],
        lambda tensor: tensor._base,
        torch.Tensor.untyped_storage,
        torch.Tensor.numpy,
        lambda tensor: lambda: tensor,
    ],
)
def test_memory_that_is_seen_in_another_way_is_not_sole(hold):
    values = differentiate_linear()
    held = hold(values[0])
    assert not is_sole(values, 0)
    del held
    # Memory that numpy had once is not resized any more, and so nobody is sure of it.
    assert is_sole(values, 0) is (hold is not torch.Tensor.numpy)


def test_what_only_a_graph_holds_is_not_sole():
    scale = torch.ones(3, requires_grad=True)
    values = [torch.full((3,), 2.0)]
    product = scale * values[0]  # keeps it for its backward
    assert not is_sole(values, 0)
    del product
    assert is_sole(values, 0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        nn.Parameter(torch.ones(2)),
        torch.eye(2).to_sparse(),
        torch.ones(2, requires_grad=True),
    ],
)
def test_what_is_no_plain_gradient_is_not_sole(value):
    assert not is_sole([value], 0)


def test_a_sum_takes_the_memory_that_is_free():
    left, right = make_pair()
    expected, place = left[0] + right[0], left[0].data_ptr()
    total = absorb(left, right)
    assert torch.equal(total[0], expected)
    assert total[0].data_ptr() == place


def test_a_sum_of_many_that_are_not_small_takes_their_memory_and_one_of_little_does_not():
    def find_places(count, size):
        left, right = ([torch.randn(size) for _ in range(count)] for _ in range(2))
        expected, places = sum_lists(left, right), [value.data_ptr() for value in left]
        total = absorb(left, right)
        assert all(map(torch.equal, total, expected))
        return [value.data_ptr() for value in total] == places

    assert find_places(40, 3500)  # 14 KB each: together 560 KB
    assert not find_places(10, 3500)
    assert not find_places(400, 350)  # asking takes longer than memory


def test_a_sum_leaves_memory_that_is_held():
    left, right = make_pair()
    held, before = left[0], left[0].clone()
    total = absorb(left, right)
    assert torch.equal(total[0], before + right[0])
    assert torch.equal(held, before)


def test_a_sum_of_free_held_missing_and_small_entries():
    generator = torch.Generator().manual_seed(0)
    shapes = [(SIZE, SIZE), (SIZE, SIZE), (3,), (SIZE, SIZE), (SIZE, SIZE), (SIZE, SIZE)]
    left, right = ([torch.randn(s, generator=generator) for s in shapes] for _ in range(2))
    left[1] = left[1].t()  # not laid out as the other
    left[3] = right[4] = None
    right[5] = torch.randn(1, SIZE, generator=generator).expand(SIZE, SIZE)
    held = left[0]
    kept = held.clone()
    expected = sum_lists(left, right)
    found = absorb(left, right)
    assert torch.equal(held, kept)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("is_held", [False, True])
def test_slices_take_the_memory_that_is_free(count, is_held):
    generator = torch.Generator().manual_seed(count)
    lists = [[torch.randn(SIZE, SIZE, generator=generator)] for _ in range(count)]
    expected = reduce.tree_sum([row[0] for row in lists])
    held = lists[0][0] if is_held else None
    before, place = lists[0][0].clone(), lists[0][0].data_ptr()
    parts = {(0, k): row for k, row in enumerate(lists)}
    found = sum_slices(count, parts, 3, lambda jobs: [job() for job in jobs])
    ((total,),) = found.values()
    assert torch.equal(total, expected)
    assert (total.data_ptr() == place) is not is_held
    if is_held:
        assert torch.equal(held, before)


# ---------------------------------------------------------------------------
# In a step
# ---------------------------------------------------------------------------


class Keeping(torch.autograd.Function):
    """Its backward keeps the gradient that it returns."""

    @staticmethod
    def forward(ctx, weight, rows, kept):
        ctx.save_for_backward(rows)
        ctx.kept = kept
        return rows @ weight

    @staticmethod
    def backward(ctx, gradient):
        (rows,) = ctx.saved_tensors
        found = rows.t() @ gradient
        ctx.kept.append(found)
        return found, None, None


class Common(nn.Module):
    """Two parameters that have one gradient, and one whose gradient is kept."""

    def __init__(self, kept):
        super().__init__()
        self.one, self.two, self.three = (
            nn.Parameter(torch.randn(SIZE, SIZE) / SIZE) for _ in range(3)
        )
        self.keep = kept.append

    def forward(self, rows):
        hidden = (rows @ (self.one + self.two)).tanh()
        found = []
        output = Keeping.apply(self.three, hidden, found)
        self.keep(found)
        return output.square().mean()


@pytest.mark.parametrize("options", [{}, {"eager_backward": True}, {"recompute": True}])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_gradients_that_somebody_keeps_stay_what_they_are(options, workers):
    torch.manual_seed(0)
    kept = []
    model = DataParallel(Common(kept), replicas=4, workers=workers, **options)
    rows = torch.randn(8, SIZE)
    for _ in range(2):  # the first call is watched
        kept.clear()
        model.zero_grad()
        model(rows).backward()
    plain_kept = []
    plain = Common(plain_kept)
    plain.load_state_dict(model.state_dict())
    plain(rows).backward()
    found = [tensor for per_shard in kept for tensor in per_shard]
    assert len(found) == 4
    # float32: the same products, added in another order
    torch.testing.assert_close(sum(found), plain_kept[0][0], rtol=1e-4, atol=1e-7)
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"eager_backward": True}])
def test_a_step_needs_no_new_memory_for_large_sums(monkeypatch, options, replicas, workers):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(SIZE, 4 * SIZE), nn.Tanh(), nn.Linear(4 * SIZE, SIZE)
            )

        def forward(self, rows):
            return self.layers(rows).square().mean()

    answers = []

    def ask(tensors, places):
        found = find_sole(tensors, places)
        answers.append(found == [*places])
        return found

    model = DataParallel(Loss(), replicas=replicas, workers=workers, **options)
    rows = torch.randn(8, SIZE)
    model(rows).backward()
    monkeypatch.setattr(reduce, "find_sole", ask)
    model.zero_grad()
    model(rows).backward()
    assert answers == [True] * len(answers)
    assert answers


@pytest.mark.parametrize("library", ["numpy", "buffer", "dlpack", "shared"])
def test_memory_that_is_not_torchs_own_is_not_sole(library):
    # Nobody counts who else has it: a backward that returns from_numpy(BUFFER) every time.
    kept = numpy.ones(4, dtype=numpy.float32)
    make = {
        "numpy": lambda: torch.from_numpy(kept),
        "buffer": lambda: torch.frombuffer(bytearray(16), dtype=torch.float32),
        "dlpack": lambda: torch.from_dlpack(kept),
        "shared": lambda: torch.ones(4).share_memory_(),
    }
    assert not is_sole([make[library]()], 0)


def test_the_counts_are_those_of_every_mode(monkeypatch):
    # They were taken once, under whatever mode the first large sum ran: one that keeps what it
    # sees made a kept tensor look as if nobody had it.
    class Keep(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            kept.append(found)
            return found

    kept = []
    before = _count_of_sole()
    _count_of_sole.cache_clear()
    with Keep():
        assert _count_of_sole() == before
    assert not kept


@pytest.mark.parametrize("workers", [1, 2])
def test_an_expanded_gradient_and_a_dense_one_are_added(workers):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

        def forward(self, rows):
            found = self.weight.sum(0) * 2 if len(rows) == 1 else self.weight.square().sum(0)
            return rows * found

    module = Either()
    rows = torch.randn(3, SIZE)
    DataParallel(module, replicas=2, split=[1, 2], workers=workers)(rows).sum().backward()
    expected = 2 * rows[:1] + 2 * module.weight.detach() * rows[1:].sum(0)
    torch.testing.assert_close(module.weight.grad, expected.expand(SIZE, SIZE))


@pytest.mark.parametrize("size", [30, 300])
def test_gradients_of_many_at_once_are_added(size):
    """Under vmap a tensor stands for many, and has no memory to ask for."""
    net = nn.Linear(size, size, bias=False)
    model = DataParallel(net, replicas=2)
    x, arriving = torch.ones(4, size), torch.randn(3, 4, size)

    def slopes(module):
        return torch.autograd.grad(module(x), [net.weight], arriving, is_grads_batched=True)[0]

    torch.testing.assert_close(slopes(model), slopes(net))
