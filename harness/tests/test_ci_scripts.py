"""The scripts in ci/: their options, their requirements, and the environments that they make, in small."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from harness.exit_codes import ExitCode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
CI = REPOSITORY / "ci"
SCRIPTS = ["environment.sh", "sanitize.sh", "stress.sh", "test.sh"]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts are bash's")


def run(command: list[str | Path], **environment: str | None) -> subprocess.CompletedProcess[str]:
    merged = {**os.environ, **environment}
    return subprocess.run(
        [str(part) for part in command],
        env={name: value for name, value in merged.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone that has nothing but ci/, and requires nothing."""
    shutil.copytree(CI, tmp_path / "clone" / "ci")
    for file in tmp_path.glob("clone/ci/requirements-*.txt"):
        file.write_text("# nothing\n")
    return tmp_path / "clone"


@pytest.fixture
def clone_without_pip(clone: Path) -> Path:
    """The same, whose environments get no pip, because to install that takes many times as long as all the rest."""
    script = clone / "ci" / "environment.py"
    text = script.read_text()
    for old, new in (
        ('"-m", "venv", str(VENV)]', '"-m", "venv", "--without-pip", str(VENV)]'),
        ('if not run_pip(["-r", str(PINNED)]', 'if False and not run_pip(["-r", str(PINNED)]'),
    ):
        assert old in text
        text = text.replace(old, new)
    script.write_text(text)
    return clone


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Something that a script takes for a Python, and for the environment's; it prints how it is called."""
    file = tmp_path / "fake-python"
    file.write_text(
        "#!/bin/bash\n"
        'case "$1" in\n'
        f'  *environment.py) echo "environment: ${{*:2}}" >&2; echo "{file}";;\n'
        "  -c) ;;\n"
        '  *) printf "<%s>" "$@"; echo; exit "${FAKE_EXIT:-0}";;\n'
        "esac\n"
    )
    file.chmod(0o755)
    return file


def stress(clone: Path, interpreter: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(["bash", clone / "ci" / "stress.sh", *arguments], PYTHON=str(interpreter), **environment)


# The scripts as such.


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_reads_it(script: str) -> None:
    assert run(["bash", "-n", CI / script]).stderr == ""


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    files = [CI / script for script in SCRIPTS] + [REPOSITORY / ".ci" / "run"]
    assert run(["shellcheck", "-x", "-P", REPOSITORY, *files]).stdout == ""


@pytest.mark.parametrize("script", ["sanitize.sh", "stress.sh", "test.sh"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_makes_nothing(clone: Path, script: str, option: str) -> None:
    answer = run(["bash", clone / "ci" / script, option], PYTHON="/nonexistent")
    assert answer.returncode == 0
    assert answer.stdout.startswith(f"bash ci/{script} [--system]")
    assert "Exit status:" in answer.stdout
    assert sorted(path.name for path in clone.iterdir()) == ["ci"]


def test_a_wrong_python_is_refused(clone: Path, tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 2.7.18\nexit 1\n')
    old.chmod(0o755)
    answer = stress(clone, old)
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr == (
        f"PYTHON={old} is not a Python 3.10 or newer (Python 2.7.18); set it to one, or unset it.\n"
    )


def test_no_python_at_all(clone: Path, tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    answer = run(["bash", clone / "ci" / "stress.sh"], PATH=str(tmp_path), PYTHON=None)
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr.startswith("No Python 3.10 or newer is on PATH; install one")
    assert answer.stderr.count("\n") == 1


def test_a_clone_that_cannot_be_written(clone: Path, interpreter: Path) -> None:
    (clone / ".sidestream").write_text("in the way")
    answer = stress(clone, interpreter)
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr == (
        f"{clone} cannot be written, so no environment can be made there; use --system, or a clone of your own.\n"
    )
    assert stress(clone, interpreter, "--system").returncode == 0


@pytest.mark.parametrize(
    ("given", "called"),
    [
        ([], ["-n", "auto", "--count", "500"]),
        (["--device", "sim", "-k", "a or b"], ["-n", "auto", "--count", "500", "--device", "sim", "-k", "a or b"]),
        (["--count", "7"], ["-n", "auto", "--count", "7"]),
        (["--count=7", "-n2"], ["--count=7", "-n2"]),
        (["-n", "2"], ["--count", "500", "-n", "2"]),
        (["--numprocesses=2"], ["--count", "500", "--numprocesses=2"]),
        (["-x", "--system", "--no-such-option"], ["-n", "auto", "--count", "500", "-x", "--no-such-option"]),
    ],
)
def test_stress_passes_options_on(clone: Path, interpreter: Path, given: list[str], called: list[str]) -> None:
    answer = stress(clone, interpreter, *given)
    assert answer.stdout == "<-m><pytest>" + "".join(f"<{argument}>" for argument in called) + "\n"
    expected = "environment: --system" if "--system" in given else "environment: --lock-descriptor 9"
    assert answer.stderr == expected + "\n"


def test_stress_ends_with_the_status_of_pytest(clone: Path, interpreter: Path) -> None:
    assert stress(clone, interpreter, FAKE_EXIT="6").returncode == 6


def test_test_runs_all_parts_and_names_those_that_failed(clone: Path, tmp_path: Path) -> None:
    python = tmp_path / "fake-python"
    python.write_text(
        "#!/bin/bash\n"
        'case "$*" in\n'
        f'  *environment.py*) echo "{python}";;\n'
        '  *"ruff check"*) echo fine;;\n'
        '  *mypy*) echo "Found 3 errors"; exit 2;;\n'
        '  *harness/tests*) echo "=== 5 passed in 1.00s ==="; echo; echo "$@" >&2;;\n'
        '  *pytest*) echo "=== 1 failed in 2.00s ==="; exit 1;;\n'
        '  *"harness canary"*) echo "5 of 5 planted races found";;\n'
        '  *"harness twins"*) echo "4 passed in 3.00s";;\n'
        "esac\n"
    )
    python.chmod(0o755)
    answer = run(["bash", clone / "ci" / "test.sh", "-k", "some thing"], PYTHON=str(python))
    table = answer.stdout.splitlines()[-9:]
    assert [re.sub(r" +", " ", re.sub(r"\d+ s", "N s", line)).strip() for line in table] == [
        "ruff passed N s fine",
        "format passed N s",
        "mypy FAILED (exit 2) N s Found 3 errors",
        "harness passed N s -m pytest harness/tests -n auto --dist worksteal -k some thing",
        "canary passed N s 5 of 5 planted races found",
        "suite FAILED (exit 1) N s 1 failed in 2.00s",
        "twins passed N s 4 passed in 3.00s",
        "-m pytest harness/tests -n auto --dist worksteal -k some thing",
        "=== 1 failed in 2.00s ===",
    ]
    assert answer.returncode == 2

    answer = run(["bash", clone / "ci" / "test.sh", "--only", "ruff,suite"], PYTHON=str(python))
    assert [line.split()[0] for line in answer.stdout.splitlines()[-3:]] == ["ruff", "suite", "==="]
    assert answer.returncode == 1
    assert run(["bash", clone / "ci" / "test.sh", "--only=ruff"], PYTHON=str(python)).returncode == 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ["--only", "ruff,pyflakes"],
            "--only: there is no part 'pyflakes'; the parts are ruff format mypy harness canary suite twins.",
        ),
        (["--only"], "--only needs parts, separated by commas: ruff format mypy harness canary suite twins."),
    ],
)
def test_wrong_parts_are_refused(clone: Path, given: list[str], sentence: str) -> None:
    answer = run(["bash", clone / "ci" / "test.sh", *given])
    assert (answer.returncode, answer.stderr) == (ExitCode.USAGE, sentence + "\n")


# Requirements.


def load_environment(clone: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("ci_environment", clone / "ci" / "environment.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_requirements_say_what_the_project_says() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    environment = load_environment(REPOSITORY)

    def read(name: str) -> list[str]:
        return [str(requirement) for requirement in environment.read_requirements(CI / name)]

    assert read("requirements-accelerator.txt") == project["dependencies"]
    assert read("requirements-development.txt") == project["optional-dependencies"]["dev"]


def test_everything_is_pinned_within_what_the_project_allows() -> None:
    environment = load_environment(REPOSITORY)
    pins = list(environment.read_requirements(CI / "requirements-cpu.txt"))
    assert pins[0].name == "torch"
    assert {pin.operator for pin in pins} == {"=="}
    names = [pin.name for pin in pins]
    assert len(set(names)) == len(names)
    versions = {pin.name: environment.release(pin.version) for pin in pins}
    for file in ("requirements-accelerator.txt", "requirements-development.txt"):
        for requirement in environment.read_requirements(CI / file):
            assert versions[requirement.name] >= environment.release(requirement.version)


def test_requirements_depend_on_the_version_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load_environment(REPOSITORY)
    file = tmp_path / "requirements.txt"
    file.write_text('# both\na==1.0; python_version < "3.11"\na==2.0; python_version >= "3.11"\nb>=3  # any\n')
    for minor, version in ((10, "1.0"), (11, "2.0"), (13, "2.0")):
        monkeypatch.setattr(sys, "version_info", type("", (), {"minor": minor}))
        assert list(map(str, environment.read_requirements(file))) == [f"a=={version}", "b>=3"]
    file.write_text("a~=1.0\n")
    with pytest.raises(ValueError, match=r"'a~=1\.0' is neither"):
        list(environment.read_requirements(file))


@pytest.mark.parametrize(
    ("required", "found", "met"),
    [
        (">=8", "8.0", True),
        (">=8", "7.4.4", False),
        (">=2.7", "2.11.0+cu130", True),
        (">=2.7", "2.11.0a0+git1", True),
        (">=0.9.3", "0.10", True),
        ("==2.13.0", "2.13.0+cpu", True),
        ("==2.13.0", "2.13.1", False),
    ],
)
def test_which_version_meets_a_requirement(
    monkeypatch: pytest.MonkeyPatch, required: str, found: str, met: bool
) -> None:
    environment = load_environment(REPOSITORY)
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda name: found)
    assert environment.Requirement("a", required[:2], required[2:]).is_met() is met


# Environments.


def prepare(
    clone: Path, *arguments: str, python: str | Path = sys.executable, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """What prepare_environment does, without the rest of a script."""
    script = f'source "{clone}/ci/environment.sh"; prepare_environment "$@"; echo "$python"'
    defaults = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": None, "PYTHONPATH": None}
    return run(["bash", "-c", script, "prepare", *arguments], **{**defaults, "PYTHON": str(python), **environment})


needs_venv = pytest.mark.skipif(importlib.util.find_spec("ensurepip") is None, reason="this Python cannot make a venv")


@needs_venv
def test_a_pinned_environment_is_made_once_and_made_again_when_it_must_be(clone_without_pip: Path) -> None:
    clone = clone_without_pip
    inside = f"{clone}/.venv/bin/python\n"
    first = prepare(clone)
    assert first.stdout == inside, first.stderr
    assert "Making .venv" in first.stderr
    assert "(once; a minute or a few)" in first.stderr

    def says_only_what_it_is(answer: subprocess.CompletedProcess[str]) -> bool:
        return (
            re.fullmatch(r"Environment: \.venv, pinned by ci/requirements-cpu\.txt, because .*\n", answer.stderr)
            is not None
        )

    second = prepare(clone)
    assert second.stdout == inside
    assert says_only_what_it_is(second), second.stderr
    # Also from within, as after "source .venv/bin/activate".
    third = prepare(clone, python=clone / ".venv" / "bin" / "python")
    assert third.stdout == inside
    assert says_only_what_it_is(third), third.stderr

    # Stale, and this time from within.
    (clone / "ci" / "requirements-cpu.txt").write_text("# nothing, in other words\n")
    fourth = prepare(clone, python=clone / ".venv" / "bin" / "python")
    assert fourth.stdout == inside
    assert "(again, since it is out of date or damaged; " in fourth.stderr

    # Damaged.
    (clone / ".venv" / "bin" / "python").unlink()
    fifth = prepare(clone)
    assert fifth.stdout == inside
    assert "(again, " in fifth.stderr


@needs_venv
def test_runs_at_one_time_make_one_environment(clone_without_pip: Path) -> None:
    clone = clone_without_pip
    script = f'source "{clone}/ci/environment.sh"; prepare_environment; "$python" -c ""'
    lock = clone / ".sidestream" / "environment.lock"
    lock.parent.mkdir()
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # so that each finds no environment and has to wait, however slow its start
        environment = {**os.environ, "PYTHON": sys.executable}
        runs = [
            subprocess.Popen(["bash", "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        for process in runs:
            assert process.stderr is not None
            assert process.stderr.readline() == "Another run in this clone makes or uses .venv; waiting for it\n"
    outputs = [process.communicate(timeout=120)[1] for process in runs]
    assert [process.returncode for process in runs] == [0, 0, 0], outputs
    assert sum("Making .venv" in output for output in outputs) == 1, outputs


@needs_venv
def test_an_environment_in_use_is_not_taken_away(clone_without_pip: Path, tmp_path: Path) -> None:
    clone = clone_without_pip
    assert prepare(clone).returncode == 0
    script = f'source "{clone}/ci/environment.sh"; prepare_environment; echo ready; read -r _; "$python" -c ""'

    def start(name: str) -> tuple[subprocess.Popen[str], Path]:
        log = tmp_path / name
        with log.open("w") as output:
            environment = {**os.environ, "PYTHON": sys.executable}
            process = subprocess.Popen(
                ["bash", "-c", script], env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True
            )
        return process, log

    def wait_for(text: str, log: Path) -> None:
        deadline = time.monotonic() + 60
        while text not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    user, user_log = start("user")
    other = None
    try:
        wait_for("ready\n", user_log)
        (clone / "ci" / "requirements-cpu.txt").write_text("# changed meanwhile\n")
        other, other_log = start("other")
        wait_for("Another run in this clone makes or uses .venv; waiting for it\n", other_log)
        assert (clone / ".venv" / "bin" / "python").exists()
        user.communicate("\n", timeout=60)
        assert user.returncode == 0
        other.communicate("\n", timeout=60)
        assert other.returncode == 0
        assert "(again, " in other_log.read_text()
    finally:
        for process in filter(None, (user, other)):
            process.kill()
            process.wait()


def test_an_environment_that_somebody_else_made_is_left_alone(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / "mine").write_text("")
    answer = prepare(clone)
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr.endswith(
        f"{clone}/.venv was not made by this script; remove it, move it away, or use --system with it activated.\n"
    )
    assert (clone / ".venv" / "mine").exists()


@needs_venv
def test_what_pip_cannot_install_is_said(clone: Path) -> None:
    (clone / "ci" / "requirements-cpu.txt").write_text("no-such-distribution==1.0\n")
    answer = prepare(clone)
    assert answer.returncode == ExitCode.INFRASTRUCTURE
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("pip could not install ci/requirements-cpu.txt (ERROR: No matching distribution found for ")
    assert f"its log is {clone}/.sidestream/environment.log" in last
    assert json.loads((clone / ".venv" / "sidestream.json").read_text()) == {}  # not taken for finished


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])  # Debian has them in a package apart
def test_a_python_that_cannot_make_environments_is_named(
    clone: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    environment = load_environment(clone)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None if name == missing else object())
    said: list[str] = []
    monkeypatch.setattr(environment, "say", said.append)
    with pytest.raises(SystemExit) as caught:
        environment.make_pinned_venv({})
    assert caught.value.code == ExitCode.USAGE
    assert "apt-get install python3." in said[0]


def test_the_system_python_as_it_is(clone: Path) -> None:
    answer = prepare(clone, "--system")
    assert answer.stdout == f"{sys.executable}\n"
    assert re.fullmatch(r"Environment: \S+ \(Python \S+\), as --system asks\n", answer.stderr)
    assert not (clone / ".sidestream").exists()

    (clone / "ci" / "requirements-accelerator.txt").write_text("no-such-distribution>=1.0\n")
    answer = prepare(clone, "--system")
    assert answer.returncode == ExitCode.USAGE
    assert "lacks no-such-distribution>=1.0; install them there" in answer.stderr
    assert answer.stderr.count("\n") == 1


def write_distribution(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def write_torch(folder: Path, version: str = "2.11.0+cu130", cuda: str | None = "13.0", devices: int = 2) -> str:
    """Something that looks like torch from outside; what to put on PYTHONPATH."""
    write_distribution(
        folder,
        "torch",
        version,
        {
            "torch/version.py": f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = None\n",
            "torch/__init__.py": f"""
class accelerator:
    is_available = staticmethod(lambda: {devices > 0})
    device_count = staticmethod(lambda: {devices})
""",
        },
    )
    return str(folder)


def write_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


def test_a_torch_that_sees_an_accelerator_is_used(clone: Path, tmp_path: Path) -> None:
    (clone / "ci" / "requirements-accelerator.txt").write_text("torch>=2.7\npytest>=8\n")
    answer = prepare(clone, PYTHONPATH=write_torch(tmp_path / "site"))
    assert answer.stdout == f"{sys.executable}\n"
    assert answer.stderr.endswith("itself, because its torch 2.11.0+cu130 sees 2 accelerators\n")
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(
    ("version", "cuda", "devices", "reason"),
    [
        ("2.11.0+cpu", None, 0, "is built for the CPU alone"),
        ("2.11.0+cu130", "13.0", 0, "sees no accelerator"),
        ("2.6.0+cu124", "12.4", 1, "is older than 2.7"),
    ],
)
def test_a_torch_that_will_not_do_is_named(
    tmp_path: Path, version: str, cuda: str | None, devices: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = load_environment(REPOSITORY)
    folder = write_torch(tmp_path, version, cuda, devices)
    monkeypatch.setattr(
        environment.importlib.util,
        "find_spec",
        lambda name: importlib.util.spec_from_file_location("torch", Path(folder, "torch", "__init__.py")),
    )
    monkeypatch.setenv("PYTHONPATH", folder)
    torch = environment.find_accelerator_torch()
    assert not torch.usable
    assert torch.remark == f"torch {version} of {sys.executable} {reason}"


def test_what_is_missing_beside_an_accelerators_torch_is_added_on_top(clone: Path, tmp_path: Path) -> None:
    (clone / "ci" / "requirements-accelerator.txt").write_text("torch>=2.7\npytest>=8\nsidestream-needed>=1.0\n")
    (clone / "ci" / "requirements-development.txt").write_text("sidestream-optional>=1.0\n")
    path = write_torch(tmp_path / "site")
    wheels = tmp_path / "wheels"

    refused = prepare(clone, PYTHONPATH=path)
    assert refused.returncode == ExitCode.USAGE
    assert "lacks sidestream-needed>=1.0, and pip could not install that: put wheels" in refused.stderr.splitlines()[-1]

    write_wheel(wheels, "sidestream_needed", "1.2")
    made = prepare(clone, PYTHONPATH=path, PIP_FIND_LINKS=str(wheels))
    assert made.stdout == f"{clone}/.venv/bin/python\n", made.stderr
    assert "Adding to .venv: sidestream-needed>=1.0\n" in made.stderr
    assert made.stderr.endswith("sees 2 accelerators but it lacks sidestream-needed>=1.0\n")
    check = "import sidestream_needed, pytest, torch; print(torch.accelerator.device_count())"
    assert run([made.stdout.strip(), "-c", check], PYTHONPATH=path).stdout == "2\n"

    for python in (sys.executable, made.stdout.strip()):  # the latter as after "source .venv/bin/activate"
        again = prepare(clone, python=python, PYTHONPATH=path)
        assert again.stdout == made.stdout
        assert again.stderr.count("\n") == 1

    development = prepare(clone, "--development", PYTHONPATH=path)
    assert development.stdout == made.stdout
    assert "Checks that need sidestream-optional>=1.0, which pip could not install, will fail: " in development.stderr


def test_the_python_below_may_be_a_virtual_environment_itself(clone: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "outer")], check=True, timeout=60)
    [folder] = tmp_path.glob("outer/lib/python3*/site-packages")
    write_torch(folder)
    outer = tmp_path / "outer" / "bin" / "python3"
    (clone / "ci" / "requirements-accelerator.txt").write_text("torch>=2.7\n")
    (clone / "ci" / "requirements-development.txt").write_text("sidestream-optional>=1.0\n")

    made = prepare(clone, "--development", python=outer)
    assert made.stdout == f"{clone}/.venv/bin/python\n", made.stderr
    assert f"Making .venv on top of {outer} " in made.stderr
    assert (
        run([made.stdout.strip(), "-c", "import torch; print(torch.__file__)"]).stdout
        == f"{folder}/torch/__init__.py\n"
    )

    again = prepare(clone, "--development", python=made.stdout.strip())  # as after "source .venv/bin/activate"
    assert again.stdout == made.stdout
    assert "Making" not in again.stderr
