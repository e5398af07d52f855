"""K18. Memory: nothing is copied without need, nothing leaks."""

import gc
import resource
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from compare import rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel


def make_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture
def no_collector():
    """Only reference counting frees memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count_tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@report("P118", "huggingface/transformers#279", "pytorch/pytorch#1893")
def test_with_the_loss_inside_only_a_number_per_shard_is_gathered():
    sizes = []

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 5000)

        def forward(self, tokens, target):
            logits = self.head(self.embed(tokens))
            sizes.append(logits.numel())
            return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    module = Language()
    tokens = torch.randint(50, (8, 6))
    loss = DataParallel(module, replicas=4)(tokens, tokens)
    assert sizes == [2 * 6 * 5000] * 4
    assert loss.numel() == 1
    # What the caller's graph holds itself is the losses: logits stay in the shards' own graphs.
    crossing = loss.grad_fn
    names = set()
    while crossing is not None and crossing.next_functions:
        names.add(type(crossing).__name__)
        crossing = next((f for f, _ in crossing.next_functions if f is not None), None)
    assert not any("Logit" in name or "LogSoftmax" in name for name in names)
    torch.testing.assert_close(loss, module(tokens, tokens))


@report("P120", "pytorch/pytorch#4865")
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_training", [True, False])
def test_no_tensor_stays_alive_after_a_call(is_training):
    model = DataParallel(make_net(), replicas=3)

    def call():
        with torch.set_grad_enabled(is_training):
            output = model(torch.ones(7, 3))
            if is_training:
                output.sum().backward()
                model.zero_grad()

    for _ in range(3):
        call()
    before = count_tensors()
    for _ in range(200):
        call()
    assert count_tensors() == before


@report("P120", "pytorch/pytorch#4865")
@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
def test_a_failed_call_and_a_dropped_wrapper_keep_nothing():
    class Failing(nn.Module):
        def forward(self, x):
            self.kept = torch.ones(5)
            raise RuntimeError("on purpose")

    model = DataParallel(Failing(), replicas=3)

    def fail():
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.ones(7, 3))

    fail()
    gc.collect()
    before = count_tensors()
    for _ in range(20):
        fail()
    gc.collect()  # a caught exception is a cycle through pytest's own frames
    assert count_tensors() <= before + 5

    module = make_net()
    other = DataParallel(module, replicas=3)
    other(torch.ones(7, 3))
    dead = weakref.ref(module)
    del module, other
    gc.collect()
    assert dead() is None


@report("P121", "pytorch/pytorch#46753")
@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
def test_a_thousand_calls_with_changing_shapes_leave_memory_and_threads_flat():
    model = DataParallel(make_net(), replicas=3)

    def call(number):
        output = model(torch.ones(3 + number % 97, 3))
        output.sum().backward()
        model.zero_grad()

    for number in range(100):
        call(number)
    tensors, threads, start = count_tensors(), threading.active_count(), peak_bytes()
    for number in range(1000):
        call(number)
    assert count_tensors() == tensors
    assert threading.active_count() == threads
    assert peak_bytes() - start < 16 << 20


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@beyond("K18")
def test_parameters_are_not_copied_on_their_own_device():
    module = make_net()
    model = DataParallel(module, replicas=5)
    pointers = set()

    def note(layer, args, output):
        pointers.add(layer.weight.data_ptr())

    module[0].register_forward_hook(note)
    for _ in range(3):
        model(torch.ones(7, 3)).sum().backward()
        with torch.no_grad():
            module[0].weight.add_(1)
    assert pointers == {module[0].weight.data_ptr()}
    assert model.stats().copied_bytes == 0


@beyond("K18")
@pytest.mark.usefixtures("no_collector")
def test_a_second_order_graph_is_freed_without_the_collector():
    model = DataParallel(make_net(), replicas=3)

    def step():
        x = torch.ones(7, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradients = torch.autograd.grad(gradient.square().sum(), list(model.parameters())[:1])
        return gradients[0].shape

    for _ in range(3):
        step()
    before = count_tensors()
    for _ in range(30):
        step()
    assert count_tensors() == before


@beyond("K18")
def test_the_rows_of_a_shard_are_a_view_of_the_batch():
    pointers = []

    class Looking(nn.Module):
        def forward(self, x):
            pointers.append(x.data_ptr())
            return x * 1

    x = rows(6, 3)
    DataParallel(Looking(), replicas=3)(x)
    assert sorted(pointers)[-3:] == sorted(part.data_ptr() for part in x.split(2))
