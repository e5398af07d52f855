"""What ranks compare of their modules, as far as one process can see it."""

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
