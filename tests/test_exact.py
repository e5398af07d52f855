"""The promise: a step of the wrapped module is the plain module's, whatever B and K are."""

import copy
import functools

import pytest
import torch
from helpers import assert_alike, train_step
from models import CASES, make_batch, make_model, normal
from torch import nn

from samestep import DataParallel

BATCHES = range(18)
SPLITS = ["chunk", "balanced"]
REPLICAS = range(1, 9)


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


def check_steps(name, split, num_replicas, batches):
    """One wrapper, one step after another with batches of these sizes."""
    case = CASES[name]
    model = DataParallel(make_model(name), replicas=num_replicas, split=split, **case.options)
    for num_rows in batches:
        if num_rows < case.min_rows:
            continue
        expected, found = plain_step(name, num_rows), try_step(model, name, num_rows)
        if isinstance(expected, Exception):
            assert num_rows == 0, expected
            assert (type(found), str(found)) == (type(expected), str(expected))
        elif isinstance(found, Exception):
            raise found
        else:
            assert_alike(found, expected)


@pytest.mark.parametrize("num_replicas", REPLICAS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_plain_modules_step(name, split, num_replicas):
    # No row, one row, and every sixth size, others for the next K; all sizes in the slow test.
    batches = [b for b in BATCHES if (b + num_replicas) % 6 == 0 or b < 2]
    check_steps(name, split, num_replicas, batches)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", REPLICAS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_plain_modules_step_for_every_number_of_rows(name, split, num_replicas):
    check_steps(name, split, num_replicas, BATCHES)


@pytest.mark.parametrize("weights", [[1, 3], [0, 1, 1], [1, 0, 2, 5], [0.2, 0.7, 0.1]])
@pytest.mark.parametrize("name", ["mlp", "nested", "own loss"])
def test_a_step_is_the_plain_modules_step_whatever_the_weights(name, weights):
    check_steps(name, weights, len(weights), [1, 2, 7, 12])


def test_a_loss_over_pairs_of_rows_has_the_plain_gradients():
    def contrast(z):
        z = z / z.norm(dim=1, keepdim=True)
        return nn.functional.cross_entropy(z @ z.T * 3, torch.arange(len(z)).roll(1))

    plain, x = make_model("mlp"), normal(11, 3)
    expected = torch.autograd.grad(contrast(plain(x)), [x, *plain.parameters()])
    for num_replicas in (2, 3, 8):
        model = DataParallel(plain, replicas=num_replicas)
        found = torch.autograd.grad(contrast(model(x)), [x, *plain.parameters()])
        assert_alike(found, expected)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.02),
    ],
    ids=["sgd", "adamw"],
)
def test_a_training_stays_with_the_plain_one(make_optimizer):
    plain = make_model("nested")
    model = DataParallel(copy.deepcopy(plain), replicas=3, in_dims={"shift": None})
    optimizers = [
        make_optimizer([p for p in one.parameters() if p.requires_grad]) for one in (plain, model)
    ]
    for num_rows in (5, 8, 3, 11, 2, 7):
        args, kwargs, leaves = make_batch("nested", num_rows)
        steps = []
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            steps.append(train_step(one, args, kwargs, leaves))
            optimizer.step()
            for leaf in leaves:
                leaf.grad = None
        assert_alike(*steps)
    assert_alike(dict(plain.state_dict()), dict(model.state_dict()))


def test_evaluation_without_gradients_is_the_plain_one():
    for name in CASES:
        model = DataParallel(make_model(name), replicas=3, **CASES[name].options)
        args, kwargs, leaves = make_batch(name, 7)
        for leaf in leaves:
            leaf.requires_grad_(False)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_alike(model(*args, **kwargs), make_model(name)(*args, **kwargs))
