"""The canonical tree: one order of additions, whoever adds and whenever."""

import itertools
import math
import random
import threading

import pytest
import torch

from samestep.reduce import TreeSum, add, naive_sum, sum_lists, tree_sum

COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31, 32, 33]


def make_values(count, seed=0):
    """Numbers of very different sizes, so that every other order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 3, generator=generator)
    return list(values * 10.0 ** torch.randint(-4, 5, (count, 1), generator=generator))


def tree_text(count):
    """The tree as text, from the same code that adds."""
    tree = TreeSum(count, lambda left, right: f"({left}+{right})")
    for index in range(count):
        tree.add(index, str(index))
    return tree.result()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_the_tree_is_this_one(count, text):
    assert tree_text(count) == text


@pytest.mark.parametrize("count", range(1, 7))
def test_every_order_of_arrival_gives_the_same_tree(count):
    expected = tree_text(count)
    for order in itertools.permutations(range(count)):
        tree = TreeSum(count, lambda left, right: f"({left}+{right})")
        for index in order:
            tree.add(index, str(index))
        assert tree.result() == expected
        assert tree.num_waiting == 0


@pytest.mark.parametrize("count", COUNTS)
def test_any_order_of_arrival_gives_the_bits_of_the_plain_form(count):
    values = make_values(count)
    expected = tree_sum(values)
    for seed in range(10):
        order = list(range(count))
        random.Random(seed).shuffle(order)
        tree = TreeSum(count, add)
        for index in order:
            tree.add(index, values[index])
        assert torch.equal(tree.result(), expected)


def test_another_order_would_have_other_bits():
    values = make_values(8)
    assert not torch.equal(tree_sum(values), naive_sum(values))
    torch.testing.assert_close(
        tree_sum([v.double() for v in values]), naive_sum([v.double() for v in values])
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_whoever_runs_shards_in_turn_holds_few_partial_sums(count, num_workers):
    bound = int(math.log2(count)) + 1
    cuts = [count * part // num_workers for part in range(num_workers + 1)]
    tree, most = TreeSum(count, add), 0
    runs = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
    values = make_values(count)
    for turn in range(count):  # the workers go at the same pace
        for run in runs:
            if turn < len(run):
                tree.add(run[turn], values[run[turn]])
                most = max(most, tree.num_waiting)
    assert most <= bound * min(num_workers, count)
    if num_workers == 1:
        assert most <= bound
    assert torch.equal(tree.result(), tree_sum(values))


@pytest.mark.parametrize("count", [2, 5, 8, 17])
def test_threads_that_add_at_once_give_the_same_bits(count):
    values = make_values(count)
    expected = tree_sum(values)
    for _ in range(20):
        tree, barrier = TreeSum(count, add), threading.Barrier(count)

        def bring(index, tree=tree, barrier=barrier):
            barrier.wait()
            tree.add(index, values[index])

        threads = [threading.Thread(target=bring, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(tree.result(), expected)


def test_a_sum_that_misses_values_has_no_result():
    tree = TreeSum(3, add)
    tree.add(0, torch.ones(1))
    tree.add(2, torch.ones(1))
    with pytest.raises(IndexError):
        tree.result()


def test_additions_of_other_subtrees_go_on_while_one_is_added():
    inside, release = threading.Event(), threading.Event()

    def combine(left, right):
        if left == [0]:
            inside.set()
            assert release.wait(5)
        return left + right

    tree = TreeSum(4, combine)
    tree.add(0, [0])
    slow = threading.Thread(target=tree.add, args=(1, [1]))
    slow.start()
    assert inside.wait(5)
    tree.add(2, [2])
    tree.add(3, [3])  # would wait for ever if the addition held the lock
    release.set()
    slow.join()
    assert tree.result() == [0, 1, 2, 3]


def test_no_gradient_is_not_zero():
    one, two = torch.ones(2), torch.full((2,), 2.0)
    found = sum_lists([one, None, None], [two, two, None])
    assert torch.equal(found[0], one + two)
    assert found[1] is two
    assert found[2] is None


def test_lists_of_different_lengths_are_our_mistake():
    with pytest.raises(ValueError, match="zip"):
        sum_lists([torch.ones(1)], [])


@pytest.mark.parametrize("layouts", ["ss", "sd", "ds", "dd"])
def test_sparse_and_dense_values_add_up(layouts):
    dense = [torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.0]])]
    values = [v.to_sparse() if kind == "s" else v for v, kind in zip(dense, layouts, strict=True)]
    total = tree_sum(values)
    assert total.is_sparse == (layouts == "ss")
    assert torch.equal(total.to_dense() if total.is_sparse else total, dense[0] + dense[1])


def test_the_sum_is_differentiable():
    values = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(5)]
    assert torch.autograd.gradcheck(lambda *parts: tree_sum([p.sin() for p in parts]), values)
