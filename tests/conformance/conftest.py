"""``pytest --copies tests/conformance``: replicas hold copies, as they do on another device.

On the CPU alone every replica shares the memory of the source's parameters. With ``--copies`` none
does, so what keeps copies fresh is tested by the whole conformance list, without an accelerator.
"""

import pytest

from samestep import runtime
from samestep.replicas import ReplicaSet

# What is said there of shared memory does not hold for copies.
ABOUT_SHARING = {
    "test_parameters_are_not_copied_on_their_own_device",
    "test_replicas_are_kept_and_follow_the_optimizer_without_copies",
}


@pytest.fixture(autouse=True)
def hold_copies(request, monkeypatch):
    if request.config.getoption("--copies"):
        if request.node.originalname in ABOUT_SHARING:
            pytest.skip("about parameters that share memory")
        monkeypatch.setattr(
            runtime, "ReplicaSet", lambda **options: ReplicaSet(**options, share=False)
        )
