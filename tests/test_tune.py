"""Settings of the process: what is set, what is said, what stays as it was."""

import subprocess
import sys

import pytest
import torch

from samestep import tune, tune_cpu


class FakeLibrary:
    """A C library that takes values up to a bound."""

    def __init__(self, most=1 << 31):
        self.most, self.calls = most, []

    def mallopt(self, name, value):
        self.calls.append((name, value))
        return int(value <= self.most)


def pretend(monkeypatch, library):
    monkeypatch.setattr(tune, "_find_glibc", lambda: library)
    return library


def test_glibc_is_told_to_keep_what_is_freed(monkeypatch):
    library = pretend(monkeypatch, FakeLibrary())
    tuning = tune_cpu()
    assert library.calls == [(-1, (1 << 31) - 1), (-3, 1 << 30), (-8, 1)]
    assert tuning.kept_bytes == 1 << 30
    assert tuning.notes == ("memory: freed blocks of up to 1024 MiB stay with the process",)


def test_an_older_glibc_gets_the_largest_bound_that_it_takes(monkeypatch):
    class Older(FakeLibrary):
        def mallopt(self, name, value):
            super().mallopt(name, value)
            return int(name != -3 or value <= 32 << 20)

    pretend(monkeypatch, Older())
    assert tune_cpu().kept_bytes == 32 << 20


def test_a_refusal_is_said_and_leaves_the_rest_alone(monkeypatch):
    library = pretend(monkeypatch, FakeLibrary(most=0))
    tuning = tune_cpu()
    assert tuning.kept_bytes == 0
    assert "glibc refused" in str(tuning)
    assert len(library.calls) == 1


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_nothing_is_done_and_that_is_said(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    tuning = tune_cpu()
    assert tuning.kept_bytes == 0
    assert "left as it was" in str(tuning)


def test_a_linux_without_glibc_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(tune.ctypes, "CDLL", lambda name: object())  # as with musl
    assert tune_cpu().kept_bytes == 0


def test_threads_stay_unless_a_number_is_given():
    before = torch.get_num_threads()
    try:
        assert tune_cpu(memory=False).num_threads == before
        tuning = tune_cpu(memory=False, num_threads=2)
        assert tuning.num_threads == torch.get_num_threads() == 2
        assert tuning.notes[1] == f"intra-op threads: {before} before, 2 now"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (True, TypeError), ("2", TypeError)])
def test_a_wrong_number_of_threads_is_an_error_and_nothing_is_set(monkeypatch, value, error):
    library = pretend(monkeypatch, FakeLibrary())
    with pytest.raises(error, match="num_threads"):
        tune_cpu(num_threads=value)
    assert not library.calls


PROBE = """if True:
    import resource, sys, torch
    from samestep import tune_cpu

    def count_faults():
        for _ in range(3):
            torch.ones(16 << 20)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            torch.ones(16 << 20)  # 64 MiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    before = count_faults()
    kept = tune_cpu().kept_bytes if "tune" in sys.argv else 0
    # A small block may take a bit of the large one's place, once, and send it elsewhere.
    print(before, min(count_faults() for _ in range(3)), kept)
"""


@pytest.mark.slow
@pytest.mark.skipif(tune._find_glibc() is None, reason="needs glibc")
@pytest.mark.parametrize("how", ["call", "environment"])
def test_large_blocks_are_not_faulted_in_again(how, monkeypatch):
    if how == "environment":
        for name, value in tune.ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
    words = [sys.executable, "-c", PROBE, *(["tune"] if how == "call" else [])]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120)
    before, after, kept = map(int, done.stdout.split())
    # Of 5 blocks of 16,384 pages (or 32 large ones each) hardly any is mapped anew.
    assert after < 50
    if how == "call":
        assert before > after
        assert kept >= 32 << 20
