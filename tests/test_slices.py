"""Subtrees that lie with several workers: planned as data, added by slices, to the same bits."""

import itertools
import random
import threading

import pytest
import torch
from test_reduce import make_values

from samestep.reduce import (
    TreeSum,
    add_into,
    evaluate,
    is_large,
    plan_tree,
    sum_lists,
    sum_slices,
)

COUNTS = [1, 2, 3, 5, 7, 8, 13]


def run_here(jobs):
    for job in jobs:
        job()


def run_in_threads(jobs):
    barrier = threading.Barrier(len(jobs))  # a thread that starts later may get an ended one's name

    def work(job):
        barrier.wait()
        job()
        barrier.wait()

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def make_lists(count, size=40, seed=0):
    """Per shard a list of gradients: of several shapes, one missing here and there."""
    generator = torch.Generator().manual_seed(seed)
    lists = []
    for k in range(count):
        scale = 10.0 ** torch.randint(-4, 5, (1,), generator=generator)
        row = [
            torch.randn(size, 3, generator=generator) * scale,
            torch.randn(7, generator=generator, dtype=torch.float64),
            torch.randn(size, generator=generator).bfloat16(),
            torch.randn(4, 4, generator=generator).T,
            None,
            torch.zeros(0, 3),
        ]
        if k % 3 == 1:
            row[0] = None
        lists.append(row)
    return lists


def add_all(lists):
    total = TreeSum(len(lists), sum_lists)
    for k, row in enumerate(lists):
        total.add(k, row)
    return total.result()


def add_by_runs(lists, num_workers, by_thread):
    """As workers do it: each a contiguous run, in a thread of its own."""
    total = TreeSum(len(lists), sum_lists, by_thread=by_thread)
    cuts = [len(lists) * w // num_workers for w in range(num_workers + 1)]

    def job(first, last):
        return lambda: [total.add(k, lists[k]) for k in range(first, last)]

    run_in_threads([job(a, b) for a, b in itertools.pairwise(cuts)])
    return total


def check_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("count", "nodes", "expected"),
    [
        (1, [(0, 0)], {(0, 0): 0}),
        (2, [(0, 0), (0, 1)], {(1, 0): (0, 1)}),
        (3, [(1, 0), (0, 2)], {(2, 0): (0, 1)}),
        (8, [(2, 0), (1, 2), (1, 3)], {(3, 0): (0, (1, 2))}),
        (8, [(1, 1), (1, 2), (1, 3)], {(1, 1): 0, (2, 1): (1, 2)}),
        (5, [(0, 4)], {(2, 1): 0}),  # without a sibling it is passed up as it is
        (5, [(1, 0), (1, 1), (0, 4)], {(3, 0): ((0, 1), 2)}),
    ],
)
def test_what_can_be_made_of_subtrees(count, nodes, expected):
    assert plan_tree(count, nodes) == expected


@pytest.mark.parametrize("count", COUNTS)
def test_the_plan_for_single_shards_is_the_tree(count):
    ((node, recipe),) = plan_tree(count, [(0, k) for k in range(count)]).items()
    assert node[1] == 0
    values = make_values(count)
    total = TreeSum(count, torch.add)
    for k, value in enumerate(values):
        total.add(k, value)
    assert torch.equal(evaluate(recipe, values), total.result())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("run", [run_here, run_in_threads])
def test_slices_have_the_bits_of_the_whole(count, num_workers, run):
    lists = make_lists(count)
    total = add_by_runs(lists, num_workers, True)
    found = sum_slices(count, total.parts(), num_workers, run)
    assert len(found) == 1
    # Of lists of their own: the others' memory has the sums now.
    check_equal(next(iter(found.values())), add_all(make_lists(count)))


def test_an_accelerators_values_are_added_by_the_caller_alone():
    # "meta" stands in for one: workers would add there without the caller's streams.
    def make(device):
        return {(0, k): [torch.ones(70_000, device=device)] for k in range(2)}

    asked = []
    ((total,),) = sum_slices(2, make("meta"), 2, asked.extend).values()
    assert total.shape == (70_000,)
    assert asked == []
    sum_slices(2, make("cpu"), 2, asked.extend)
    assert len(asked) == 2


def test_large_values_of_other_workers_are_left_alone():
    lists = make_lists(8)
    total = add_by_runs(lists, 2, True)
    assert list(total.parts()) == [(2, 0), (2, 1)]
    assert list(add_by_runs(lists, 2, False).parts()) == [(3, 0)]


def test_parts_come_in_the_order_of_the_shards():
    for seed in range(10):
        order = [1, 2, 3, 4, 6]
        random.Random(seed).shuffle(order)
        total = TreeSum(7, sum_lists)
        for k in order:
            total.add(k, [torch.ones(1) * k])
        assert list(total.parts()) == [(0, 1), (1, 1), (0, 4), (1, 3)]


@pytest.mark.parametrize("size", [0, 1, 1 << 15, (1 << 15) + 1, 100_000])
def test_blocks_have_the_bits_of_the_whole(size):
    values = [torch.randn(size) * 10.0**k for k in range(3)]
    total = torch.empty(size)
    add_into(total, ((0, 1), 2), values)
    assert torch.equal(total, (values[0] + values[1]) + values[2])
    add_into(total, 2, values)
    assert torch.equal(total, values[2])


def test_work_is_shared_where_there_are_many_entries_but_not_many_tensors():
    def ask(count, size):
        return is_large([torch.empty(size, device="meta")] * count)

    assert ask(1, 1 << 19)
    assert ask(16, 1 << 15)
    assert not ask(1, 1 << 18)
    assert not ask(3000, 3500)  # each has to be looked at, which takes longer than adding it
