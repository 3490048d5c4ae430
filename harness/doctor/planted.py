"""Looks for the planted races of the canary, in a process of its own: a process has one accelerator."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from harness.doctor.check import Check, blind, broken
from harness.exit_codes import ExitCode
from harness.processes import preexec_dies_with_this_process

LIMIT_S = 900.0
"""Of which a slow machine needs most to build the native extensions."""


def planted_races(device: str, hold: str | None = None) -> Check:
    """Look for them on a device.

    Args:
        device: as ``--device`` takes it.
        hold: how to hold launches on a real device.
    """
    name = "races on " + device + (f", held by {hold}" if hold else "")
    command = [sys.executable, "-m", "harness", "canary", "--json", "--device", device]
    if hold is not None:
        command += ["--hold", hold]
    again = " ".join(["python", *command[1:]])
    try:
        # Standard error stays ours: a build says there how far it is.
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            preexec_fn=preexec_dies_with_this_process(),
        )
    except subprocess.TimeoutExpired:
        return broken(name, f"no answer within {LIMIT_S:g} s", f"Look where it hangs: {again}.")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        why = "what it wrote to standard error, above, says why"
        if done.returncode == ExitCode.USAGE:
            return blind(name, f"not looked for; {why}", f"Mend that, then: {again}.")
        return broken(name, f"the process ended with {done.returncode}; {why}", f"Mend that, then: {again}.")
    return _said(name, answer["races"], ExitCode(answer["exit_code"]), again)


def _said(name: str, races: list[dict[str, Any]], code: ExitCode, again: str) -> Check:
    problems = [f"{race['missing']}: {race['problem']}" for race in races if race["problem"]]
    found = f"{len(races) - len(problems)} of {len(races)} planted races were found by both oracles"
    if code is ExitCode.CLEAN:
        return Check(name, f"{found}, and none was seen in their repaired forms")
    said = "; ".join([found, *problems])
    if any(race["alarm"] for race in races):
        advice = (
            f"A race where there is none: a bug in PyTorch, in the driver or in Sidestream; report it with {again}."
        )
        return broken(name, said, advice)
    return blind(name, said, f"Mend what is named above, then: {again}.")
