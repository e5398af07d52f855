"""cuda_graphs=True: what is captured when, that replays change nothing, and what is refused.

A stand-in records on the CPU: each "replay" runs the function that was recorded, on the static
inputs, and writes the results into the same memory as the time before. What CUDA itself does is in
tests/gpu/test_cuda_graphs.py.
"""

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from samestep import DataParallel, capture, current_shard
from samestep.devices import Slot
from samestep.recording import Recording, differentiate


class Recorder:
    """Records on the CPU; ``spoil`` is done to every output, ``error`` raised."""

    def __init__(self):
        self.recordings = []
        self.spoil = lambda tensor: tensor
        self.error = None
        self.is_idle = False

    def __call__(self, function, leaves, at, device):
        if self.error is not None:
            raise self.error
        # A leaf's node that is older belongs to another stream, for which the backward would wait.
        assert not any("old" in get_gradient_edge(leaf).node.metadata for leaf in leaves)
        made = []
        recording = Recording(lambda: None, [t.detach().clone() for t in function()], at)

        def run():
            if self.is_idle:
                return
            with torch.set_grad_enabled(at is not None):
                made[:] = function()
            for static, tensor in zip(recording.outputs, made, strict=True):
                static.copy_(self.spoil(tensor.detach()))

        def run_backward():
            found = differentiate(made[at], leaves, recording.arriving)
            for static, tensor in zip(recording.gradients, found, strict=True):
                static.copy_(tensor)

        recording.run = run
        if at is not None:
            recording.arriving = torch.zeros_like(recording.outputs[at])
            recording.gradients = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
            recording.run_backward = run_backward
        self.recordings.append(recording)
        return recording


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()

    def note(output, leaves, gradient):
        for leaf in leaves:
            get_gradient_edge(leaf).node.metadata["old"] = True
        return differentiate(output, leaves, gradient)

    monkeypatch.setattr(capture, "differentiate", note)
    monkeypatch.setattr(capture, "record", made)
    return made


def wrap(net, replicas=2, **options):
    """With the option, which is refused without a CUDA device, set behind its back."""
    model = DataParallel(net, replicas=replicas, **options)
    object.__setattr__(model._samestep_options, "cuda_graphs", True)
    model._samestep_runtime.captures = capture.Captures()
    model._samestep_is_single = False
    return model


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rows=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator)


def call(model, times, x=None, **kwargs):
    for seed in range(times):
        model(batch(seed=seed) if x is None else x, **kwargs).sum().backward()


def replays(model):
    return model.stats().num_replays


def take_steps(model, plan, steps=12):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs = []
    for step in range(steps):
        x, y = plan(model, step)
        output = model(x)
        optimizer.zero_grad()
        (output - y).square().mean().backward()
        optimizer.step()
        outputs.append(output)  # kept over the calls that follow, graph and all
    return [*outputs, *model.parameters()]


def same_shape(model, step):
    return batch(seed=step), 1.0


def two_shapes(model, step):
    return batch(6 if step % 3 else 5, seed=step), 1.0


def evaluation_between(model, step):
    model.eval()
    with torch.no_grad():
        target = model(batch(seed=99 + step))
    model.train()
    return batch(seed=step), target


def new_memory(model, step):
    if step == 8:
        weight = next(model.parameters())
        weight.data = weight.data.clone().mul_(1.5)
    return batch(seed=step), 1.0


def frozen_later(model, step):
    next(model.parameters()).requires_grad_(step < 6)
    return batch(seed=step), 1.0


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    "plan", [same_shape, two_shapes, evaluation_between, new_memory, frozen_later]
)
def test_steps_with_replays_are_the_steps_without(plan, replicas, recorder):
    model = wrap(make_net(), replicas)
    found = take_steps(model, plan)
    for one, other in zip(found, take_steps_of(replicas, plan), strict=True):
        assert torch.equal(one, other)
    assert replays(model) >= 2 * replicas
    assert model.stats().uncaptured == ()


def take_steps_of(replicas, plan):
    return take_steps(DataParallel(make_net(), replicas=replicas), plan)


def test_nothing_is_captured_before_a_form_was_seen_three_times(recorder):
    model = wrap(make_net())
    call(model, 3)
    assert recorder.recordings == []
    call(model, 1)
    assert (len(recorder.recordings), replays(model)) == (2, 2)
    call(model, 4)
    assert (len(recorder.recordings), replays(model)) == (2, 10)


class Scaled(nn.Module):
    def __init__(self, body=None):
        super().__init__()
        self.fc = nn.Linear(4, 3).double()
        self.body = body
        self.factor = 2.0
        self.register_buffer("shift", torch.ones(3, dtype=torch.float64))

    def forward(self, x, power=1, **more):
        h = self.fc(x) if self.body is None else self.body(self, x)
        return h * self.factor**power + self.shift if isinstance(h, torch.Tensor) else h


def new_attribute(model):
    model.module.factor = 3.0


def new_buffer(model):
    model.module.shift = torch.zeros(3, dtype=torch.float64)


def new_tensor(model):
    model.module.fc.weight.data = torch.ones(3, 4, dtype=torch.float64)


def new_part(model):
    model.module.fc = nn.Linear(4, 3).double()


@pytest.mark.parametrize("change", [new_attribute, new_buffer, new_tensor, new_part])
def test_what_is_exchanged_on_the_module_is_seen_and_captured_anew(change, recorder):
    model = wrap(Scaled())
    call(model, 5)
    change(model)
    made = len(recorder.recordings)
    for _ in range(5):
        with torch.no_grad():
            expected = copy.deepcopy(model.module)(batch())
        assert torch.equal(model(batch()), expected)
    assert len(recorder.recordings) == made + 2


def test_a_buffer_written_in_place_is_read_by_the_same_recording(recorder):
    model = wrap(Scaled())
    call(model, 4)
    model.module.shift.add_(5)
    assert torch.equal(model(batch()), model.module(batch()))
    assert (len(recorder.recordings), replays(model)) == (2, 4)


@pytest.mark.parametrize(
    "other",
    [
        lambda model: model(batch(7)),
        lambda model: model(batch().requires_grad_()),
        lambda model: model(batch(), 2),
        lambda model: model(batch(), True),
        lambda model: model(batch(), power=1),
        lambda model: model(batch(), more=[1]),
        lambda model: model.eval()(batch()),
        lambda model: torch.no_grad()(model)(batch()),
        lambda model: torch.autocast("cpu", dtype=torch.bfloat16)(model)(batch()),
    ],
)
def test_a_call_of_another_form_is_not_a_replay(other, recorder):
    model = wrap(Scaled())
    call(model, 4)
    other(model)
    assert replays(model) == 2


def test_at_most_eight_forms_of_a_replica_are_captured(recorder, monkeypatch):
    model = wrap(Scaled(), 1)
    for power in range(10):
        call(model, 4, power=power)
    assert (len(recorder.recordings), replays(model)) == (8, 8)


def test_gradients_of_inputs_and_of_a_part_of_the_parameters(recorder):
    model, plain = wrap(Scaled()), DataParallel(Scaled(), replicas=2)
    plain.module.load_state_dict(model.module.state_dict())
    for seed in range(6):
        one, other = (batch(seed=seed).requires_grad_() for _ in range(2))
        found = torch.autograd.grad(model(one).square().sum(), [one, model.module.fc.bias])
        expected = torch.autograd.grad(plain(other).square().sum(), [other, plain.module.fc.bias])
        assert all(map(torch.equal, found, expected))
    assert replays(model) == 6


def test_gradients_are_the_callers_own(recorder):
    model = wrap(Scaled(), 1)
    call(model, 4)
    kept = []
    for seed in range(3):
        loss = model(batch(seed=seed)).square().sum()
        kept.append(torch.autograd.grad(loss, list(model.parameters())))
    static = {g.data_ptr() for made in recorder.recordings for g in made.gradients}
    assert not static & {g.data_ptr() for row in kept for g in row}
    assert not torch.equal(kept[0][0], kept[1][0])


def test_gradients_of_several_calls_add_up_in_memory_of_their_own(recorder):
    model, plain = wrap(Scaled(), 1), DataParallel(Scaled(), replicas=1)
    plain.module.load_state_dict(model.module.state_dict())
    for m in (model, plain):
        call(m, 6)
        m.module.fc.bias.grad.mul_(3)
        call(m, 3)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    static = {g.data_ptr() for made in recorder.recordings for g in made.gradients}
    assert not static & {p.grad.data_ptr() for p in model.parameters()}


def test_outputs_are_the_callers_own(recorder):
    model = wrap(Scaled(lambda self, x: {"h": self.fc(x), "n": [1]}), 1)
    call_keys = [model(batch(seed=seed)) for seed in range(4)]
    with torch.no_grad():
        kept = [model(batch(seed=0)) for _ in range(5)]
        first = kept[-1]["h"].clone()
        kept[-1]["n"].append(2)
        kept[-1]["h"].add_(0)
        again = model(batch(seed=1))
    assert replays(model) >= 3
    assert torch.equal(kept[-1]["h"], first)
    assert again["n"] == [1]
    static = {o.data_ptr() for made in recorder.recordings for o in made.outputs}
    assert not static & {o["h"].data_ptr() for o in [*call_keys, *kept, again]}


def test_a_recording_whose_backward_is_waited_for_is_not_replayed(recorder):
    model = wrap(Scaled(), 1)
    call(model, 4)
    plain = copy.deepcopy(model.module)
    for m in (model, plain):
        m.zero_grad()
        (m(batch(seed=1)) * m(batch(seed=2)) + m(batch(seed=3))).sum().backward()
    assert replays(model) == 2
    assert torch.equal(model.module.fc.weight.grad, plain.fc.weight.grad)
    call(model, 1)
    assert replays(model) == 3


def test_a_graph_that_is_kept_can_be_walked_twice_and_keeps_its_recording(recorder):
    model = wrap(Scaled(), 1)
    call(model, 4)
    model.zero_grad()
    loss = model(batch()).square().sum()
    loss.backward(retain_graph=True)
    once = model.module.fc.weight.grad.clone()
    call(model, 1, batch(seed=5))  # plainly: the kept graph still needs what is recorded
    assert replays(model) == 2
    model.zero_grad()
    loss.backward()
    assert torch.equal(model.module.fc.weight.grad, once)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_graph_that_was_freed_is_not_walked_again(recorder):
    model = wrap(Scaled(), 1)
    call(model, 4)
    loss = model(batch()).sum()  # a sum saves nothing, so only the replay can tell
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_what_was_captured_is_used_again_after_evaluation(recorder):
    model = wrap(Scaled())
    for _ in range(3):
        call(model.train(), 5)
        call(model.eval(), 5)
    assert len(recorder.recordings) == 4
    assert replays(model) == 2 * (2 + 2 + 4 * 5)


@pytest.mark.parametrize("power", [True, 1.0, 2])
def test_constants_are_alike_if_their_types_are(power, recorder):
    model = wrap(Scaled())
    call(model, 4, power=1)
    call(model, 1, power=power)
    assert replays(model) == 2


def test_second_derivatives_are_refused(recorder):
    model = wrap(Scaled())
    call(model, 4)
    loss = model(batch()).square().sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True .* use cuda_graphs=False"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_a_parameter_written_before_backward_is_an_error(recorder):
    model = wrap(Scaled())
    call(model, 4)
    loss = model(batch()).sum()
    with torch.no_grad():
        model.module.fc.weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_a_backward_under_autocast_is_an_error(recorder):
    model = wrap(Scaled())
    call(model, 4)
    loss = model(batch()).sum()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match="called under autocast"),
    ):
        loss.backward()


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.fc = 0, nn.Linear(4, 3).double()

    def forward(self, x):
        self.calls += 1
        return self.fc(x)


class Embeds(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=sparse).double()

    def forward(self, x):
        return self.table((x > 0).long())


OWN = nn.Parameter(torch.ones(3, dtype=torch.float64))


def with_hook():
    net = make_net()
    net[1].register_forward_hook(lambda module, args, output: None)
    return net


def with_backward_hook():
    net = make_net()
    net[1].register_full_backward_hook(lambda module, arriving, leaving: None)
    return net


def hidden_parameter():
    net = Scaled(lambda self, x: x @ self.hidden[0].T)
    net.hidden = [net.fc.weight]
    return net


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double(), "writes to the"),
        (Counts, "writes to the module"),
        (lambda: nn.Sequential(make_net(), nn.Dropout(0.5)), "draws random numbers"),
        (with_hook, "has hooks"),
        (with_backward_hook, "has hooks"),
        (hidden_parameter, "another way than by its name"),
        (lambda: Scaled(lambda self, x: self.fc(x) * OWN), "no registered parameter"),
        (lambda: Scaled(lambda self, x: [self.fc(x), self.fc(x)]), "several that require"),
        (lambda: Scaled(lambda self, x: [self.fc(x), x]), "shares memory"),
        (lambda: Embeds(sparse=True), "a gradient is sparse"),
        (lambda: Embeds(sparse=False), None),
        (lambda: Scaled(lambda self, x: [self.fc(x), None, 1 + 1j, self.factor]), None),
        (lambda: Scaled(lambda self, x: [self.fc(x), self.fc(x).detach()]), None),
    ],
)
def test_what_is_not_pure_runs_as_before_and_one_warning_says_why(make, reason, recorder):
    model, plain = wrap(make()), DataParallel(make(), replicas=2)
    plain.module.load_state_dict(model.module.state_dict())
    results = []
    for m in (model, plain):
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for seed in range(6):
                output = m(batch(seed=seed))
                output = output[0] if isinstance(output, list) else output
                output.square().sum().backward()
        results.append([output, torch.rand(3), *[p.grad for p in m.parameters()]])
        if m is model:
            assert len(seen) == (reason is not None)
            assert all(reason in str(warning.message) for warning in seen)
    assert all(map(_same, *results))
    assert (replays(model) > 0) == (reason is None)
    assert len(model.stats().uncaptured) == (reason is not None)


def _same(one, other):
    if one is not None and one.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return one is other or torch.equal(one, other)


@pytest.mark.parametrize(
    "argument", [object(), batch(3)[:, :2], torch.ones(3).to_sparse(), torch.ones(3, device="meta")]
)
def test_arguments_of_other_kinds_are_not_captured(argument, recorder):
    model = wrap(Scaled())
    with pytest.warns(UserWarning, match="are not captured and run as without it"):
        call(model, 5, more=argument)
    assert recorder.recordings == []


def test_an_input_changed_in_place_is_not_captured(recorder):
    model = wrap(Scaled(lambda self, x: self.fc(x.mul_(1.0))), 1)
    with pytest.warns(UserWarning, match="changes its input in place"):
        call(model, 5)
    assert recorder.recordings == []


class Passes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "context",
    [
        Passes,
        torch.inference_mode,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.device("cpu"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_where_something_looks_at_every_operation_nothing_is_replayed(context, recorder):
    model = wrap(Scaled())
    call(model, 4)
    with context():
        model(batch())
    assert replays(model) == 2


@pytest.mark.parametrize("what", ["output", "nothing", "one bit"])
def test_a_recording_that_gives_other_bits_is_dropped_with_one_warning(what, recorder):
    recorder.spoil = {
        "output": lambda tensor: tensor + 1,
        "nothing": torch.zeros_like,
        "one bit": lambda tensor: tensor.nextafter(torch.tensor(9.0, dtype=tensor.dtype)),
    }[what]
    model, plain = wrap(Scaled()), DataParallel(Scaled(), replicas=2)
    plain.module.load_state_dict(model.module.state_dict())
    with pytest.warns(UserWarning, match="does not give the bits of the plain call") as seen:
        call(model, 6)
    assert len(seen) == 1
    call(plain, 6)
    assert replays(model) == 0
    assert torch.equal(model.module.fc.weight.grad, plain.module.fc.weight.grad)


def test_a_replay_that_does_nothing_is_seen(recorder):
    recorder.is_idle = True  # captured on a wrong device, say; what it wrote while it was is there
    model = wrap(Scaled())
    with torch.no_grad(), pytest.warns(UserWarning, match="does not give the bits"):
        list(map(model, [batch()] * 5))
    assert replays(model) == 0


def test_a_backward_that_gives_other_bits_is_dropped(recorder, monkeypatch):
    plainly = Recording.differentiate
    monkeypatch.setattr(
        Recording,
        "differentiate",
        lambda self, gradient: [g * 2 for g in plainly(self, gradient)],
    )
    model = wrap(Scaled())
    with pytest.warns(UserWarning, match="does not give the bits of the plain call"):
        call(model, 5)
    assert replays(model) == 0


def test_after_a_recording_that_failed_there_is_no_second_one(recorder):
    model = wrap(Scaled(), 1)
    call(model, 4)
    recorder.error = RuntimeError("operation not permitted when stream is capturing")
    with pytest.warns(UserWarning, match="not tried again: operation not permitted"):
        call(model, 5, power=2)
    recorder.error = None
    call(model, 5, power=3)
    assert len(recorder.recordings) == 1
    call(model, 1)
    assert replays(model) == 2  # what was recorded before goes on


def test_capturing_leaves_no_trace(recorder):
    model = wrap(Scaled())
    call(model, 3)
    model.zero_grad()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        for _ in range(4):
            model(batch())
    model(batch())
    assert len(recorder.recordings) == 4
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_the_current_shard_is_known_while_capturing_and_part_of_the_form(recorder):
    def body(self, x):
        return self.fc(x) * (1 + current_shard().start)

    model = wrap(Scaled(body))
    for rows in [6] * 5 + [8, 5, 6]:
        with torch.no_grad():
            found, x = model(batch(rows)), batch(rows)
        cut = (rows + 1) // 2
        scale = torch.tensor([1.0] * cut + [1.0 + cut] * (rows - cut), dtype=torch.float64)
        assert torch.equal(found, model.module.fc(x) * scale[:, None] * 2 + 1)
    assert replays(model) == 6


def test_copies_of_the_wrapper_have_no_recordings(recorder):
    model = wrap(make_net())
    call(model, 5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert replays(other) == 0
        assert torch.equal(other(batch()), model(batch()))
        assert len(other._samestep_runtime.captures._forms) == 2  # its own replicas
    assert replays(model) == 8


def test_another_method_is_not_captured(recorder):
    model = wrap(Scaled())
    model.module.twice = lambda x: x * 2
    for _ in range(6):
        model.call("forward", batch())
    assert recorder.recordings == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"no slot is on one \(they are on cpu\)"),
        ({"replicas": "auto", "device_ids": None}, "replicas='auto'.*cuda_graphs=True"),
    ],
)
def test_without_a_cuda_device_the_option_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        DataParallel(make_net(), **({"device_ids": ["cpu"] * 2} | options), cuda_graphs=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recompute": True}, "recompute=True"),
        ({"eager_backward": True}, "eager_backward=True"),
        ({"sync_batch_norm": True}, "sync_batch_norm=True"),
        ({"num_ranks": 2}, "2 ranks"),
    ],
)
def test_options_that_do_not_go_together_are_both_named(options, text):
    said = DataParallel(make_net(), replicas=1)._samestep_options
    slots = (Slot(0, torch.device("cuda", 0)),)
    dataclasses.replace(said, slots=slots, cuda_graphs=True)
    with pytest.raises(ValueError, match=rf"cuda_graphs=True.*{text}"):
        dataclasses.replace(said, slots=slots, cuda_graphs=True, **options)


def test_the_option_is_a_bool():
    with pytest.raises(TypeError, match="cuda_graphs must be True or False, got 1"):
        DataParallel(make_net(), cuda_graphs=1)
