"""Which accelerator an option value means, and what is asked of it before it starts."""

from __future__ import annotations

import pytest
import torch

from harness.backends import hardware_queues, simulator
from harness.backends.select import SimulatedBackend, open_backend, resolve
from harness.errors import UsageError
from harness.exit_codes import ExitCode
from harness.tests.simulator_support import registered


@pytest.fixture
def machine(monkeypatch):
    """Makes this a machine with so many GPUs; with None, one whose torch was built without CUDA."""

    def with_gpus(count: int | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(count))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count or 0)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: count is not None)

    return with_gpus


@pytest.mark.parametrize(
    ("option", "gpus", "device"),
    [
        ("auto", 2, "cuda"),
        ("auto", 0, "sim"),
        ("auto", None, "sim"),
        ("sim", 2, "sim"),
        ("sim", None, "sim"),
        ("cuda", 1, "cuda"),
        ("cuda:0", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_value_that_names_a_device(machine, option, gpus, device):
    machine(gpus)
    assert resolve(option) == device


@pytest.mark.parametrize(
    ("option", "gpus", "sentence"),
    [
        ("tpu", 1, "--device tpu is unknown: use auto, cuda, cuda:N or sim."),
        ("", 1, "--device  is unknown"),
        ("cuda:", 1, "--device cuda: is unknown"),
        ("cuda:-1", 1, "--device cuda:-1 is unknown"),
        ("cuda:0 ", 1, "--device cuda:0  is unknown"),
        ("CUDA", 1, "--device CUDA is unknown"),
        ("sim:0", 1, "--device sim:0 is unknown"),
        ("cuda:2", 2, "--device cuda:2 does not exist: this machine has 2 GPU(s), counted from 0."),
        ("cuda", 0, "--device cuda needs a GPU and torch finds no GPU here: use --device sim"),
        ("cuda:1", None, "--device cuda:1 needs a GPU and this torch was built without CUDA here"),
    ],
)
def test_a_value_that_names_none_is_a_usage_error(machine, option, gpus, sentence):
    machine(gpus)
    with pytest.raises(UsageError) as caught:
        resolve(option)
    assert str(caught.value).startswith(sentence)
    assert caught.value.exit_code is ExitCode.USAGE


def test_the_simulator_is_the_native_module_of_the_process():
    native = registered()
    backend = open_backend("sim")
    assert isinstance(backend, SimulatedBackend)
    assert backend.native is native
    assert backend.device == torch.device("sim", 0)
    assert backend.describe() == {"device": f"simulated accelerator ({backend.device_count} devices)"}


def test_what_building_says_reaches_whoever_opens_it(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(simulator, "register", lambda announce: announce("building"))
    open_backend("sim", said.append)
    assert said == ["building"]


def test_synchronizing_waits_for_every_device():
    native = registered()
    backend = SimulatedBackend(native)
    assert backend.device_count == 2
    streams = [torch.Stream(device=f"sim:{index}") for index in range(2)]
    native.begin_repetition([(index, stream.stream_id, 0) for index, stream in enumerate(streams)], False, False)
    for stream in streams:
        with stream:
            torch.zeros(4, device=stream.device)
    backend.synchronize()
    entries, outcomes = native.finish_repetition()
    assert [entry[1] for entry in entries if entry[0] == "sync_device"] == [0, 1]
    assert [state for state, *_ in outcomes] == ["forced", "forced"]


def test_cuda_is_asked_for_the_most_queues():
    environ = {"OTHER": "1"}
    hardware_queues.use_all(environ)
    assert environ == {"OTHER": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@pytest.mark.parametrize("number", ["1", "8", ""])
def test_the_user_decides_on_the_queues(number):
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": number}
    hardware_queues.use_all(environ)
    assert environ == {"CUDA_DEVICE_MAX_CONNECTIONS": number}
