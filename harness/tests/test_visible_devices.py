"""Which GPUs a worker sees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.backends import visible_devices
from harness.backends.visible_devices import rotate, visible

UUIDS = ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1a2b", "GPU-ffff"]


@pytest.mark.parametrize(
    ("outer", "device_count", "worker_index", "rotated"),
    [
        (None, 3, 0, "0,1,2"),
        (None, 3, 1, "1,2,0"),
        (None, 3, 5, "2,0,1"),
        (None, 1, 7, "0"),
        (None, 0, 0, ""),
        ("2,0", 4, 0, "2,0"),
        ("2,0", 4, 1, "0,2"),
        (" 2 , 0 ", 4, 1, "0,2"),
        ("3", 4, 9, "3"),
        ("", 4, 0, ""),
        ("-1", 4, 0, ""),
        ("1,-1,2", 4, 1, "1"),  # an invalid index ends the list
        ("0,9,1", 4, 0, "0"),
        ("1,1", 4, 0, ""),  # a repeated one empties it
        ("1gpu2,2ampere", 4, 0, "1,2"),  # as strtoul reads it
        ("NoDevFiles", 4, 0, ""),
        (",".join(UUIDS), 8, 1, ",".join([UUIDS[1], UUIDS[2], UUIDS[0]])),
        ("GPU-8932f937,1", 8, 0, "GPU-8932f937"),
        ("MIG-a,MIG-b,MIG-c", 1, 2, "MIG-c,MIG-a,MIG-b"),
    ],
)
def test_each_worker_gets_its_own_gpu_first(
    outer: str | None, device_count: int, worker_index: int, rotated: str
) -> None:
    assert rotate(outer, device_count, worker_index) == rotated


outer_lists = st.one_of(
    st.none(),
    st.lists(st.integers(0, 7), unique=True, max_size=8).map(lambda ids: ",".join(map(str, ids))),
    st.lists(st.sampled_from(UUIDS), unique=True, max_size=3).map(",".join),
)


@given(outer=outer_lists, worker_index=st.integers(0, 40))
def test_a_worker_sees_the_same_gpus_in_rotated_order(outer: str | None, worker_index: int) -> None:
    entries = visible(outer, 8)
    rotated = visible(rotate(outer, 8, worker_index), 8)
    assert sorted(rotated) == sorted(entries)
    if entries:
        assert rotated[0] == entries[worker_index % len(entries)]
        following = dict(zip(entries, [*entries[1:], entries[0]], strict=True))
        assert [following[entry] for entry in rotated[:-1]] == rotated[1:]


@given(outer=outer_lists)
def test_workers_spread_evenly_over_the_gpus(outer: str | None) -> None:
    entries = visible(outer, 8)
    first = [rotate(outer, 8, index).split(",")[0] for index in range(3 * len(entries))]
    assert all(first.count(entry) == 3 for entry in entries)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine with four GPUs and a torch that was built for CUDA."""
    monkeypatch.setattr(visible_devices, "physical_count", lambda: 4)
    monkeypatch.setattr(visible_devices, "_torch_is_built_for_hip", lambda: False)
    yield monkeypatch


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("environ", "index", "changes"),
    [
        ({}, 1, {"CUDA_VISIBLE_DEVICES": "1,2,3,0"}),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 1, {"CUDA_VISIBLE_DEVICES": "1,3"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, {}),
        (
            {"HIP_VISIBLE_DEVICES": "3,1"},
            1,
            {"CUDA_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1,3"},
        ),
        (
            {"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "0"},
            0,
            {"CUDA_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "3,1"},
        ),
        # The list for HIP counts within the one for the runtime below it.
        (
            {"ROCR_VISIBLE_DEVICES": "5,GPU-ab"},
            1,
            {"CUDA_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1,0"},
        ),
    ],
)
def test_the_environment_of_a_worker(environ: dict[str, str], index: int, changes: dict[str, str]) -> None:
    assert visible_devices.environment_of_worker(environ, index) == changes


def test_a_rocm_build_of_torch_sets_both_variables(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(visible_devices, "_torch_is_built_for_hip", lambda: True)
    changes = visible_devices.environment_of_worker({"CUDA_VISIBLE_DEVICES": "2,3"}, 1)
    assert changes == {"CUDA_VISIBLE_DEVICES": "3,2", "HIP_VISIBLE_DEVICES": "3,2"}


@pytest.mark.parametrize(
    ("version", "is_hip"),
    [("hip: Optional[str] = '6.4.43482'", True), ("hip: Optional[str] = None", False), ("cuda = '13.0'", False)],
)
def test_a_rocm_build_of_torch_is_told_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, is_hip: bool
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\n{version}\n")
    specification = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: specification)
    visible_devices._torch_is_built_for_hip.cache_clear()
    try:
        assert visible_devices._torch_is_built_for_hip() is is_hip
    finally:
        visible_devices._torch_is_built_for_hip.cache_clear()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("device", "environ", "after"),
    [
        ("cuda:2", {}, {"CUDA_VISIBLE_DEVICES": "2,3,0,1"}),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "3,0"}, {"CUDA_VISIBLE_DEVICES": "0,3"}),
        ("cuda:0", {}, {}),
        ("cuda", {}, {}),
        ("auto", {}, {}),
        ("sim", {}, {}),
        ("cuda:4", {}, {}),  # does not exist: whoever resolves the option says so
    ],
)
def test_the_gpu_that_was_asked_for_becomes_the_first(
    device: str, environ: dict[str, str], after: dict[str, str]
) -> None:
    visible_devices.put_first(device, environ)
    assert environ == after


@pytest.mark.usefixtures("machine")
def test_gpus_are_counted_as_the_process_would_see_them() -> None:
    assert visible_devices.count({}) == 4
    assert visible_devices.count({"CUDA_VISIBLE_DEVICES": "1,0"}) == 2
    assert visible_devices.count({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def nvml(count: int, fails: bool = False) -> SimpleNamespace:
    class NVMLError(Exception):
        pass

    def init() -> None:
        if fails:
            raise NVMLError("Driver Not Loaded")

    return SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=init, nvmlDeviceGetCount=lambda: count, nvmlShutdown=lambda: None
    )


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    visible_devices.physical_count.cache_clear()
    yield monkeypatch
    visible_devices.physical_count.cache_clear()


def nvidia_smi(folder: Path, output: str, status: int = 0) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    script.chmod(0o755)


def test_nvml_counts_first(uncounted: pytest.MonkeyPatch) -> None:
    uncounted.setitem(sys.modules, "pynvml", nvml(5))
    assert visible_devices.physical_count() == 5


def test_nvidia_smi_counts_where_nvml_cannot(uncounted: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uncounted.setitem(sys.modules, "pynvml", nvml(0, fails=True))
    uncounted.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    nvidia_smi(
        tmp_path,
        "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-2)\nGPU 1: NVIDIA H200 (UUID: GPU-3)",
    )
    assert visible_devices.physical_count() == 2


def test_torch_counts_where_nothing_else_can(uncounted: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uncounted.setitem(sys.modules, "pynvml", None)
    uncounted.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    uncounted.setenv("CUDA_VISIBLE_DEVICES", "0")
    nvidia_smi(tmp_path, "NVIDIA-SMI has failed", status=9)
    seen: list[dict[str, str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != sys.executable:
            return subprocess_run(command, **options)
        seen.append(options["env"])
        return subprocess.CompletedProcess(command, 0, stdout="3\n")

    subprocess_run = subprocess.run
    uncounted.setattr(subprocess, "run", run)
    assert visible_devices.physical_count() == 3
    assert "CUDA_VISIBLE_DEVICES" not in seen[0], "it would count what is visible, not what is there"


def test_a_machine_without_gpus_has_none(uncounted: pytest.MonkeyPatch) -> None:
    for ask in ("_count_by_nvml", "_count_by_nvidia_smi", "_count_by_torch"):
        uncounted.setattr(visible_devices, ask, lambda: None)
    assert visible_devices.physical_count() == 0


def test_deciding_does_not_import_torch() -> None:
    script = (
        "import sys; from harness.backends import visible_devices\n"
        "visible_devices.environment_of_worker({'CUDA_VISIBLE_DEVICES': '1,0'}, 1)\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, check=False).returncode == 0
