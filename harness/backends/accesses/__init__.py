"""What an operator, or the host itself, touches in memory: what the simulator and the tap have in common.

The C++ is compiled into the extensions of both.
"""

from __future__ import annotations

from pathlib import Path

SOURCES: list[Path] = sorted(Path(__file__).parent.glob("*.cpp"))
