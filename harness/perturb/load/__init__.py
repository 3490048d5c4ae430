"""Load: work on streams of its own, in the process under test, that competes with the case for the device."""

from __future__ import annotations

from harness.errors import UsageError

DIMENSIONS = {"compute": "matrix multiplications that fill the chip"}
"""The dimensions of load, each with what it does."""


def parse_loads(text: str) -> list[str]:
    """The dimensions that ``--load`` names, separated by commas, each once.

    Raises:
        UsageError: there is no such dimension, or none is named.
    """
    names = list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown or not names:
        what = f"{', '.join(map(repr, unknown))} is unknown" if unknown else "names nothing"
        valid = "; ".join(f"{name} ({effect})" for name, effect in DIMENSIONS.items())
        raise UsageError(f"--load {text!r}: {what}. Dimensions of load: {valid}.")
    return names


def require_real_device(device_type: str) -> None:
    """Refuse a load on the simulator.

    Raises:
        UsageError: the device is simulated.
    """
    if device_type == "sim":
        raise UsageError(
            "--load compute needs a real device: simulated time has nothing to compete for, and the plans already "
            "decide what runs late. Leave --load out, or use --device cuda."
        )
