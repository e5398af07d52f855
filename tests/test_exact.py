"""The promise: the step of the wrapped module is the step of the plain one, whatever B and K are."""

import functools

import pytest
import torch
from helpers import assert_alike, train_step
from models import CASES, make_batch, make_model

from samestep import DataParallel

BATCHES = range(18)


def try_step(model, name, num_rows):
    """The step, or the error that the module answers with."""
    args, kwargs, leaves = make_batch(name, num_rows)
    try:
        return train_step(model, args, kwargs, leaves)
    except (RuntimeError, ValueError) as error:
        return error


@functools.cache
def plain_step(name, num_rows):
    return try_step(make_model(name), name, num_rows)


@pytest.mark.parametrize("num_replicas", range(1, 9))
@pytest.mark.parametrize("split", ["chunk", "balanced"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_plain_modules_step(name, split, num_replicas):
    case = CASES[name]
    model = DataParallel(make_model(name), replicas=num_replicas, split=split, **case.options)
    for num_rows in BATCHES[case.min_rows :]:
        expected, found = plain_step(name, num_rows), try_step(model, name, num_rows)
        if isinstance(expected, Exception):
            assert num_rows == 0, expected
            assert (type(found), str(found)) == (type(expected), str(expected))
        else:
            if isinstance(found, Exception):
                raise found
            assert_alike(found, expected)
