"""What an operator touches in memory: C++ that the simulator and the tap compile into their extensions alike."""

from __future__ import annotations

from pathlib import Path

SOURCES: list[Path] = sorted(Path(__file__).parent.glob("*.cpp"))
