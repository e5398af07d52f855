"""The caller's settings hold in every replica, whichever thread runs it."""

import contextlib
import contextvars
import threading

import pytest
import torch
from helpers import use_workers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep import DataParallel, current_shard
from samestep.context import CallerContext, Shard, has_modes, must_run_plainly, use_num_threads

CPU = torch.device("cpu")
VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


class Ask(nn.Module):
    """Answers a question in every shard; one answer per shard."""

    def __init__(self, question):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.question = question

    def forward(self, x):
        return {"answer": self.question(x), "thread": threading.get_ident()}


def ask(question, num_replicas=3):
    """The answers of all shards, from as many threads."""
    with torch.inference_mode(False), torch.device("cpu"):
        model = DataParallel(Ask(question), replicas=num_replicas, out_dims="list")
    use_workers(model, num_replicas)
    answers = model(torch.ones(2 * num_replicas, 3, device="cpu"))
    return [answer["answer"] for answer in answers]


def in_thread(function):
    """Call it in a fresh thread and return its value."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


# --------------------------------------------------------------------------------------------------
# Settings of torch
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_grad_mode_is_the_callers(mode):
    def question(x):
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with mode():
        expected = question(None)
        assert ask(question) == [expected] * 3
    assert torch.is_grad_enabled()


def test_a_module_made_in_inference_mode_runs_there():
    with torch.inference_mode():
        plain, x = nn.Linear(3, 2), torch.randn(7, 3)
        model = DataParallel(plain, replicas=3)
        for _ in range(2):
            assert torch.equal(model(x), plain(x))


def test_grad_mode_off_inside_on_outside_and_back():
    def question(x):
        with torch.no_grad():
            return (x * 2).requires_grad, torch.is_grad_enabled()

    assert ask(question) == [(False, False)] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_the_callers(dtype):
    def question(x):
        product = x @ torch.ones(3, 3)
        return product.dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    with torch.autocast("cpu", dtype=dtype):
        assert ask(question) == [(dtype, True, dtype)] * 3
    assert ask(question)[0][:2] == (torch.float32, False)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_autocast_cache_is_the_callers(enabled):
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=enabled):
        assert ask(lambda x: torch.is_autocast_cache_enabled()) == [enabled] * 3


def test_autocast_switched_off_inside_autocast_is_off():
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert ask(lambda x: torch.is_autocast_enabled("cpu")) == [False] * 3


def test_gradients_under_autocast_have_the_parameters_dtype():
    model = use_workers(DataParallel(nn.Linear(3, 2), replicas=3), 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(7, 3))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert model.weight.grad.dtype == torch.float32


def test_default_dtype_and_device_are_the_callers():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert ask(lambda x: torch.ones(1).dtype) == [torch.float64] * 3
    finally:
        torch.set_default_dtype(before)
    # The module lies on the CPU and the user asks for "meta": every shard makes such tensors.
    with torch.device("meta"):
        assert ask(lambda x: torch.ones(1).device.type) == ["meta"] * 3


def test_a_default_device_given_as_a_context_does_not_cost_the_threads():
    with torch.device("cpu"):
        threads = ask(lambda x: threading.get_ident())
    assert len(set(threads)) == 3


def test_context_variables_are_the_callers_and_each_shards_own():
    def question(x):
        seen = VARIABLE.get()
        VARIABLE.set(f"shard {current_shard().index}")
        return seen

    token = VARIABLE.set("outer")
    try:
        assert ask(question) == ["outer"] * 3
        assert VARIABLE.get() == "outer"
    finally:
        VARIABLE.reset(token)


def test_settings_hold_in_backward_too():
    seen = []

    class Hooked(nn.Module):
        def forward(self, x):
            y = x * 2
            y.register_hook(lambda g: seen.append((torch.is_grad_enabled(), VARIABLE.get())))
            return y

    model = use_workers(DataParallel(Hooked(), replicas=3), 3)
    out = model(torch.ones(6, 1, requires_grad=True))
    token = VARIABLE.set("backward")
    try:
        out.sum().backward()
    finally:
        VARIABLE.reset(token)
    assert seen == [(False, "backward")] * 3


def test_intra_op_threads_in_a_context_come_back_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), use_num_threads(before + 2):
        divmod(1, torch.get_num_threads() - before - 2)  # zero, if they were set
    assert torch.get_num_threads() == before


def test_a_captured_context_can_be_entered_by_many_threads_and_leaves_none_changed():
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        context = CallerContext()

    def question():
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def work():
        return context.run(question, CPU), question()

    assert in_thread(work) == ((False, True), (True, False))


# --------------------------------------------------------------------------------------------------
# Modes and transforms
# --------------------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.sin:
            self.seen.append(threading.get_ident())
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.sin.default:
            self.seen.append(threading.get_ident())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [Functions, Dispatches])
def test_a_mode_sees_every_operation_of_every_shard(make):
    model = use_workers(DataParallel(Ask(torch.sin), replicas=3, out_dims="list"), 3)
    assert not has_modes()
    with make() as mode:
        assert has_modes()
        model(torch.ones(6, 3))
        mode.seen.clear()
        model(torch.ones(6, 3))
    assert mode.seen == [threading.get_ident()] * 3


def test_a_device_is_no_mode():
    with torch.device("cpu"):
        assert not has_modes()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_torch_func_transforms_see_the_plain_module():
    model = DataParallel(nn.Linear(3, 2), replicas=3)
    x = torch.randn(6, 3)
    assert not must_run_plainly()
    mapped = torch.func.vmap(lambda row: model(row.unsqueeze(0)).squeeze(0))(x)
    torch.testing.assert_close(mapped, model.module(x))
    slope = torch.func.grad(lambda x: model(x).sum())(x)
    torch.testing.assert_close(slope, model.weight.detach().sum(0).expand(6, 3))


# --------------------------------------------------------------------------------------------------
# The current shard
# --------------------------------------------------------------------------------------------------


def test_a_shard_knows_its_index_rows_and_device():
    model = DataParallel(Ask(lambda x: current_shard()), replicas=3, out_dims="list")
    shards = [answer["answer"] for answer in model(torch.ones(10, 3))]
    assert shards == [
        Shard(0, 3, 0, 4, 10, CPU),
        Shard(1, 3, 4, 8, 10, CPU),
        Shard(2, 3, 8, 10, 10, CPU),
    ]
    assert [shard.describe() for shard in shards][2] == "in shard 2 of 3 (rows 8-9 of 10, cpu)"
    assert isinstance(shards[0], samestep.Shard)


def test_there_is_no_shard_outside_nor_in_a_pass_through():
    assert current_shard() is None
    seen = []
    model = DataParallel(Ask(lambda x: seen.append(current_shard())))
    model(torch.ones(2, 3))
    assert seen == [None]


def test_a_wrapped_module_inside_a_replica_runs_as_it_is():
    inner = DataParallel(Ask(lambda x: current_shard().index), replicas=2)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)["answer"]

    model = DataParallel(Outer(), replicas=3, out_dims="list")
    assert model(torch.ones(6, 3)) == [0, 1, 2]


def test_serial_running_stays_in_the_callers_thread(monkeypatch):
    monkeypatch.setenv("SAMESTEP_SERIAL", "1")
    assert set(ask(lambda x: threading.get_ident())) == {threading.get_ident()}
    threads = []

    class Hooked(nn.Module):
        def forward(self, x):
            y = x * 2
            y.register_hook(lambda g: threads.append(threading.get_ident()))
            return y

    DataParallel(Hooked(), replicas=3)(torch.ones(6, 1, requires_grad=True)).sum().backward()
    assert threads == [threading.get_ident()] * 3


def test_threads_are_used_otherwise(monkeypatch):
    monkeypatch.delenv("SAMESTEP_SERIAL", raising=False)
    threads = ask(lambda x: threading.get_ident())
    assert len(set(threads)) == 3
    assert threads[0] == threading.get_ident()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_with_an_accelerator_each_shard_differentiates_in_its_own_thread(monkeypatch, num_workers):
    """A stand-in: where streams are captured, an accelerator is there."""
    monkeypatch.setattr("samestep.context._capture_streams", lambda: (0, []))
    monkeypatch.setattr("samestep.context._set_streams", lambda streams: None)
    seen = []

    class Noted(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(torch._C._is_multithreading_enabled())
            y.register_hook(lambda gradient: seen.append(torch._C._is_multithreading_enabled()))
            return y

    model = DataParallel(Noted(3, 2), replicas=2, workers=num_workers)
    model(torch.randn(4, 3)).sum().backward()
    assert seen == [False] * 4
    assert torch._C._is_multithreading_enabled()


class Stream:
    """As torch's, it keeps what was before a ``with``."""

    def __init__(self, index, name, accelerators):
        self.index, self.name, self.accelerators, self.before = index, name, accelerators, []

    def __eq__(self, other):
        return (self.index, self.name) == (other.index, other.name)

    __hash__ = None

    def __enter__(self):
        self.before.append((self.accelerators.index, self.accelerators.streams[self.index]))
        self.accelerators.set_stream(self)

    def __exit__(self, *error):
        self.accelerators.index, self.accelerators.streams[self.index] = self.before.pop()


class Accelerators(threading.local):
    """Stands in for ``torch.accelerator``: two devices; each thread has its own streams."""

    def __init__(self):
        self.index, self.streams = 0, [Stream(0, "default", self), Stream(1, "default", self)]

    def install(self, monkeypatch):
        monkeypatch.setattr("samestep.context._device_types", lambda: ["cpu", "cuda"])
        names = (
            "device_count device_index current_stream set_stream current_device_index "
            "set_device_index"
        )
        for name in names.split():
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))

    def device_count(self):
        return 2

    def current_device_index(self):
        return self.index

    def set_device_index(self, index):
        self.index = index

    @contextlib.contextmanager
    def device_index(self, index):
        before, self.index = self.index, index
        yield
        self.index = before

    def current_stream(self, index):
        return self.streams[index]

    def set_stream(self, stream):
        self.index = stream.index
        self.streams[stream.index] = stream


def test_threads_that_have_the_callers_streams_at_one_time_go_back_to_their_own(monkeypatch):
    accelerators = Accelerators()
    accelerators.install(monkeypatch)
    accelerators.streams[1] = Stream(1, "side", accelerators)
    context = CallerContext()
    is_inside, may_leave = threading.Event(), threading.Event()
    seen = {}

    def look():
        return accelerators.index, *[stream.name for stream in accelerators.streams]

    def wait():
        seen["worker, inside"] = look()
        is_inside.set()
        assert may_leave.wait(20)

    def work():
        context.run(wait, torch.device("cuda", 1))
        seen["worker, after"] = look()

    worker = threading.Thread(target=work)

    def run():
        worker.start()
        assert is_inside.wait(20)
        seen["caller, inside"] = look()

    context.run(run, torch.device("cuda", 0))
    seen["caller, after"] = look()
    may_leave.set()
    worker.join()
    assert seen == {
        "worker, inside": (1, "default", "side"),
        "caller, inside": (0, "default", "side"),
        "caller, after": (0, "default", "side"),
        "worker, after": (0, "default", "default"),
    }


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_on_the_cpu_has_the_callers_current_device(monkeypatch, index):
    accelerators = Accelerators()
    accelerators.install(monkeypatch)
    accelerators.index = index
    context = CallerContext()
    seen = []

    def work():
        context.run(lambda: seen.append(accelerators.index), CPU)
        seen.append(accelerators.index)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [index, 0]


class LeavesOn(nn.Linear):
    """Switches something on or off in its thread, and leaves it so."""

    def __init__(self, switch):
        super().__init__(6, 6)
        self.switch = switch

    def forward(self, x):
        y = super().forward(x).tanh()
        self.switch()
        return y


SWITCHES = {
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "no gradients": lambda: torch._C._set_grad_enabled(False),
}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_what_a_forward_leaves_on_reaches_no_other_shard_and_no_later_call(name, num_workers):
    torch.manual_seed(0)
    model = DataParallel(LeavesOn(SWITCHES[name]), replicas=4, workers=num_workers, out_dims="list")
    for _ in range(2):
        outputs = model(torch.ones(8, 6))
        assert {output.dtype for output in outputs} == {torch.float32}
        assert all(output.requires_grad for output in outputs)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


def test_autocast_that_a_forward_switches_off_is_on_for_the_other_shards():
    off = LeavesOn(lambda: torch.set_autocast_enabled("cpu", False))
    model = DataParallel(off, replicas=4, workers=1, out_dims="list")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(torch.ones(8, 6))
        assert torch.is_autocast_enabled("cpu")
    assert {output.dtype for output in outputs} == {torch.bfloat16}
