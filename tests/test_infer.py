"""Inference over batches: the plain loop's outputs, from several slots, and nothing left behind."""

import contextlib
import gc
import io
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
from helpers import assert_alike, use_workers
from torch import nn

from samestep import DataParallel, SplitError, current_shard, map_batches, workers
from samestep.errors import DrawWarning
from samestep.regroup import regroup
from samestep.whole import _Gate

SIZES = [4, 7, 1, 0, 9, 3, 3, 12, 2, 5]
WAIT = 20  # seconds until a test that hangs fails


def make_net():
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


def make_batches(sizes=SIZES):
    return [torch.randn(size, 5) for size in sizes]


def wrap(module, num_slots):
    """A wrapper with a worker per slot, however few cores there are."""
    return use_workers(DataParallel(module, replicas=num_slots), num_slots)


class Step(nn.Module):
    """Calls a function of the test's with every batch."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, batch):
        return self.function(batch)


@pytest.fixture
def is_quiet():
    """Whether all workers are back in the pool, asked at the end of a test."""
    yield
    if not has_idle_workers_only():
        gc.collect()  # an iterator in the cycle of an exception
    assert has_idle_workers_only()


def has_idle_workers_only():
    stats = workers.pool.stats()
    return stats.num_idle == stats.num_started


pytestmark = pytest.mark.usefixtures("is_quiet")


# -- The plain loop's outputs ------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("is_serial", [False, True])
def test_outputs_are_those_of_a_plain_loop_bit_for_bit(num_slots, is_serial, monkeypatch):
    monkeypatch.setenv("SAMESTEP_SERIAL", str(int(is_serial)))
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 1).eval()  # has a fast path that interception would close
    batches = [torch.randn(size, 6, 8) for size in (4, 1, 7, 3, 3)]
    with torch.inference_mode():
        expected = [net(batch) for batch in batches]
    outputs = list(map_batches(wrap(net, num_slots), batches))
    assert_alike(outputs, expected, atol=0)
    assert all(output.is_inference() for output in outputs)


def test_a_plain_module_takes_the_arguments_of_the_wrapper():
    net, batches = make_net(), make_batches()
    with torch.inference_mode():
        expected = [net(batch) for batch in batches]
    assert_alike(list(map_batches(net, batches, replicas=2)), expected, atol=0)
    assert_alike(list(map_batches(net, batches, device_ids=["cpu"] * 2)), expected, atol=0)
    assert_alike(list(map_batches(net, batches)), expected, atol=0)


def test_no_batches_give_no_outputs():
    assert list(map_batches(wrap(make_net(), 2), [])) == []


def test_unordered_outputs_are_the_same_ones_as_they_come():
    first_may_end = threading.Event()

    def forward(batch):
        if batch.item() == 1:
            assert first_may_end.wait(WAIT)
        return batch + 0

    batches = [torch.tensor([float(i)]) for i in range(6)]
    seen = []
    for output in map_batches(wrap(Step(forward), 2), batches, ordered=False):
        seen.append(int(output))
        if len(seen) == 5:
            first_may_end.set()
    assert seen == [0, 2, 3, 4, 5, 1]


def test_a_free_slot_takes_the_next_batch_and_order_is_kept():
    others_done = threading.Semaphore(0)
    by_thread = {}

    def forward(batch):
        by_thread.setdefault(threading.get_ident(), []).append(int(batch))
        if batch.item() == 1:  # as slow as five others
            for _ in range(5):
                assert others_done.acquire(timeout=WAIT)
        elif batch.item() > 1:
            others_done.release()
        return batch + 0

    batches = [torch.tensor([float(i)]) for i in range(7)]
    outputs = list(map_batches(wrap(Step(forward), 2), batches))
    assert [int(output) for output in outputs] == list(range(7))
    assert sorted(by_thread.values()) == [[0], [1], [2, 3, 4, 5, 6]]


# -- How a batch is handed over ----------------------------------------------------------------


class Named(nn.Module):
    def forward(self, first, second=None):
        return first, second


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("text", ("text", None)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a", None)),
        ({"second": "b", "first": "a"}, ("a", "b")),
        (nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]), None),
    ],
    ids=["single", "list", "tuple", "dict", "packed"],
)
def test_containers_become_arguments_and_all_else_is_one(batch, expected):
    (output,) = map_batches(Named().eval(), [batch])
    assert output == (expected or (batch, None))


def test_call_decides_how_a_batch_is_handed_over():
    net, batches = make_net(), [(x, torch.ones(len(x))) for x in make_batches()]
    outputs = map_batches(net, batches, replicas=2, call=lambda model, batch: model(batch[0]))
    with torch.inference_mode():
        assert_alike(list(outputs), [net(x) for x, _ in batches], atol=0)


def test_a_replica_not_the_source_is_given_to_call():
    net, seen = make_net(), set()

    def call(model, batch):
        seen.add(id(model))
        return model(batch)

    list(map_batches(net, make_batches(), replicas=2, call=call))
    assert id(net) not in seen


def test_a_batch_is_one_shard_so_wrappers_inside_do_not_cut_it_again():
    seen = []

    def forward(batch):
        seen.append(current_shard())
        return batch

    inner = DataParallel(Step(lambda batch: torch.tensor([len(batch)])), replicas=2).eval()
    outputs = map_batches(
        Step(forward), make_batches([4, 5]), call=lambda model, batch: inner(model(batch))
    )
    assert [output.tolist() for output in outputs] == [[4], [5]]
    assert [(s.index, s.num_shards, s.start, s.stop) for s in seen] == [(0, 1, 0, 4), (0, 1, 0, 5)]


# -- Another batch size ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
def test_rows_are_cut_anew_without_padding_or_repetition(size):
    rows = torch.arange(46.0)
    batches = list(rows.split(SIZES))
    outputs = list(map_batches(wrap(nn.Identity().eval(), 2), batches, batch_size=size))
    assert torch.equal(torch.cat(outputs), rows)
    assert [len(output) for output in outputs] == [len(part) for part in rows.split(size)]


def test_nested_batches_are_cut_anew_and_what_they_share_stays_whole():
    mask, scale = torch.eye(4), torch.tensor(0.1)
    batches = [
        {"x": (torch.arange(a, b), [str(i) for i in range(a, b)]), "mask": mask, "scale": scale}
        for a, b in ((0, 3), (3, 5), (5, 10))
    ]
    found = list(regroup(iter(batches), 4))
    assert [batch["x"][0].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch["x"][1] for batch in found] == [list("0123"), list("4567"), list("89")]
    assert all(torch.equal(batch["mask"], mask) for batch in found)
    assert all(batch["scale"].item() == scale.item() for batch in found)


def test_lists_of_texts_are_rows():
    assert list(regroup(iter([["a", "b", "c"], ["d"], ["e"]]), 2)) == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
    ]


def test_lists_of_images_are_rows_where_the_model_says_so():
    class Count(nn.Module):
        def forward(self, images, scale=None):
            return torch.tensor([image.shape[0] for image in images])

    images = [torch.full((3, 2, 2), float(i)) for i in range(7)]
    batches = [images[:3], images[3:]]  # three items, and three channels
    model = DataParallel(Count().eval(), replicas=2, in_dims={"images": "rows"})
    outputs = map_batches(model, batches, batch_size=4, call=lambda model, batch: model(batch))
    assert [output.tolist() for output in outputs] == [[3] * 4, [3] * 3]
    outputs = map_batches(model, [(batch, 1.0) for batch in batches], batch_size=4)
    assert [output.tolist() for output in outputs] == [[3] * 4, [3] * 3]


@pytest.mark.parametrize("nest", [list, lambda images: (images,), lambda images: {"x": images}])
def test_a_list_of_images_or_columns_is_not_cut_anew_on_a_guess(nest):
    images = nest([torch.ones(3, 2, 2)] * 5)
    outputs = map_batches(
        nn.Identity().eval(), [images], batch_size=2, call=lambda model, batch: batch
    )
    with pytest.raises(SplitError, match=r"5 rows, or columns of 3 .*in_dims=\{.*'rows'\}"):
        list(outputs)


def test_columns_of_torchs_default_collate_are_cut_anew_whatever_call_is():
    rows = torch.arange(6.0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, rows), 3)
    model = nn.Identity().eval()
    outputs = map_batches(model, loader, batch_size=4, call=lambda model, batch: model(batch[1]))
    assert [len(output) for output in outputs] == [4, 2]


def test_columns_that_are_positional_arguments_are_cut_anew():
    class Sum(nn.Module):
        def forward(self, one, other):
            return one + other

    batches = [[torch.arange(3.0), torch.arange(3.0)]] * 2
    outputs = list(map_batches(Sum().eval(), batches, batch_size=4))
    assert [output.tolist() for output in outputs] == [[0, 2, 4, 0], [2, 4]]


def test_what_has_no_rows_and_differs_between_batches_cannot_be_cut_anew():
    batches = [{"x": torch.ones(3), "scale": scale} for scale in (1.0, 2.0)]
    with pytest.raises(SplitError, match=r"kwargs\['scale'\] .*not the same in all batches"):
        list(regroup(iter(batches), 4))
    batches = [{"x": torch.ones(rows), "mask": torch.eye(4)} for rows in (3, 4)]
    with pytest.raises(SplitError, match=r"kwargs\['mask'\] .*does not count as before"):
        list(regroup(iter(batches), 5))


def test_a_batch_that_fits_is_handed_on_as_it_is():
    batch = (torch.ones(4, 2), "name")
    (found,) = regroup(iter([batch]), 4)
    assert found is batch


def test_a_batch_without_rows_cannot_be_cut_anew():
    with pytest.raises(SplitError, match=r"batch_size=2 .*\(float\) holds nothing that counts"):
        list(map_batches(nn.Identity().eval(), [1.0], batch_size=2))


# -- Bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_a_slow_consumer_holds_the_slots_back(ordered):
    pulled = []

    def load():
        for i in range(20):
            pulled.append(i)
            yield torch.tensor([float(i)])

    most_out = 0
    outputs = map_batches(wrap(make_echo(), 2), load(), ordered=ordered, max_in_flight=5)
    for taken, _ in enumerate(outputs, start=1):
        wait_until_still(pulled, min(taken + 5, 20) * (taken > 1))  # the first runs alone
        most_out = max(most_out, len(pulled) - taken)
    assert most_out == 5
    assert len(pulled) == 20


def make_echo():
    return Step(lambda batch: batch + 0)


def wait_until_still(pulled, at_least=0):
    """Give the slots all the time they want: they must stop by themselves."""
    deadline = time.monotonic() + WAIT
    while len(pulled) < at_least and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    before = -1
    while len(pulled) != before:
        before = len(pulled)
        threading.Event().wait(0.005)


def test_a_slow_first_output_holds_the_others_back():
    pulled, may_end = [], threading.Event()

    def load():
        for i in range(40):
            pulled.append(i)
            if i == 7:  # the bound is reached: let the slow batch end, or it would never
                may_end.set()
            yield torch.tensor([float(i)])

    def forward(batch):
        if batch.item() == 1:
            assert may_end.wait(WAIT)
            wait_until_still(pulled, 1 + 7)
            assert len(pulled) == 1 + 7
        return batch + 0

    outputs = list(map_batches(wrap(Step(forward), 2), load(), max_in_flight=7))
    assert [int(output) for output in outputs] == list(range(40))


def test_the_default_bound_is_six_batches_per_slot():
    pulled = []

    def load():
        for i in range(60):
            pulled.append(i)
            yield torch.tensor([float(i)])

    outputs = map_batches(wrap(make_echo(), 2), load())
    next(outputs)  # alone, before the workers start
    next(outputs)
    wait_until_still(pulled, 2 + 6 * 2)
    assert len(pulled) == 2 + 6 * 2
    outputs.close()


def test_an_output_that_was_taken_is_not_kept():
    outputs = map_batches(wrap(make_echo(), 2), make_batches())
    for _ in range(3):
        kept = weakref.ref(next(outputs))
        assert kept() is None
    outputs.close()


@pytest.mark.parametrize("num_taken", [1, 3])
def test_a_batch_that_has_run_is_not_kept(num_taken):
    kept = []

    def load():
        for size in SIZES:
            batch = torch.ones(size, 5)
            kept.append(weakref.ref(batch))
            yield batch
            del batch

    outputs = map_batches(wrap(make_echo(), 2), load(), max_in_flight=3)
    for _ in range(num_taken):
        next(outputs)
    wait_until_still(kept)
    assert [batch() for batch in kept[:-1]] == [None] * (len(kept) - 1)
    assert num_taken > 1 or len(kept) == 1  # the first runs alone
    outputs.close()


def test_nothing_runs_before_the_first_output_is_asked_for():
    pulled = []
    outputs = map_batches(make_net(), (pulled.append(1) for _ in range(3)), replicas=2)
    assert pulled == []
    outputs.close()
    assert pulled == []


# -- Ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_taken", [0, 1, 2, 5])
def test_an_iteration_that_is_left_early_leaves_nothing_running(num_taken):
    running, ended = [], []

    def forward(batch):
        running.append(1)
        ended.append(1)
        return batch

    def load():
        try:
            while True:
                yield torch.ones(2)
        finally:
            closed.append(1)

    closed = []
    outputs = map_batches(wrap(Step(forward), 2), load())
    for _ in range(num_taken):
        next(outputs)
    outputs.close()
    assert len(running) == len(ended)
    assert has_idle_workers_only()
    assert len(closed) == (num_taken > 0)


def test_break_and_closing_leave_nothing_running():
    for number, _ in enumerate(map_batches(wrap(make_net(), 2), make_batches())):
        if number == 2:
            break
    assert has_idle_workers_only()
    with contextlib.closing(map_batches(wrap(make_net(), 2), make_batches())) as outputs:
        assert next(outputs) is not None
        assert next(outputs) is not None
        assert not has_idle_workers_only()  # that is what there is to close
    assert has_idle_workers_only()


class Picky(nn.Module):
    def __init__(self, refused):
        super().__init__()
        self.refused = refused
        self.eval()

    def forward(self, batch):
        if batch[0].item() in self.refused:
            raise LookupError(f"not {int(batch[0])}")
        return batch + 0


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("refused", [{0}, {3}, {3, 4, 5}])
def test_the_models_error_comes_after_the_outputs_before_it(num_slots, refused):
    batches = [torch.tensor([float(i)] * 2) for i in range(12)]
    seen = []
    with pytest.raises(LookupError, match=f"not {min(refused)}") as caught:
        seen.extend(map_batches(wrap(Picky(refused), num_slots), batches))
    assert [int(output[0]) for output in seen] == list(range(min(refused)))
    (note,) = caught.value.__notes__
    assert note.startswith(f"in batch {min(refused)} (2 rows, slot ")
    assert note.endswith(", cpu)")


@pytest.mark.parametrize("num_good", [0, 1, 4])
def test_the_loaders_error_comes_after_the_outputs_before_it(num_good):
    def load():
        yield from make_batches([2] * num_good)
        raise OSError("disk")

    seen = []
    with pytest.raises(OSError, match="disk") as caught:
        seen.extend(map_batches(wrap(make_net(), 2), load()))
    assert len(seen) == num_good
    assert caught.value.__notes__ == [f"while fetching batch {num_good}"]


def test_an_interrupt_while_waiting_ends_the_iteration_and_leaves_nothing_running():
    ended = []

    def forward(batch):
        if batch.item() == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ended.append(int(batch))
        return batch + 0

    model = wrap(Step(forward), 2)
    batches = [torch.tensor([float(i)]) for i in range(50)]
    with pytest.raises(KeyboardInterrupt):
        list(map_batches(model, batches))
    assert has_idle_workers_only()
    assert len(ended) < 50
    assert [int(output) for output in map_batches(model, batches[:2])] == [0, 1]


def test_after_an_error_the_wrapper_works_as_before():
    model = wrap(Picky({2.0}), 2)
    batches = [torch.tensor([float(i)]) for i in range(6)]
    for _ in range(2):
        with pytest.raises(LookupError):
            list(map_batches(model, batches))
    assert [int(o) for o in map_batches(model, batches[:2])] == [0, 1]
    assert torch.equal(model(torch.tensor([5.0, 6.0])), torch.tensor([5.0, 6.0]))


def test_after_an_error_nothing_more_is_pulled():
    pulled, may_fail = [], threading.Event()

    def load():
        for i in range(50):
            pulled.append(i)
            yield torch.tensor([float(i)])

    def forward(batch):
        if batch.item() == 1:
            raise LookupError
        if batch.item() == 2:
            may_fail.wait(0.02)
        return batch

    with pytest.raises(LookupError):
        list(map_batches(wrap(Step(forward), 2), load()))
    assert len(pulled) <= 4  # the first, the failing, and what the other slot had begun


def test_an_iteration_may_be_closed_in_one_of_its_own_workers():
    # As the garbage collector may do.
    closed = threading.Event()

    def forward(batch):
        if batch.item() == 2:
            assert may_close.wait(WAIT)
            outputs.close()
            closed.set()
        return batch + 0

    may_close = threading.Event()
    outputs = map_batches(
        wrap(Step(forward), 2), (torch.tensor([float(i)]) for i in range(5)), max_in_flight=3
    )
    next(outputs)
    next(outputs)
    before = workers.pool.stats()
    may_close.set()
    assert closed.wait(WAIT)
    # Those workers end by themselves and are not lent again: count them out.
    workers.pool._num_started -= before.num_started - before.num_idle


@pytest.mark.slow
def test_a_script_may_end_in_the_middle_of_an_iteration():
    code = """if True:
        import torch, samestep
        net = torch.nn.Linear(64, 64).eval()
        def load():
            while True:
                yield torch.ones(512, 64)
        outputs = samestep.map_batches(net, load(), replicas=2)
        next(outputs), next(outputs)
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


# -- State and random numbers ------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.seen = 0
        self.eval()

    def forward(self, batch):
        self.count += 1
        self.seen += 1
        self.last = batch
        return batch + self.count, self.seen


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_what_forwards_write_reaches_neither_the_source_nor_the_next_batch(num_slots):
    net, batches = Counting(), make_batches()
    outputs = list(map_batches(wrap(net, num_slots), batches))
    assert_alike(outputs, [(batch + 1, 1) for batch in batches], atol=0)
    assert net.count.item() == net.seen == 0
    assert not hasattr(net, "last")


@pytest.mark.parametrize("sync", [False, True])
def test_running_statistics_stay_and_training_mode_is_warned_of(sync):
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))
    before = [buffer.clone() for buffer in net.buffers()]
    model = use_workers(DataParallel(net, replicas=2, sync_batch_norm=sync), 2)
    batches = make_batches([4, 5, 6, 7])
    with pytest.warns(UserWarning, match=r"training mode.*model\.eval\(\)"):
        outputs = list(map_batches(model, batches))
    assert all(map(torch.equal, net.buffers(), before))
    assert all(
        not replica.norms[0].calls
        for replica in model._samestep_runtime.replicas._replicas.values()
    )
    with torch.inference_mode():
        assert_alike(outputs, [net(batch) for batch in batches], atol=0)


def test_an_output_in_the_replicas_own_memory_is_not_written_over():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(12, 5))

        def forward(self, batch):
            self.cache[: len(batch)] = batch
            return self.cache[: len(batch)], self.cache

    net, batches = Cached().eval(), make_batches()
    outputs = list(map_batches(wrap(net, 2), batches))
    for (view, whole), batch in zip(outputs, batches, strict=True):
        assert torch.equal(view, batch)
        assert torch.equal(whole[: len(batch)], batch)
        assert not whole[len(batch) :].any()
    assert not net.cache.any()


def test_a_parameter_that_is_returned_is_the_modules_own():
    net = make_net()
    outputs = list(map_batches(net, make_batches(), replicas=2, call=lambda m, _: m[0].weight))
    assert all(output is net[0].weight for output in outputs)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.eval()
        self.drop.train()  # as in a Monte Carlo estimate

    def forward(self, batch):
        return self.drop(torch.ones(40)) + torch.rand(40)


def test_random_numbers_depend_on_seed_and_batch_only():
    found = []
    for num_slots in (1, 2, 3):
        torch.manual_seed(7)
        outputs = list(map_batches(wrap(Noisy(), num_slots), make_batches()))
        found.append((outputs, torch.rand(3)))
    assert_alike(found[1], found[0], atol=0)
    assert_alike(found[2], found[0], atol=0)
    outputs = found[0][0]
    assert all(not torch.equal(outputs[0], other) for other in outputs[1:])
    torch.manual_seed(8)
    other = next(map_batches(wrap(Noisy(), 2), make_batches()))
    assert not torch.equal(other, outputs[0])


def test_a_model_that_draws_nothing_leaves_the_generator_alone():
    net, batches = make_net(), make_batches()
    state = torch.get_rng_state()
    list(map_batches(wrap(net, 2), batches))
    assert torch.equal(torch.get_rng_state(), state)


class Retrying(nn.Module):
    """Draws only where the batch says so."""

    def __init__(self, threshold=2.0):
        super().__init__()
        self.threshold = threshold
        self.register_buffer("count", torch.zeros(()))
        self.drop = nn.Dropout(0.5)
        self.eval()
        self.drop.train()

    def forward(self, batch):
        self.count += 1
        if batch.max() < self.threshold:
            return batch * self.count
        drawn = self.drop(torch.ones(30)) + torch.rand(30)
        return torch.cat([batch * self.count, drawn])


def run_retrying(num_slots, *, draw=False):
    torch.manual_seed(7)
    batches = [torch.full((2,), float(i % 4)) for i in range(12)]
    outputs = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for output in map_batches(wrap(Retrying(), num_slots), batches):
            outputs.append(output)
            if draw:
                torch.rand(3), torch.manual_seed(len(outputs))
    assert [w.category for w in caught] == [DrawWarning]
    assert "batch 2 drew" in str(caught[0].message) or num_slots > 1
    return outputs


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_model_that_draws_after_the_first_batch_gives_the_same_outputs_each_time(num_slots):
    expected = run_retrying(1)
    for draw in (False, True):
        assert_alike(run_retrying(num_slots, draw=draw), expected, atol=0)
    # What the first of the two runs wrote is not there in the second.
    assert [int(output[0]) for output in expected] == [i % 4 for i in range(12)]
    drawn = [output[2:] for output in expected if len(output) > 2]
    assert len({tuple(values.tolist()) for values in drawn}) == len(drawn) == 6


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_batch_that_runs_again_is_as_it_was_although_forward_wrote_it(is_inference):
    def forward(batch):
        batch += 1
        return batch + (torch.rand(2) if batch.max() > 2 else 0)

    def load():
        with torch.inference_mode(is_inference):
            batches = [torch.full((2,), float(i)) for i in range(4)]
        yield from batches

    with pytest.warns(DrawWarning):
        outputs = list(map_batches(wrap(Step(forward), 2), load()))
    assert [int(output[0]) for output in outputs] == [1, 2, 3, 4]


def test_a_first_write_to_a_batch_that_must_run_again_is_refused():
    def forward(batch):
        return batch if batch.max() < 1 else batch.add_(torch.rand(2))

    batches = [torch.zeros(2), torch.ones(2)]
    with pytest.raises(RuntimeError, match=r"changed its input in place.*clone the input"):
        list(map_batches(wrap(Step(forward), 1), batches))


def test_draws_of_other_threads_change_no_output_and_warn_of_nothing():
    runs = []

    def forward(batch):
        other = threading.Thread(target=torch.rand, args=(1,))  # the loop's or the loader's
        if runs:
            other.start()
            other.join()
        runs.append(torch._C._len_torch_function_stack())
        return batch + runs[-1]

    batches = [torch.full((2,), float(i)) for i in range(4)]
    outputs = list(map_batches(wrap(Step(forward), 2), batches))
    assert [int(output[0]) for output in outputs] == [0, 1, 2, 3]  # the runs without interception
    assert sorted(runs) == [0] * 4 + [1] * 3


def test_lazy_parameters_get_their_shape_from_the_first_batch_and_can_train():
    net = nn.LazyLinear(3).eval()
    outputs = list(map_batches(wrap(net, 2), make_batches()))
    assert net.weight.shape == (3, 5)
    assert len(outputs) == len(SIZES)
    net(torch.ones(1, 5)).sum().backward()
    assert net.weight.grad is not None


def test_a_module_that_initialises_itself_does_so_once():
    class Init(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))
            self.is_done = False

        def forward(self, batch):
            if not self.is_done:
                self.scale.data.fill_(batch.max())
                self.is_done = True
            return batch * self.scale

    net = Init().eval()
    batches = [torch.full((2,), float(i)) for i in range(2, 6)]
    outputs = list(map_batches(wrap(net, 2), batches))
    assert [output[0].item() for output in outputs] == [4, 6, 8, 10]
    assert net.scale.item() == 2
    assert net.is_done


# -- Around it ---------------------------------------------------------------------------------


def test_replicas_are_the_wrappers_own_and_fresh():
    net, batches = make_net(), make_batches()
    model = wrap(net, 2)
    list(map_batches(model, batches))
    assert model.stats().num_builds == 2
    with torch.no_grad():
        net[0].weight.add_(1.0)
    net[1] = nn.Tanh().eval()
    with torch.inference_mode():
        expected = [net(batch) for batch in batches]
    assert_alike(list(map_batches(model, batches)), expected, atol=0)
    model(torch.randn(6, 5))
    builds = model.stats().num_builds
    assert_alike(list(map_batches(model, batches)), expected, atol=0)
    assert model.stats().num_builds == builds


def test_the_wrapper_may_be_called_in_between():
    model, batches = wrap(Counting(), 2), make_batches([4] * 6)
    for output, _ in map_batches(model, batches):
        model(output)
    assert model.module.seen == 6


def test_two_iterations_of_one_wrapper_do_not_meet():
    model, batches = wrap(make_net(), 2), make_batches()
    pairs = list(zip(map_batches(model, batches), map_batches(model, batches), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_callers_settings_hold_in_every_worker():
    seen = []

    def forward(batch):
        seen.append((torch.is_inference_mode_enabled(), torch.get_num_threads()))
        return batch @ batch.T

    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = list(map_batches(wrap(Step(forward), 2), make_batches([2] * 6)))
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    assert set(seen) == {(True, 1)}
    assert not torch.is_inference_mode_enabled()


def test_the_callers_mode_is_not_left_changed_between_outputs():
    for output in map_batches(make_net(), make_batches([2, 2, 2]), replicas=2):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        assert not output.requires_grad


def test_a_mode_of_the_callers_sees_everything_in_the_callers_thread():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append((func, threading.get_ident()))
            return func(*args, **(kwargs or {}))

    seen, batches = [], make_batches()
    with Mode():
        list(map_batches(wrap(make_net(), 2), batches))
    assert seen.count((nn.functional.linear, threading.get_ident())) == 2 * len(batches)


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_outputs():
    net, batches = make_net(), make_batches([3, 3, 4, 4, 5, 5])
    compiled = torch.compile(net, backend="eager", dynamic=False)
    with torch.inference_mode():
        expected = [net(batch) for batch in batches]
    assert_alike(list(map_batches(wrap(compiled, 2), batches)), expected, atol=0)
    torch._dynamo.reset()


def test_what_must_be_alone_waits_for_the_others_and_they_for_it():
    gate, order, begun = _Gate(), [], threading.Event()

    def pass_through(name, alone):
        begun.set()
        with gate.passing(alone=alone):
            order.append(name)

    lone = threading.Thread(target=pass_through, args=("alone", True))
    late = threading.Thread(target=pass_through, args=("late", False))
    with gate.passing(alone=False), gate.passing(alone=False):
        lone.start()
        while not gate._num_waiting:
            assert begun.wait(WAIT)
        late.start()
        lone.join(0.02)
        late.join(0.02)
        assert order == []
    lone.join(WAIT)
    late.join(WAIT)
    assert order == ["alone", "late"]


def test_a_data_loader_with_labels_works():
    data = torch.utils.data.TensorDataset(torch.randn(10, 5), torch.arange(10))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    figures = []
    outputs = map_batches(
        make_net(), loader, replicas=2, call=lambda m, b: (m(b[0]), b[1]), progress=figures.append
    )
    assert torch.equal(torch.cat([labels for _, labels in outputs]), torch.arange(10))
    assert [(f.num_batches, f.num_rows, f.total) for f in figures] == [
        (1, 4, 3),
        (2, 8, 3),
        (3, 10, 3),
    ]


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_progress_is_shown_on_standard_error(has_tqdm, monkeypatch):
    if has_tqdm:
        # Its bars start a thread of tqdm's own, which watches for bars that stand still.
        monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        list(map_batches(make_net(), make_batches(), progress=True))
    assert "rows/s" in shown.getvalue()
    assert f"{len(SIZES)}/{len(SIZES)}" in shown.getvalue()
    assert shown.getvalue().endswith("\n")


def test_batches_are_counted_where_rows_are_not_known():
    figures = []
    list(map_batches(Step(lambda b: b), iter(["a", "b"]), progress=figures.append))
    assert (figures[1].num_rows, figures[1].total) == (None, None)
    assert str(figures[1]).startswith("batch 2, ")
    assert str(figures[1]).endswith(" batches/s")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an int, got 2.0"),
        ({"max_in_flight": 0}, ValueError, "max_in_flight must be at least 1"),
        ({"progress": "yes"}, TypeError, "progress must be True, False or a function"),
        ({"replicas": 0}, ValueError, "replicas must be at least 1"),
        ({"output_device": "no"}, ValueError, "output_device holds 'no'"),
        ({"loader": 3}, TypeError, "loader must be an iterable of batches, got int"),
        ({"model": 3}, TypeError, "module must be a torch.nn.Module, got int"),
        (
            {"model": DataParallel(nn.Identity()), "replicas": 2},
            ValueError,
            "replicas is for a plain",
        ),
        ({"call": 3}, TypeError, "call must be a function of a model and a batch, got 3"),
    ],
)
def test_what_cannot_be_met_is_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        map_batches(**{"model": nn.Identity().eval(), "loader": [], **options})


def test_a_batch_that_was_unpacked_by_mistake_is_explained():
    loader = [(torch.randn(3, 4), torch.zeros(3))]  # rows and labels
    with pytest.raises(TypeError) as info:
        list(map_batches(nn.Linear(4, 2).eval(), loader, replicas=2))
    notes = " ".join(info.value.__notes__)
    assert "a tuple of 2, was passed as so many arguments" in notes
    assert "batch[0]" in notes
