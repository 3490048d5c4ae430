"""The commands about the machine: doctor, canary."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from harness.exit_codes import ExitCode

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def doctor(as_json: Json = False) -> None:
    """Say whether this machine can find races: one line a check, and what to do.

    Exits with 3 if the harness cannot run here, with 6 if it can and would prove nothing; warnings do not count.
    """
    from harness.doctor.check import Check, Status, exit_code_of
    from harness.doctor.examine import examine

    console = Console(highlight=False)
    checks: list[Check] = []
    for check in examine(Path.cwd()):
        checks.append(check)
        if not as_json:
            _say(console, check.status.value, f"{check.name:<14} {check.found}")
            if check.advice:
                console.print(f"{'':8} {'':14} {check.advice}", soft_wrap=True, markup=False)
    code = exit_code_of(checks)
    if as_json:
        listed = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"finds_races": code is ExitCode.CLEAN, "exit_code": code, "checks": listed}, indent=1))
    else:
        problems = sum(check.status is Status.PROBLEM for check in checks)
        verdict = f"it cannot be relied on to find races: {problems} to mend" if problems else "it can find races"
        console.print(f"\nThis machine: {verdict}.", soft_wrap=True, markup=False)
    raise typer.Exit(int(code))


def canary(
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:N or sim")] = "auto",
    hold: Annotated[str | None, typer.Option(help="how to hold launches on a real device: sleep or gate")] = None,
    seed: Annotated[int, typer.Option(help="of the plans that hold several launches")] = 0,
    as_json: Json = False,
) -> None:
    """Look for planted races, and fail unless both oracles find each of them and neither sees one where there is none.

    Exits with 1 then; with 6 if no hold took effect.
    """
    from harness.backends import hardware_queues, hidden_races, module_loading, visible_devices
    from harness.backends.select import is_rocm, resolve
    from harness.doctor.canary import exit_code_of, hunt
    from harness.perturb.hold import DEFAULT_KIND, require_kind

    hardware_queues.use_all(os.environ)
    if hold == "gate":
        module_loading.load_at_start(os.environ)
    visible_devices.put_first(device)
    name = resolve(device)
    hidden_races.refuse(os.environ, name)
    if hold is not None:
        require_kind(hold, name, is_rocm())

    def announce(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    findings = hunt(name, hold=hold or DEFAULT_KIND, seed=seed, announce=announce)
    code = exit_code_of(findings)
    if as_json:
        races = [
            {
                "missing": finding.name,
                "oracles": finding.oracles,
                "plan": finding.plan,
                "alarm": finding.alarm is not None,
                "problem": finding.problem,
            }
            for finding in findings
        ]
        print(json.dumps({"device": name, "exit_code": code, "races": races}, indent=1))
        raise typer.Exit(int(code))
    console = Console(highlight=False)
    for finding in findings:
        found = f"seen by {' and '.join(finding.oracles)} under {finding.plan}"
        _say(console, "problem" if finding.problem else "ok", f"without {finding.name}: {finding.problem or found}")
    good = sum(finding.problem is None for finding in findings)
    console.print(
        f"{good} of {len(findings)} planted races found on {name}, and none where there is none.", soft_wrap=True
    )
    raise typer.Exit(int(code))


def _say(console: Console, status: str, text: str) -> None:
    console.print(Text.assemble((f"{status:<8} ", _STYLES[status]), text), soft_wrap=True)
