"""What ranks compare of their modules, as far as one process can see it."""

import pytest
import torch
from torch import nn

from samestep.comm import ALONE
from samestep.mirror import Mirror
from samestep.spread import Spread


def test_in_turn_every_parameter_and_every_buffer_is_looked_at():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module.register_buffer("table", torch.randn(5))
    mirror, spread = Mirror(), Spread(ALONE, [0, 0], [4, 4])
    notes = [mirror.note(spread, module, ((torch.randn(8, 3),), {}), version=1) for _ in range(20)]
    seen = {name for note in notes for name in note["module"]}
    assert seen == {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    assert all(len(note["module"]) < len(seen) for note in notes)  # a few at a time


def test_a_changed_buffer_has_another_checksum():
    module = nn.Module()
    module.register_buffer("table", torch.zeros(5))
    mirror, spread = Mirror(), Spread(ALONE, [0, 0], [4, 4])

    def look():
        return mirror.note(spread, module, ((torch.ones(8, 3),), {}), version=1)["module"]["table"]

    before = look()
    assert look() == before
    module.table[3] = 1e-6
    assert look() != before


def test_a_module_without_its_shapes_is_looked_at():
    # A first batch of one row, which goes whole to the source, raised torch's own ValueError.
    spread = Spread(ALONE, [0, 0], [4, 4])
    note = Mirror().note(spread, nn.LazyLinear(3), ((torch.ones(1, 3),), {}))
    assert note["module"] == {"weight": None, "bias": None}


@pytest.mark.parametrize("kind", ["reversed", "big-endian", "text", "read-only"])
@pytest.mark.parametrize("num_rows", [4, 999])
def test_arrays_that_torch_cannot_hold_are_compared(kind, num_rows):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(num_rows, dtype=numpy.float32)
    if kind == "reversed":
        array = array[::-1]
    elif kind == "read-only":
        array.setflags(write=False)
    else:
        array = array.astype({"big-endian": ">f4", "text": "U5"}[kind])
    mirror, spread = Mirror(), Spread(ALONE, [0, 0], [4, 4])

    def look(batch):
        return mirror.note(spread, nn.Linear(3, 3), ((batch,), {}))["batch"]

    before = look(array)
    assert look(array.copy()) == before
    other = array.copy()
    other[:] = other[::-1].copy()
    assert look(other) != before


@pytest.mark.parametrize("dtype", ["g", "O", "f4,f8"])
def test_arrays_with_bytes_that_are_no_value_are_not_compared(dtype):
    numpy = pytest.importorskip("numpy")
    spread = Spread(ALONE, [0, 0], [4, 4])
    note = Mirror().note(spread, nn.Linear(3, 3), ((numpy.zeros(4, dtype=dtype),), {}))
    assert note["batch"] == {"args[0]": "ndarray"}
