"""Gates, on the simulated accelerator: when they are opened, and what a hold by one proves.

The simulator's streams cannot wait for a word. In place of the wait a launch is enqueued that the simulator holds until
something forces it (test_real_device.py has the real thing).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import harness.observe.tap as tap_package
from harness.backends import module_loading
from harness.errors import UsageError
from harness.perturb.hold import require_kind
from harness.tests.simulator_support import filled, preparing, registered, repetition, streams

LIMIT_MS = 5000.0
REPOSITORY = Path(__file__).resolve().parents[2]
SHORT_LIMIT_MS = 5.0
"""Less than the simulator's patience with who asks again and again."""


class Gate:
    """A word that a stream was made to wait for."""

    def __init__(self, device: int, stream: int, address: int, value: int) -> None:
        self.stream = (device, stream)
        self.address = address
        self.value = value

    def is_open(self) -> bool:
        """What a stream that waits for it would find, by the driver's definition of greater or equal."""
        return ctypes.c_int32(ctypes.c_uint32.from_address(self.address).value - self.value).value >= 0


class Driver:
    """Takes note of the waits, and enqueues a launch in place of each."""

    def __init__(self, tap: Any) -> None:
        self.gates: list[Gate] = []
        self._tap = tap
        self._launched = torch.zeros(1, device="sim")

    def wait(self, device: int, stream: int, address: int, value: int) -> None:
        self.gates.append(Gate(device, stream, address, value))
        self._tap.ignore_this_thread(True)
        self._launched.zero_()
        self._tap.ignore_this_thread(False)


@pytest.fixture(scope="module")
def simulator() -> ModuleType:
    return registered()


@pytest.fixture(scope="module")
def tap(simulator: ModuleType) -> Iterator[Any]:
    native = tap_package.install("sim")
    native.set_ignored_prefixes([str(Path(torch.__file__).parent), str(Path(contextlib.__file__))])
    yield native
    tap_package.remove()


@pytest.fixture
def driver(tap: Any) -> Iterator[Driver]:
    driver = Driver(tap)
    tap.use_gates(LIMIT_MS, driver.wait)
    yield driver
    tap.use_sleeps()


@pytest.fixture
def expiring(tap: Any) -> Iterator[Driver]:
    """Gates that soon expire."""
    driver = Driver(tap)
    tap.use_gates(SHORT_LIMIT_MS, driver.wait)
    yield driver
    tap.use_sleeps()


@contextlib.contextmanager
def held(tap: Any, simulator: ModuleType, stream: torch.Stream) -> Iterator[Any]:
    """A repetition in which the first launch on a stream is held."""
    with repetition(simulator, [(stream, 0)]), repetition(tap, [(stream, 0)]) as result:
        with preparing(tap), preparing(simulator):
            value = filled(4, 1.0)
        with stream:
            value.add_(1)
        yield result


def test_a_gate_is_closed_until_the_body_has_been_enqueued(tap: Any, simulator: ModuleType, driver: Driver) -> None:
    (stream,) = streams(1)
    for number in range(3):
        with held(tap, simulator, stream) as result:
            gate = driver.gates[number]
            assert gate.stream == (0, stream.stream_id)
            assert not gate.is_open()
        assert gate.is_open()
        assert result.outcomes == [("pending", None, 0)]
    assert len({gate.address for gate in driver.gates}) == 1, "the word is used again"
    assert len({gate.value for gate in driver.gates}) == 3, "and what it is waited for is new"


def test_a_hold_that_is_not_pending_is_not_proved(tap: Any, driver: Driver) -> None:
    (stream,) = streams(1)
    with repetition(tap, [(stream, 0), (stream, 7)]) as result, stream:
        filled(4, 1.0)  # runs, since the simulator holds nothing
    assert result.outcomes == [("ran", None, 0), ("missing", None, 0)]


@pytest.mark.parametrize("kind", ["synchronize_stream", "synchronize_event", "synchronize_device"])
def test_a_synchronization_opens_the_gates_that_it_waits_for_before_it_does(
    tap: Any, simulator: ModuleType, driver: Driver, kind: str
) -> None:
    stream, other = streams(2)
    opened: list[bool] = []
    with held(tap, simulator, stream) as result:
        event = stream.record_event()

        def synchronize() -> None:
            opened.append(driver.gates[0].is_open())
            other.synchronize()

        tap.call_around_guard("record", 0, stream.stream_id, id(event), lambda: None)
        line, key = sys._getframe().f_lineno, 0 if kind == "synchronize_device" else stream.stream_id
        tap.call_around_guard(kind, 0, key, id(event), synchronize)
    assert opened == [True]
    assert result.outcomes == [("forced", __file__, line + 1)]


def test_a_synchronization_leaves_gates_closed_that_it_does_not_wait_for(
    tap: Any, simulator: ModuleType, driver: Driver
) -> None:
    stream, other = streams(2)
    with held(tap, simulator, stream) as result:
        with other:
            filled(4, 1.0)
        other.synchronize()
        assert not driver.gates[0].is_open()
    assert result.outcomes == [("pending", None, 0)]


def test_a_body_that_asks_again_and_again_is_not_kept_waiting(tap: Any, simulator: ModuleType, driver: Driver) -> None:
    (stream,) = streams(1)
    with held(tap, simulator, stream) as result:
        line, first = sys._getframe().f_lineno, stream.query()
        assert not first and not driver.gates[0].is_open(), "who asks once may have something else to do"
        stream.query()
        assert driver.gates[0].is_open()
    assert result.outcomes == [("forced", __file__, line)]


@pytest.mark.parametrize(("elements", "opens"), [(16 * 1024, False), (16 * 1024 + 1, True)])
def test_a_copy_for_which_the_driver_may_wait_opens_the_gate(
    tap: Any, simulator: ModuleType, driver: Driver, elements: int, opens: bool
) -> None:
    (stream,) = streams(1)
    pageable = torch.zeros(elements)
    with preparing(tap):
        on_device = filled(elements, 1.0)
    with held(tap, simulator, stream) as result, stream:
        line = sys._getframe().f_lineno + 1
        on_device.copy_(pageable, non_blocking=True)
        assert driver.gates[0].is_open() is opens
    assert result.outcomes == ([("forced", __file__, line)] if opens else [("pending", None, 0)])
    assert not result.of_kind("sync_stream"), "it orders nothing"


# What is not behind the gate has to have run before it is opened.


def test_a_hold_proves_nothing_if_what_should_overtake_it_has_not_run(
    tap: Any, simulator: ModuleType, expiring: Driver
) -> None:
    stream, other = streams(2)
    with repetition(simulator, [(stream, 0), (other, 0)]), repetition(tap, [(stream, 0)]) as result:
        with preparing(tap), preparing(simulator):
            values = [filled(4, 1.0), filled(4, 1.0)]
        for each, value in zip((stream, other), values, strict=True):
            with each:
                value.add_(1)
    assert result.outcomes == [("expired", None, 0)]


@pytest.mark.parametrize("held_by_simulator", [0, 1])
def test_what_a_stream_does_before_it_waits_for_the_held_launch_has_to_have_run(
    tap: Any, simulator: ModuleType, expiring: Driver, held_by_simulator: int
) -> None:
    stream, other = streams(2)
    wanted = [(stream, 0), (other, held_by_simulator)]
    with repetition(simulator, wanted), repetition(tap, [(stream, 0)]) as result:
        with preparing(tap), preparing(simulator):
            values = [filled(4, 1.0), filled(4, 1.0)]
        with stream:
            values[0].add_(1)
        with other:
            values[1].add_(1)
            other.wait_stream(stream)
            values[1].add_(1)
    assert result.outcomes == [("expired" if held_by_simulator == 0 else "pending", None, 0)]


def test_a_synchronization_of_one_held_stream_leaves_the_other_closed(
    tap: Any, simulator: ModuleType, driver: Driver
) -> None:
    first, second = streams(2)
    with repetition(simulator, [(first, 0), (second, 0)]), repetition(tap, [(first, 0), (second, 0)]) as result:
        with preparing(tap), preparing(simulator):
            values = [filled(4, 1.0), filled(4, 1.0)]
        for each, value in zip((second, first), values, strict=True):
            with each:
                value.add_(1)
        line = sys._getframe().f_lineno + 1
        second.synchronize()
        opened = {gate.stream[1]: gate.is_open() for gate in driver.gates}
    assert opened == {first.stream_id: False, second.stream_id: True}
    assert all(gate.is_open() for gate in driver.gates)
    assert result.outcomes == [("pending", None, 0), ("forced", __file__, line)]


# The watchdog.


def sleep_with_the_gil(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(round(seconds * 1e6))


@pytest.mark.parametrize("sleep", [time.sleep, sleep_with_the_gil])
def test_the_watchdog_opens_a_forgotten_gate(
    tap: Any, simulator: ModuleType, expiring: Driver, sleep: Callable[[float], None]
) -> None:
    (stream,) = streams(1)
    for number in range(2):
        with held(tap, simulator, stream) as result:
            assert not expiring.gates[number].is_open()
            sleep(SHORT_LIMIT_MS / 1e3 + 0.2)
            assert expiring.gates[number].is_open()
        assert result.outcomes == [("expired", None, 0)]
    with held(tap, simulator, stream) as result:
        pass
    assert result.outcomes == [("pending", None, 0)], "the next repetition has all the time again"


def test_gates_that_are_no_longer_used_are_open(tap: Any, simulator: ModuleType, driver: Driver) -> None:
    (stream,) = streams(1)
    tap.set_sleep_fallback(lambda cycles: None)
    with held(tap, simulator, stream):
        tap.use_sleeps()
        assert driver.gates[0].is_open()
    with repetition(tap, [(stream, 0)]), stream:
        filled(4, 1.0)
    assert len(driver.gates) == 1


def test_many_gates_are_there_when_a_repetition_begins(tap: Any, driver: Driver) -> None:
    (stream,) = streams(1)
    count = 3000
    with repetition(tap, [(stream, index) for index in range(count)]), stream:
        value = torch.empty(4, device="sim")
        for _ in range(count):
            value.zero_()
        assert not any(gate.is_open() for gate in driver.gates)
    assert len({gate.address for gate in driver.gates}) == count
    assert all(gate.is_open() for gate in driver.gates)


# The driver itself, in the place of which a library stands that only takes notes.

FAKE_DRIVER = """
extern "C" {
int waits = 0, answer = 0;
void* stream = nullptr;
unsigned long long address = 0;
unsigned int value = 0, flags = 99;
int cuStreamWaitValue32_v2(void* on, unsigned long long at, unsigned int until, unsigned int how) {
  ++waits;
  stream = on, address = at, value = until, flags = how;
  return answer;
}
int cuStreamWaitValue32(void*, unsigned long long, unsigned int, unsigned int) {
  return 1;
}
}
"""
FAKE_RUNTIME = """
#include <cstdlib>
extern "C" {
unsigned int allocated_with = 0;
int cudaHostAlloc(void** pointer, size_t size, unsigned int flags) {
  allocated_with = flags;
  *pointer = std::malloc(size);
  return 0;
}
int cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  *device = static_cast<char*>(host) + (1ull << 40);
  return 0;
}
int cudaMemsetAsync(void*, int, size_t, void*) { return 0; }
void* _ZNK3c104cuda10CUDAStream6streamEv(const void*) { return reinterpret_cast<void*>(0x1234); }
}
"""
USE_FAKES = """
import ctypes, sys
driver, runtime = (ctypes.CDLL(path) for path in sys.argv[1:])
import torch
from harness.observe import tap as tap_package
from harness.tests.simulator_support import filled, registered, repetition, streams

def noted(name, kind=ctypes.c_uint32, library=driver):
    return kind.in_dll(library, name).value

registered()
tap = tap_package.install("sim")
tap.use_gates(1000.0)
word = ctypes.c_uint32.from_address(noted("address", ctypes.c_uint64) - (1 << 40))
assert (noted("waits"), noted("flags"), noted("allocated_with", library=runtime)) == (1, 0, 3)
assert word.value == noted("value"), "it was tried on an open gate"
(stream,) = streams(1)
with repetition(tap, [(stream, 0)]), stream:
    filled(4, 1.0)
    assert (noted("waits"), noted("flags"), noted("stream", ctypes.c_uint64)) == (2, 0, 0x1234)
    assert word.value + 1 == noted("value"), "closed"
assert word.value == noted("value"), "open"
for answer in (801, 1):
    ctypes.c_int.in_dll(driver, "answer").value = answer
    try:
        tap.use_gates(1000.0)
    except RuntimeError as error:
        print(error)
"""


def test_the_driver_is_asked_to_wait_for_a_word_that_the_device_reaches(tmp_path: Path) -> None:
    libraries = []
    for name, source in (("libcuda.so.1", FAKE_DRIVER), ("libc10_cuda.so", FAKE_RUNTIME)):
        (tmp_path / f"{name}.cpp").write_text(source)
        library = str(tmp_path / name)
        compiler = [os.environ.get("CXX") or "c++", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", library]
        subprocess.run([*compiler, f"{library}.cpp"], check=True)
        libraries.append(library)
    done = subprocess.run(
        [sys.executable, "-c", USE_FAKES, *libraries], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "cuStreamWaitValue32 is not supported by this device or driver",
        "cuStreamWaitValue32 failed with error 1",
    ]


# Where there are none.


def test_without_the_driver_there_are_no_gates(tap: Any) -> None:
    if torch.version.cuda is not None:
        pytest.skip("not covered: this torch may have loaded the driver")
    with pytest.raises(RuntimeError, match="the CUDA driver has no cuStreamWaitValue32"):
        tap.use_gates(LIMIT_MS)


@pytest.mark.parametrize("kind", ["sleep", "gate"])
def test_the_simulator_has_one_way_to_hold(kind: str) -> None:
    with pytest.raises(UsageError, match=rf"--hold {kind} is .* leave --hold out"):
        require_kind(kind, "sim", is_rocm=False)


def test_rocm_has_sleeps_alone() -> None:
    require_kind("sleep", "cuda:1", is_rocm=True)
    require_kind("gate", "cuda", is_rocm=False)
    with pytest.raises(UsageError, match="use --hold sleep"):
        require_kind("gate", "cuda", is_rocm=True)


@pytest.mark.parametrize("given", [{}, {"CUDA_MODULE_LOADING": "LAZY"}])
def test_kernels_are_loaded_at_the_start_unless_the_user_has_decided(given: dict[str, str]) -> None:
    environment = dict(given)
    module_loading.load_at_start(environment)
    assert environment == {"CUDA_MODULE_LOADING": "EAGER", **given}
