"""ci/sanitize.sh in small: what it refuses, which reports count, and what it does with them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from harness.exit_codes import ExitCode

REPOSITORY = Path(__file__).resolve().parents[2]
CI = REPOSITORY / "ci"
SCRIPT = CI / "sanitize.sh"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the script is bash's")

FOREIGN = """WARNING: ThreadSanitizer: data race (pid=1)
  Write of size 8 at 0x7b44 by thread T8:
    #0 operator delete(void*) <null> tsan_new_delete.cpp:150 (/lib/libtsan.so+0x86c3d)
    #1 torch::autograd::GraphTask::~GraphTask() <null> (/site-packages/torch/lib/libtorch_cpu.so+0x5c42141)

  Mutex M1 (0x7b64) created at:
    #0 pthread_mutex_lock <null> (/lib/libtsan.so+0x558e1)
    #1 sidestream::launch_operator <null> (/cache/sidestream_simulator-torch2.13/sidestream_simulator.so+0x5402)

  Thread T8 'pt_autograd_0' (tid=2, running) created by main thread at:
    #0 pthread_create <null> (/lib/libtsan.so+0x5e687)
    #1 sidestream::submit <null> (/cache/sidestream_simulator-torch2.13/sidestream_simulator.so+0x5402)

SUMMARY: ThreadSanitizer: data race in operator delete(void*)
"""
OURS = """==================
WARNING: ThreadSanitizer: data race (pid=1)
  Write of size 8 at 0x7b44 by thread T8:
    #0 0x5402 in sidestream::submit launch.cpp:7 (/cache/sidestream_simulator-torch2.13/sidestream_simulator.so+0x5402)
"""
OVERFLOW = """launch.cpp:7:3: runtime error: signed integer overflow: 1 + 2147483647 cannot be represented in type 'int'
    #0 0x5402 in sidestream::submit launch.cpp:7 (/cache/sidestream_simulator-torch2.13/sidestream_simulator.so+0x5402)
"""
HEAP = """=================================================================
==1==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x60 at pc 0x7f bp 0x7f sp 0x7f
WRITE of size 4 at 0x602 thread T0
    #0 0x7f in sidestream::submit launch.cpp:7 (/cache/sidestream_simulator-torch2.13/sidestream_simulator.so+0x54)
"""


@pytest.fixture
def reports() -> ModuleType:
    specification = importlib.util.spec_from_file_location("sanitizer_reports", CI / "sanitizer_reports.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mine", [OURS, OVERFLOW, HEAP])
def test_a_report_counts_if_a_frame_of_it_is_ours(
    reports: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    (tmp_path / "report.1").write_text(FOREIGN)
    assert reports.main(tmp_path) == 0
    assert capsys.readouterr().out == "Sanitizers: 0 reports in our code, 1 in other code alone\n"
    (tmp_path / "report.2").write_text(FOREIGN + mine + FOREIGN)
    assert reports.main(tmp_path) == reports.FOUND
    output = capsys.readouterr().out
    assert mine.splitlines()[-1] in output
    assert "GraphTask" not in output
    assert output.endswith("Sanitizers: 1 reports in our code, 3 in other code alone\n")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    answer = run("--only", "address,leaks")
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr == "--only: there is no run 'leaks'; the runs are address undefined thread.\n"

    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "${1#-print-file-name=}"\n')  # as GCC says that it has no such file
    compiler.chmod(0o755)
    answer = run("--system", "--only", "thread", CXX=str(compiler))
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr.splitlines()[1:] == [
        f"The compiler {compiler} has no libstdc++.so.6, which the sanitizers need: install it (Debian, Ubuntu: "
        "apt-get install g++; Fedora: dnf install libasan libubsan libtsan), or set CXX to a GCC that has it."
    ]


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Something that the script takes for Python; it writes the reports that $REPORT_PLANTED and $REPORT_TESTS hold."""
    file = tmp_path / "fake-python"
    file.write_text(f"""#!/bin/bash
log=${{ASAN_OPTIONS#*log_path=}}
log=${{log%%:*}}
case "$*" in
  *environment.py*|*"print(sys.executable)"*) echo "{file}";;
  *find_compiler*) echo c++;;
  *plant_defect*) printf %s "$REPORT_PLANTED" >"$log.1";;
  *pytest*) echo "$SIDESTREAM_SANITIZER: $*"; printf %s "$REPORT_TESTS" >"$log.1"; exit "${{TESTS_EXIT:-0}}";;
  *sanitizer_reports*) exec "{sys.executable}" "$@";;
esac
""")
    file.chmod(0o755)
    return file


@pytest.mark.skipif(shutil.which("c++") is None, reason="the sanitizers are the compiler's")
@pytest.mark.parametrize(
    ("planted", "of_tests", "tests_exit", "status"),
    [
        (HEAP, FOREIGN, 0, 0),
        (HEAP, "", 1, 1),
        (HEAP, HEAP, 0, 1),
        ("", "", 0, 3),
        (FOREIGN, "", 0, 3),
    ],
)
def test_the_status_says_what_was_found(
    interpreter: Path, planted: str, of_tests: str, tests_exit: int, status: int
) -> None:
    answer = run(
        "--only=address", "-k", "some thing",
        PYTHON=str(interpreter), REPORT_PLANTED=planted, REPORT_TESTS=of_tests, TESTS_EXIT=str(tests_exit),
    )  # fmt: skip
    if "no libasan.so" in answer.stderr:
        pytest.skip("this compiler has no AddressSanitizer")
    assert answer.returncode == status, answer.stderr
    if status == ExitCode.INFRASTRUCTURE:
        assert "did not report the planted defect, heap-overflow" in answer.stderr
    else:
        assert "The planted defect is reported: heap-overflow\naddress: -m pytest --device sim" in answer.stdout
        assert "-k some thing\n" in answer.stdout
