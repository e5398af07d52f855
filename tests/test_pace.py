"""When the calling thread does the work alone: by what was measured, and with the same bits."""

import threading
import time

import pytest
import torch
from test_engine import CPU, make_jobs
from torch import nn

from samestep import DataParallel
from samestep.comm import ALONE
from samestep.context import CallerContext
from samestep.engine import ThreadEngine
from samestep.pace import Mode, Pace, _Kind
from samestep.ranks import open_call
from samestep.split import plan_split


class Machine:
    """Runs of one kind, as a machine would take them: it says how long, the pace says how."""

    def __init__(self, workers=1.0, busy=1.0, alone=1.0):
        self.pace, self.workers, self.busy, self.alone = Pace(), workers, busy, alone

    def run(self, count=1):
        """So many runs; returns how each was done."""
        modes = []
        for _ in range(count):
            modes.append(self.pace.choose("work"))
            if modes[-1] is Mode.WATCHED:
                half = self.busy / 2
                self.pace.note_workers("work", self.workers, [half, half])
            elif modes[-1] is Mode.ALONE:
                self.pace.note_alone("work", self.alone)
        return modes


def test_work_that_keeps_the_cores_busy_is_never_tried_alone():
    modes = Machine(workers=1.0, busy=1.9, alone=0.1).run(3000)
    assert Mode.ALONE not in modes
    assert 5 <= modes.count(Mode.WATCHED) <= 30


def test_work_that_is_faster_alone_stays_alone():
    modes = Machine(workers=1.0, busy=0.9, alone=0.8).run(900)
    first = modes.index(Mode.ALONE)
    assert first <= 10
    assert modes[first:].count(Mode.ALONE) > 800
    assert Mode.WORKERS not in modes[first:]


def test_work_that_only_looked_faster_alone_goes_back_to_the_workers():
    modes = Machine(workers=1.0, busy=0.9, alone=1.1).run(3000)
    assert modes[-1] is Mode.WORKERS
    looks = [i for i, mode in enumerate(modes) if mode is Mode.ALONE]
    assert len(looks) <= 30  # rarer and rarer
    assert max(looks) > 1000


def test_a_try_takes_turns_with_the_workers_so_that_both_are_disturbed_alike():
    machine = Machine(workers=1.0, busy=0.9, alone=0.8)
    machine.run(4 + 5)
    assert machine.run(6) == [Mode.ALONE, Mode.WATCHED] * 3


def test_what_is_found_while_the_machine_is_busy_does_not_last():
    # One core is taken by others: alone is as fast as ever, and the workers are not.
    machine = Machine(workers=2.0, busy=1.6, alone=1.5)
    assert machine.run(30)[-1] is Mode.ALONE
    machine.workers = 1.0
    assert machine.run(80)[-1] is Mode.WORKERS


def test_one_run_that_takes_twice_as_long_ends_a_try():
    # Shards that sleep: no processor time at all, and one after the other they take far longer.
    assert Machine(workers=1.0, busy=0.0, alone=8.0).run(100).count(Mode.ALONE) == 1


def test_what_was_found_is_looked_at_again():
    machine = Machine(workers=1.0, busy=0.9, alone=0.8)
    machine.run(500)
    machine.workers = 0.5
    assert Mode.WATCHED in machine.run(1000)
    assert machine.run(40)[-1] is Mode.WORKERS


def test_work_that_got_slow_is_looked_at_at_once():
    machine = Machine(workers=1.0, busy=0.9, alone=0.8)
    assert machine.run(100)[-1] is Mode.ALONE
    machine.alone, machine.workers, machine.busy = 8.0, 4.0, 7.0
    assert machine.run(20)[-1] is Mode.WORKERS


def test_a_few_slow_runs_change_nothing():
    machine = Machine(workers=1.0, busy=0.9, alone=0.8)
    machine.run(100)
    for _ in range(5):
        machine.alone = 8.0
        machine.run(3)
        machine.alone = 0.8
        assert {*machine.run(3)} == {Mode.ALONE}


def test_kinds_are_found_out_each_for_itself_and_do_not_grow_without_bound():
    pace = Pace()
    for number in range(5000):
        assert pace.choose(number) is Mode.WORKERS
    assert len(pace._kinds) <= 1024


def test_threads_that_share_it_take_turns(monkeypatch):
    machine, held = Machine(workers=1.0, busy=0.9, alone=0.8), []
    for name in ("choose", "note_workers", "note_alone"):
        method = getattr(_Kind, name)

        def noted(*args, method=method):
            held.append((method.__name__, machine.pace._lock.locked()))
            return method(*args)

        monkeypatch.setattr(_Kind, name, noted)
    machine.run(20)
    assert {*held} == {("choose", True), ("note_workers", True), ("note_alone", True)}


# -- The engine ------------------------------------------------------------------------------------


class Always(Pace):
    """Always the same answer; what it is told is kept."""

    def __init__(self, mode):
        super().__init__()
        self.mode, self.told = mode, []

    def choose(self, kind):
        return self.mode

    def note_workers(self, kind, seconds, busy):
        self.told.append((kind, seconds, busy))

    def note_alone(self, kind, seconds):
        self.told.append((kind, seconds, None))


def run_paced(mode, functions, kind="work", num_workers=None):
    engine = ThreadEngine(1, num_workers=num_workers)
    engine._num_workers = len(functions)  # as on a machine with so many cores
    if num_workers is None:
        engine._pace = Always(mode)
    values = engine.run(make_jobs(functions), CallerContext(), kind=kind)
    return values, getattr(engine._pace, "told", None)


def where():
    return threading.get_ident()


def test_alone_all_shards_run_in_the_calling_thread_in_order():
    order = []
    values, told = run_paced(
        Mode.ALONE, [lambda k=k: (order.append(k), where())[1] for k in range(5)]
    )
    assert {*values} == {where()}
    assert order == [0, 1, 2, 3, 4]
    assert [kind for kind, _, _ in told] == ["work"]


def test_on_the_workers_each_ones_processor_time_is_told_not_what_it_waited():
    def spin():
        start = time.thread_time()
        while time.thread_time() - start < 0.02:
            pass

    _, [(_, seconds, busy)] = run_paced(Mode.WATCHED, [spin, lambda: time.sleep(0.1)])
    assert len(busy) == 2
    assert 0.02 <= max(busy) < 0.1 <= seconds
    assert min(busy) < 0.01


@pytest.mark.parametrize(("kind", "num_workers"), [(None, None), ("work", 3)])
def test_without_a_kind_or_with_a_number_of_workers_the_workers_have_it(kind, num_workers):
    values, told = run_paced(Mode.ALONE, [where] * 3, kind, num_workers)
    assert len({*values}) == 3
    assert not told


def test_an_error_alone_is_the_lowest_failing_shards_after_all_have_run():
    ran = []

    def fail(k):
        ran.append(k)
        raise LookupError(k)

    with pytest.raises(LookupError) as info:
        run_paced(Mode.ALONE, [lambda k=k: fail(k) for k in range(3)])
    assert info.value.args == (0,)
    assert info.value.__notes__[0] == f"in shard 0 of 3 (rows 0-1 of 6, {CPU})"
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_a_training_has_the_same_bits_whoever_does_the_work(options):
    found = []
    for mode in Mode:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3))
        model = DataParallel(net, replicas=5, **options)
        engine = model._samestep_runtime.threads
        engine._pace, engine._num_workers = Always(mode), 3
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(29, 6)).square().mean().backward()
            optimizer.step()
        phases = [kind[0] for kind, _, _ in engine._pace.told]
        expected = 0 if mode is Mode.WORKERS else 4
        assert phases.count("forward") >= expected
        assert phases.count("backward") == expected
        found.append([*net.state_dict().values(), torch.get_rng_state()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_equal_calls_are_one_kind_and_others_are_not():
    net = nn.Linear(4, 2)
    model = DataParallel(net, replicas=2)
    engine = model._samestep_runtime.threads
    engine._num_workers = 2  # whatever this machine has

    def kinds(*calls):
        engine._pace = pace = Pace()
        for call in calls:
            call()
        return len(pace._kinds)

    def call(rows):
        with torch.no_grad():
            model(torch.randn(rows, 4))

    def train(rows):
        model(torch.randn(rows, 4)).sum().backward()

    assert kinds(lambda: call(8), lambda: call(8)) == 1
    assert kinds(lambda: call(8), lambda: call(10)) == 2
    assert kinds(lambda: train(8), lambda: train(8)) == 2  # forward, backward
    assert kinds(lambda: train(8), lambda: call(8)) == 3
    assert kinds(lambda: train(8), model.eval, lambda: train(8)) == 4


def test_a_call_under_another_name_is_the_same_kind_and_is_not_found_out_again():
    options = DataParallel(nn.Linear(4, 2), replicas=2)._samestep_options
    plan = plan_split((torch.randn(8, 4),), {}, num_slots=2)
    call = open_call(ALONE, options, plan, "", None)
    one, other = call.named("Linear (wrapper 0)#1"), call.named("Linear (wrapper 0)#2")
    assert one.kind is other.kind is call.kind
    assert one.shards is other.shards
    assert one.own_rows is other.own_rows
    assert (one.spread.number, other.spread.number) == (1, 2)
    assert open_call(ALONE, options, plan, "", None).kind is not call.kind
