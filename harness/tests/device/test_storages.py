"""The memory behind tensors: addresses, resizing, and the ways out of the process and back."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from harness.tests.device.accelerator import Accelerator


def test_an_address_stays_while_its_tensor_lives(accelerator: Accelerator) -> None:
    value = accelerator.full(1.0)
    address = value.data_ptr()
    value.add_(1.0).mul_(2.0).copy_(torch.zeros(256))
    assert value.data_ptr() == address
    assert value[3:].data_ptr() == address + 12
    assert value.view(2, 128).t().data_ptr() == address
    assert value.untyped_storage().data_ptr() == address
    assert value.detach().data_ptr() == address
    assert value.clone().data_ptr() != address


def test_a_storage_that_grows_keeps_its_bytes(accelerator: Accelerator) -> None:
    value = torch.arange(8.0, device=accelerator.device())
    storage = value.untyped_storage()
    assert storage.nbytes() == 32
    storage.resize_(4096)
    assert storage.nbytes() == 4096
    assert value.tolist() == list(range(8))
    grown = torch.arange(3.0, device=accelerator.device()).resize_(5)
    assert grown[:3].tolist() == [0.0, 1.0, 2.0]


def test_a_storage_of_no_bytes_has_given_its_memory_back(accelerator: Accelerator) -> None:
    value = accelerator.full(1.0)
    allocated = accelerator.module.memory_allocated()
    storage = value.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    assert accelerator.module.memory_allocated() == allocated - 1024
    storage.resize_(1024)
    assert accelerator.module.memory_allocated() == allocated
    value.fill_(3.0)
    assert value.unique().tolist() == [3.0]


def test_resizing_a_storage_is_ordered_with_the_current_stream(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    with stream:
        value = torch.full((256,), 1.0, device=accelerator.device())
    with accelerator.busy(stream), stream:
        value.fill_(2.0)
        value.untyped_storage().resize_(4096)
        assert not stream.query()
        value.add_(1.0)
    assert value.unique().tolist() == [3.0]


def test_set_makes_a_tensor_look_at_another_storage(accelerator: Accelerator) -> None:
    value, other = accelerator.full(1.0), accelerator.full(2.0)
    view = value.view(2, 128)
    value.set_(other)  # type: ignore[call-overload]
    assert value.data_ptr() == other.data_ptr()
    assert (value[0].item(), view[0, 0].item()) == (2.0, 1.0)
    view.data = other[:4]
    assert view.tolist() == [2.0] * 4


def test_a_saved_tensor_has_what_was_enqueued_before(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    value = accelerator.full(1.0)
    file = io.BytesIO()
    with accelerator.busy(stream), stream:
        value.fill_(2.0)
        torch.save({"value": value, "view": value[:2]}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    assert loaded["value"].device.type == "cpu"
    assert loaded["value"].unique().tolist() == [2.0]
    assert loaded["view"].data_ptr() == loaded["value"].data_ptr()


@pytest.mark.parametrize("located", [True, False])
def test_a_loaded_tensor_goes_where_it_was_or_where_it_is_sent(accelerator: Accelerator, located: bool) -> None:
    file = io.BytesIO()
    torch.save(accelerator.full(2.0), file)
    file.seek(0)
    loaded = torch.load(file) if located else torch.load(file, map_location=accelerator.device())
    assert loaded.device == accelerator.device()
    assert loaded.unique().tolist() == [2.0]
    host = io.BytesIO()
    torch.save(torch.full((4,), 3.0), host)
    host.seek(0)
    assert torch.load(host, map_location=accelerator.type).tolist() == [3.0] * 4


@pytest.mark.usefixtures("two_devices")
def test_a_tensor_is_loaded_to_the_device_that_it_is_sent_to(accelerator: Accelerator) -> None:
    file = io.BytesIO()
    torch.save(accelerator.full(2.0, index=1), file)
    file.seek(0)
    assert torch.load(file).device == accelerator.device(1)
    file.seek(0)
    moved = torch.load(file, map_location={str(accelerator.device(1)): str(accelerator.device(0))})
    assert moved.device == accelerator.device(0)
    assert moved.unique().tolist() == [2.0]


def copies(value: Any) -> list[Any]:
    return [pickle.loads(pickle.dumps(value)), copy.deepcopy(value)]


def test_pickled_and_deep_copied_tensors_are_copies(accelerator: Accelerator) -> None:
    value = accelerator.full(2.0).requires_grad_()
    for made in copies(value):
        assert made.device == value.device
        assert made.requires_grad
        assert made.data_ptr() != value.data_ptr()
        assert made.tolist() == value.tolist()
    parameter = nn.Parameter(accelerator.full(2.0))
    for made in copies(parameter):
        assert isinstance(made, nn.Parameter)
        assert made.device == value.device


def test_modules_and_optimizers_are_saved_and_loaded(accelerator: Accelerator) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(accelerator.device())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, device=accelerator.device())).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    twin = copy.deepcopy(model)
    twin.load_state_dict(loaded["model"])
    twin_optimizer = torch.optim.AdamW(twin.parameters())
    twin_optimizer.load_state_dict(loaded["optimizer"])
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert other.device == accelerator.device()
        assert torch.equal(one, other)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        state, twin_state = optimizer.state[one], twin_optimizer.state[other]
        assert twin_state["exp_avg"].device == accelerator.device()
        assert torch.equal(state["exp_avg"], twin_state["exp_avg"])
