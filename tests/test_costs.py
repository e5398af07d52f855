"""What a call costs, as counts that are the same on every machine.

Times move with the machine; how many Python functions of ours a step runs, how often it wakes a
thread, what it copies and which operations it adds do not. The bounds lie close above what was
measured (on Python 3.11, which counts a comprehension as a call; later ones count less), so that a
step that does more work than it must fails here. Who makes it cheaper lowers them.
"""

import contextlib
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep import DataParallel, map_batches
from samestep.devices import Slot
from samestep.engine import ThreadEngine
from samestep.replicas import ReplicaSet
from samestep.workers import WorkerPool

PACKAGE = str(Path(samestep.__file__).parent)
NUM_LAYERS = 40


class Calls:
    """Counts the calls of our own Python functions, in every thread, while it is on."""

    def __init__(self):
        self.is_on = False
        self.names = Counter()

    def __call__(self, frame, event, arg):
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.names[frame.f_code.co_qualname] += 1


@contextlib.contextmanager
def watched():
    """Calls that are counted, and workers of whose threads they are: only threads that are started
    from now on are watched."""
    workers, calls = WorkerPool(), Calls()
    before, before_in_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        yield calls, workers
    finally:
        calls.is_on = False
        sys.setprofile(before)
        threading.setprofile(before_in_threads)
        for worker in workers._lease(workers.stats().num_idle):
            worker.stop()


def count_calls(model, step):
    """The calls of one step, after a few that teach the wrapper all it wants to know."""
    with watched() as (calls, workers):
        model._samestep_runtime.threads = ThreadEngine(1, num_workers=2, workers=workers)
        for _ in range(5):
            step()
        calls.is_on = True
        step()
    return calls.names


def make_mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))


def make_deep(num_layers=NUM_LAYERS):
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)])


def evaluation(model):
    x = torch.randn(8, 4)

    def step():
        with torch.no_grad():
            return model(x)

    return step


def training(model):
    x, parameters = torch.randn(8, 4), list(model.parameters())

    def step():
        for parameter in parameters:
            parameter.grad = None
        model(x).sum().backward()

    return step


def test_one_slot_adds_a_handful_of_calls():
    model = DataParallel(make_mlp(), replicas=1)
    assert count_calls(model, evaluation(model)).total() <= 3


def test_clearing_gradients_costs_what_it_costs_inside():
    model = DataParallel(make_deep(), replicas=1)
    assert count_here(model.zero_grad).total() <= 2


@pytest.mark.parametrize(
    ("kind", "num_replicas", "bound"),
    [(evaluation, 2, 175), (evaluation, 4, 220), (training, 2, 330), (training, 4, 445)],
)
def test_a_step_of_a_small_model_takes_few_calls(kind, num_replicas, bound):
    model = DataParallel(make_mlp(), replicas=num_replicas)
    names = count_calls(model, kind(model))
    assert names.total() <= bound, names.most_common(20)


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_mlp()

    def forward(self, rows):
        return self.net(rows).square().mean()


@pytest.mark.parametrize(
    ("num_replicas", "options", "bound"),
    [
        (2, {}, 350),
        (4, {}, 470),
        (2, {"eager_backward": True}, 283),
        (4, {"eager_backward": True}, 390),
    ],
)
def test_a_step_of_a_small_model_that_returns_its_loss_takes_few_calls(
    num_replicas, options, bound
):
    model = DataParallel(Loss(), replicas=num_replicas, **options)
    names = count_calls(model, training(model))
    assert names.total() <= bound, names.most_common(20)


@pytest.mark.parametrize("kind", [evaluation, training])
def test_more_layers_take_no_more_calls(kind):
    few, many = DataParallel(make_deep(2), replicas=2), DataParallel(make_deep(), replicas=2)
    assert count_calls(many, kind(many)) == count_calls(few, kind(few))


def test_a_forward_wakes_each_worker_once_and_so_does_its_backward():
    model = DataParallel(make_mlp(), replicas=4)
    assert count_calls(model, evaluation(model))["Running.send"] == 1
    names = count_calls(model, training(model))
    assert names["Running.send"] == names["Running.wait"] == 2
    assert names["ThreadEngine._run.<locals>.work"] == 4  # two workers, forward and backward


def test_a_steady_training_copies_no_byte_and_makes_no_replica():
    # Statistics that are held as copies, and used as they are.
    model = DataParallel(nn.Sequential(make_mlp(), nn.BatchNorm1d(4)).eval(), replicas=3)
    step = training(model)
    step()
    before = model.stats()
    for _ in range(3):
        step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        evaluation(model)()
    assert model.stats() == before


class Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher. It ties the shards to this thread."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_operations(step):
    for _ in range(3):
        step()
    with Operations() as operations:
        step()
    return operations.names


def test_looking_for_changes_makes_no_tensor():
    model = DataParallel(nn.Sequential(make_mlp(), nn.BatchNorm1d(4)), replicas=3)
    training(model)()
    assert not count_operations(model.refresh)


def make_set(num_layers, **options):
    """Replicas, and what refreshes them, after every parameter has changed."""
    net, replicas = make_deep(num_layers), ReplicaSet(**options)
    slots = [Slot(k, torch.device("cpu")) for k in range(8)]

    def renew(num_slots=2):
        increment_version(list(net.parameters()))
        replicas.refresh(net, slots[:num_slots])

    return renew


def count_here(function, *args):
    """The calls of our own Python functions in this thread."""
    calls = Calls()
    before = sys.getprofile()
    sys.setprofile(calls)
    try:
        calls.is_on = True
        function(*args)
    finally:
        sys.setprofile(before)
    return calls.names


def test_more_tensors_take_no_more_calls_to_be_copied():
    few, many = make_set(2, share=False), make_set(NUM_LAYERS, share=False)
    for _ in range(3):
        few(), many()
    assert count_here(many) == count_here(few)
    # One operation per replica, and nothing that is done tensor by tensor.
    assert count_operations(many) == {"cat": 2}


def test_more_replicas_take_few_more_calls_to_be_made():
    def count(num_slots):
        return count_here(make_set(NUM_LAYERS), num_slots).total()

    first, second, eighth = count(1), count(2), count(8)
    # For each tensor of a replica a link and an alias; for its modules and containers none.
    assert (eighth - second) / 6 <= 4 * 2 * NUM_LAYERS + 130
    assert first <= 125 * NUM_LAYERS  # the module tree, object by object
    assert second <= 150 * NUM_LAYERS  # and once more, in words that can be repeated


def test_looking_for_changes_takes_few_calls_and_asks_no_tensor_alone():
    modes = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]
    for num_layers in (2, NUM_LAYERS):
        model = DataParallel(make_deep(num_layers), replicas=3)
        for make_mode in [*modes, *modes, *modes]:  # each mode has to be seen once
            with make_mode():
                names = count_here(model.refresh)
        assert "Stamps._look" not in names
        assert names.total() <= 10, names


def test_a_module_without_parameters_has_no_more_to_look_at_than_its_containers():
    replicas = ReplicaSet()
    (replica,) = replicas.refresh(nn.Identity(), [Slot(0, torch.device("cpu"))])
    containers = [v for v in vars(nn.Identity()).values() if isinstance(v, dict | list | set)]
    assert len(replica.follower.cells) == len(containers) + 1


def test_an_evaluation_adds_the_cutting_and_the_joining_only():
    plain = make_mlp()
    model = DataParallel(plain, replicas=3)
    added = count_operations(evaluation(model))
    for name, count in count_operations(evaluation(plain)).items():
        added[name] -= 3 * count
    assert +added == {"slice": 3, "cat": 1}


def test_a_training_step_adds_the_cutting_the_joining_and_one_sum():
    plain = make_mlp()
    model = DataParallel(plain, replicas=2)
    added = count_operations(training(model))
    for name, count in count_operations(training(plain)).items():
        added[name] -= 2 * count
    # Cut forward, and the gradient of the joined output cut again; all gradients added at once.
    assert +added == {"slice": 4, "cat": 1, "_foreach_add": 1}


def test_a_forward_that_runs_again_notes_no_statistics_again():
    model = DataParallel(nn.Sequential(make_mlp(), nn.BatchNorm1d(4)), replicas=2, recompute=True)
    names = count_calls(model, training(model))
    assert names["record"] == 4  # two shards, twice
    assert names["_factor"] == 2


def test_statistics_are_noted_past_the_shards_own_mode():
    counts = []
    for layers in ([], [nn.BatchNorm1d(4)]):
        layers = [make_mlp(), nn.Dropout(0.5), *layers]
        model = DataParallel(nn.Sequential(*layers), replicas=2)
        counts.append(count_calls(model, training(model))["StreamMode.__torch_function__"])
    assert counts[1] - counts[0] == 2 * 3  # BatchNorm's own look at its input, count and function


def test_what_a_second_run_makes_is_looked_at_past_the_shards_own_mode():
    layers = [make_mlp(), nn.Dropout(0.5), nn.Unflatten(1, (2, 2, 1)), nn.Dropout2d(0.5)]
    layers.append(nn.BatchNorm2d(2))
    counts = []
    for recompute in (False, True):
        model = DataParallel(nn.Sequential(*layers), replicas=2, recompute=recompute)
        names = count_calls(model, training(model))
        counts.append(names["StreamMode.__torch_function__"])
        assert names["Stream.swapped_in"] == 0
    kept, again = counts
    assert again <= 2 * kept + 2 * 4  # grad mode on and off, the default device twice
    assert names["Rerun._note"] == names["_Found.take"] == names["Rerun._find"] > 0
    num_written = 2 * 3  # buffers of the norm, in either shard
    assert names["storage_of"] == names["_Found.take"] + num_written


def count_inference(model, num_batches, monkeypatch):
    """The calls of one iteration over so many batches, by a wrapper that knows its model."""
    batches = [torch.randn(8, 4)] * num_batches
    with watched() as (calls, workers):
        monkeypatch.setattr("samestep.infer.pool", workers)
        for _ in range(2):
            list(map_batches(model, batches[:4]))
        calls.is_on = True
        list(map_batches(model, batches))
    return calls.names


def test_a_batch_of_inference_takes_few_calls(monkeypatch):
    model = DataParallel(make_mlp().eval(), replicas=2)
    added = count_inference(model, 60, monkeypatch)
    added.subtract(count_inference(model, 10, monkeypatch))
    waiting = ("Lookahead.", "_Bell.")  # how often who waits for whom is a matter of timing
    fixed = {name: round(n / 50) for name, n in added.items() if not name.startswith(waiting)}
    assert sum(fixed.values()) <= 41, fixed
    assert {name for name, count in fixed.items() if count > 1} <= {
        "read_default",  # before and after a batch
        "_read",
        "CallerContext.run",  # the loader's code, and the model's
        "CallerContext._run",
    }


def test_an_iteration_compares_each_replica_as_a_whole_not_cell_by_cell(monkeypatch):
    model = DataParallel(make_deep().eval(), replicas=2)
    names = count_inference(model, 4, monkeypatch)
    assert names["Snapshot.is_current"]
    assert not names["Snapshot.changed"]
    assert names.total() <= 420, names.most_common(20)
