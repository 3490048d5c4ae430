"""A process that uses the device ends cleanly, whatever is pending, and can be profiled."""

from __future__ import annotations

import pytest
import torch

from harness.tests.device.accelerator import Accelerator

PENDING = """
    first, second = accelerator.streams(2)
    value = accelerator.full(1.0)
    accelerator.keep_busy(first)
    with first:
        value.add_(1.0)
    second.wait_stream(first)
    event = second.record_event()
    assert not event.query()
"""

BACKWARD = """
    devices = [accelerator.device(index) for index in range(accelerator.device_count)]
    leaves = [torch.ones(256, device=device, requires_grad=True) for device in devices]
    sum((leaf * 2).sum().to(devices[0]) for leaf in leaves).backward()
"""


@pytest.mark.parametrize("body", [PENDING, BACKWARD + PENDING], ids=["pending", "backward and pending"])
def test_a_process_ends_cleanly(accelerator: Accelerator, body: str) -> None:
    done = accelerator.run_script(body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_work_can_be_profiled(accelerator: Accelerator) -> None:
    leaf = accelerator.full(2.0).requires_grad_()
    with torch.profiler.profile() as profiler, torch.profiler.record_function("the whole"):
        (leaf * 3).sum().backward()
        accelerator.backend.synchronize()
    assert leaf.grad is not None
    assert leaf.grad.unique().tolist() == [3.0]
    assert {"the whole", "aten::mul", "aten::sum"} <= {event.key for event in profiler.key_averages()}
