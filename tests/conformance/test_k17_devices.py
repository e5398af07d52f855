"""K17. Devices: what is asked for is given, or refused with the reason."""

import pytest
import torch
from compare import check_same, rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel, ReplicaError, current_shard


@report("P110", "google-research/big_transfer#73")
def test_a_module_on_another_device_than_the_first_slot_is_copied_there():
    model = DataParallel(nn.Linear(3, 2), device_ids=["meta", "meta"])
    assert next(model.parameters()).device.type == "cpu"
    assert model(torch.ones(7, 3)).device.type == "meta"
    model = DataParallel(nn.Linear(3, 2, device="meta"), device_ids=["meta", "meta"])
    assert model(torch.ones(7, 3, device="meta")).shape == (7, 2)


@report("P111", "pytorch/pytorch#17065", "pytorch/pytorch#17362", "pytorch/pytorch#69966")
def test_moving_after_wrapping_is_followed():
    model = DataParallel(nn.Linear(3, 2), replicas=2).to("cpu")
    x = torch.randn(7, 3)
    torch.testing.assert_close(model(x), model.module(x))
    model.double()
    model.to(torch.device("cpu"), torch.float32)
    torch.testing.assert_close(model(x), model.module(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("cpu")
    before = model(x)
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(model(x), before)


@report("P112", "pytorch/pytorch#3301", "pytorch/pytorch#2150", "pytorch/pytorch#7457")
def test_cpu_slots_are_real_and_what_is_not_there_is_refused():
    seen = []

    class Telling(nn.Module):
        def forward(self, x):
            seen.append((current_shard().index, str(current_shard().device)))
            return x

    DataParallel(Telling(), device_ids=["cpu"] * 3)(torch.ones(7, 3))
    assert sorted(seen) == [(0, "cpu"), (1, "cpu"), (2, "cpu")]
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    with pytest.raises(ValueError, match="accelerator"):
        DataParallel(nn.Linear(3, 2), device_ids=[count, count + 1])
    with pytest.raises(ValueError, match="device_ids is empty"):
        DataParallel(nn.Linear(3, 2), device_ids=[])


@report("P114", "huggingface/transformers#9577")
def test_a_module_that_spans_devices_is_refused_with_the_names():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        ReplicaError, match=r"'0.weight' on cpu, '1.weight' on meta.*spread already"
    ):
        DataParallel(module, replicas=2)(torch.ones(7, 3))


@report("P115", "pytorch/pytorch#38936")
def test_device_ids_takes_devices_of_every_form_and_an_unknown_name_is_told():
    module = nn.Linear(3, 2)
    for devices in (["cpu", torch.device("cpu")], ("cpu:0", "cpu")):
        assert DataParallel(module, devices)(torch.ones(7, 3)).shape == (7, 2)
    with pytest.raises(TypeError, match="device_ids must be a sequence of devices"):
        DataParallel(module, "cpu")
    with pytest.raises(TypeError, match="devices"):
        DataParallel(module, devices=["cpu", "cpu"])


@report("P116", "pytorch/pytorch#1051", "pytorch/pytorch#31553")
def test_a_device_may_be_named_twice():
    module = nn.Linear(3, 2).double()
    model = DataParallel(module, device_ids=["cpu", "cpu", "cpu"])
    assert [slot.index for slot in model.slots] == [0, 1, 2]
    assert model.explain(torch.ones(7, 3)).endswith("into 3 3 1")
    x = rows(7, 3)
    torch.testing.assert_close(model(x), module(x))


@report("P117", "pytorch/examples#343")
def test_a_faster_slot_gets_more_rows():
    module = nn.Linear(3, 2).double()
    model, _ = check_same(module, rows(8, 3), replicas=2, options={"split": [3, 1]})
    assert model.explain(torch.ones(8, 3)).endswith("into 6 2")


@beyond("K17")
def test_more_replicas_than_devices_take_turns_and_fewer_are_refused():
    module = nn.Linear(3, 2).double()
    model = DataParallel(module, device_ids=["cpu"], replicas=5)
    assert model.num_replicas == 5
    x = rows(7, 3)
    torch.testing.assert_close(model(x), module(x))
    with pytest.raises(ValueError, match="replicas=1 is smaller than the number of devices named"):
        DataParallel(module, device_ids=["cpu", "cpu"], replicas=1)


@beyond("K17")
def test_the_environment_gives_replicas_to_who_names_none(monkeypatch):
    monkeypatch.setenv("SAMESTEP_REPLICAS", "3")
    assert DataParallel(nn.Linear(3, 2)).num_replicas == 3
    assert DataParallel(nn.Linear(3, 2), replicas=2).num_replicas == 2
    assert DataParallel(nn.Linear(3, 2), device_ids=["cpu"]).num_replicas == 1
    monkeypatch.setenv("SAMESTEP_REPLICAS", "many")
    with pytest.raises(ValueError, match="'many' is not a whole number"):
        DataParallel(nn.Linear(3, 2))


@beyond("K17")
def test_a_module_without_tensors_runs_on_every_slot():
    check_same(nn.Tanh(), rows(7, 3, grad=True))
    assert DataParallel(nn.Tanh(), ["meta", "meta"])(torch.ones(7, 3)).device.type == "meta"
