"""What is packed for another rank arrives as it was."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from samestep.parcel import pack, unpack

Pair = namedtuple("Pair", "one other")


def send(value, own=None, theirs=None, hollow=()):
    """Through bytes, as another process would get it."""
    own, theirs = own or {}, theirs or {}
    names = {id(thing): name for name, thing in own.items()}
    data, tensors = pack(value, names, hollow)
    return unpack(data, [tensor.detach().clone() for tensor in tensors], theirs)


def test_containers_numbers_and_texts_keep_their_types():
    value = OrderedDict(a=[1, 2.5, None, "text"], b=Pair((True,), {3}), c=torch.device("cpu"))
    found = send(value)
    assert found == value
    assert type(found) is OrderedDict
    assert type(found["b"]) is Pair


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_keep_their_bits(dtype):
    value = torch.randn(3, 4).to(dtype)
    found = send([value.T, value[:0], value.sum()])
    assert torch.equal(found[0], value.T)
    assert found[1].shape == (0, 4)
    assert found[2].dtype == value.sum().dtype


def test_whether_a_tensor_requires_grad_arrives():
    weight = torch.ones(2, requires_grad=True)
    found = send([weight * 2, weight.detach()])
    assert [tensor.requires_grad for tensor in found] == [True, False]
    assert found[0].grad_fn is None  # graphs do not travel


def test_an_object_that_is_there_twice_stays_one():
    tensor, names = torch.ones(2), ["a"]
    found = send({"x": tensor, "y": [tensor, names], "z": names})
    assert found["x"] is found["y"][0]
    assert found["z"] is found["y"][1]


def test_what_both_sides_have_is_not_sent():
    here, there = nn.Linear(2, 2), nn.Linear(2, 2)
    own = {"module": here, "weight": here.weight}
    found = send([here.weight, here], own, {"module": there, "weight": there.weight})
    assert found[0] is there.weight
    assert found[1] is there
    assert pack([here.weight], {id(here.weight): "weight"}).tensors == []


def test_sparse_tensors_arrive():
    value = torch.eye(3).to_sparse().requires_grad_()
    found = send([value])[0]
    assert found.layout == torch.sparse_coo
    assert found.requires_grad
    assert torch.equal(found.to_dense(), torch.eye(3))


def test_a_hollow_tensor_arrives_without_values():
    tensor = torch.ones(3, 2, requires_grad=True) * 2
    data, tensors = pack([tensor, tensor], {}, {id(tensor)})
    assert tensors == []
    found = unpack(data, [], {})
    assert found[0] is found[1]
    assert found[0].is_meta
    assert (found[0].shape, found[0].requires_grad) == ((3, 2), True)


def test_what_cannot_be_sent_is_refused_by_its_type():
    with pytest.raises(TypeError, match="a list cannot be sent to the other ranks"):
        pack([lambda: 1], {})
