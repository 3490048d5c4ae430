"""The catalogue: what it says of each case, which edges it finds, and that docs/catalogue.md is up to date."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from harness import __main__ as command_line
from harness import catalogue
from harness.catalogue import Catalogue
from harness.exit_codes import ExitCode
from harness.tests.suite_runner import REPOSITORY, Suite, new_suite

SUITE = '''
"""Families: each file is one.

More of its contract.
"""

import pytest

pytestmark = pytest.mark.contract("notes/cuda")


@pytest.mark.contract("pytorch/pytorch#1")
@pytest.mark.parametrize("value", [5.0, 7.0])
def test_ambient(lab, value):
    """A promise | of
    two lines."""
    with lab.stream("forward"):
        leaf, product = lab.product(2.0, 3.0)
    with lab.stream("ambient") as ambient:
        seed = lab.poisoned(product).fill_(value)
        product.backward(seed)
        del seed
        lab.observe(leaf.grad, value * 3.0)


@pytest.mark.control("Nothing orders the fill.", aim="fill")
def test_unordered(lab):
    """The same without."""
    leaf, product = lab.product(2.0, 3.0)
    seed = lab.poisoned(product)
    with lab.stream("fill"):
        seed.fill_(5.0)
    with lab.stream("ambient"):
        product.backward(seed)
        lab.observe(leaf.grad, 15.0)


@pytest.mark.defect("docs/defects/x.md", aim="fill", torch="<1.0", devices=("cuda",))
@pytest.mark.devices(2)
def test_wrong(lab):
    """Wrong in an old version."""
    leaf, product = lab.product(2.0, 3.0)
    product.sum().backward()
    lab.observe(leaf.grad, 3.0)


def test_no_case():
    pass
'''


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    made = new_suite(tmp_path_factory.mktemp("suite"), SUITE.lstrip())
    for report in ("docs/defects/x.md", "elsewhere/y.md"):
        (made.folder / report).parent.mkdir(parents=True)
        (made.folder / report).write_text("# Wrong\n")
    return made


@pytest.fixture(scope="module")
def listed(suite: Suite) -> Any:
    return json.loads(run(suite, "--json"))


def run(suite: Suite, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "harness", "catalogue", *arguments]
    done = subprocess.run(
        command, cwd=suite.folder, env=suite.environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def test_each_case_is_listed_without_running_it(listed: Any) -> None:
    cases = listed["cases"]
    assert [case["nodeid"].partition("::")[2] for case in cases] == [
        "test_ambient[5.0]",
        "test_ambient[7.0]",
        "test_unordered",
        "test_wrong",
    ]
    once, _, unordered, wrong = cases
    assert once == {
        "nodeid": "test_written.py::test_ambient[5.0]",
        "family": "test_written.py",
        "contract": "Families: each file is one.",
        "case": "test_ambient",
        "sentence": "A promise | of two lines.",
        "sources": ["pytorch/pytorch#1", "notes/cuda"],
        "kind": "safe",
        "unsafe": None,
        "versions": None,
        "devices": 1,
        "edges": [],
        "streams": None,
        "twins": None,
    }
    assert (unordered["kind"], unordered["unsafe"]) == ("control", "Nothing orders the fill.")
    assert (wrong["kind"], wrong["unsafe"], wrong["devices"]) == ("defect", "docs/defects/x.md", 2)


def test_runs_tell_streams_edges_and_twins(suite: Suite) -> None:
    data = json.loads(run(suite, "--json", "--twins"))
    once, _, unordered, _ = data["cases"]
    assert once["streams"] == ["ambient", "forward"]
    assert once["edges"] == ["a", "e", "g"]
    assert once["twins"] == {"killed": 2, "redundant": 1}
    assert unordered["streams"] == ["fill", "default", "ambient"]
    assert unordered["twins"] == {}
    assert data["edges"]["e"]["cases"] == 3
    text = Catalogue.from_json(data).to_markdown()
    assert "## Edges of the autograd engine" in text and "| streams | edges | twins |" in text
    assert data["edges"]["e"]["source"].startswith("GraphTask::exec_post_processing")


def test_the_document_has_a_row_a_test(suite: Suite, listed: Any) -> None:
    text = run(suite)
    assert text == Catalogue.from_json(listed).to_markdown()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    unordered = "The same without. *Unsafe: Nothing orders the fill.*"
    wrong = "Wrong in an old version. *Wrong in torch <1.0: [x](defects/x.md).*"
    assert rows == [
        "| `test_ambient` | A promise \\| of two lines. | pytorch/pytorch#1; notes/cuda | safe | 2 | 1 |",
        f"| `test_unordered` | {unordered} | notes/cuda | control | 1 | 1 |",
        f"| `test_wrong` | {wrong} | notes/cuda | defect | 1 | 2 |",
    ]
    assert "4 cases in 1 file: 2 safe, 1 controls" in text


def test_what_was_not_measured_is_not_said(suite: Suite, listed: Any) -> None:
    text = Catalogue.from_json(listed).to_markdown()
    assert "| **a** |" not in text and "--twins" in text.split("\n## ")[0]
    assert {edge["cases"] for edge in listed["edges"].values()} == {None}


def test_a_report_outside_of_docs_is_linked_all_the_same(listed: Any) -> None:
    made = Catalogue.from_json(listed)
    made.entries[-1].unsafe = "elsewhere/y.md"
    assert "*Wrong in torch <1.0: [y](../elsewhere/y.md).*" in made.to_markdown()


def test_workers_write_it_as_well(suite: Suite, listed: Any) -> None:
    ran = suite.run("-n", "1", "--catalogue-json", "cases.json", "-k", "unordered")
    assert ran.code == 0, ran.output
    written = json.loads((suite.folder / "cases.json").read_text())
    assert written["cases"] == [case for case in listed["cases"] if "unordered" in case["nodeid"]]


def test_cases_that_cannot_be_collected_are_no_empty_catalogue(suite: Suite) -> None:
    assert run(suite, "no_such_file.py", code=4) == ""
    empty = suite.folder / "empty"
    empty.mkdir(exist_ok=True)
    assert run(suite, "empty", code=5) == ""


def test_a_full_disk_leaves_the_old_catalogue(
    listed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "catalogue.md"
    old.write_text("old\n")

    def pytest_writes(options: list[str], tests: object, silent: bool = True) -> int:
        name = "--catalogue-json" if silent else "--twins-json"
        Path(options[options.index(name) + 1]).write_text(json.dumps(listed))
        return 0

    monkeypatch.setattr(command_line, "_pytest", pytest_writes)
    monkeypatch.setattr(Catalogue, "add_twins", lambda self, studies: None)
    monkeypatch.setattr(catalogue, "PATH", old)
    monkeypatch.setattr("sys.argv", ["harness", "catalogue", "--twins", "--write"])
    monkeypatch.setattr(Path, "open", functools.partialmethod(open_on_a_full_disk, tmp_path, Path.open))
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == ExitCode.INFRASTRUCTURE
    assert f"ERROR: {old} could not be written (No space left on device) and is as it was." in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old\n"]


def open_on_a_full_disk(path: Path, disk: Path, real: Callable[..., TextIO], *how: Any, **further: Any) -> TextIO:
    """A file that takes the first half of what is written to it if it is on the disk."""
    file = real(path, *how, **further)
    if path.parent == disk:
        write = file.write

        def write_half(text: str) -> int:
            write(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        file.write = write_half  # type: ignore[method-assign]
    return file


def with_twins(plain: Catalogue, edges: list[str]) -> Catalogue:
    """As if a run had told that each case has one stream, these edges and one twin."""
    measured = Catalogue.from_json(plain.to_json())
    told = {"streams": ["a"], "edges": edges, "twins": [{"outcome": "killed"}]}
    measured.add_twins([{"nodeid": entry.nodeid, **told} for entry in plain.entries])
    return measured


def test_what_only_a_run_can_tell_does_not_count_as_a_change(listed: Any) -> None:
    one = Catalogue.from_json(listed)
    plain, measured = with_twins(one, []), with_twins(one, ["c"])
    assert measured.to_markdown() != plain.to_markdown()
    assert catalogue.static_part(measured.to_markdown()) == catalogue.static_part(plain.to_markdown())
    plain.entries[0].sentence = "Another promise."
    assert catalogue.static_part(measured.to_markdown()) != catalogue.static_part(plain.to_markdown())


@pytest.mark.parametrize("arguments", [("--write",), ("--write", "--twins", "test_written.py")])
def test_only_the_whole_catalogue_is_written(suite: Suite, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "harness", "catalogue", *arguments]
    done = subprocess.run(command, cwd=suite.folder, env=suite.environment(), capture_output=True, text=True)
    assert done.returncode == 4
    assert "--write writes the whole catalogue" in done.stderr


# Edges that the suite above does not cross.

EDGES = """
import threading

import pytest
import torch


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, inner):
        ctx.save_for_backward(value)
        ctx.inner = inner
        return value * 2.0

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            again = ctx.saved_tensors[0].detach().requires_grad_()
            with ctx.inner:
                doubled = again * 2.0
            doubled.backward(gradient)
        again.grad.record_stream(torch.accelerator.current_stream())
        return again.grad, None


def test_reentrant(lab):
    with lab.stream("forward"):
        leaf, product = lab.product(2.0, 3.0)
        result = Backward.apply(product, lab.stream("inner"))
    with lab.stream("ambient"):
        result.backward(torch.full_like(result, 5.0))
        lab.observe(leaf.grad, 30.0)


def test_host(lab):
    with lab.preparing():
        leaf = torch.full((256,), 2.0, requires_grad=True)
        result = leaf.to(lab.device) * 3.0
    with lab.stream("ambient"):
        result.backward(torch.full_like(result, 5.0))
    lab.observe(leaf.grad, 15.0)


def test_sum(lab):
    leaf, product = lab.product(2.0, 3.0)
    with lab.preparing():
        with lab.stream("one"):
            one = product * 5.0
        with lab.stream("two"):
            two = product * 7.0
        result = one + two
    with lab.stream("ambient"):
        result.backward(torch.full_like(result, 1.0))
        lab.observe(leaf.grad, 36.0)


def test_leaf(lab):
    with lab.preparing():
        leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
        lab.keep(leaf * 3.0)
        with lab.stream("forward"):
            result = lab.keep(leaf * 3.0)
    with lab.stream("forward"):
        result.backward(torch.full_like(result, 5.0))
        lab.observe(leaf.grad, 15.0)


def test_devices(lab):
    with lab.preparing():
        leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
        result = leaf.to("sim:1") * 3.0
    result.backward(torch.full_like(result, 5.0))
    lab.observe(leaf.grad, 15.0)


def test_devices_with_no_thread_each(lab):
    with torch.autograd.set_multithreading_enabled(False):
        test_devices(lab)


def test_pinned(lab):
    def keep(gradient):
        memory.copy_(gradient, non_blocking=True)

    with lab.preparing():
        memory = torch.zeros(256).pin_memory()
        leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
        result = leaf * 3.0
        result.register_hook(keep)
    result.backward(torch.full_like(result, 5.0))
    torch.accelerator.current_stream().synchronize()
    lab.observe(memory, 5.0)
    lab.observe(leaf.grad, 15.0)


def test_sparse(lab):
    with lab.preparing():
        table = torch.full((4, 16), 3.0, device=lab.device, requires_grad=True)
        rows = torch.arange(4, device=lab.device)
    torch.nn.functional.embedding(rows, table, sparse=True).sum().backward()
    lab.observe(table.grad.to_dense(), 1.0)


@pytest.mark.parametrize("in_callback", [lambda gradient: gradient.mul_(2.0), lambda gradient: None])
def test_callback(lab, in_callback):
    leaf, product = lab.product(2.0, 3.0)
    queue = torch.autograd.Variable._execution_engine.queue_callback
    product.register_hook(lambda _: queue(lambda: in_callback(leaf.grad)))
    product.sum().backward()
    lab.observe(leaf.grad * 0.0, 0.0)


def test_threads(lab):
    leaf, product = lab.product(2.0, 3.0)

    def train():
        with lab.stream("ambient"):
            product.backward(torch.full_like(product, 5.0))

    in_a_thread(train)
    with lab.stream("ambient"):
        lab.observe(leaf.grad, 15.0)


def test_thread_that_does_nothing(lab):
    leaf, product = lab.product(2.0, 3.0)
    in_a_thread(lambda: None)
    product.sum().backward()
    lab.observe(leaf.grad, 3.0)
"""


def test_edges_are_told_by_who_synchronized_where(tmp_path: Path) -> None:
    # Not every synchronization of these matters, so some twins survive.
    data = json.loads(run(new_suite(tmp_path, EDGES), "--json", "--twins", code=1))
    edges = {case["nodeid"].partition("::")[2]: set(case["edges"]) for case in data["cases"]}
    assert {"e", "i"} <= edges["test_reentrant"]
    assert {name for name, found in edges.items() if "j" in found} == {"test_host", "test_pinned"}
    assert {name for name, found in edges.items() if "h" in found} == {"test_callback[<lambda>0]"}
    assert {name for name, found in edges.items() if "k" in found} == {"test_devices", "test_threads"}
    assert {"a", "b", "c"} <= edges["test_sum"]
    assert "d" in edges["test_leaf"] and "d" not in edges["test_sum"]
    assert "f" in edges["test_devices"] and "f" not in edges["test_sum"]


# The suite's own.


@pytest.fixture(scope="module")
def own() -> Catalogue:
    command = [sys.executable, "-m", "harness", "catalogue", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return Catalogue.from_json(json.loads(done.stdout))


def test_each_case_has_a_sentence_and_a_source(own: Catalogue) -> None:
    assert [entry.nodeid for entry in own.entries if not entry.sentence or not entry.sources] == []


def test_each_known_defect_is_described(own: Catalogue) -> None:
    reports = {str(entry.unsafe) for entry in own.entries if entry.kind == catalogue.DEFECT}
    assert reports
    assert {
        path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs" / "defects").glob("*.md")
    } == reports


def test_the_document_is_up_to_date(own: Catalogue) -> None:
    written = catalogue.static_part(catalogue.PATH.read_text())
    assert written == catalogue.static_part(with_twins(own, []).to_markdown()), f"run {catalogue.COMMAND}"
