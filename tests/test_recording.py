"""What is said to torch.cuda while something is recorded, in which order, and what if it fails.

CUDA itself is replaced by a stand-in that notes every call; on a device, tests/gpu does the rest.
"""

import contextlib
import warnings

import pytest
import torch
from torch import nn

from samestep import recording
from samestep.recording import RecordingError, differentiate, find_setting, record


class Generator:
    def __init__(self, state="own"):
        self.state = state

    def graphsafe_get_state(self):
        return self.state

    def graphsafe_set_state(self, state):
        self.state = state

    def clone_state(self):
        return "clone"


class Cuda:
    """As much of ``torch.cuda`` as is used, on the CPU."""

    def __init__(self):
        self.generator = Generator()
        self.log = []
        self.current = "user's"
        self.sync_mode = 0
        self.fails_at = None

    default_generators = property(lambda self: [self.generator])

    @contextlib.contextmanager
    def device(self, device):
        self.log.append(f"device {device}")
        yield

    def Stream(self, device):  # torch's name
        return _Stream("side", self)

    def current_stream(self, device=None):
        return _Stream(self.current, self)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self):
        return "pool"

    def CUDAGraph(self):  # torch's name
        return _Graph(self)

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert (pool, stream.name, capture_error_mode) == ("pool", "side", "thread_local")
        assert (self.generator.state, self.current) == ("clone", "side")
        assert not torch.is_autocast_cache_enabled()
        self.log.append("capture")
        yield
        if len([entry for entry in self.log if entry == "capture"]) == self.fails_at:
            self.current = "left behind"
            raise RuntimeError("capture failed")

    def get_sync_debug_mode(self):
        return self.sync_mode

    def set_sync_debug_mode(self, mode):
        self.sync_mode = mode


class _Stream:
    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, name, cuda):
        self.name, self._cuda = name, cuda

    def wait_stream(self, other):
        self._cuda.log.append(f"{self.name} waits for {other.name}")


class _Graph:
    def __init__(self, cuda):
        self.replay = lambda: cuda.log.append("replay")


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    names = [name for name in dir(Cuda) if not name.startswith("_")]
    for name in names:
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(recording, "_failed", [])
    return made


DEVICE = torch.device("cuda", 0)


def make_function(net, x, during=lambda: None):
    def function():
        during()
        return [net(x), x.sum()]

    return function


def test_forward_and_backward_are_captured_on_a_stream_of_their_own(cuda):
    net, x, runs = nn.Linear(3, 2), torch.ones(4, 3), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = record(
            make_function(net, x, lambda: runs.append(cuda.sync_mode)),
            list(net.parameters()),
            0,
            DEVICE,
        )
        assert torch.is_autocast_cache_enabled()
    assert cuda.log == [
        "device cuda:0",
        "side waits for user's",
        "capture",
        "capture",
        "user's waits for side",
    ]
    assert runs == [0, "warn", "warn", 0]  # what may start the libraries, what must not wait
    assert (cuda.generator.state, cuda.current, cuda.sync_mode) == ("own", "user's", 0)
    assert [o.requires_grad for o in made.outputs] == [False, False]
    assert [g.shape for g in made.gradients] == [p.shape for p in net.parameters()]
    made.clear()
    assert not any(map(torch.any, [*made.outputs, *made.gradients]))
    assert made.differentiate(torch.full((4, 2), 7.0)) is made.gradients
    assert torch.equal(made.arriving, torch.full((4, 2), 7.0).to(made.arriving.dtype))
    made.run()
    assert cuda.log[-2:] == ["replay", "replay"]


def test_without_a_gradient_there_is_no_backward(cuda):
    with torch.no_grad():
        made = record(make_function(nn.Linear(3, 2), torch.ones(4, 3)), [], None, DEVICE)
    assert cuda.log.count("capture") == 1
    assert (made.arriving, made.gradients) == (None, [])


def test_a_forward_that_waits_for_the_device_is_refused_before_a_capture(cuda):
    def wait():
        if cuda.sync_mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    function = make_function(nn.Linear(3, 2), torch.ones(4, 3), wait)
    with pytest.raises(RecordingError, match="waits for the device"):
        record(function, [], None, DEVICE)
    assert "capture" not in cuda.log
    assert (cuda.generator.state, cuda.sync_mode) == ("own", 0)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_capture_that_fails_leaves_what_is_known_of_torch_as_it_was(cuda, fails_at, monkeypatch):
    ended = []
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda *args: ended.append(args), raising=False
    )
    cuda.fails_at = fails_at
    net = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="capture failed"):
        record(make_function(net, torch.ones(4, 3)), list(net.parameters()), 0, DEVICE)
    assert (cuda.generator.state, cuda.current) == ("own", "user's")
    assert ended == [(0, "pool")]
    assert len(recording._failed) == 1
    assert torch.is_autocast_cache_enabled()
    assert not recording._lock.locked()


def test_gradients_are_those_outside_of_autocast_and_the_graph_is_kept():
    x = torch.ones(2, 3, requires_grad=True)
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    output = Looks.apply(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert torch.equal(differentiate(output, [x], torch.ones(2, 3))[0], torch.ones(2, 3))
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (torch.backends, "fp32_precision"),
        (torch.backends.cuda.matmul, "fp32_precision"),
        (torch.backends.cudnn, "fp32_precision"),
        (torch.backends.cudnn.conv, "fp32_precision"),
        (torch.backends.cudnn.rnn, "fp32_precision"),
        (torch.backends.cuda.matmul, "allow_tf32"),  # the older way to say it
        (torch.backends.cudnn, "allow_tf32"),
    ],
)
def test_precision_is_part_of_the_setting_whichever_way_it_is_said(backend, name):
    device = torch.device("cpu")
    before, found = getattr(backend, name), find_setting(device)
    other = not before if isinstance(before, bool) else "tf32" if before != "tf32" else "ieee"
    try:
        setattr(backend, name, other)
        assert find_setting(device) != found
    finally:
        setattr(backend, name, before)
