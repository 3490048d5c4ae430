"""What the markers of a case say: that it is a control, or that it fails since PyTorch is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from harness.campaign.case import Control
from harness.errors import SidestreamError, UsageError

KINDS = ("cuda", "sim")
"""The kinds of device, as ``--device`` names them."""
_CONTROL = '@pytest.mark.control("why it is unsafe", aim="the racing stream")'
_DEFECT = (
    '@pytest.mark.defect("docs/defects/report.md", aim="the racing stream", torch=">=2.7,<2.16", devices=("cuda", '
    '"sim")), or raises=TheError instead of aim'
)


@dataclass(frozen=True, slots=True)
class Defect:
    """A case that is safe by its contract and races or raises all the same, since PyTorch is wrong."""

    report: str
    """The file that describes the defect."""
    aim: str | None
    """The stream whose launches are the racing accesses; None if it raises."""
    torch: SpecifierSet
    """The versions that have it."""
    devices: tuple[str, ...]
    """The kinds of device that have it: ``cuda``, ``sim``."""
    raises: type[Exception] | None = None
    """What its body ends with; None if it races."""

    def affects(self, torch_version: str, device: str) -> bool:
        """Whether it shows in this version, on the device that ``--device`` names."""
        return device.partition(":")[0] in self.devices and self.torch.contains(torch_version, prereleases=True)


def control_marker(item: pytest.Item) -> Control | None:
    """What the marker ``control`` says of a case.

    Raises:
        UsageError: the marker lacks its sentence or its aim.
    """
    marker = item.get_closest_marker("control")
    if marker is None:
        return None
    given = _given(marker, "reason")
    missing = [name for name in ("reason", "aim") if not _is_text(given.get(name))]
    if missing or set(given) != {"reason", "aim"}:
        problem = "needs no more than reason and aim" if not missing else f"lacks a text as {' and '.join(missing)}"
        raise UsageError(f"{item.nodeid}: the marker control {problem}: write {_CONTROL}.")
    return Control(given["reason"], given["aim"])


def devices_needed(item: pytest.Item) -> int:
    """How many devices a case needs, by its marker ``devices``; 1 without one.

    Raises:
        UsageError: the marker gives no number from 1 on.
    """
    marker = item.get_closest_marker("devices")
    if marker is None:
        return 1
    given = [*marker.args, *marker.kwargs.values()]
    if len(given) != 1 or set(marker.kwargs) > {"count"} or type(given[0]) is not int or given[0] < 1:
        raise UsageError(f"{item.nodeid}: write @pytest.mark.devices(2), how many devices it needs.")
    return given[0]


def contract_sources(item: pytest.Item) -> list[str]:
    """Where a case's promises come from, by its markers ``contract``.

    Raises:
        UsageError: one names no source.
    """
    sources = []
    for marker in item.iter_markers("contract"):
        given = [*marker.args, *marker.kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].strip():
            raise UsageError(f'{item.nodeid}: write @pytest.mark.contract("the source of the promise").')
        sources.append(given[0])
    return list(dict.fromkeys(sources))


def defect_marker(item: pytest.Item) -> Defect | None:
    """What the marker ``defect`` says of a case; its report is named as seen from pytest's root.

    Raises:
        UsageError: the marker lacks something, or has nonsense; or its report is not there.
    """
    marker = item.get_closest_marker("defect")
    if marker is None:
        return None
    given = _given(marker, "report")
    problem = _defect_problem(given, item.config.rootpath)
    if problem is not None:
        raise UsageError(f"{item.nodeid}: the marker defect {problem}: write {_DEFECT}.")
    return Defect(
        given["report"], given.get("aim"), SpecifierSet(given["torch"]), given["devices"], given.get("raises")
    )


def _given(marker: pytest.Mark, first: str) -> dict[str, Any]:
    """What a marker was given by name; its positional arguments after the first one have none and are kept as such."""
    names = (first, *map(str, range(1, len(marker.args))))
    return {**dict(zip(names, marker.args, strict=False)), **marker.kwargs}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _defect_problem(given: Mapping[str, Any], root: Path) -> str | None:
    """What is wrong with a marker ``defect``; None if nothing is."""
    known = ("report", "aim", "torch", "devices", "raises")
    missing = [name for name in ("report", "torch", "devices") if name not in given]
    if not {"aim", "raises"} & given.keys():
        missing.append("aim (or raises)")
    if missing:
        return f"lacks {', '.join(missing)}"
    if unknown := [name for name in given if name not in known]:
        return f"takes nothing beside {', '.join(known)}, and was given {', '.join(unknown)}"
    if {"aim", "raises"} <= given.keys():
        return "takes aim or raises, and was given both"
    not_texts = [name for name in ("report", "aim", "torch") if name in given and not _is_text(given[name])]
    if not_texts:
        return f"takes a text as {' and '.join(not_texts)}"
    if "raises" in given and not _is_raisable(given["raises"]):
        return "takes as raises an exception of PyTorch's or your own, narrower than Exception"
    devices = given["devices"]
    if not isinstance(devices, tuple) or not devices or any(kind not in KINDS for kind in devices):
        return f"takes as devices a tuple of {' and '.join(map(repr, KINDS))}, and was given {devices!r}"
    try:
        SpecifierSet(given["torch"])
    except InvalidSpecifier:
        return f"takes versions as torch, which {given['torch']!r} are not"
    if not (root / given["report"]).is_file():
        return f"names {given['report']} as its report, and there is no such file in {root}"
    return None


def _is_raisable(given: object) -> bool:
    # What is so wide that it takes our own errors in would hide what the harness finds.
    return isinstance(given, type) and issubclass(given, Exception) and not issubclass(SidestreamError, given)


def control_of(item: pytest.Item, torch_version: str, device: str) -> Control | None:
    """Why a case must be seen to race here: a control, or a defect of PyTorch where that is present; else None.

    Raises:
        UsageError: its markers are incomplete, or contradict each other.
    """
    control, defect = _require_one_kind(item)
    if defect is None or defect.aim is None or not defect.affects(torch_version, device):
        return control
    return Control(defect.report, defect.aim, defect=True)


def check(item: pytest.Item) -> None:
    """Refuse a case whose markers make no sense, wherever it is to run.

    Raises:
        UsageError: they do not.
    """
    devices_needed(item)
    contract_sources(item)
    _require_one_kind(item)


def _require_one_kind(item: pytest.Item) -> tuple[Control | None, Defect | None]:
    control, defect = control_marker(item), defect_marker(item)
    if control is not None and defect is not None:
        raise UsageError(
            f"{item.nodeid} is both a control and a defect: a case is unsafe by its contract, or it is not."
        )
    return control, defect


def expect_defect_to_raise(item: pytest.Item, torch_version: str, device: str) -> None:
    """Let pytest expect that a case raises, and fail if it does not, where a defect of PyTorch makes it.

    Raises:
        UsageError: its marker is incomplete.
    """
    defect = defect_marker(item)
    if defect is not None and defect.raises is not None and defect.affects(torch_version, device):
        reason = f"a known defect of PyTorch, described in {defect.report}; if this passes: fixed upstream?"
        item.add_marker(pytest.mark.xfail(raises=defect.raises, reason=reason, strict=True))
