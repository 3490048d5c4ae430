"""The device that the conformance tests run on: the one that ``--device`` names."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from harness.backends import simulator
from harness.perturb.schedule import SubmissionOrder
from harness.pytest_side.run import RUN
from harness.tests.device.accelerator import SCHEDULES, Accelerator

# CUDA loads a kernel when it is first used, and that can wait for the device (CUDA Programming Guide, "Lazy Loading").
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test under every schedule that decides when a simulated device goes on."""
    if "accelerator" in metafunc.fixturenames and metafunc.config.stash[RUN].options.device == "sim":
        metafunc.parametrize("accelerator", SCHEDULES, indirect=True, scope="module")


@pytest.fixture(scope="module")
def accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """The device under test."""
    name = request.config.stash[RUN].options.device
    if name == "sim":
        yield Accelerator(name, request.param)
        simulator.set_schedule(SubmissionOrder())
        return
    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        pytest.skip("not covered: this process has the simulator as its accelerator; run harness/tests/device alone")
    yield Accelerator(name)


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Memory is freed with its last reference, and never between two lines of a test that counts it."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def two_devices(accelerator: Accelerator) -> None:
    """For tests that need two devices."""
    if accelerator.device_count < 2:
        pytest.skip("not covered: needs two devices")
    # The first copy between two devices opens the way between them, which can wait for both.
    for index in (0, 1):
        accelerator.full(1.0, index=index).to(accelerator.device(1 - index))
    accelerator.backend.synchronize()
