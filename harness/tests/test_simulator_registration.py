"""The device type ``sim``: registration, device module, streams and events as torch's generic API shows them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from harness.backends import simulator
from harness.backends.simulator import device_module as sim
from harness.tests.simulator_support import PACKAGE_ROOT, registered, run_script


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


def test_registering_twice_changes_nothing(native: ModuleType) -> None:
    assert simulator.register() is native
    assert simulator.build().name == f"{simulator.EXTENSION_NAME}.so"


def test_it_is_the_accelerator(native: ModuleType) -> None:
    current = torch.accelerator.current_accelerator()
    assert current is not None and current.type == "sim"
    assert sim.device_count() == 2 and not sim._is_in_bad_fork()
    assert sys.modules["torch.sim"] is vars(torch)["sim"] is sim


def test_a_device_that_does_not_exist_is_named(native: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="no sim:2"):
        sim.set_device(2)
    with pytest.raises(RuntimeError, match="no sim:5"):
        torch.empty(1, device="sim:5")


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


@pytest.mark.timeout(120)
def test_the_process_exits_cleanly_from_a_repetition_that_looks_lines_up(native: ModuleType) -> None:
    done = run_script("""
        import torch
        from harness.backends import simulator
        native = simulator.register()
        stream = torch.Stream(device="sim")
        native.begin_repetition([(0, stream.stream_id, 0)], False, True)
        with stream:
            value = torch.ones(4, device="sim", requires_grad=True)
            (value * 2).sum().backward()
        torch.accelerator.current_stream().wait_stream(stream)
        value.detach().add_(1)
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_sources_are_all_listed(native: ModuleType) -> None:
    folders = [PACKAGE_ROOT / "harness" / "backends" / name for name in ("simulator", "accesses")]
    assert set(simulator.SOURCES) == {source for folder in folders for source in folder.glob("*.cpp")}
