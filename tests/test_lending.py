"""Large memory that is kept: never lent while a tensor lies in it."""

import os
from pathlib import Path

import pytest
import torch

from samestep.lending import Lender

SIZE = 1 << 16


def test_memory_that_came_back_is_lent_again():
    lender = Lender()
    first = lender.lend(SIZE)
    place = first.data_ptr()
    del first
    assert lender.lend(SIZE).data_ptr() == place


def test_memory_in_which_any_tensor_lies_is_not_lent():
    lender = Lender()
    first = lender.lend(SIZE)
    part = first[64:128].view(torch.float32).detach()
    del first
    part.fill_(1.0)
    for _ in range(5):
        lender.lend(SIZE).zero_()
    assert part.tolist() == [1.0] * 16


def test_what_does_not_come_back_is_not_kept_for_ever():
    lender = Lender()
    lent = [lender.lend(SIZE) for _ in range(5)]
    assert len({one.data_ptr() for one in lent}) == 5
    assert len(lender._kept) == 2
    del lent
    lender.lend(2 * SIZE)
    assert [len(memory) for memory, _ in lender._kept] == [2 * SIZE]


def test_nothing_is_lent_as_nothing():
    assert Lender().lend(0).numel() == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's /proc")
def test_a_forked_childs_memory_is_its_own():
    # Shared, a child that zeroes its gradients would zero its parent's.
    lent = Lender().lend(SIZE)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, *_ = line.split()
        first, last = (int(part, 16) for part in place.split("-"))
        if first <= lent.data_ptr() < last:
            assert rights[3] == "p"
            return
    raise AssertionError("the memory is not in the list")
