"""Observes the run of a test that knows nothing of the harness."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _pytest
import pluggy

from harness.backends.select import SimulatedBackend, open_backend
from harness.judge.order import implied
from harness.observe import tap
from harness.observe.instrument import Instrument, Recording, ignored_prefixes
from harness.observe.streams import StreamsByAppearance
from harness.observe.synchronizations import USER, Fault, Synchronization, SynchronizationId
from harness.perturb.plan import Plan
from harness.perturb.schedule import SUBMISSION_ORDER, VirtualTime
from harness.upstream.runs import Issued


class _Untraced:
    """A native instrument that sees nothing, so that a run is as fast as without one."""

    def begin_repetition(self, holds: list[tuple[int, int, int]], serial: bool, lines: bool) -> None:
        pass

    def set_preparing(self, on: bool) -> None:
        pass

    def can_poison(self) -> bool:
        return False

    def set_poisoning(self, on: bool) -> None:
        pass

    def finish_repetition(self) -> tuple[list[tuple[Any, ...]], list[tuple[str, str | None, int]]]:
        return [], []

    def set_ignored_prefixes(self, prefixes: list[str]) -> None:
        pass


class Observer:
    """The accelerator under test, and the tap on it."""

    def __init__(self, device: str, announce: Callable[[str], None] | None = None) -> None:
        """Open the backend of a resolved device.

        Raises:
            UsageError: the device cannot be had.
        """
        self.backend = open_backend(device, announce)
        self._simulated = isinstance(self.backend, SimulatedBackend)
        self._announce = announce
        self._names = StreamsByAppearance()
        # On the simulator in virtual time, where what is not waited for is late by as much as it would be on a GPU.
        self._schedule = VirtualTime() if self._simulated else SUBMISSION_ORDER
        native = self.backend.native if isinstance(self.backend, SimulatedBackend) else _Untraced()
        self._instrument = Instrument(native, self._names)

    def untapped(self) -> contextlib.AbstractContextManager[None]:
        """A run without the tap."""
        return self._scheduled()

    @contextlib.contextmanager
    def _scheduled(self) -> Iterator[None]:
        self._instrument.begin(Plan(), schedule=self._schedule)
        try:
            yield
        finally:
            self._instrument.finish()

    @contextlib.contextmanager
    def tapped(self, left_out: SynchronizationId | None) -> Iterator[list[Recording]]:
        """A run under the tap; its recording is in the list afterwards, unless the device failed."""
        with self._tap(self._instrument):
            yield from self._record(self._instrument, left_out)

    @contextlib.contextmanager
    def traced(self) -> Iterator[list[Recording]]:
        """A complete run under the tap and with a trace."""
        if self._simulated:
            with self.tapped(None) as recordings:
                yield recordings
            return
        instrument = Instrument(tap.install(self.backend.device.type, self._announce), self._names)
        try:
            with self._tap(instrument):
                yield from self._record(instrument, None)
        finally:
            tap.remove()

    @contextlib.contextmanager
    def _tap(self, instrument: Instrument) -> Iterator[None]:
        # Around whoever traces, and gone afterwards: what is not under test should cost nothing.
        backend = self.backend
        function = backend.native.last_entry_function() if isinstance(backend, SimulatedBackend) else None
        native = tap.observe_synchronizations(backend.device.type, function, self._announce)
        instrument.use_tap(native)
        native.set_ignored_prefixes([*ignored_prefixes(), *_framework_prefixes()])
        try:
            yield
        finally:
            tap.ignore_synchronizations()

    def _record(self, instrument: Instrument, left_out: SynchronizationId | None) -> Iterator[list[Recording]]:
        self._names.clear()
        recordings: list[Recording] = []
        fault = Fault(left_out) if left_out is not None else None
        instrument.begin(Plan(), schedule=self._schedule, lines=True, synchronizations=True, fault=fault)
        try:
            yield recordings
        finally:
            recordings.append(instrument.finish())


def issued(recording: Recording, *, proofs: bool) -> list[Issued]:
    """What can be left out of a run: every wait, host synchronization and ``record_stream``.

    Args:
        recording: of the run.
        proofs: whether to look for those that the others imply; takes a trace.
    """
    return [
        Issued(
            str(each.id),
            each.id.kind,
            each.id.issuer,
            each.describe(),
            by_framework=each.id.issuer == USER and each.line is None,
            proof=_proof(recording, each) if proofs else None,
        )
        for each in recording.synchronizations
        if each.id.kind != "record"
    ]


def _proof(recording: Recording, each: Synchronization) -> str | None:
    proof = implied(recording.trace, each.entries) if each.entries else None
    return None if proof is None else str(proof)


def _framework_prefixes() -> list[str]:
    folders = [Path(module.__file__).parent for module in (unittest, _pytest, pluggy) if module.__file__]
    return [*(f"{folder}/" for folder in folders), "<frozen "]
