"""Which slots there are, and what is refused."""

import pytest
import torch

from samestep import devices
from samestep.devices import Slot, is_serial_forced, plan_slots, resolve_device

CPU = torch.device("cpu")


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def two_accelerators(monkeypatch):
    """A machine with two of them, as far as planning is concerned."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)


def names(slots):
    return [str(slot.device) for slot in slots]


# --------------------------------------------------------------------------------------------------
# Without an accelerator
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_ids", "replicas", "count"),
    [
        (None, None, 1),
        (None, 1, 1),
        (None, 4, 4),
        (["cpu"], None, 1),
        (["cpu"], 3, 3),
        (["cpu"] * 4, None, 4),
        (("cpu", torch.device("cpu"), "cpu:0"), None, 3),
        (["cpu", "cpu"], 5, 5),
    ],
)
def test_cpu_slots_are_asked_for(no_accelerator, monkeypatch, device_ids, replicas, count):
    monkeypatch.delenv("SAMESTEP_REPLICAS", raising=False)
    assert plan_slots(device_ids, replicas) == tuple(Slot(k, CPU) for k in range(count))


@pytest.mark.parametrize(
    ("device_ids", "replicas", "error", "message"),
    [
        ([0], None, ValueError, r"asks for accelerator 0, but torch sees no accelerator"),
        ([0, 1], None, ValueError, r"for CPU slots pass replicas=2 or device_ids=\['cpu', 'cpu'\]"),
        (["cuda:0"], None, ValueError, r"asks for 'cuda:0', which is not on this machine"),
        (["cuda"], None, ValueError, r"\(accelerators: none\)"),
        (["gpu"], None, ValueError, r"device_ids holds 'gpu', which torch does not know"),
        (["cpu", "nonsense:7"], None, ValueError, r"holds 'nonsense:7'"),
        ([], None, ValueError, r"device_ids is empty; name at least one device"),
        ([None], None, TypeError, r"device_ids holds None \(NoneType\); write an"),
        ([True], None, TypeError, r"device_ids holds True \(bool\)"),
        ([1.0], None, TypeError, r"device_ids holds 1.0 \(float\)"),
        ("cpu", None, TypeError, r"a sequence of devices, got 'cpu'; write device_ids=\['cpu'\]"),
        (0, None, TypeError, r"got 0; write device_ids=\[0\], or replicas=0"),
        (torch.nn.Tanh(), None, TypeError, r"a sequence of devices, got a Tanh; the module is the"),
        (CPU, None, TypeError, r"must be a sequence of devices"),
        (None, 0, ValueError, r"replicas must be at least 1, got 0"),
        (None, -3, ValueError, r"replicas must be at least 1, got -3"),
        (None, True, TypeError, r"replicas must be an int or 'auto', got True \(bool\)"),
        (None, 2.0, TypeError, r"replicas must be an int or 'auto', got 2.0 \(float\)"),
        (None, "3", TypeError, r"replicas must be an int or 'auto', got '3' \(str\)"),
        (["cpu"] * 3, 2, ValueError, r"is smaller .* named \(3\); pass device_ids\[:2\]"),
    ],
)
def test_what_cannot_be_met_says_why(no_accelerator, device_ids, replicas, error, message):
    with pytest.raises(error, match=message):
        plan_slots(device_ids, replicas)


# --------------------------------------------------------------------------------------------------
# The environment
# --------------------------------------------------------------------------------------------------


def test_the_environment_gives_slots_to_those_who_named_none(no_accelerator, monkeypatch):
    monkeypatch.setenv("SAMESTEP_REPLICAS", "3")
    assert len(plan_slots(None, None)) == 3
    assert len(plan_slots(None, 2)) == 2
    assert len(plan_slots(["cpu"], None)) == 1
    monkeypatch.setenv("SAMESTEP_REPLICAS", "")
    assert len(plan_slots(None, None)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("many", "SAMESTEP_REPLICAS='many' is not a whole number"),
        ("2.5", "SAMESTEP_REPLICAS='2.5' is not a whole number"),
        ("0", "SAMESTEP_REPLICAS must be at least 1, got 0"),
        ("-1", "SAMESTEP_REPLICAS must be at least 1, got -1"),
    ],
)
def test_a_bad_environment_is_refused(monkeypatch, text, message):
    monkeypatch.setenv("SAMESTEP_REPLICAS", text)
    with pytest.raises(ValueError, match=message):
        plan_slots(None, None)


@pytest.mark.parametrize(("text", "forced"), [("1", True), ("0", False), ("", False)])
def test_serial_running_is_asked_for_by_the_environment(monkeypatch, text, forced):
    monkeypatch.setenv("SAMESTEP_SERIAL", text)
    assert is_serial_forced() == forced


def test_what_does_not_say_whether_to_run_serially_is_refused(monkeypatch):
    monkeypatch.setenv("SAMESTEP_SERIAL", "false")
    with pytest.raises(ValueError, match="SAMESTEP_SERIAL must be 1 or 0, got 'false'"):
        is_serial_forced()


# --------------------------------------------------------------------------------------------------
# With accelerators
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_ids", "replicas", "expected"),
    [
        (None, None, ["cuda:0", "cuda:1"]),
        (None, 1, ["cuda:0"]),
        (None, 5, ["cuda:0", "cuda:0", "cuda:0", "cuda:1", "cuda:1"]),
        ([1, 0], None, ["cuda:1", "cuda:0"]),
        ([1], 3, ["cuda:1"] * 3),
        (["cuda"], None, ["cuda:1"]),  # the current one
        ([0, "cpu"], 4, ["cuda:0", "cuda:0", "cpu", "cpu"]),
        (["cpu"], None, ["cpu"]),
    ],
)
def test_slots_take_contiguous_runs_of_devices(two_accelerators, device_ids, replicas, expected):
    assert names(plan_slots(device_ids, replicas)) == expected


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (2, r"asks for cuda:2, but this machine has 2 \(0 to 1\)"),
        (-1, r"asks for cuda:-1|asks for accelerator -1"),
        ("cuda:9", r"asks for cuda:9, but this machine has 2 \(0 to 1\)"),
        ("xpu:0", r"asks for 'xpu:0', which is not on this machine \(accelerators: 2 x cuda\)"),
    ],
)
def test_accelerators_that_are_not_there_are_refused(two_accelerators, device, message):
    with pytest.raises(ValueError, match=message):
        resolve_device(device)


def test_the_argument_is_named(no_accelerator):
    with pytest.raises(ValueError, match="output_device asks for accelerator 3"):
        resolve_device(3, argument="output_device")


def test_meta_is_a_device_for_plans():
    assert resolve_device("meta") == torch.device("meta")


class Far:
    """Stands for a tensor on an accelerator; copies to another one arrive as they are told to."""

    def __init__(self, device, route=()):
        self.device, self.route = torch.device(device), route

    def to(self, device, **_):
        return Far(device, (*self.route, str(device)))

    def cpu(self):
        return Far("cpu", (*self.route, "cpu"))


@pytest.mark.parametrize(("arrives", "route"), [(True, ("cuda:1",)), (False, ("cpu", "cuda:1"))])
def test_a_pair_of_accelerators_that_garbles_copies_goes_through_the_host(
    monkeypatch, arrives, route
):
    monkeypatch.setattr(devices, "_arrives", lambda source, target: arrives)
    assert devices.move_tensor(Far("cuda:0"), torch.device("cuda:1")).route == route
    assert devices.move_tensor(Far("cpu"), torch.device("cuda:1")).route == ("cuda:1",)


def test_garbled_copies_are_noticed(monkeypatch):
    devices._arrives.cache_clear()
    assert devices._arrives(torch.device("cpu"), torch.device("cpu"))
    monkeypatch.setattr(torch, "equal", lambda one, other: False)
    devices._arrives.cache_clear()
    with pytest.warns(UserWarning, match="copies from cpu to cpu do not arrive as they were sent"):
        assert not devices._arrives(torch.device("cpu"), torch.device("cpu"))
    devices._arrives.cache_clear()


@pytest.mark.parametrize(("source", "target"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_what_goes_to_the_host_is_waited_for(source, target):
    # torch returns at once, with memory that is filled later.
    class Sent:
        device = torch.device(source)

        def to(self, device, non_blocking):
            return "there" if non_blocking else "waited for"

    found = devices.move_tensor(Sent(), torch.device(target), non_blocking=True)
    assert found == ("waited for" if target == "cpu" else "there")
