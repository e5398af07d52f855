"""Inference on several ranks: each takes every so manieth batch, all get all outputs.

What it holds: :func:`share_rounds`. Why: with several ranks each runs the user's script, so each
goes through the loader and gets every output; but it computes its own batches only.

How: batch n is rank n mod W's. After a round of W batches the ranks tell each other the outputs.

Guarantees: every rank yields all outputs, in the order of the batches, and ends at the same place.
A rank that fails ends the iteration in all, after the outputs of the rounds before.
Must not: know how a batch is run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from samestep.comm import Comm
from samestep.errors import RankError
from samestep.parcel import pack, unpack
from samestep.rng import Draws
from samestep.spread import Spread, describe

__all__ = ["share_rounds"]


def share_rounds(own: Iterator[Any], comm: Comm, get_draws: Callable[[], Draws]) -> Iterator[Any]:
    """Yield the outputs of all ranks.

    Args:
        own: the outputs of this rank's batches, in order.
        comm: the line to the other ranks.
        get_draws: returns, at the end, this rank's source of seeds, to be kept in step with the
            others'.

    Raises:
        RankError: another rank failed, or left the loop earlier.
    """
    number = next(comm.numbers)
    for turn in itertools.count():
        first = turn * comm.num_ranks
        last = first + comm.num_ranks - 1
        kind = f"outputs of batches {first}-{last} of map_batches (loop {number})"
        try:
            output = next(own, _END)
            is_there = output is not _END
            data, tensors = pack(output if is_there else None, {})
        except RankError:
            raise
        except Exception as error:
            comm.exchange(kind, describe(error))
            raise
        told, found = comm.gather(kind, (is_there, data), tensors)
        for rank, (is_theirs, data) in enumerate(told):
            if is_theirs:
                yield output if rank == comm.rank else unpack(data, found[rank], {})
        if not all(is_theirs for is_theirs, _ in told):
            break
    spread = Spread(comm, range(comm.num_ranks), [1] * comm.num_ranks, f"loop {number}")
    draws = get_draws()
    spread.draw_alike(draws, spread.agree("random numbers", draws.drawn))


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_END = object()
