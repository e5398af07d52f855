"""The line between ranks of one machine: sockets that nobody else has."""

import os
import socket

import pytest
import rank_jobs
from spmd import Ranks

from samestep import wires
from samestep.segments import is_supported
from samestep.wires import Place, Wires

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no such memory")


@pytest.mark.spmd
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_messages_of_any_length_go_through_sockets(ranks, count):
    found = ranks.ask(count, "speak", [1, 4000, 20_000, 3_000_000, 20_000, 5])
    assert found == ["Wires"] * count


@pytest.mark.spmd
@pytest.mark.slow
@pytest.mark.parametrize("is_odd", ["0", "1"])
def test_where_one_rank_has_no_sockets_all_speak_through_gloo(ranks, is_odd):
    found = ranks.ask(3, "speak_without_sockets", env={"IS_ODD": is_odd})
    assert found == ["Wires" if is_odd == "0" else "NoneType"] * 3


@pytest.mark.spmd
@pytest.mark.slow
def test_without_shared_memory_there_are_no_sockets_either(ranks):
    env = {"SAMESTEP_SHARED_MEMORY": "0"}
    assert ranks.ask(2, "speak", [10, 100_000], env=env) == ["NoneType"] * 2


@pytest.mark.spmd
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_ctrl_c_ends_the_waiting_and_the_ranks_stay_in_step(ranks, count):
    seconds = ranks.ask(count, "interrupted")
    assert 0.1 < seconds[1] < 0.9  # not only when rank 0 came


@pytest.mark.spmd
@pytest.mark.slow
def test_a_rank_that_dies_is_noticed_although_a_child_has_its_sockets():
    if not hasattr(os, "pidfd_open"):
        pytest.skip("this system does not tell when a process ends")
    ranks = Ranks()
    try:
        found = ranks.run(3, "orphan", env={"SAMESTEP_TIMEOUT": "30"})
        assert found[1] is None
        for rank in (0, 2):
            seconds, text = found[rank]
            assert "rank 1 ended or died" in text
            assert seconds < 5
    finally:
        ranks.close()


@pytest.mark.spmd
@pytest.mark.slow
@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shared", ["0", "1"])
def test_large_gradients_are_those_of_one_process_and_stay(ranks, count, batch, shared):
    expected = rank_jobs.large_gradients()
    env = {"SAMESTEP_SHARED_MEMORY": shared}
    found = ranks.ask(count, "large_gradients", options={"batch": batch}, env=env)
    assert found == [expected] * count


@pytest.mark.spmd
@pytest.mark.slow
def test_a_child_that_ends_does_not_end_the_line_of_its_parent(ranks):
    assert ranks.ask(2, "children_end") == [[0, 1]] * 2


def test_a_process_that_is_no_rank_is_not_let_in(monkeypatch):
    monkeypatch.setattr(wires, "_PATIENCE", 0.2)
    line = Wires(0, 1.0)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(line.place.name)
            with pytest.raises(TimeoutError):
                line.accept([line.place, Place(b"another", os.getpid() + 1)])
            assert stranger.recv(1) == b""
    finally:
        line.close()


def test_a_rank_does_not_speak_to_another_process_than_the_one_it_was_told_of():
    line, other = Wires(0, 1.0), Wires(1, 1.0)
    try:
        with pytest.raises(ConnectionRefusedError, match="is no rank"):
            other.connect([Place(line.place.name, os.getpid() + 1)])
    finally:
        line.close()
        other.close()


def test_a_line_leaves_no_descriptor_open():
    before = set(os.listdir("/proc/self/fd"))
    line = Wires(0, 1.0)
    line.close()
    line.close()
    assert set(os.listdir("/proc/self/fd")) <= before
