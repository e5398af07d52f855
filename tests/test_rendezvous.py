"""Finding the other ranks: what a process alone sees, and what the environment says."""

import subprocess
import sys

import pytest
import torch

import samestep
from samestep import rendezvous
from samestep.comm import ALONE, Comm
from samestep.devices import owner_of_slot, plan_slots
from samestep.errors import RankError

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}


def test_a_process_alone_is_the_main_one_and_speaks_to_itself():
    assert samestep.is_main()
    comm = rendezvous.find_comm()
    assert comm is ALONE
    assert (comm.rank, comm.num_ranks) == (0, 1)
    assert comm.exchange("anything", {"a": 1}) == [{"a": 1}]
    tensor = torch.ones(2)
    told, found = comm.gather("anything", 5, [tensor])
    assert told == [5]
    assert found[0][0] is tensor


def test_the_environment_says_who_is_main(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert not samestep.is_main()
    monkeypatch.setenv("RANK", "0")
    assert samestep.is_main()


@pytest.mark.parametrize("missing", ["RANK", "MASTER_PORT"])
def test_half_an_environment_is_none(monkeypatch, missing):
    for name, value in LAUNCHED.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    assert rendezvous.find_comm() is ALONE


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_time_out_that_is_no_number_of_seconds_is_refused(monkeypatch, text):
    monkeypatch.setenv("SAMESTEP_TIMEOUT", text)
    with pytest.raises(ValueError, match="must be a number of seconds above 0"):
        rendezvous.get_timeout()


def test_the_time_out_is_what_was_set(monkeypatch):
    monkeypatch.delenv("SAMESTEP_TIMEOUT", raising=False)
    assert rendezvous.get_timeout() == 60
    monkeypatch.setenv("SAMESTEP_TIMEOUT", "2.5")
    assert rendezvous.get_timeout() == 2.5


def test_a_group_without_torch_distributed_is_refused():
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized"):
        rendezvous.find_comm(object())


@pytest.mark.parametrize(("num_slots", "num_ranks"), [(8, 3), (3, 8), (1, 4), (5, 5), (7, 2)])
def test_slots_go_to_ranks_in_contiguous_runs(num_slots, num_ranks):
    owners = [owner_of_slot(k, num_slots, num_ranks) for k in range(num_slots)]
    assert owners == sorted(owners)
    counts = [owners.count(rank) for rank in range(num_ranks)]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == num_slots


def test_slots_without_a_number_are_one_per_device_of_each_rank(monkeypatch):
    monkeypatch.delenv("SAMESTEP_REPLICAS", raising=False)
    assert len(plan_slots(None, None, rank=1, num_ranks=3)) == 3
    assert len(plan_slots(["cpu", "cpu"], None, rank=1, num_ranks=3)) == 6
    assert len(plan_slots(None, 8, rank=2, num_ranks=3)) == 8
    with pytest.raises(ValueError, match="replicas=3 is smaller than the number of devices named"):
        plan_slots(["cpu", "cpu"], 3, rank=0, num_ranks=3)


def test_a_line_that_is_dead_says_so():
    comm = Comm()
    comm.num_ranks = 2
    comm.close()
    with pytest.raises(RankError, match="the process group was taken down"):
        comm.exchange("anything", 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_seeded", [False, True])
def test_ranks_without_a_seed_start_alike_and_others_keep_theirs(is_seeded):
    code = f"""if True:
        import torch, random
        {"torch.manual_seed(7)" if is_seeded else ""}
        import samestep
        print(torch.rand(1).item(), random.random() if {not is_seeded} else "")
    """
    environment = LAUNCHED | {"PATH": "", "OMP_NUM_THREADS": "1"}
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment | {"RANK": rank, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for rank in "01"
    ]
    assert found[0] == found[1]
    if is_seeded:
        torch.manual_seed(7)
        assert float(found[0]) == torch.rand(1).item()
