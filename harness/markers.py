"""What the markers of a case say: that it is a control, or that it fails since PyTorch is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from harness.campaign.case import Control
from harness.errors import SidestreamError, UsageError

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
    reason = marker.args[0] if marker.args else marker.kwargs.get("reason")
    aim = marker.kwargs.get("aim")
    if not reason or not aim:
        raise UsageError(f"{item.nodeid}: write {_CONTROL}.")
    return Control(reason, aim)


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
    """What the marker ``defect`` says of a case.

    Raises:
        UsageError: the marker lacks something, or its versions are none.
    """
    marker = item.get_closest_marker("defect")
    if marker is None:
        return None
    given = {**({"report": marker.args[0]} if marker.args else {}), **marker.kwargs}
    aim, raises, devices = given.get("aim"), given.get("raises"), given.get("devices")
    if (
        set(given) not in ({"report", "torch", "devices", how} for how in ("aim", "raises"))
        or not all(isinstance(given[name], str) and given[name] for name in ("report", "torch"))
        or (isinstance(raises, type) and issubclass(SidestreamError, raises))  # which would hide what the harness finds
        or not ((isinstance(aim, str) and aim) or (isinstance(raises, type) and issubclass(raises, Exception)))
        or not isinstance(devices, tuple)
        or not devices
    ):
        raise UsageError(f"{item.nodeid}: write {_DEFECT}.")
    try:
        versions = SpecifierSet(given["torch"])
    except InvalidSpecifier:
        raise UsageError(f"{item.nodeid}: {given['torch']!r} names no versions of torch: write {_DEFECT}.") from None
    return Defect(given["report"], aim, versions, devices, raises)


def control_of(item: pytest.Item, torch_version: str, device: str) -> Control | None:
    """Why a case must be seen to race here: a control, or a defect of PyTorch where that is present; else None.

    Raises:
        UsageError: its markers are incomplete, or contradict each other.
    """
    control, defect = control_marker(item), defect_marker(item)
    if control is not None and defect is not None:
        raise UsageError(
            f"{item.nodeid} is both a control and a defect: a case is unsafe by its contract, or it is not."
        )
    if defect is None or defect.aim is None or not defect.affects(torch_version, device):
        return control
    return Control(defect.report, defect.aim, defect=True)


def expect_defect_to_raise(item: pytest.Item, torch_version: str, device: str) -> None:
    """Let pytest expect that a case raises, and fail if it does not, where a defect of PyTorch makes it.

    Raises:
        UsageError: its marker is incomplete.
    """
    defect = defect_marker(item)
    if defect is not None and defect.raises is not None and defect.affects(torch_version, device):
        reason = f"a known defect of PyTorch, described in {defect.report}; if this passes: fixed upstream?"
        item.add_marker(pytest.mark.xfail(raises=defect.raises, reason=reason, strict=True))
