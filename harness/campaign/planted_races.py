"""Planted races: bodies with one synchronization too few, each beside its repaired form.

What the caller owes is missing in the code; what the autograd engine owes, the tap leaves out. They are what a run must
find before its silence about other races means anything (``harness/doctor/canary.py``), and are no part of the suite:
that says what must hold, and these say nothing about PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness.campaign.lab import ELEMENTS, Lab


def _full(lab: Lab, value: float, **options: Any) -> torch.Tensor:
    return torch.full((ELEMENTS,), value, device=lab.device, **options)


def _seed(lab: Lab, *, waits: bool) -> None:
    leaf, product = lab.product(2.0, 3.0)
    seed = lab.poisoned(product)
    with lab.stream("fill") as fill:
        seed.fill_(5.0)
    with lab.stream("ambient") as ambient:
        if waits:
            ambient.wait_stream(fill)
        product.backward(seed)
        lab.observe(leaf.grad, 15.0)


def _reuse(lab: Lab, *, records: bool) -> None:
    owner, user = lab.stream("owner"), lab.stream("user")
    with owner:
        tensor = _full(lab, 2.0)
    user.wait_stream(owner)
    with user:
        result = tensor * 3
    if records:
        tensor.record_stream(user)
    del tensor
    with owner:
        lab.keep(_full(lab, 99.0))  # in the same memory, where nothing keeps that back
    with user:
        lab.observe(result, 6.0)


def _chain(lab: Lab) -> None:
    """A gradient goes from the ambient stream through nodes of two others, and is used on the ambient stream."""
    with lab.preparing():
        leaf = _full(lab, 2.0, requires_grad=True)
        with lab.stream("first"):
            tripled = leaf * 3
        with lab.stream("second"):
            product = tripled * 4
        with lab.stream("ambient"):
            seed = _full(lab, 1.0)
    lab.keep((leaf, tripled, product, seed))
    with lab.stream("ambient"):
        product.backward(seed)
        lab.observe(leaf.grad, 12.0)


@dataclass(frozen=True, slots=True)
class PlantedRace:
    """A race, and the same without it."""

    name: str
    """What is missing."""
    repaired: Callable[[Lab], None]
    racy: Callable[[Lab], None] | None = None
    """The body with the race in its code; None where the tap leaves out what the engine does in ``repaired``."""
    left_out: tuple[str, str] | None = None
    """Kind and stream of the engine's synchronization that is left out."""


PLANTED = (
    PlantedRace("a wait of the caller's", lambda lab: _seed(lab, waits=True), racy=lambda lab: _seed(lab, waits=False)),
    PlantedRace(
        "a record_stream of the caller's",
        lambda lab: _reuse(lab, records=True),
        racy=lambda lab: _reuse(lab, records=False),
    ),
    PlantedRace("the engine's wait before a node", _chain, left_out=("wait", "first")),
    PlantedRace("the engine's wait at the end of backward", _chain, left_out=("wait", "ambient")),
    PlantedRace("the engine's record_stream of a gradient", _chain, left_out=("record_stream", "first")),
)
