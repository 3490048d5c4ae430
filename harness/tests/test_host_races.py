"""Cases in which the host reads or overwrites pinned memory: right with the wait, caught by both oracles without."""

from __future__ import annotations

from pathlib import Path

from harness.tests.suite_runner import new_suite

CASES = """
import torch


def prepare(lab):
    with lab.preparing():
        value = torch.full((256,), 3.0, device=lab.device)
        host = torch.full((256,), 7.0).pin_memory()
    return lab.keep(value), host


def test_read_after_the_event(lab):
    value, host = prepare(lab)
    with lab.stream("copy") as copy:
        host.copy_(value, non_blocking=True)
        copied = copy.record_event()
    copied.synchronize()
    lab.observe(host, 3.0)


def test_read_without_a_wait(lab):
    value, host = prepare(lab)
    with lab.stream("copy") as copy:
        host.copy_(value, non_blocking=True)  # the copy
        copy.record_event()
    lab.observe(host, 3.0)  # the read


def test_result_of_to_is_read_without_a_wait(lab):
    value, _ = prepare(lab)
    with lab.stream("copy"):
        host = value.to("cpu", non_blocking=True)
    str(host)  # many operators of one line
    lab.observe(host, 3.0)


def test_overwritten_after_the_event(lab):
    value, host = prepare(lab)
    with lab.stream("copy") as copy:
        value.copy_(host, non_blocking=True)
        copied = copy.record_event()
        copied.synchronize()
        host.fill_(9.0)
        lab.observe(value, 7.0)


def test_overwritten_without_a_wait(lab):
    value, host = prepare(lab)
    with lab.stream("copy"):
        value.copy_(host, non_blocking=True)  # the upload
        host.fill_(9.0)  # the overwriting
        lab.observe(value, 7.0)


def test_freed_while_a_copy_uses_it(lab):
    value, host = prepare(lab)
    with lab.stream("copy"):
        value.copy_(host, non_blocking=True)
        del host
        torch.empty(256, pin_memory=True).fill_(9.0)
        lab.observe(value, 7.0)
"""


def line_of(marker: str) -> int:
    return next(number for number, line in enumerate(CASES.splitlines(), 1) if f"# {marker}" in line)


def section(output: str, test: str) -> str:
    """What the output says of one failed test."""
    return output.split(f"_ {test} _", 1)[1].split("\n____", 1)[0]


def test_the_host_is_judged_by_both_oracles(tmp_path: Path) -> None:
    ran = new_suite(tmp_path, CASES).run("--count", "4")
    assert ran.code == 1
    failed = {line.split("::")[1].split()[0] for line in ran.output.splitlines() if line.startswith("FAILED")}
    racy = {"read_without_a_wait", "result_of_to_is_read_without_a_wait", "overwritten_without_a_wait"}
    assert failed == {f"test_{name}" for name in racy}
    reading = section(ran.output, "test_read_without_a_wait")
    assert "race: a wrong value and an unordered access" in reading
    assert f"first  aten::copy_ on copy:0, test_written.py:{line_of('the copy')}\n" in reading
    assert f"second aten::copy_ on the host, test_written.py:{line_of('the read')}\n" in reading
    assert (
        "missing the host must synchronize stream 'copy', or an event recorded on it after copy:0 (aten::copy_), "
        "before aten::copy_ on the host reads it.\n"
    ) in reading
    assert "expected 3.0, got 7.0" in reading and "--plan hold=copy:0" in reading

    of_to = section(ran.output, "test_result_of_to_is_read_without_a_wait")
    assert "expected 3.0, got nan, poison" in of_to
    assert (
        of_to.count("  race   ") == 2 and "further races are between the same launches and lines of the host" in of_to
    )

    overwriting = section(ran.output, "test_overwritten_without_a_wait")
    assert "race: a wrong value and an unordered access" in overwriting
    assert "race     write after read, bytes 0 to 1024" in overwriting
    assert f"first  aten::copy_ on copy:0, test_written.py:{line_of('the upload')}\n" in overwriting
    assert f"second aten::fill_.Scalar on the host, test_written.py:{line_of('the overwriting')}\n" in overwriting
    assert "expected 7.0, got 9.0" in overwriting
