"""``torch.accelerator``, where this version of torch has it, and the device's own module say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.tests.device.accelerator import Accelerator


def accelerator_function(name: str) -> Any:
    function = getattr(torch.accelerator, name, None)
    if function is None:
        pytest.skip(f"not covered: torch {torch.__version__} has no torch.accelerator.{name}")
    return function


def test_the_device_under_test_is_the_accelerator(accelerator: Accelerator) -> None:
    assert torch.accelerator.is_available()
    current = torch.accelerator.current_accelerator()
    assert current is not None
    assert current.type == accelerator.type
    assert torch.accelerator.device_count() == accelerator.module.device_count() == accelerator.device_count
    assert accelerator.module.is_available()
    assert accelerator.module.is_initialized()
    assert accelerator.module.get_device_name(0)


def test_device_0_is_current_at_first(accelerator: Accelerator) -> None:
    assert torch.accelerator.current_device_index() == accelerator.module.current_device() == 0
    assert torch.empty(1, device=accelerator.type).device == accelerator.device(0)


@pytest.mark.usefixtures("two_devices")
def test_the_current_device_can_be_set(accelerator: Accelerator) -> None:
    for set_device in (torch.accelerator.set_device_index, accelerator.module.set_device):
        set_device(1)
        try:
            assert torch.accelerator.current_device_index() == accelerator.module.current_device() == 1
            assert torch.empty(1, device=accelerator.type).device == accelerator.device(1)
            assert torch.accelerator.current_stream().device_index == 1
        finally:
            set_device(0)
        assert torch.accelerator.current_device_index() == 0


@pytest.mark.usefixtures("two_devices")
def test_the_former_device_is_current_again_after_a_block(accelerator: Accelerator) -> None:
    for entered in (accelerator.module.device(1), accelerator.module.device(f"{accelerator.type}:1")):
        with pytest.raises(KeyError), entered:
            assert torch.accelerator.current_device_index() == 1
            raise KeyError
        assert torch.accelerator.current_device_index() == 0


@pytest.mark.usefixtures("two_devices")
def test_device_index_makes_a_device_current_for_a_block(accelerator: Accelerator) -> None:
    device_index = accelerator_function("device_index")
    with device_index(1):
        assert torch.accelerator.current_device_index() == 1
        with device_index(None):
            assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0


def test_there_is_no_device_beyond_the_last(accelerator: Accelerator) -> None:
    count = accelerator.device_count
    with pytest.raises(RuntimeError):
        torch.empty(1, device=accelerator.device(count))
    with pytest.raises(RuntimeError):
        torch.Stream(device=accelerator.device(count))
    assert torch.accelerator.current_device_index() == 0


def test_torch_device_as_a_context_names_the_device_of_new_tensors(accelerator: Accelerator) -> None:
    with accelerator.device():
        assert torch.empty(1).device == accelerator.device()
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize("name", ["memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"])
def test_memory_is_counted_alike_by_both(accelerator: Accelerator, name: str) -> None:
    counted = accelerator_function(name)
    value = accelerator.full(1.0)
    assert counted() == counted(0) == getattr(accelerator.module, name)() > 0
    del value


def test_peaks_are_reset(accelerator: Accelerator) -> None:
    reset = accelerator_function("reset_peak_memory_stats")
    reset()
    before = torch.accelerator.memory_allocated()
    accelerator.full(1.0, size=128)
    assert torch.accelerator.max_memory_allocated() == before + 512
    reset()
    assert torch.accelerator.max_memory_allocated() == before


def test_memory_stats_add_allocations_up(accelerator: Accelerator) -> None:
    stats = accelerator_function("memory_stats")
    before = stats()
    assert before == stats(0)
    value = accelerator.full(1.0, size=128)
    del value
    after = stats()
    for name in ("allocated_bytes.all.allocated", "allocated_bytes.all.freed"):
        assert after[name] - before[name] == 512
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    torch.accelerator.reset_accumulated_memory_stats()
    assert stats()["allocated_bytes.all.allocated"] == 0


def test_the_memory_of_a_device_is_free_or_in_use(accelerator: Accelerator) -> None:
    free_bytes, total_bytes = accelerator.module.mem_get_info()
    assert 0 < free_bytes < total_bytes


def test_memory_info_is_that_of_the_module(accelerator: Accelerator) -> None:
    _, total_bytes = accelerator_function("get_memory_info")()
    assert total_bytes == accelerator.module.mem_get_info()[1]


def test_tensors_know_their_device(accelerator: Accelerator) -> None:
    value = accelerator.full(1.0)
    assert getattr(value, f"is_{accelerator.type}")
    assert value.get_device() == 0
    assert not value.is_cpu
    assert getattr(torch.ones(2), accelerator.type)().device == accelerator.device()
    assert torch.ones(2).to(accelerator.type).device == accelerator.device()
    assert repr(value[:1]) == f"tensor([1.], device='{accelerator.type}:0')"
