"""Large memory that is kept: never lent while a tensor lies in it."""

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
