"""The device type ``sim``: registration, device module, streams and events as torch's generic API shows them."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
import torch

from harness.backends import simulator
from harness.backends.simulator import device_module as sim
from harness.tests.simulator_support import PACKAGE_ROOT, registered, run_script, streams


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


def test_registering_twice_changes_nothing(native: ModuleType) -> None:
    assert simulator.register() is native
    assert simulator.build().name == f"{simulator.EXTENSION_NAME}.so"


def test_it_is_the_accelerator(native: ModuleType) -> None:
    assert torch.accelerator.is_available()
    current = torch.accelerator.current_accelerator()
    assert current is not None and current.type == "sim"
    assert torch.accelerator.device_count() == sim.device_count() == 2
    assert sim.is_available() and sim.is_initialized() and not sim._is_in_bad_fork()
    assert sys.modules["torch.sim"] is vars(torch)["sim"] is sim
    assert vars(torch.Tensor)["is_sim"]


def test_the_current_device(native: ModuleType) -> None:
    with sim.device(1):
        assert sim.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.empty(1, device="sim").device.index == 1
    assert sim.current_device() == 0
    sim.set_device("sim:1")
    assert torch.empty(1, device="sim").device.index == 1
    torch.accelerator.set_device_index(0)
    assert sim.current_device() == 0
    with pytest.raises(RuntimeError, match="no sim:2"):
        sim.set_device(2)
    with pytest.raises(RuntimeError, match="no sim:5"):
        torch.empty(1, device="sim:5")


def test_the_current_stream_is_one_a_thread_and_device(native: ModuleType) -> None:
    stream, other_device = streams(1, 0)[0], streams(1, 1)[0]
    seen = []
    with stream:
        assert torch.accelerator.current_stream() == sim.current_stream(0) == stream
        assert torch.accelerator.current_stream(1).stream_id == 0
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream().stream_id))
        thread.start()
        thread.join()
        with other_device:
            assert sim.current_device() == 1
            assert sim.current_stream() == other_device
    assert seen == [0]
    assert sim.current_device() == 0
    assert sim.current_stream() == sim.default_stream()
    torch.accelerator.set_stream(stream)
    assert sim.current_stream() == stream
    sim.set_stream(sim.default_stream())


def test_streams_come_from_a_pool_of_32_a_priority(native: ModuleType) -> None:
    ids = [stream.stream_id for stream in streams(64)]
    assert len(set(ids)) == 32 and ids[:32] == ids[32:]
    assert 0 not in ids
    urgent = {torch.Stream(device="sim", priority=-1).stream_id for _ in range(40)}
    assert len(urgent) == 32 and not urgent & set(ids)
    assert [torch.Stream(device="sim:1").device_index for _ in range(2)] == [1, 1]


def test_events(native: ModuleType) -> None:
    first, second = streams(2)
    event = torch.Event(device="sim")
    assert event.query()
    event.synchronize()
    event.wait(second)
    event.record(first)
    event.wait(second)
    event.synchronize()
    assert event.query() and first.query()
    start, end = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
    start.record(first)
    end.record(first)
    assert 0 <= start.elapsed_time(end) < 1000
    assert isinstance(first.record_event(), torch.Event)
    second.wait_stream(first)
    second.synchronize()
    sim.synchronize()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "taken",
    [
        "torch.utils.rename_privateuse1_backend('other')",
        "torch.utils.backend_registration._setup_privateuseone_for_python_backend('other')",
    ],
)
def test_a_second_privateuse1_backend_is_refused_with_one_sentence(native: ModuleType, taken: str) -> None:
    if "_setup" in taken and not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        taken = "torch.utils.rename_privateuse1_backend('third')"
    done = run_script(f"""
        import torch, torch.utils.backend_registration
        {taken}
        from harness.backends import simulator
        from harness.errors import UsageError
        try:
            simulator.register()
        except UsageError as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "('other')" in done.stdout or "('third')" in done.stdout


@pytest.mark.timeout(120)
def test_a_registered_guard_without_a_name_is_refused(native: ModuleType) -> None:
    done = run_script("""
        import torch
        from harness.backends import extension, simulator
        from harness.errors import UsageError
        native = extension.load(simulator.EXTENSION_NAME, simulator.SOURCES)
        native.install()
        try:
            simulator.register()
        except UsageError as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr
    assert "one without a name" in done.stdout and len(done.stdout.splitlines()) == 1


EXITS = {
    "work pending": """
        native.begin_repetition([(0, stream.stream_id, 0)], False, True)
        with stream:
            value = torch.ones(4, device="sim")
            event = stream.record_event()
        torch.accelerator.current_stream().wait_stream(stream)
        value.add_(1)
    """,
    "autograd threads alive": """
        leaves = [torch.ones(4, device=f"sim:{i}", requires_grad=True) for i in (0, 1)]
        (leaves[0] * leaves[1].to("sim:0")).sum().backward()
    """,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("state", EXITS)
def test_the_process_exits_cleanly(native: ModuleType, state: str) -> None:
    body = "\n".join(line[8:] for line in EXITS[state].splitlines())
    script = (
        "import torch\n"
        "from harness.backends import simulator\n"
        "native = simulator.register()\n"
        "torch.set_num_threads(1)\n"
        "stream = torch.Stream(device='sim')\n" + body
    )
    done = run_script(script)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_sources_are_all_listed(native: ModuleType) -> None:
    folder = PACKAGE_ROOT / "harness" / "backends" / "simulator"
    assert {source.name for source in simulator.SOURCES} == {source.name for source in folder.glob("*.cpp")}
