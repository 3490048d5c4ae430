"""Finds or makes the Python environment for the scripts beside this file, and prints the path of its interpreter.

There are three kinds:

- *pinned*, the usual one: a virtual environment ``.venv`` in the clone with exactly ``requirements-cpu.txt``;
- *accelerator*, where the Python that runs this has a torch for an accelerator that is there: that Python itself, or if
  it lacks something, a ``.venv`` on top of it that adds what is missing and leaves torch alone;
- *system* (``--system``): the Python that runs this, as it is.

One line on standard error says which was chosen and why. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "sidestream.json"
LOG = ROOT / ".sidestream" / "environment.log"
PINNED = ROOT / "ci" / "requirements-cpu.txt"
ACCELERATOR = ROOT / "ci" / "requirements-accelerator.txt"
DEVELOPMENT = ROOT / "ci" / "requirements-development.txt"
OLDEST_TORCH = (2, 7)

# As in harness/exit_codes.py, which cannot be relied on before there is an environment.
INFRASTRUCTURE = 3
USAGE = 4


class Requirement(NamedTuple):
    """A line of a requirements file: ``name==1.2``, or ``name>=1.2``, with at most a bound on the Python version."""

    name: str
    operator: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.version}"

    def is_met(self) -> bool:
        """Whether this Python has the distribution, in a version that will do."""
        try:
            found = importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return False
        if self.operator == "==":
            return found.partition("+")[0] == self.version
        return release(found) >= release(self.version)


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 11, 0) of ``2.11.0a0+cu130``."""
    matched = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, matched[0].split("."))) if matched else ()


def read_requirements(path: Path) -> Iterator[Requirement]:
    """The requirements in a file that hold for the version of this Python.

    Raises:
        ValueError: a line is of another form.
    """
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        matched = re.fullmatch(r'([\w.-]+)(==|>=)([\w.]+)(?:; python_version (<|>=) "3\.(\d+)")?', text)
        if matched is None:
            raise ValueError(f"{path}: {text!r} is neither 'name==version' nor 'name>=version'")
        name, operator, version, bound, minor = matched.groups()
        applies = bound is None or (sys.version_info.minor < int(minor)) == (bound == "<")
        if applies:
            yield Requirement(name, operator, version)


def unmet(paths: Iterable[Path]) -> list[Requirement]:
    """The requirements in these files that this Python does not meet."""
    return [requirement for path in paths for requirement in read_requirements(path) if not requirement.is_met()]


def unmet_in(python: Path, paths: Iterable[Path], *, isolated: bool) -> list[str] | None:
    """The same for another Python; None if that does not even start. Isolated means that PYTHONPATH does not count."""
    command = [
        str(python),
        *(["-I"] if isolated else []),
        str(Path(__file__).resolve()),
        "--list-unmet",
        *map(str, paths),
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.split() if run.returncode == 0 else None


def say(line: str) -> None:
    """Tell the user, without touching what the calling script reads."""
    print(line, file=sys.stderr, flush=True)


def fail(sentence: str, code: int) -> NoReturn:
    """End with one sentence."""
    say(sentence)
    sys.exit(code)


def this_python() -> str:
    """How this interpreter is named in messages."""
    return f"{sys.executable} (Python {'.'.join(map(str, sys.version_info[:3]))})"


class Torch(NamedTuple):
    """The torch of this Python, as far as it matters here."""

    version: str
    usable: bool
    remark: str
    """Why it is used, or why not."""


def find_accelerator_torch() -> Torch:
    """Looks whether this Python's torch is built for an accelerator, and whether that is there."""
    specification = importlib.util.find_spec("torch")
    if specification is None or specification.origin is None:
        return Torch("", False, f"{sys.executable} has no torch")
    try:
        version = runpy.run_path(str(Path(specification.origin).parent / "version.py"))
    except Exception:
        return Torch("", False, f"the torch of {sys.executable} is broken")
    name = f"torch {version['__version__']}"
    if not any(version.get(platform) for platform in ("cuda", "hip", "xpu")):
        return Torch("", False, f"{name} of {sys.executable} is built for the CPU alone")
    if release(version["__version__"]) < OLDEST_TORCH:
        return Torch("", False, f"{name} of {sys.executable} is older than {'.'.join(map(str, OLDEST_TORCH))}")
    # In a process of its own: a driver that crashes or hangs must not take this one along.
    question = "import torch; print(torch.accelerator.is_available() and torch.accelerator.device_count())"
    try:
        answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, timeout=180)
        count = int(answer.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        count = 0
    if count < 1:
        return Torch("", False, f"{name} of {sys.executable} sees no accelerator")
    return Torch(version["__version__"], True, f"its {name} sees {count} accelerator{'s' if count > 1 else ''}")


def use_system(groups: list[Path]) -> Path:
    """This Python as it is."""
    missing = unmet(groups)
    if missing:
        fail(
            f"--system: {this_python()} lacks {join(missing)}; install them there "
            f"(python -m pip install {' '.join(map(quoted, missing))}), or leave --system out.",
            USAGE,
        )
    say(f"Environment: {this_python()}, as --system asks")
    return Path(sys.executable)


def use_accelerator_torch(torch: Torch, groups: list[Path], lock: Lock) -> Path:
    """This Python, or a virtual environment on top of it with what it lacks."""
    missing = unmet(groups)
    if not missing:
        say(f"Environment: {this_python()} itself, because {torch.remark}")
        return Path(sys.executable)
    wanted = stamp("accelerator", ACCELERATOR, prefix=sys.prefix, torch=torch.version)

    def lacking() -> list[str] | None:
        return unmet_in(venv_python(), groups, isolated=False) if read_stamp() == wanted else None

    lock.share()
    if lacking() != []:
        lock.own()
        left = lacking()
        if left is None:
            make_layered_venv(wanted)
            left = unmet_in(venv_python(), groups, isolated=False)
        if left is None:
            fail(f"The new {VENV} does not start; its making is logged in {LOG}.", INFRASTRUCTURE)
        if left:
            add_packages(left)
        lock.share()
    say(f"Environment: .venv on top of {this_python()}, because {torch.remark} but it lacks {join(missing)}")
    return venv_python()


def add_packages(missing: list[str]) -> None:
    """Installs what is missing into the layered environment; what only ci/test.sh needs may stay missing."""
    names = {requirement.name for requirement in read_requirements(ACCELERATOR)}
    needed = [text for text in missing if name_of(text) in names]
    constraints = VENV / "constraints.txt"
    constraints.write_text(f"torch=={importlib.metadata.version('torch')}\n")
    for batch in filter(None, [needed, *([text] for text in missing if text not in needed)]):
        say(f"Adding to .venv: {join(batch)}")
        if run_pip(["--retries", "1", "--timeout", "15", "-c", str(constraints), *batch], keep_python_path=True):
            continue
        remedy = f"put wheels where PIP_FIND_LINKS says, or the packages on PYTHONPATH; pip's log is {LOG}"
        if batch is needed:
            fail(f"{this_python()} lacks {join(batch)}, and pip could not install that: {remedy}.", USAGE)
        say(f"Checks that need {join(batch)}, which pip could not install, will fail: {remedy}.")


def make_layered_venv(wanted: dict[str, str]) -> None:
    """A virtual environment that sees all packages of this Python, also if that is a virtual environment itself."""
    say(f"Making .venv on top of {this_python()} (once)")
    clear_venv()
    # Pip comes from the Python below, which need not be able to install it (Debian's ensurepip is a package apart).
    run_logged([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(VENV)])
    folders = list(VENV.glob("lib/python3*/site-packages"))
    if not folders:
        fail(f"Python's venv module made no environment; its log is {LOG}.", INFRASTRUCTURE)
    below = [path for path in sys.path if path in site_folders()]
    (folders[0] / "below.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in below))
    STAMP.write_text(json.dumps(wanted))


def site_folders() -> list[str]:
    """Folders of installed packages of this Python, without those that PYTHONPATH names."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def use_pinned(reason: str, lock: Lock) -> Path:
    """The virtual environment with the pinned requirements."""
    wanted = stamp("pinned", PINNED, prefix=sys.base_prefix)

    def is_good() -> bool:
        return read_stamp() == wanted and unmet_in(venv_python(), [PINNED], isolated=True) == []

    lock.share()
    if not is_good():
        lock.own()
        if not is_good():  # still, after waiting for whoever else was making it
            make_pinned_venv(wanted)
            lacking = unmet_in(venv_python(), [PINNED], isolated=True)
            if lacking != []:
                fail(f"The new {VENV} lacks {join(lacking or ['everything'])}; pip's log is {LOG}.", INFRASTRUCTURE)
            STAMP.write_text(json.dumps(wanted))
        lock.share()
    say(f"Environment: .venv, pinned by {PINNED.relative_to(ROOT)}, because {reason}")
    return venv_python()


def make_pinned_venv(wanted: dict[str, str]) -> None:
    """A new virtual environment; whatever was there is removed."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        fail(
            f"{this_python()} cannot make virtual environments: install its venv module (Debian, Ubuntu: "
            f"apt-get install python{version}-venv), or use --system.",
            USAGE,
        )
    what = "again, since it is out of date or damaged" if VENV.exists() else "once"
    say(f"Making .venv with {this_python()} and the packages of {PINNED.relative_to(ROOT)} ({what}; a minute or a few)")
    clear_venv()
    if not run_logged([sys.executable, "-m", "venv", str(VENV)]):
        fail(f"Python's venv module failed; its log is {LOG}.", INFRASTRUCTURE)
    if not run_pip(["-r", str(PINNED)], keep_python_path=False):
        fail(
            f"pip could not install {PINNED.relative_to(ROOT)} ({last_error()}); its log is {LOG}. With --system the "
            f"packages of {sys.executable} are used as they are.",
            INFRASTRUCTURE,
        )


def run_pip(arguments: list[str], *, keep_python_path: bool) -> bool:
    """Installs with the pip of the virtual environment; says whether that worked."""
    environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    environment.pop("PIP_TARGET", None)
    if not keep_python_path:
        # What is on it would count as installed.
        environment.pop("PYTHONPATH", None)
    return run_logged([str(venv_python()), "-m", "pip", "install", *arguments], environment)


def run_logged(command: list[str], environment: dict[str, str] | None = None) -> bool:
    """Runs a command with its output in the log; says whether it succeeded."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode == 0


def last_error() -> str:
    """The line of the log that says best what went wrong."""
    lines = [line.strip() for line in LOG.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1]


def clear_venv() -> None:
    """Removes what an earlier run made, and starts the log; an environment that somebody else made is left alone."""
    if VENV.exists() or VENV.is_symlink():
        if VENV.is_symlink() or not STAMP.is_file():
            fail(
                f"{VENV} was not made by this script; remove it, move it away, or use --system with it activated.",
                USAGE,
            )
        shutil.rmtree(VENV)
    VENV.mkdir()
    STAMP.write_text("{}")  # ours, but not finished
    LOG.unlink(missing_ok=True)


def venv_python() -> Path:
    """The interpreter of the virtual environment."""
    return VENV / "bin" / "python"


def stamp(kind: str, requirements: Path, **more: str) -> dict[str, str]:
    """What an environment is made from; it is stale when any of that has changed."""
    return {
        "kind": kind,
        "root": str(ROOT),
        "python": sys.version,
        "requirements": hashlib.sha256(requirements.read_bytes()).hexdigest(),
        **more,
    }


def read_stamp() -> object:
    """What the environment that is there was made from; None if it was never finished."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return None


def name_of(requirement: str) -> str:
    """``pytest`` of ``pytest>=8``."""
    return re.split("[=>]", requirement)[0]


def quoted(requirement: object) -> str:
    """A requirement as the shell takes it."""
    return f"'{requirement}'"


def join(things: Iterable[object]) -> str:
    """``a, b and c``."""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last


class Lock:
    """Keeps two scripts in one clone from breaking each other's environment.

    It belongs to a file that the calling script has opened, so it lasts as long as the script and what that starts:
    shared while the environment is used, exclusive while it is made.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def share(self) -> None:
        """Holds the lock together with others."""
        self._take(fcntl.LOCK_SH)

    def own(self) -> None:
        """Holds the lock alone; others may have it in between."""
        self._take(fcntl.LOCK_EX)

    def _take(self, kind: int) -> None:
        if self._descriptor is None:
            return
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another run in this clone makes or uses .venv; waiting for it")
            fcntl.flock(self._descriptor, kind)


def leave_own_venv() -> None:
    """If this runs in the very environment that it is to check, starts again in the Python below."""
    if Path(sys.prefix).resolve() != VENV.resolve():
        return
    made_from = read_stamp()
    prefix = Path(sys.base_prefix)
    if isinstance(made_from, dict) and made_from.get("kind") == "accelerator":
        prefix = Path(made_from["prefix"])
    # Not sys._base_executable: in some versions of Python that is the environment's own interpreter again.
    for name in (f"python{sys.version_info.major}.{sys.version_info.minor}", "python3"):
        below = prefix / "bin" / name
        if below.exists():
            os.execv(below, [str(below), __file__, *sys.argv[1:]])
    fail(f"{VENV} is activated, and the Python below it is gone from {prefix}; deactivate it and run again.", USAGE)


def main() -> None:
    """Prints the path of the interpreter to use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", action="store_true", help="use the Python that runs this, as it is")
    parser.add_argument("--development", action="store_true", help="with the tools of ci/test.sh")
    parser.add_argument("--lock-descriptor", type=int, help="open file that carries the lock on the environment")
    parser.add_argument(
        "--list-unmet", nargs="+", type=Path, help="print what these files require and is missing, and end"
    )
    options = parser.parse_args()
    if options.list_unmet is not None:
        print(*unmet(options.list_unmet), sep="\n")
        return
    groups = [ACCELERATOR, DEVELOPMENT] if options.development else [ACCELERATOR]
    if options.system:
        print(use_system(groups))
        return
    leave_own_venv()
    torch = find_accelerator_torch()
    lock = Lock(options.lock_descriptor)
    print(use_accelerator_torch(torch, groups, lock) if torch.usable else use_pinned(torch.remark, lock))


if __name__ == "__main__":
    main()
