"""The doctor: each check says what it found, and what to do about it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.backends import visible_devices
from harness.doctor import gpu, planted, resources, software
from harness.doctor.check import Check, Status, blind, broken, exit_code_of, warning
from harness.exit_codes import ExitCode
from harness.tests.simulator_support import PACKAGE_ROOT

OK, WARNING, PROBLEM = Status.OK, Status.WARNING, Status.PROBLEM


def only(checks: Iterable[Check]) -> Check:
    (check,) = checks
    return check


def test_the_exit_code_is_that_of_the_worst() -> None:
    fine, odd = Check("a", "b"), warning("a", "b", "c")
    assert exit_code_of([fine, odd]) is ExitCode.CLEAN
    assert exit_code_of([fine, blind("a", "b", "c"), odd]) is ExitCode.INCONCLUSIVE
    assert exit_code_of([blind("a", "b", "c"), broken("a", "b", "c")]) is ExitCode.INFRASTRUCTURE


# Software.


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "status", "found"),
    [
        ("2.13.0+cpu", None, None, OK, "built for the CPU alone"),
        ("2.7.0", "12.6", None, OK, "built for CUDA 12.6"),
        ("3.0.0.dev20270101", None, "7.0", OK, "built for ROCm 7.0"),
        ("2.6.1", "12.4", None, PROBLEM, "2.6.1"),
        ("nightly", None, None, PROBLEM, "nightly"),
    ],
)
def test_torch_is_new_enough(version: str, cuda: str | None, hip: str | None, status: Status, found: str) -> None:
    module: Any = SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda, hip=hip))
    check = software.torch_build(module)
    assert check.status is status and found in check.found
    assert (check.advice == "Install torch 2.7 or newer.") is (status is PROBLEM)


def test_the_oldest_versions_are_those_of_the_package() -> None:
    text = (PACKAGE_ROOT / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, software.OLDEST_TORCH))}"' in text
    assert f'requires-python = ">={".".join(map(str, software.OLDEST_PYTHON))}"' in text


def test_without_a_compiler_what_is_built_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "nosuch")
    check = software.compiler()
    assert check.status is WARNING and "CXX names 'nosuch'" in check.advice


def test_python_without_assertions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.python().status is OK
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=1))
    assert "drops assertions" in software.python().found


def test_plugins_that_disturb_are_named() -> None:
    needed = {"pytest-xdist": "3.8.0", "pytest-repeat": "0.9.4"}
    assert only(software.plugins(needed)) == Check("pytest", "pytest-xdist 3.8.0, pytest-repeat 0.9.4")
    installed = {**needed, "pytest-randomly": "4.0", "pytest-rerunfailures": "16", "pytest-sugar": "1"}
    checks = list(software.plugins(installed))
    assert [check.name for check in checks] == ["pytest", "pytest-rerunfailures", "pytest-randomly"]
    assert [check.status for check in checks] == [OK, WARNING, WARNING]
    missing = only(software.plugins({"pytest-xdist": "3.8.0"}))
    assert (missing.found, missing.advice) == ("pytest-repeat not installed", "pip install pytest-repeat.")
    assert missing.exit_code is ExitCode.INFRASTRUCTURE


def test_the_installed_plugins_are_found() -> None:
    assert only(check for check in software.plugins() if check.name == "pytest").status is OK


def test_settings_that_hide_races_are_a_problem_where_they_have_an_effect() -> None:
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert only(software.settings(environ, ["sim"])).status is OK
    checks = list(software.settings(environ, ["sim", "cuda"]))
    assert [check.status for check in checks] == [PROBLEM, WARNING]
    assert checks[0].found.startswith("CUDA_LAUNCH_BLOCKING=1: the host waits")
    assert exit_code_of(checks) is ExitCode.INCONCLUSIVE
    everywhere = software.settings({"TORCH_CUDA_SANITIZER": "1"}, ["sim", "cuda"])
    assert only(everywhere).status is PROBLEM
    assert only(software.settings({"PYTEST_ADDOPTS": "-x"}, ["sim"])).status is WARNING


def write_process(proc: Path, number: str, name: str, parent: str, traced_by: str = "0") -> None:
    (proc / number).mkdir()
    (proc / number / "status").write_text(f"Name:\t{name}\nPPid:\t{parent}\nTracerPid:\t{traced_by}\n")


def test_debuggers_are_found_among_the_parents_and_as_tracers(tmp_path: Path) -> None:
    write_process(tmp_path, "1", "init", "0")
    write_process(tmp_path, "2", "compute-sanitizer"[:15], "1")
    write_process(tmp_path, "3", "bash", "2")
    write_process(tmp_path, "4", "python3", "3")
    write_process(tmp_path, "5", "strace", "1")
    write_process(tmp_path, "6", "python3", "1", "5")
    write_process(tmp_path, "7", "python3", "1", "1")
    assert only(software.tracers(1, tmp_path)) == Check("debuggers", "none")
    sanitizer = only(software.tracers(4, tmp_path))
    assert sanitizer.exit_code is ExitCode.INCONCLUSIVE
    assert "runs under compute-sanitizer, which" in sanitizer.found
    strace = only(software.tracers(6, tmp_path))
    assert strace.status is WARNING and "runs under strace" in strace.found
    assert "runs under init, which traces this process" in only(software.tracers(7, tmp_path)).found


def test_this_process_is_debugged_by_nobody() -> None:
    assert only(software.tracers()).status is OK


def test_a_program_that_starts_this_one_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "ncu"
    ask = "from harness.doctor import software; print(*software.tracers())"
    script.write_text(f"#!/bin/sh\n{sys.executable} -c '{ask}'\ntrue\n")
    script.chmod(0o755)
    done = subprocess.run([script], cwd=PACKAGE_ROOT, capture_output=True, text=True)
    assert "this runs under ncu, which runs kernels one after another" in done.stdout, done.stderr


# Resources.


def test_a_folder_that_can_be_written_is_fine_and_is_not_made(tmp_path: Path) -> None:
    assert resources.results(tmp_path).status is OK
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    check = resources.results(Path("/proc/self"))
    assert check.status is PROBLEM and check.exit_code is ExitCode.INFRASTRUCTURE
    assert check.found.startswith("/proc/self/.sidestream is not writable (")
    monkeypatch.setenv("SIDESTREAM_CACHE", "/proc/self/cache")
    assert "/proc/self/cache is not writable" in resources.cache().found


def test_a_disk_that_is_nearly_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=5 << 20))
    check = resources.results(tmp_path)
    assert check.status is WARNING and check.found.endswith("5 MiB free") and check.advice.startswith("Free 100 MiB")
    assert resources.shared_memory().status is WARNING


def test_missing_shared_memory_is_told(tmp_path: Path) -> None:
    assert resources.shared_memory(tmp_path / "gone").status is WARNING


def test_too_little_memory_for_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resources.machine().status is OK
    monkeypatch.setattr("harness.backends.toolchain.available_memory_bytes", lambda: 700 << 20)
    check = resources.machine()
    assert check.status is WARNING and "700 MiB of memory free" in check.found


def test_limits_that_a_run_would_meet_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    low = {resource.RLIMIT_NOFILE: 64, resource.RLIMIT_FSIZE: 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (low.get(kind, resource.RLIM_INFINITY), 0))
    checks = list(resources.limits())
    assert [check.advice for check in checks] == ["ulimit -n 256.", "ulimit -f unlimited."]
    low.clear()
    assert only(resources.limits()).status is OK


# GPUs. What a real one says is in test_real_device.py.

H200 = {
    "name": "NVIDIA H200",
    "uuid": "GPU-1",
    "driver_version": "580.1",
    "compute_mode": "Default",
    "persistence_mode": "Enabled",
    "clocks.sm": "1980 MHz",
    "clocks.max.sm": "1980 MHz",
}


def torch_for(available: bool, cuda: str | None = "13.0") -> Any:
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=SimpleNamespace(is_available=lambda: available, device_count=lambda: 2),
    )


@pytest.mark.parametrize(
    ("there", "environ", "torch_here", "status", "found"),
    [
        (0, {}, torch_for(False), OK, "none, so the simulated accelerator alone is tested"),
        (2, {}, torch_for(True), OK, "2 x NVIDIA H200, 2 of 2 visible"),
        (2, {"CUDA_VISIBLE_DEVICES": "1"}, torch_for(True), OK, "2 x NVIDIA H200, 1 of 2 visible"),
        (2, {"CUDA_VISIBLE_DEVICES": ""}, torch_for(False), WARNING, "none of 2 visible"),
        (2, {}, torch_for(False, None), WARNING, "which this torch is not built for"),
        (2, {}, torch_for(False), PROBLEM, "2, and torch finds none: it gives no reason"),
    ],
)
def test_gpus_are_there_visible_and_usable(
    there: int, environ: dict[str, str], torch_here: Any, status: Status, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible_devices, "physical_count", lambda: there)
    monkeypatch.setattr(gpu, "nvidia_gpus", lambda: [H200] * there)
    check = only(gpu.gpus(torch_here, environ))
    assert check.status is status and found in check.found


def statuses(changed: dict[str, str], environ: dict[str, str]) -> dict[str, Check]:
    checks = {check.name: check for check in gpu.nvidia([{**H200, **changed}], environ)}
    assert list(checks) == ["driver", "compute mode", "MPS", "persistence", "clocks"]
    return checks


def test_a_gpu_that_is_set_as_it_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    checks = statuses({}, {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    assert {check.status for check in checks.values()} == {OK}
    assert checks["clocks"].found == "1980 MHz (at most 1980 MHz)"


@pytest.mark.parametrize(
    ("changed", "name", "status", "advice"),
    [
        ({"compute_mode": "Exclusive_Process"}, "compute mode", WARNING, "nvidia-smi -c DEFAULT, or run without -n."),
        ({"compute_mode": "Prohibited"}, "compute mode", PROBLEM, "nvidia-smi -c DEFAULT."),
        ({"persistence_mode": "Disabled"}, "persistence", WARNING, "nvidia-smi -pm 1."),
    ],
)
def test_a_gpu_that_is_set_otherwise(
    changed: dict[str, str], name: str, status: Status, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    check = statuses(changed, {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})[name]
    assert (check.status, check.advice) == (status, advice)


def test_mps_is_seen_by_its_pipe_and_by_its_process(tmp_path: Path) -> None:
    pipes, proc = tmp_path / "pipes", tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    pipes.mkdir()
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    assert gpu.mps(environ, proc).status is OK
    (pipes / "control").touch()
    assert gpu.mps(environ, proc).status is WARNING
    (pipes / "control").unlink()
    (proc / "7" / "cmdline").write_bytes(b"/usr/bin/nvidia-cuda-mps-control\0-d\0")
    assert gpu.mps(environ, proc).status is WARNING


# The planted races, and the whole.


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        ({"exit_code": 0, "races": [{"missing": "a", "problem": None, "alarm": False}]}, OK, ExitCode.CLEAN),
        ({"exit_code": 1, "races": [{"missing": "a", "problem": "unseen", "alarm": False}]}, PROBLEM, 6),
        ({"exit_code": 6, "races": [{"missing": "a", "problem": "no hold", "alarm": False}]}, PROBLEM, 6),
        ({"exit_code": 1, "races": [{"missing": "a", "problem": "seen", "alarm": True}]}, PROBLEM, 3),
        (None, PROBLEM, 3),
    ],
)
def test_what_the_canary_answers(
    answer: dict[str, Any] | None, status: Status, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = "" if answer is None else json.dumps(answer)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=output, returncode=3))
    check = planted.planted_races("cuda", "gate")
    assert (check.status, check.exit_code) == (status, code)
    assert (status is not OK) is ("harness canary --json --device cuda --hold gate" in check.advice)


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", "doctor", *arguments],
        cwd=PACKAGE_ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_a_machine_that_finds_races() -> None:
    if torch.cuda.is_available():
        pytest.skip("not covered: how this GPU is set is not known here; test_real_device.py has it")
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok       races on sim" in done.stdout
    assert done.stdout.endswith("This machine: it can find races.\n")


def test_a_machine_that_cannot_is_told_so_in_json() -> None:
    done = doctor("--json", TORCH_CUDA_SANITIZER="1")
    answer = json.loads(done.stdout)
    assert done.returncode == answer["exit_code"] == 6
    assert done.stderr.startswith("ERROR: TORCH_CUDA_SANITIZER=1 is set: its dispatch mode"), done.stderr
    assert answer["finds_races"] is False
    (setting,) = [check for check in answer["checks"] if check["name"] == "settings"]
    assert setting["status"] == "problem" and setting["advice"] == "Unset it."
