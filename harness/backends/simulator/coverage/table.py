"""The outcome of a survey of all operators, as ``OPERATORS.md``: written for people, and read back by a test."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.backends.simulator.coverage.comparison import NOT_REPRODUCIBLE, UNINITIALIZED, Direction, Result

COMMAND = "python -m harness operators"
WITH_FLOAT64 = "with float64, "
"""Begins the reason of an operator that passes with float32."""

_LINE_LENGTH = 120
_PASSED = {"forward": "Pass forward", "backward": "Pass backward"}
_OUT = {"forward": "Out forward", "backward": "Out backward"}
_NOT_RUN = {"forward": "Not run forward", "backward": "Not run backward"}
_DIRECTIONS = ("forward", "backward")
_NO_BACKWARD = "it has no backward"

_INTRODUCTION = """\
Each operator of PyTorch's own database (`torch.testing._internal.common_methods_invocations`) runs on `sim` and on the
CPU with the same samples: all of float32, one of float64 (an operator that takes neither runs with another dtype). On
`sim` all its launches are held until the sample has been enqueued, so that they run later, in the order of the queue.
Outputs, inputs (some are written) and, backward, the gradients of all inputs for a fixed random gradient must be the
CPU's bit for bit; NaNs are alike."""


@dataclass
class Outcomes:
    """What became of all operators in one direction."""

    passed: list[str] = field(default_factory=list)
    out: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Number of the first sample that failed, and why."""
    not_run: dict[str, str] = field(default_factory=dict)
    """Why there is nothing to run; without those that have no backward."""


@dataclass
class Table:
    """The parsed table, and the lines that only people read."""

    torch_version: str
    outcomes: dict[str, Outcomes]
    remarks: list[str] = field(default_factory=list)

    @staticmethod
    def of(float32: Sequence[Result], float64: Sequence[Result], torch_version: str) -> Table:
        """From all results; an operator is out where it fails with either dtype."""
        outcomes = {direction: Outcomes() for direction in _DIRECTIONS}
        others = {result.name: result for result in float64}
        for result in sorted(float32, key=lambda result: result.name):
            for direction, outcome in outcomes.items():
                own: Direction = getattr(result, direction)
                other: Direction = getattr(others[result.name], direction)
                if own.failure:
                    outcome.out[result.name] = (own.failing_sample, own.failure)
                elif other.failure:
                    outcome.out[result.name] = (other.failing_sample, WITH_FLOAT64 + other.failure)
                elif own.passed:
                    outcome.passed.append(result.name)
                elif own.not_applicable != _NO_BACKWARD:
                    outcome.not_run[result.name] = own.not_applicable
        return Table(torch_version, outcomes, _remarks(float32, float64))

    def to_markdown(self) -> str:
        """The file's content."""
        lines = [
            "# Operators on the simulated accelerator",
            "",
            f"Generated with torch {self.torch_version} by",
            "",
            f"    {COMMAND}",
            "",
            *self.remarks,
        ]
        for direction, outcome in self.outcomes.items():
            lines += ["", f"## {_OUT[direction]} ({len(outcome.out)})", ""]
            lines += [f"- `{name}`, sample {number}: {reason}" for name, (number, reason) in outcome.out.items()]
            lines += [] if outcome.out else ["None."]
            lines += ["", f"## {_NOT_RUN[direction]} ({len(outcome.not_run)})", ""]
            lines += [f"- `{name}`: {reason}" for name, reason in outcome.not_run.items()]
            lines += [] if outcome.not_run else ["None."]
        for direction, outcome in self.outcomes.items():
            lines += ["", f"## {_PASSED[direction]} ({len(outcome.passed)})", "", *_wrap(outcome.passed)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def read(markdown: str) -> Table:
        """Reads what :meth:`to_markdown` wrote, without the remarks."""
        version = re.search(r"^Generated with torch (\S+) by$", markdown, re.MULTILINE)
        sections = dict(re.findall(r"^## (.*?) \(\d+\)\n\n(.*?)(?=\n\n## |\Z)", markdown, re.MULTILINE | re.DOTALL))
        outcomes = {}
        for direction in _DIRECTIONS:
            out = re.findall(r"^- `(.*?)`, sample (\d+): (.*)$", sections[_OUT[direction]], re.MULTILINE)
            not_run = re.findall(r"^- `(.*?)`: (.*)$", sections[_NOT_RUN[direction]], re.MULTILINE)
            outcomes[direction] = Outcomes(
                re.findall(r"`(.*?)`", sections[_PASSED[direction]]),
                {name: (int(number), reason) for name, number, reason in out},
                dict(not_run),
            )
        assert version is not None
        return Table(version[1], outcomes)


def _remarks(float32: Sequence[Result], float64: Sequence[Result]) -> list[str]:
    lines = [
        *_INTRODUCTION.splitlines(),
        "",
        "| | float32, all samples | float64, one sample |",
        "|---|---|---|",
    ]
    for direction in _DIRECTIONS:
        both = [[getattr(result, direction) for result in results] for results in (float32, float64)]
        lines.append(f"| {direction}: pass, of those that the CPU runs | {_cells(map(_share, both))} |")
        lines.append(f"| {direction}: samples compared | {_cells(map(_samples, both))} |")
        lines.append(f"| {direction}: operators with wrong values | {_cells(map(_wrong, both))} |")
    random = [result.name for result in float32 if result.forward.random or result.backward.random]
    waiting = [result.name for result in float32 if result.forward.synchronized or result.backward.synchronized]
    others = [f"{result.name} ({result.dtype})" for result in float32 if result.dtype not in {"float32", "None"}]
    lines += [
        "",
        f"Random operators ({len(random)}) are compared bit for bit as well, against the CPU with the seeds that the",
        "simulator draws for each launch:",
        "",
        *_wrap(random),
        "",
        "Compared by shape and dtype alone, because their memory is not initialized:",
        "",
        *_wrap(sorted(UNINITIALIZED)),
        "",
        "Compared by `torch.testing.assert_close`, because the CPU does not give the same bits twice:",
        "",
        *(f"- `{name}`: {reason}" for name, reason in NOT_REPRODUCIBLE.items()),
        "",
        f"Not deferred to the end in some sample ({len(waiting)}), because shapes or Python values depend on results,",
        "or for want of a meta kernel:",
        "",
        *_wrap(waiting),
        "",
        f"Without a CPU kernel for float32 ({len(others)}):",
        "",
        *_wrap(others),
    ]
    return lines


def _cells(cells: Iterable[str]) -> str:
    return " | ".join(cells)


def _share(directions: Sequence[Direction]) -> str:
    run = [direction for direction in directions if direction.samples]
    passed = sum(direction.passed for direction in run)
    return f"{passed} of {len(run)} ({100 * passed / max(1, len(run)):.1f} %)"


def _samples(directions: Sequence[Direction]) -> str:
    return f"{sum(direction.samples for direction in directions):,}"


def _wrong(directions: Sequence[Direction]) -> str:
    return str(sum(direction.wrong for direction in directions))


def _wrap(names: Sequence[str]) -> list[str]:
    lines = [""]
    for index, name in enumerate(names):
        word = f"`{name}`" + ("," if index + 1 < len(names) else "")
        if lines[-1] and len(lines[-1]) + 1 + len(word) > _LINE_LENGTH:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines if names else ["None."]
