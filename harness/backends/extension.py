"""Native extensions, built at first use and cached.

The cache has a folder for each combination of extension, torch, Python, sources, headers and flags. A folder appears by
renaming a finished build into place: it is whole or absent. Builders take turns under a lock that the kernel releases
when its holder dies (``torch.utils.cpp_extension`` waits for ever on the lock file that a killed build left behind).
One build at a time also bounds the memory.

Sources are compiled several at once, as one translation unit: most of what a compiler does for one of them is to read
PyTorch's headers. So names must differ between the sources of an extension even where they are local to one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from harness.backends import compile_extension
from harness.backends.toolchain import build_environment
from harness.errors import UsageError

AS_TORCH_WAS_BUILT = "-DNDEBUG"
"""``at::RecordFunction`` has members that exist only without NDEBUG, which PyTorch's own libraries are built with."""
FLAGS = ("-O2", AS_TORCH_WAS_BUILT)
SANITIZED_FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", AS_TORCH_WAS_BUILT)
SANITIZER_VARIABLE = "SIDESTREAM_SANITIZER"
"""Environment variable: the compiler's sanitizer to build extensions with, if any (see ``ci/sanitize.sh``)."""
SANITIZERS = ("address", "undefined", "thread")
ENTRIES_KEPT = 16
"""Cached builds of one extension; the oldest beyond these are removed after a build."""
PROGRESS_INTERVAL_S = 5.0
POLL_INTERVAL_S = 0.05
UNITS = 2
"""Translation units that the sources of an extension are joined into, on every machine the same."""

Announce = Callable[[str], None]


def build(name: str, sources: Sequence[Path], announce: Announce | None = None, *, title: str | None = None) -> Path:
    """The shared library of the extension ``name``, compiled from ``sources`` unless the cache has it.

    Args:
        name: Python module name; the sources see it as ``TORCH_EXTENSION_NAME``.
        sources: C++ files. The headers (``*.h``) in their folders count as sources for the cache.
        announce: receives progress sentences while this process builds or waits for another one that does.
        title: what the extension is called in those sentences; made from ``name`` by default.

    Raises:
        UsageError: something is missing for the build, the cache cannot be written, or the sources do not compile.
    """
    return _Build(name, sources, announce or _say_nothing, title).library()


def load(
    name: str, sources: Sequence[Path], announce: Announce | None = None, *, title: str | None = None
) -> ModuleType:
    """The extension ``name`` as a module, built if needed (see :func:`build`), imported once a process.

    Raises:
        UsageError: as :func:`build`; or another build of the extension is already loaded in this process.
    """
    import torch  # noqa: F401 - the extension's symbols are resolved against torch's libraries

    job = _Build(name, sources, announce or _say_nothing, title)
    library = job.library()
    loaded = sys.modules.get(name)
    if loaded is not None:
        if loaded.__file__ == str(library):
            return loaded
        raise UsageError(f"{name} is already loaded in this process from {loaded.__file__}, not from {library}.")
    try:
        return _import(name, library)
    except ImportError:
        # Built against libraries that this machine does not have, say on another host that shares the cache.
        job.discard(library)
    try:
        return _import(name, job.library())
    except ImportError as error:
        raise UsageError(f"The {job.title} was built but does not load: {error}.") from error


def join_sources(sources: Sequence[Path], folder: Path) -> list[Path]:
    """Write translation units into ``folder`` that include the sources.

    Args:
        sources: C++ files, by absolute paths.
        folder: an existing one.
    """
    units = []
    for number in range(min(UNITS, len(sources))):
        unit = folder / f"unit_{number}.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in sources[number::UNITS]))
        units.append(unit)
    return units


def cache_folder() -> Path:
    """Where builds are cached: ``$SIDESTREAM_CACHE``, else ``sidestream`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises:
        UsageError: no home folder is known.
    """
    own = os.environ.get("SIDESTREAM_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(own).expanduser() if own else Path(shared or "~/.cache").expanduser() / "sidestream"
    except RuntimeError as error:
        raise UsageError(
            "No home folder is known to cache compiled extensions in; set SIDESTREAM_CACHE to a writable directory."
        ) from error
    return folder.absolute()


def compiler_flags() -> tuple[str, ...]:
    """The flags that extensions are compiled with; those of a sanitizer if ``$SIDESTREAM_SANITIZER`` names one.

    Raises:
        UsageError: there is no such sanitizer.
    """
    sanitizer = os.environ.get(SANITIZER_VARIABLE)
    if not sanitizer:
        return FLAGS
    if sanitizer not in SANITIZERS:
        raise UsageError(f"{SANITIZER_VARIABLE}={sanitizer}: there are {', '.join(SANITIZERS)}; or unset it.")
    # What goes on after a report leaves the judgement of it to whoever reads the reports.
    return (*SANITIZED_FLAGS, f"-fsanitize={sanitizer}", "-fsanitize-recover=all")


def _say_nothing(sentence: str) -> None:
    pass


def _import(name: str, library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    specification = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


class _Build:
    """One extension in the cache."""

    def __init__(self, name: str, sources: Sequence[Path], announce: Announce, title: str | None) -> None:
        import torch

        self.name = name
        self.sources = [Path(source).absolute() for source in sources]
        self.announce = announce
        self.title = title or "native extension " + name
        self.torch_version = str(torch.__version__)
        self.flags = compiler_flags()
        self.cache = cache_folder()
        self.entry = self.cache / self._entry_name()
        self.log = self.cache / f"{self.entry.name}.log"

    def _entry_name(self) -> str:
        import torch

        digest = hashlib.sha256()
        folders = sorted({source.parent for source in self.sources})
        headers = sorted(header for folder in folders for header in folder.glob("*.h"))
        for part in (str(torch.version.git_version), str(torch.compiled_with_cxx11_abi()), *self.flags):
            digest.update(part.encode() + b"\0")
        for file in [*self.sources, *headers]:
            try:
                content = file.read_bytes()
            except OSError as error:
                raise UsageError(f"The source of {self.name} cannot be read: {error}.") from error
            digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
        tag = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
        return f"{self.name}-torch{self.torch_version}-{tag}-{digest.hexdigest()[:16]}"

    def library(self) -> Path:
        """The library from the cache, built first if it is not there."""
        found = self._cached()
        if found is not None:
            return found
        asked_at = time.time()
        with self._writable_cache(), self._lock() as waited:
            found = self._cached()  # another process may have built it while this one waited
            if found is not None:
                return found
            if waited:
                self._raise_failure_since(asked_at)
            self._remove_leftovers()
            return self._compile()

    def discard(self, library: Path) -> None:
        """Forgets a cached build that turned out to be unusable."""
        if library.parent == self.entry:
            with self._writable_cache(), self._lock():
                shutil.rmtree(self.entry, ignore_errors=True)

    def _cached(self) -> Path | None:
        library = self.entry / f"{self.name}.so"
        try:
            stamp = json.loads((self.entry / "complete.json").read_text())
            intact = stamp["sha256"] == hashlib.sha256(library.read_bytes()).hexdigest()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return library if intact else None

    @contextlib.contextmanager
    def _writable_cache(self) -> Iterator[None]:
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.cache):
                pass
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            yield
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise self._unwritable(error) from error
            raise

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(
            f"The cache of compiled extensions, {self.cache}, cannot be written ({error.strerror}); "
            "set SIDESTREAM_CACHE to a writable directory."
        )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Holds the cache's lock; yields whether another process had it first."""
        with open(self.cache / "lock", "a") as file:
            started = time.monotonic()
            next_report = started
            waited = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waited = True
                except OSError as error:
                    raise UsageError(
                        f"The cache of compiled extensions, {self.cache}, is on a file system without locks "
                        f"({error.strerror}); set SIDESTREAM_CACHE to a local directory."
                    ) from error
                now = time.monotonic()
                if now >= next_report:
                    next_report = now + PROGRESS_INTERVAL_S
                    self.announce(f"Waiting for another process that builds an extension ({now - started:.0f} s)")
                time.sleep(POLL_INTERVAL_S)
            yield waited

    def _raise_failure_since(self, moment: float) -> None:
        """Repeats the failure of the build that this process waited for, instead of failing alike later."""
        with contextlib.suppress(OSError):
            if self.log.stat().st_mtime >= moment:
                raise self._failure()

    def _remove_leftovers(self) -> None:
        # Whoever holds the lock is the only live builder on this host; another host may share the cache over a network.
        for folder in self.cache.glob(f"building.{socket.gethostname()}.*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _compile(self) -> Path:
        environment = build_environment(UNITS)
        self.log.unlink(missing_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"building.{socket.gethostname()}.", dir=self.cache))
        try:
            log = folder / "build.log"
            units = join_sources(self.sources, folder)
            if not self._run_compiler(folder, log, environment, units):
                log.replace(self.log)
                raise self._failure()
            for file in folder.iterdir():
                if file.suffix in {".o", ".d", ".cpp"}:
                    file.unlink()
            library = folder / f"{self.name}.so"
            digest = hashlib.sha256(library.read_bytes()).hexdigest()
            (folder / "complete.json").write_text(json.dumps({"sha256": digest}))
            folder.chmod(0o755)
            shutil.rmtree(self.entry, ignore_errors=True)
            try:
                folder.rename(self.entry)
            except OSError:
                if self._cached() is None:  # else a host that shares the cache was faster
                    raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._remove_old_entries()
        return self.entry / f"{self.name}.so"

    def _run_compiler(self, folder: Path, log: Path, environment: dict[str, str], units: Sequence[Path]) -> bool:
        package_root = Path(__file__).resolve().parents[2]
        search_path = [str(package_root), *filter(None, [environment.get("PYTHONPATH")])]
        environment = {**environment, "PYTHONPATH": os.pathsep.join(search_path)}
        command = [sys.executable, "-m", compile_extension.__name__, "--name", self.name, "--folder", str(folder)]
        command += [f"--flag={flag}" for flag in self.flags]
        command += [f"--include={parent}" for parent in sorted({source.parent for source in self.sources})]
        command += ["--", *map(str, units)]
        self.announce(f"Building the {self.title} for torch {self.torch_version} (once, about half a minute)")
        started = time.monotonic()
        next_report = started + PROGRESS_INTERVAL_S
        with log.open("wb") as output:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which then ends the whole group.
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment,
                cwd=folder, start_new_session=True,
            )  # fmt: skip
            try:
                while child.poll() is None:
                    now = time.monotonic()
                    if now >= next_report:
                        next_report += PROGRESS_INTERVAL_S
                        self.announce(f"Building the {self.title}: {now - started:.0f} s")
                    time.sleep(POLL_INTERVAL_S)
            finally:
                _end(child)
        succeeded = child.returncode == 0
        if succeeded:
            self.announce(f"Built the {self.title} in {time.monotonic() - started:.0f} s")
        return succeeded

    def _failure(self) -> UsageError:
        log = self.log.read_text(errors="replace")
        sentence = f"Building the {self.title} failed ({_first_error(log)}); the compiler's log is {self.log}."
        if os.environ.get("SIDESTREAM_BUILD_LOG", "0") not in {"", "0"}:
            return UsageError(f"{sentence}\n{log}")
        return UsageError(f"{sentence[:-1]} (SIDESTREAM_BUILD_LOG=1 prints it).")

    def _remove_old_entries(self) -> None:
        def age(entry: Path) -> float:
            with contextlib.suppress(OSError):
                return -entry.stat().st_mtime
            return 0.0

        for entry in sorted(self.cache.glob(f"{self.name}-torch*"), key=age)[ENTRIES_KEPT:]:
            if entry.suffix == ".log":  # of a failed build
                entry.unlink(missing_ok=True)
            else:
                shutil.rmtree(entry, ignore_errors=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a compiling child with all that it started, if it has not ended by itself."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(compile_extension.GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()


def _first_error(log: str) -> str:
    """The line of a build log that says best what went wrong: the first error (the later ones often follow from it)."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern in (r"Killed signal", r"\berror:", r"undefined reference", r"No space left on device", r"Error: "):
        for line in lines:
            if re.search(pattern, line):
                if pattern == "Killed signal":
                    return f"{line}; probably out of memory, MAX_JOBS=1 takes least"
                return line
    return lines[-1] if lines else "no output"
