"""The process that runs the tests: ``python -m harness.upstream.child``; ``study.py`` starts it, again where it dies.

It is pytest with one more plugin, which runs each test as often as its study needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from harness.campaign.watchdog import Watchdog
from harness.exit_codes import ExitCode
from harness.observe.instrument import Recording
from harness.observe.synchronizations import SynchronizationId
from harness.processes import die_with_parent
from harness.upstream.observer import Observer, issued
from harness.upstream.runs import (
    ALONE,
    DIED,
    FAILED,
    PASSED,
    SKIPPED,
    TRACED,
    UNTAPPED,
    WARM_UP,
    WHOLE,
    Log,
    Run,
    RunKey,
    next_run,
)

_WITHOUT = ("cacheprovider", "randomly", "rerunfailures", "xdist", "repeat", "harness.plugin")
"""Plugins that would run tests in another way, or leave files in somebody else's checkout."""


class Studying:
    """The plugin."""

    def __init__(self, log: Log, observer: Observer, repetitions: int, watchdog: Watchdog) -> None:
        self._log = log
        self._observer = observer
        self._repetitions = repetitions
        self._watchdog = watchdog
        self._key = RunKey("", ALONE)
        self._recordings: list[Recording] = []
        self._failed_parts: list[pytest.TestReport] = []
        self._collection_error: str | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the reason why a file cannot be collected."""
        if report.failed and self._collection_error is None:
            self._collection_error = _reason(report)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Say which tests there are."""
        if self._collection_error is not None:
            self._log.write(unusable=self._collection_error)
        else:
            self._log.write(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run one test as often as its study needs."""
        is_warm = False
        while True:
            key = next_run(item.nodeid, self._log.runs.get(item.nodeid, []), self._repetitions)
            if key is None:
                return True
            if not is_warm and key.what != ALONE:
                key = RunKey(item.nodeid, WARM_UP)
            is_warm = True
            self._run(item, nextitem, key)

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None, key: RunKey) -> None:
        self._log.write(started=asdict(key))
        self._key = key
        self._recordings = []
        self._failed_parts = []
        with self._watchdog.guard():
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        run = _judge(key, [*reports, *self._failed_parts])
        for recording in self._recordings:
            run.left_out = any(each.left_out for each in recording.synchronizations)
            if key.what in (*WHOLE, TRACED):
                run.issued = issued(recording, proofs=key.what == TRACED)
        # Its synchronizations are lost if the device failed at the end of the run, as it did in no complete one.
        run.left_out = run.left_out or (not self._recordings and run.outcome == FAILED and key.what not in UNTAPPED)
        broken = self._device_error()
        if broken is not None:
            run.outcome, run.reason = DIED, broken
        self._log.write(ended=run.to_json())
        if broken is not None:
            self._leave()

    def _device_error(self) -> str | None:
        """Why the device is unusable, if it is."""
        error: RuntimeError | None = None
        for _ in range(2):  # the first call may only deliver an error that was pending
            try:
                self._observer.backend.synchronize()
            except RuntimeError as raised:
                error = raised
            else:
                return None
        return f"the device is unusable: {_first_line(str(error))}"

    def _leave(self) -> None:
        # With a broken device an orderly end may hang.
        os._exit(int(ExitCode.INFRASTRUCTURE))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        """Observe the call of the test, with its ``setUp`` and ``tearDown`` where it has such, but no fixtures."""
        what = self._key.what
        if what in UNTAPPED:
            with self._observer.untapped():
                return (yield)
        if what == TRACED:
            context = self._observer.traced()
        else:
            context = self._observer.tapped(None if what in WHOLE else SynchronizationId.parse(what))
        with context as self._recordings:
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Parts of a test (``subTest``) are reported on their own."""
        if report.failed:
            self._failed_parts.append(report)


def _judge(key: RunKey, reports: list[pytest.TestReport]) -> Run:
    failed = [report for report in reports if report.failed]
    skipped = [report for report in reports if report.skipped]
    if failed:
        return Run(key, FAILED, _reason(failed[0]))
    if skipped:
        expected = hasattr(skipped[0], "wasxfail")
        return Run(key, SKIPPED, "it is expected to fail" if expected else _reason(skipped[0]))
    return Run(key, PASSED)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The sentence of a report, in one line."""
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        return _first_line(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return _first_line(crash.message)
    lines = [line.strip() for line in str(longrepr).splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (errors or lines or ["no reason was given"])[-1]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def main() -> int:
    """Study the tests of a file; everything that comes of it is in the log."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--keyword")
    parser.add_argument("tests")
    given = parser.parse_args()
    # PyTorch's tests parse it too (parse_cmd_line_args in torch/testing/_internal/common_utils.py).
    del sys.argv[1:]
    die_with_parent()
    from harness.backends import hardware_queues, visible_devices

    # As for the suite's own cases.
    hardware_queues.use_all(os.environ)
    visible_devices.put_first(given.device)
    log = Log(given.log)
    observer = Observer("sim" if given.device == "sim" else given.device)
    watchdog = Watchdog(given.limit_s, None)
    options = ["-q", *(text for name in _WITHOUT for text in ("-p", f"no:{name}"))]
    if given.keyword is not None:
        options += ["-k", given.keyword]
    code = pytest.main([*options, "--", given.tests], plugins=[Studying(log, observer, given.repetitions, watchdog)])
    with contextlib.suppress(Exception):
        watchdog.rest()
    if log.nodeids is not None and code in (ExitCode.CLEAN, ExitCode.NOTHING_RAN):
        log.write(finished=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
