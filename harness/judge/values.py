"""The value oracle: bit for bit, localised.

A stale read shows as the value that was there before, an early one as poison. Both are exact values of the right shape,
so a tolerance could only hide them; and NaN is compared by its bits, because poison is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from harness.errors import UsageError
from harness.observe.trace import SourceLine

POISON_BYTE = 0xFF
"""Fills memory that nobody has written: NaN in every floating-point format, -1 or the largest value in the integers."""

Found: TypeAlias = Literal["poison", "stale", "other", "shape", "dtype"]

_INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALL_ONES = {1: 0xFF, 2: -1, 4: -1, 8: -1}


@dataclass(frozen=True, slots=True)
class Observation:
    """A value that the case would have used, and what it should have been."""

    label: str
    line: SourceLine | None
    """Where the case observed it."""
    expected: torch.Tensor
    got: torch.Tensor
    stale: Mapping[str, torch.Tensor] | None = None
    """What may have been there before, by name, in the shape and dtype of ``expected``; others are not compared."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A wrong value: where it is first wrong, how much of it, and what was there instead."""

    label: str
    line: SourceLine | None
    found: Found
    """What is at the first wrong element: ``poison`` (never written), ``stale`` (a value from before) or ``other``;
    ``shape`` and ``dtype`` where the tensors cannot be compared element by element."""
    expected: str
    """The right value of the first wrong element; the right shape or dtype."""
    got: str
    index: tuple[int, ...] = ()
    """The first wrong element, in row-major order; empty for a scalar."""
    wrong: int = 0
    """How many elements are wrong."""
    total: int = 0
    alike: int = 0
    """How many of the wrong elements are poison, if the first is; or stale by the same name; else all of them."""
    stale_name: str | None = None

    def __str__(self) -> str:
        where = f"{self.label} ({self.line})" if self.line else self.label
        if self.found in ("shape", "dtype"):
            return f"{where} has the wrong {self.found}: expected {self.expected}, got {self.got}"
        if self.total == 1 and not self.index:
            text = f"{where} is wrong: "
        else:
            verb = "is" if self.wrong == 1 else "are"
            index = ", ".join(map(str, self.index))
            text = f"{where}: {self.wrong} of {self.total} elements {verb} wrong, first at [{index}]: "
        text += f"expected {self.expected}, got {self.got}"
        if self.found == "other":
            return text
        share = "" if self.alike == self.wrong else f" in {self.alike} of the {self.wrong}"
        if self.found == "poison":
            return f"{text}, poison{share}: it was read before it was written"
        return f"{text}, the value of {self.stale_name}{share}: it was read before it was overwritten"


def compare(observation: Observation) -> Mismatch | None:
    """What is wrong with an observed value, or None.

    Tensors on an accelerator are copied to the host first, which synchronizes.

    Raises:
        UsageError: a tensor is not strided (sparse tensors have no bytes of their own to compare).
    """
    expected, got = observation.expected, observation.got
    if expected.dtype != got.dtype:
        return Mismatch(observation.label, observation.line, "dtype", _name(expected.dtype), _name(got.dtype))
    if expected.shape != got.shape:
        return Mismatch(observation.label, observation.line, "shape", str(list(expected.shape)), str(list(got.shape)))
    expected_bits, got_bits = _bits(observation.label, expected), _bits(observation.label, got)
    if torch.equal(expected_bits, got_bits):
        return None
    return _locate(observation, expected_bits, got_bits)


def _locate(observation: Observation, expected_bits: torch.Tensor, got_bits: torch.Tensor) -> Mismatch:
    shape = observation.expected.shape
    differs = _elements(expected_bits != got_bits, shape)
    places = differs.nonzero()
    index = tuple(places[0].tolist())
    got = observation.got.detach().cpu()
    expected = observation.expected.detach().cpu()
    found: Found = "other"
    alike = wrong = len(places)
    stale_name = None

    poison = _elements(got_bits == _ALL_ONES[got_bits.element_size()], shape)
    if expected.is_floating_point() or expected.is_complex():
        poison = _is_nan(got) & ~_is_nan(expected)
    if poison[index]:
        found, alike = "poison", int((poison & differs).sum())
    else:
        for name, value in (observation.stale or {}).items():
            if value.dtype == expected.dtype and value.shape == shape:
                same = ~_elements(_bits(name, value) != got_bits, shape)
                if same[index]:
                    found, alike, stale_name = "stale", int((same & differs).sum()), name
                    break

    right, there = str(expected[index].item()), str(got[index].item())
    if right == there:  # Two different NaN, say.
        right += f" ({_hexadecimal(expected[index])})"
        there += f" ({_hexadecimal(got[index])})"
    total = observation.expected.numel()
    return Mismatch(observation.label, observation.line, found, right, there, index, wrong, total, alike, stale_name)


def _bits(label: str, tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of the same width; complex128 as pairs of them in a further dimension."""
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{label} is a {_name(tensor.layout)} tensor; only strided tensors can be compared bit by bit."
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    width = tensor.element_size()
    if width == 16:
        tensor, width = torch.view_as_real(tensor), 8
    return tensor.view(_INTEGER_OF_WIDTH[width])


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    # The 8-bit formats have no isnan of their own.
    return torch.isnan(tensor if tensor.element_size() > 1 else tensor.float())


def _elements(flags: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Flags an element of ``shape`` if any of its parts is flagged."""
    return flags if flags.shape == shape else flags.any(-1)


def _hexadecimal(element: torch.Tensor) -> str:
    parts = _bits("element", element).reshape(-1)
    digits = 2 * parts.element_size()
    mask = (1 << 4 * digits) - 1
    return " ".join(f"0x{part & mask:0{digits}x}" for part in parts.tolist())


def _name(of_torch: object) -> str:
    return str(of_torch).removeprefix("torch.")
