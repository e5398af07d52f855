"""Memory without a name, seen by several processes."""

import os
import subprocess
import sys

import pytest
import torch

from samestep.segments import Segments, is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no memfd")


@pytest.fixture
def pair():
    writer, reader = Segments(), Segments()
    yield writer, reader
    writer.close()
    reader.close()


def write(segments, values):
    address, memory = segments.stage(values.numel())
    memory.copy_(values)
    return address


def test_a_reader_sees_what_was_written(pair):
    writer, reader = pair
    for size in (1, 100, 1 << 21, 5):  # grows, and is used again
        values = torch.randint(0, 255, (size,), dtype=torch.uint8)
        address = write(writer, values)
        assert torch.equal(reader.open(0, address)[:size], values)


def test_the_message_before_stays_readable(pair):
    writer, reader = pair
    first = reader.open(0, write(writer, torch.ones(4, dtype=torch.uint8)))
    write(writer, torch.zeros(4, dtype=torch.uint8))
    assert first[:4].tolist() == [1, 1, 1, 1]


def test_two_segments_are_enough_for_any_number_of_messages(pair):
    writer, reader = pair
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        reader.open(0, write(writer, torch.full((8,), number, dtype=torch.uint8)))
    # Two files, and for each a mapping on both sides, which Python gives a descriptor of its own.
    assert len(os.listdir("/proc/self/fd")) <= before + 6


def test_a_file_number_that_comes_again_is_another_segment(pair):
    """A segment that grows gives its number back to the system, and the other one may get it."""
    writer, reader = pair
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    small = 1 << 20
    seen = set()
    for number, size in enumerate([small, small, 2 * small, small, 2 * small, small]):
        seen.add(exchange(writer, reader, size, number)[:3])
    for file in held:
        os.close(file)
    for number, size in enumerate([4 * small, 2 * small, 4 * small, 2 * small], start=6):
        seen.add(exchange(writer, reader, size, number)[:3])
    assert len(seen) < writer._own[0][0].number + 2  # it did come again


def exchange(writer, reader, size, number):
    """Send bytes that are all alike, and see that they arrive; returns the address."""
    address = write(writer, torch.full((size,), number, dtype=torch.uint8))
    assert reader.open(0, address)[:size].unique().tolist() == [number]
    return address


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_nothing_behind():
    code = """if True:
        import os, signal
        from samestep.segments import Segments
        kept = Segments()
        kept.stage(1 << 24)[1].fill_(1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    before = set(os.listdir("/dev/shm"))
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert set(os.listdir("/dev/shm")) <= before
