"""Items to workers and results back: order, bounds, and whom a result wakes."""

import threading
import time

import pytest

from samestep.lookahead import Lookahead


def make(num_items=10, *, limit=4, ordered=True):
    return Lookahead(iter(enumerate(range(num_items))), limit=limit, ordered=ordered)


def count_rings(bell):
    return bell._rung.qsize()


def test_a_result_that_overtook_another_wakes_nobody():
    ahead = make()
    ahead.pull(), ahead.pull(), ahead.pull()
    assert ahead._find() is None  # the consumer is about to wait
    ahead.put(1, "b")
    assert count_rings(ahead._due) == 0
    ahead.put(0, "a")
    ahead.put(2, "c")
    assert count_rings(ahead._due) == 1
    assert [ahead.take() for _ in range(3)] == [(0, "a"), (1, "b"), (2, "c")]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_result_wakes_nobody_while_the_consumer_is_busy(ordered):
    ahead = make(ordered=ordered)
    for number in range(3):
        ahead.pull()
        ahead.put(number)
        ahead.take()
    assert count_rings(ahead._due) == count_rings(ahead._room) == 0


def test_a_worker_that_waits_for_room_is_woken_by_the_consumer_alone():
    ahead = make(limit=2)
    ahead.pull(), ahead.pull()
    assert not ahead._may_go_on()
    ahead.put(1)
    ahead.put(0)
    assert count_rings(ahead._room) == 0
    ahead.take(), ahead.take()
    assert count_rings(ahead._room) == 1


def test_a_ring_that_was_left_over_does_no_harm():
    ahead = make()
    ahead.pull()
    ahead._find()
    ahead.put(0)  # rings for a consumer that Ctrl-C took away before it waited
    assert ahead.take() == (0, None)
    ahead.pull()
    threading.Timer(0.05, ahead.put, (1, "late")).start()
    assert ahead.take() == (1, "late")


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 7])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_no_wake_up_is_lost(num_workers, limit, ordered):
    num_items = 2000
    ahead = make(num_items, limit=limit, ordered=ordered)

    def work(seed):
        while (pair := ahead.pull()) is not None:
            if (pair[0] * 7 + seed) % 50 == 0:
                time.sleep(1e-4)
            ahead.put(pair[0], -pair[1])

    workers = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(num_workers)]
    for worker in workers:
        worker.start()
    found = []
    while (taken := ahead.take()) is not None:
        found.append(taken)
        if taken[0] % 90 == 0:
            time.sleep(1e-4)
    assert sorted(found) == [(number, -number) for number in range(num_items)]
    assert not ordered or found == sorted(found)
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()


def test_stopping_wakes_those_who_wait():
    ahead = make(limit=1)
    ahead.pull()
    got = []
    waiting = [
        threading.Thread(target=lambda: got.append(ahead.pull()), daemon=True) for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    ahead.stop()
    for thread in waiting:
        thread.join(10)
    assert got == [None] * 3


class Stopping:
    """Stops the iteration in the middle of what is done to it, as the garbage collector may."""

    def __init__(self, ahead):
        self.ahead = ahead

    def __len__(self):
        self.ahead.stop()
        return 10

    def __bool__(self):
        self.ahead.stop()
        return False


@pytest.mark.parametrize("name", ["pull", "put"])
def test_an_iteration_may_be_stopped_in_the_middle_of_its_own_work(name):
    ahead = make(limit=2)
    ahead.pull()
    got = []

    def work():
        got.append(ahead.pull() if name == "pull" else ahead.put(0))

    ahead._order = Stopping(ahead)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert got == [None]
    assert ahead._is_over
