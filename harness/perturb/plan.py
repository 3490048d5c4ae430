"""Plans: which launches are held in one repetition, with a short string form that replays it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from harness.errors import UsageError


class LaunchId(NamedTuple):
    """Names one launch of a body: the ``index``-th (from 0) on ``stream``; written ``stream:index``.

    Never a global count: with two devices the engine's threads interleave differently from run to run.
    """

    stream: str
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody asks a launch for

    def __str__(self) -> str:
        return f"{self.stream}:{self.index}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches held in one repetition, in the order in which they are released.

    Its string form is ``baseline`` (nothing held) or ``hold=ambient:3,fill:0``.
    """

    holds: tuple[LaunchId, ...] = ()

    def __str__(self) -> str:
        if not self.holds:
            return "baseline"
        return "hold=" + ",".join(map(str, self.holds))

    @property
    def kind(self) -> str:
        """``baseline``, ``single`` (one launch held) or ``set`` (several)."""
        return ("baseline", "single")[len(self.holds)] if len(self.holds) < 2 else "set"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that ``str(plan)`` came from.

        Raises:
            UsageError: the text is no plan.
        """
        if text == "baseline":
            return cls()
        holds = []
        if text.startswith("hold="):
            for part in text.removeprefix("hold=").split(","):
                stream, separator, index = part.rpartition(":")
                if not (separator and stream and index.isdecimal()):
                    break
                holds.append(LaunchId(stream, int(index)))
            else:
                if len(set(holds)) == len(holds):
                    return cls(tuple(holds))
        raise UsageError(
            f"{text!r} is no plan: write 'baseline', or 'hold=' and launches as stream:index, "
            "separated by commas, each once (hold=ambient:3,fill:0)."
        )
