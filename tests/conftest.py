"""What every test starts from, and what none may leave behind."""

import os
import threading
import time

import pytest
import torch
from spmd import Ranks

# Worker threads of the library are daemons that wait for work between calls; they may stay.
OURS = "samestep-"
# pytest rewrites the first before each phase of a test; torch sets the others when its compiler is
# imported, which the first optimizer does.
ALLOWED_ENV = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def pytest_report_header():
    """Name what decides the numbers."""
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, {threads} threads, {accelerators} accelerators"


@pytest.fixture(scope="session")
def ranks():
    """Real processes, started once: see :mod:`spmd`."""
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in each test, whichever ran before it."""
    torch.manual_seed(20240607)


@pytest.fixture(autouse=True)
def no_leaks():
    """Fail a test that leaves a thread, a variable or a setting of torch behind."""
    before, threads = read_settings(), set(threading.enumerate())
    yield
    leaked = wait_for_end(set(threading.enumerate()) - threads)
    assert not leaked, f"threads left running: {leaked}"
    after = read_settings()
    changed = [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    assert not changed, f"settings left changed: {changed}"


def read_settings():
    """Everything global that a test could forget to put back."""
    environment = {f"${k}": v for k, v in os.environ.items() if k not in ALLOWED_ENV}
    return environment | {
        "working directory": os.getcwd(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "intra-op threads": torch.get_num_threads(),
    }


def wait_for_end(threads, seconds=2.0):
    """The names of those threads that do not end by themselves soon, ours excepted."""
    deadline = time.monotonic() + seconds
    threads = [thread for thread in threads if not thread.name.startswith(OURS)]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sorted(thread.name for thread in threads if thread.is_alive())


def pytest_addoption(parser):
    parser.addoption(
        "--copies",
        action="store_true",
        help="let replicas hold copies of parameters, as on another device (tests/conformance)",
    )
