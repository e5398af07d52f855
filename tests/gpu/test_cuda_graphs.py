"""cuda_graphs=True on a CUDA device: the bits of the same wrapper without it, step by step.

Not yet run by those who wrote it. ``pytest tests/gpu`` runs it; one device is enough for all but
the test that says otherwise.
"""

import copy
import gc

import pytest
import torch
from torch import nn

from samestep import DataParallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    ).cuda()


def batch(rows=8, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 8, 8, generator=generator).to("cuda", **kwargs)


def wrap(slots, cuda_graphs=True, net=None):
    return DataParallel(
        make_net() if net is None else net, device_ids=slots, cuda_graphs=cuda_graphs
    )


def same_shape(model, step):
    return batch(seed=step)


def two_shapes(model, step):
    return batch(8 if step % 3 else 6, seed=step)


def evaluation_between(model, step):
    model.eval()
    with torch.no_grad():
        x = batch(seed=step) + model(batch(seed=99 + step)).mean()
    model.train()
    return x


def new_memory(model, step):
    if step == 8:
        weight = model.module[0].weight
        weight.data = weight.data.clone().mul_(1.5)
    return batch(seed=step)


def channels_last(model, step):
    return batch(seed=step, memory_format=torch.channels_last)


def needs_gradient(model, step):
    return batch(seed=step).requires_grad_()


def take_steps(model, plan, autocast=False, steps=14):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outputs = []
    for step in range(steps):
        x = plan(model, step)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            output = model(x)
        (output.float() - 1).square().mean().backward()
        if step % 2:  # gradients of two batches add up
            optimizer.step()
            optimizer.zero_grad()
        outputs += [output, *([x.grad] if x.requires_grad else [])]  # kept over later calls
    return [*outputs, *model.parameters()]


@pytest.fixture
def deterministic(monkeypatch):
    """Else bits may differ from run to run, captured or not."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize("slots", [[0], [0, 0], [0, 0, 0]])
@pytest.mark.parametrize(
    "plan",
    [same_shape, two_shapes, evaluation_between, new_memory, channels_last, needs_gradient],
)
def test_steps_with_replays_have_the_bits_of_those_without(slots, plan, deterministic):
    model = wrap(slots)
    found = take_steps(model, plan)
    expected = take_steps(wrap(slots, cuda_graphs=False), plan)
    assert model.stats().uncaptured == ()
    assert model.stats().num_replays >= 2 * len(slots)
    assert all(map(torch.equal, found, expected))


def test_autocast(deterministic):
    model = wrap([0, 0])
    found = take_steps(model, same_shape, autocast=True)
    assert model.stats().num_replays > 0
    expected = take_steps(wrap([0, 0], cuda_graphs=False), same_shape, autocast=True)
    assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_devices(deterministic):
    model = wrap([0, 1])
    found = take_steps(model, same_shape)
    assert model.stats().num_replays > 0
    assert all(map(torch.equal, found, take_steps(wrap([0, 1], cuda_graphs=False), same_shape)))


def test_on_a_stream_of_the_callers(deterministic):
    model = wrap([0, 0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = take_steps(model, same_shape)
    stream.synchronize()
    assert model.stats().num_replays > 0
    assert all(map(torch.equal, found, take_steps(wrap([0, 0], cuda_graphs=False), same_shape)))


def test_a_kept_graph_and_two_forwards_before_a_backward(deterministic):
    model, plain = wrap([0, 0]), wrap([0, 0], cuda_graphs=False)
    for m in (model, plain):
        take_steps(m, same_shape)
        m.zero_grad()
        loss = (m(batch(seed=1)) * m(batch(seed=2)).detach()).sum()
        loss.backward(retain_graph=True)
        m(batch(seed=3)).sum().backward()
        loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Waits(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if x.flatten()[0].item() > 0 else 3)


@pytest.mark.parametrize("make", [lambda: nn.Dropout(0.5), lambda: Waits(8, 8)])
def test_random_numbers_go_on_after_a_refusal(make, deterministic):
    results = []
    for cuda_graphs in (True, False):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 8), make()).cuda()
        model = DataParallel(net, device_ids=[0, 0], cuda_graphs=cuda_graphs)
        with pytest.warns(UserWarning, match="not captured") if cuda_graphs else _nothing():
            outputs = [model(torch.ones(4, 8, device="cuda")) for _ in range(6)]
        assert model.stats().num_replays == 0
        results.append([*outputs, torch.rand(3, device="cuda"), torch.rand(3)])
    assert all(map(torch.equal, *results))


class Fails(nn.Linear):
    """Asks for something that no capture allows, and that no sync warning tells of before."""

    def forward(self, x):
        torch.cuda.current_stream().query()
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return super().forward(x)


def train(model, x):
    for _ in range(6):
        model(x).sum().backward()


def test_after_a_capture_that_failed_torch_works_on():
    model = DataParallel(Fails(8, 8).cuda(), device_ids=[0], cuda_graphs=True)
    x = torch.ones(4, 8, device="cuda")
    with pytest.warns(UserWarning, match="not captured"):
        train(model, x)
    assert model.stats().num_replays == 0
    torch.manual_seed(1)
    first = torch.rand(3, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    graph, y = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y += 1
    graph.replay()
    assert y.tolist() == [1, 1, 1]


def test_memory_goes_with_the_wrapper():
    model = wrap([0, 0])
    take_steps(model, same_shape)
    assert copy.deepcopy(model).stats().num_replays == 0
    del model
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = wrap([0, 0])
    take_steps(model, same_shape)
    del model
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def _nothing():
    return torch.enable_grad()
