"""The cache of native extensions, tried with an extension so small that it compiles in a second."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from harness.backends import extension, toolchain
from harness.errors import UsageError
from harness.exit_codes import ExitCode

SOURCE = """
#include <Python.h>
#include "answer.h"
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr, nullptr, nullptr, nullptr, 0};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", ANSWER);
  return module;
}
"""

BUILDER = """
import sys
from pathlib import Path
from harness.backends import extension
library = extension.build("sidestream_tiny", [Path(sys.argv[1])], lambda sentence: print(sentence, flush=True))
print("library", library, "torch.utils.cpp_extension" in sys.modules, flush=True)
"""

SLOW_COMPILER = """#!/bin/sh
case "$*" in
  *unit_0.cpp*) echo $$ > "$MARKER.part"; mv "$MARKER.part" "$MARKER"; exec sleep 1000;;
  *) exec c++ "$@";;
esac
"""

REPOSITORY = Path(__file__).resolve().parents[2]


def write_source(folder: Path, answer: int = 42) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "answer.h").write_text(f"#define ANSWER {answer}\n")
    source = folder / "tiny.cpp"
    source.write_text(SOURCE)
    return source


def start_builder(source: Path, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(source)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "SIDESTREAM_CACHE": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_hanging_builder(source: Path, cache: Path, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A builder whose compiler never ends, once that has started, and the compiler's process id."""
    compiler, marker = folder / "slow-g++", folder / "marker"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    builder = start_builder(source, cache, CXX=str(compiler), MARKER=str(marker))
    wait_until(marker.exists)
    return builder, int(marker.read_text())


def wait_until(condition, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_gone(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SIDESTREAM_CACHE", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the compiler by one that writes any bytes at once; lists the folders it was asked to fill."""
    folders: list[Path] = []

    def compile_at_once(self, folder: Path, log: Path, environment: dict[str, str], units: list[Path]) -> bool:
        folders.append(folder)
        log.write_text("compiled\n")
        (folder / "tiny.o").write_bytes(b"object")
        (folder / f"{self.name}.so").write_bytes(b"library %d" % len(folders))
        return True

    monkeypatch.setattr(extension._Build, "_run_compiler", compile_at_once)
    return folders


def test_builds_once_then_loads_from_the_cache(cache: Path, source: Path) -> None:
    said: list[str] = []
    module = extension.load("sidestream_tiny_loaded", [source], said.append, title="tiny thing")
    assert module.answer == 42
    assert re.fullmatch(r"Building the tiny thing for torch \d+\.\d+\S* \(once, about half a minute\)", said[0])
    assert re.fullmatch(r"Built the tiny thing in \d+ s", said[-1])

    said.clear()
    assert extension.load("sidestream_tiny_loaded", [source], said.append) is module
    library = extension.build("sidestream_tiny_loaded", [source], said.append)
    assert str(library) == module.__file__
    assert said == []
    assert sorted(file.name for file in cache.iterdir()) == sorted(["lock", library.parent.name])


def test_sources_are_joined_and_see_the_headers_beside_them(cache: Path, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "more.h").write_text("int more();\n")
    more = [other / f"more_{number}.cpp" for number in range(3)]
    more[0].write_text('#include "more.h"\n#include "answer.h"\nint more() { return ANSWER; }\n')
    more[1].write_text("int second() { return 2; }\n")
    more[2].write_text("int third() { return 3; }\n")
    source.write_text(
        '#include "more.h"\nint second();\nint third();\n' + SOURCE.replace(", ANSWER", ", more() + second() + third()")
    )
    library = extension.build("sidestream_joined", [source, *more])
    assert extension._import("sidestream_joined", library).answer == 47
    assert not list(library.parent.glob("*.cpp"))
    units = extension.join_sources([source, *more], tmp_path)
    assert [re.findall(r'"(.*)"', unit.read_text()) for unit in units] == [
        [str(source), str(more[1])],
        [str(more[0]), str(more[2])],
    ]


def test_another_build_of_a_loaded_extension_is_refused(
    cache: Path, source: Path, fake_compiler: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = type(sys)("sidestream_tiny_elsewhere")
    loaded.__file__ = "/elsewhere.so"
    monkeypatch.setitem(sys.modules, "sidestream_tiny_elsewhere", loaded)
    with pytest.raises(UsageError, match=r"already loaded in this process from /elsewhere\.so"):
        extension.load("sidestream_tiny_elsewhere", [source])


def test_a_hit_needs_neither_the_build_machinery_nor_a_writable_cache(cache: Path, source: Path) -> None:
    first = start_builder(source, cache)
    assert "Built" in first.communicate(timeout=120)[0]
    (cache / "lock").unlink()
    second = start_builder(source, cache, PATH="/nonexistent", CXX="/nonexistent")
    output = second.communicate(timeout=120)[0]
    assert re.fullmatch(r"library \S+\.so False\n", output), output
    assert not (cache / "lock").exists()


def test_concurrent_builders_on_a_cold_cache_build_once(cache: Path, source: Path) -> None:
    builders = [start_builder(source, cache) for _ in range(4)]
    outputs = [builder.communicate(timeout=150)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0, 0, 0], outputs
    assert sum("Built" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_a_killed_builder_neither_hangs_the_next_nor_leaves_anything_behind(
    cache: Path, source: Path, tmp_path: Path
) -> None:
    builder, compiler = start_hanging_builder(source, cache, tmp_path)
    waiting = start_builder(source, cache)
    assert waiting.stdout is not None
    assert "Waiting for another process that builds an extension" in waiting.stdout.readline()
    builder.kill()
    builder.communicate(timeout=60)
    assert "Built" in waiting.communicate(timeout=120)[0]
    wait_until(lambda: is_gone(compiler), limit_s=10)
    assert list(cache.glob("building.*")) == []


def test_ctrl_c_ends_the_compiler(cache: Path, source: Path, tmp_path: Path) -> None:
    builder, compiler = start_hanging_builder(source, cache, tmp_path)
    builder.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in builder.communicate(timeout=30)[0]
    wait_until(lambda: is_gone(compiler), limit_s=10)
    assert [file.name for file in cache.iterdir()] == ["lock"]


def test_progress_is_announced(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "PROGRESS_INTERVAL_S", 0.2)
    said: list[str] = []
    extension.build("sidestream_tiny", [source], said.append)
    assert "Building the native extension sidestream_tiny: 0 s" in said[1:-1]


def test_a_failed_build_names_its_log_and_its_first_error(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text("int broken() { return undeclared; }\nint worse() { return nothing; }\n")
    with pytest.raises(UsageError) as caught:
        extension.build("sidestream_tiny", [source], title="tiny thing")
    sentence = str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in sentence
    assert re.match(r"Building the tiny thing failed \(.*tiny\.cpp:1:.*error:.*undeclared.*\)", sentence), sentence
    found = re.search(r"the compiler's log is (\S+\.log) \(SIDESTREAM_BUILD_LOG=1 prints it\)\.$", sentence)
    assert found is not None
    log = Path(found[1]).read_text()
    assert "nothing" in log
    assert sorted(file.name for file in cache.iterdir()) == sorted(["lock", Path(found[1]).name])

    monkeypatch.setenv("SIDESTREAM_BUILD_LOG", "1")
    with pytest.raises(UsageError) as caught:
        extension.build("sidestream_tiny", [source], title="tiny thing")
    assert "int worse()" in str(caught.value)

    source.write_text(SOURCE)
    extension.build("sidestream_tiny", [source])


def test_who_waited_for_a_failing_build_fails_with_it(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch, fake_compiler: list[Path]
) -> None:
    job = extension._Build("sidestream_tiny", [source], print, None)

    def lock_held_by_a_failing_builder(self):
        job.log.write_text("tiny.cpp:1: error: no\n")
        yield True

    monkeypatch.setattr(extension._Build, "_lock", contextlib.contextmanager(lock_held_by_a_failing_builder))
    with pytest.raises(UsageError, match=r"failed \(tiny.cpp:1: error: no\)"):
        extension.build("sidestream_tiny", [source])
    assert fake_compiler == []


@pytest.mark.parametrize("damage", ["truncated", "missing library", "missing stamp", "senseless stamp"])
def test_a_damaged_entry_is_rebuilt(cache: Path, source: Path, fake_compiler: list[Path], damage: str) -> None:
    library = extension.build("sidestream_tiny", [source])
    stamp = library.parent / "complete.json"
    if damage == "truncated":
        library.write_bytes(library.read_bytes()[:-1])
    elif damage == "missing library":
        library.unlink()
    elif damage == "missing stamp":
        stamp.unlink()
    else:
        stamp.write_text("[]")
    assert extension.build("sidestream_tiny", [source]) == library
    assert library.read_bytes() == b"library 2"
    assert extension.build("sidestream_tiny", [source]) == library
    assert len(fake_compiler) == 2


def test_an_entry_that_does_not_load_here_is_rebuilt(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(extension._Build, "_run_compiler", write_a_foreign_library)
        extension.build("sidestream_tiny_foreign", [source])
    assert extension.load("sidestream_tiny_foreign", [source]).answer == 42


def write_a_foreign_library(self, folder: Path, log: Path, environment: dict[str, str], units: list[Path]) -> bool:
    log.write_text("")
    (folder / f"{self.name}.so").write_bytes(b"for another machine")
    return True


def test_left_overs_of_dead_builders_are_removed(cache: Path, source: Path, fake_compiler: list[Path]) -> None:
    dead = cache / f"building.{socket.gethostname()}.dead"
    elsewhere = cache / "building.another-host.alive"
    for folder in (dead, elsewhere):
        folder.mkdir(parents=True)
        (folder / "tiny.o").write_bytes(b"")
    library = extension.build("sidestream_tiny", [source])
    assert not dead.exists()
    assert elsewhere.exists()
    assert not (library.parent / "tiny.o").exists()


def test_old_entries_are_removed(cache: Path, source: Path, fake_compiler: list[Path]) -> None:
    libraries = []
    for answer in range(extension.ENTRIES_KEPT + 3):
        write_source(source.parent, answer)
        libraries.append(extension.build("sidestream_tiny", [source]))
        os.utime(libraries[-1].parent, (answer, answer))
    assert [library.exists() for library in libraries] == [False] * 3 + [True] * extension.ENTRIES_KEPT


def test_what_the_library_depends_on_makes_another_entry(
    cache: Path, source: Path, fake_compiler: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    entries = {extension.build("sidestream_tiny", [source])}
    entries.add(extension.build("sidestream_other", [source]))
    write_source(source.parent, answer=43)  # a header beside the source
    entries.add(extension.build("sidestream_tiny", [source]))
    source.write_text(SOURCE + "\n")
    entries.add(extension.build("sidestream_tiny", [source]))
    with monkeypatch.context() as patch:
        patch.setattr(extension, "FLAGS", ("-O1",))
        entries.add(extension.build("sidestream_tiny", [source]))
    for chosen in ("address", "undefined"):
        with monkeypatch.context() as patch:
            patch.setenv(extension.SANITIZER_VARIABLE, chosen)
            entries.add(extension.build("sidestream_tiny", [source]))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", torch.__version__ + ".local")
        entries.add(extension.build("sidestream_tiny", [source]))
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_config_var", lambda name: "cpython-399")
        entries.add(extension.build("sidestream_tiny", [source]))
    assert len(entries) == 9
    extension.build("sidestream_tiny", [source])
    assert len(fake_compiler) == 9


def test_a_sanitizer_reaches_the_compiler_and_the_linker(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(extension.SANITIZER_VARIABLE, "undefined")
    log = extension.build("sidestream_tiny", [source]).parent / "build.log"
    compiled, linked = re.findall(r"^\[\d/\d\] (.*)$", log.read_text(), flags=re.MULTILINE)
    assert "-fsanitize=undefined" in compiled
    assert "-fsanitize=undefined" in linked


def test_a_sanitizer_that_does_not_exist_is_named(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(extension.SANITIZER_VARIABLE, "leak")
    with pytest.raises(UsageError, match=r"^SIDESTREAM_SANITIZER=leak: there are address, undefined, thread; or"):
        extension.build("sidestream_tiny", [source])


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDESTREAM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert extension.cache_folder() == Path("/home/someone/.cache/sidestream")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert extension.cache_folder() == Path("/shared/sidestream")
    monkeypatch.setenv("SIDESTREAM_CACHE", "here")
    assert extension.cache_folder() == Path.cwd() / "here"


def refusal(source: Path) -> str:
    """The sentence with which a build is refused."""
    with pytest.raises(UsageError) as caught:
        extension.build("sidestream_tiny", [source])
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unwritable_cache_is_named(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "file" / "cache"))
    assert refusal(source) == (
        f"The cache of compiled extensions, {tmp_path}/file/cache, cannot be written (Not a directory); "
        "set SIDESTREAM_CACHE to a writable directory."
    )


def test_a_full_disk_is_reported_as_an_unwritable_cache(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(self, folder: Path, log: Path, environment: dict[str, str], units: list[Path]) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(extension._Build, "_run_compiler", fill_the_disk)
    assert f"{cache}, cannot be written (No space left on device)" in refusal(source)
    assert list(cache.glob("building.*")) == []


def test_a_missing_source_is_named(cache: Path, tmp_path: Path) -> None:
    assert f"{tmp_path}/absent.cpp" in refusal(tmp_path / "absent.cpp")


def test_no_compiler(cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    sentence = refusal(source)
    assert sentence.startswith("No C++ compiler: there is no c++, g++ or clang++ on PATH; install one")
    assert "apt-get install g++" in sentence


def test_a_chosen_compiler_that_is_missing(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-c++ -pipe")
    assert refusal(source).startswith("No C++ compiler: CXX names 'no-such-c++ -pipe', which is not on PATH")


def test_another_compiler_serves_when_there_is_no_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "clang++").write_text("#!/bin/sh\n")
    (tmp_path / "clang++").chmod(0o755)
    assert toolchain.build_environment(1)["CXX"] == "clang++"


def test_no_python_headers(cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme=None: str(tmp_path))
    assert refusal(source).startswith(f"No Python headers: {tmp_path} has no Python.h; install them")


def test_no_ninja(cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "ninja"  # such as the launcher of a version manager with nothing behind it
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr(toolchain, "_ninja_candidates", lambda: iter([tmp_path / "absent", broken]))
    assert refusal(source) == "No ninja, which torch needs to compile an extension: install it (pip install ninja)."


def test_no_setuptools(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    assert refusal(source).startswith("No setuptools, which torch needs to compile an extension: install it")


def test_the_ninja_of_an_interpreter_that_is_not_on_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("c++")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PATH", "/nonexistent")
    folder = toolchain.build_environment(1)["PATH"].split(os.pathsep)[0]
    assert Path(folder, "ninja").exists()


@pytest.mark.parametrize(
    ("sources", "cores", "memory_gb", "jobs"),
    [(6, 8, 16, 6), (6, 2, 16, 2), (6, 8, 4, 2), (6, 8, 1, 1), (6, 8, None, 6), (1, 8, 16, 1)],
)
def test_memory_bounds_the_compilers_at_once(sources: int, cores: int, memory_gb: int | None, jobs: int) -> None:
    memory = None if memory_gb is None else memory_gb * 1_000_000_000
    assert toolchain.compile_jobs(sources, cores, memory) == jobs


def test_the_user_may_set_the_compilers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "7")
    assert toolchain.build_environment(3)["MAX_JOBS"] == "7"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("a.cpp:1: warning: w\na.cpp:2: error: first\na.cpp:3: error: second\n", "a.cpp:2: error: first"),
        ("ld: a.o: undefined reference to `f'\ncollect2: error: ld returned 1", "collect2: error: ld returned 1"),
        ("Traceback\nModuleNotFoundError: No module named 'torch'\n", "ModuleNotFoundError: No module named 'torch'"),
        ("", "no output"),
    ],
)
def test_the_first_error_of_a_log(log: str, reason: str) -> None:
    assert extension._first_error(log) == reason
