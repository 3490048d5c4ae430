"""Settings that hide races."""

from __future__ import annotations

import re

import pytest

from harness.backends.hidden_races import Finding, find, refuse
from harness.errors import UsageError


def only(environ: dict[str, str], device: str = "cuda") -> Finding:
    (finding,) = find(environ, device)
    return finding


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("HIP_LAUNCH_BLOCKING", "1"),
        ("AMD_SERIALIZE_KERNEL", "3"),
        ("AMD_SERIALIZE_COPY", "2"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("GPU_MAX_HW_QUEUES", "1"),
        ("TORCH_CUDA_SANITIZER", "1"),
        ("TORCH_CUDA_SANITIZER", "0"),  # torch asks for the name only
    ],
)
def test_a_run_that_would_prove_nothing_is_refused(name: str, value: str) -> None:
    finding = only({name: value, "HOME": "/root"})
    assert finding.setting == f"{name}={value}"
    assert finding.refuse


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "4"),
        ("GPU_MAX_HW_QUEUES", "2"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0"),  # torch asks for the name only
        ("PYTORCH_NO_HIP_MEMORY_CACHING", "1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True, backend:cudaMallocAsync"),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync"),
        ("CUDA_INJECTION64_PATH", "/opt/tool/libinjection.so"),
    ],
)
def test_what_hides_some_races_is_told(name: str, value: str) -> None:
    finding = only({name: value})
    assert finding.setting == f"{name}={value}"
    assert not finding.refuse


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("CUDA_LAUNCH_BLOCKING", ""),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "many"),
        ("GPU_MAX_HW_QUEUES", "4"),
        ("AMD_SERIALIZE_KERNEL", "0"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native,expandable_segments:True"),
        ("CUDA_INJECTION64_PATH", ""),
        ("CUDA_VISIBLE_DEVICES", "0"),
    ],
)
def test_harmless_values_are_passed_over(name: str, value: str) -> None:
    assert find({name: value}, "cuda") == []


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "sim"])
def test_a_setting_matters_where_it_has_an_effect(device: str) -> None:
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "UR_L0_SERIALIZE": "2", "TORCH_CUDA_SANITIZER": "1"}
    found = {finding.setting.partition("=")[0] for finding in find(environ, device)}
    wanted = {
        "cuda": {"CUDA_LAUNCH_BLOCKING", "TORCH_CUDA_SANITIZER"},
        "cuda:1": {"CUDA_LAUNCH_BLOCKING", "TORCH_CUDA_SANITIZER"},
        "xpu": {"UR_L0_SERIALIZE", "TORCH_CUDA_SANITIZER"},
        "sim": {"TORCH_CUDA_SANITIZER"},
    }
    assert found == wanted[device]


def test_all_that_is_set_is_found_and_each_in_one_sentence() -> None:
    environ = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "CUDA_INJECTION64_PATH": "/opt/tool.so",
    }
    findings = find(environ, "cuda")
    assert [finding.setting.partition("=")[0] for finding in findings] == list(environ)
    for finding in findings:
        assert re.fullmatch(r"[a-z][^.]*\.", finding.effect)


def test_what_would_prove_nothing_is_refused_in_a_sentence_each() -> None:
    refuse({"CUDA_LAUNCH_BLOCKING": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "cuda")
    with pytest.raises(UsageError, match=r"^CUDA_LAUNCH_BLOCKING=1 is set: the host waits .* Unset it\.$"):
        refuse({"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "cuda")
