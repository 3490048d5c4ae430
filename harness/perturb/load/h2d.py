"""The load ``h2d``: keeps the way to the device busy."""

from __future__ import annotations

from harness.perturb.load.copies import Copies


class Uploads(Copies):
    """Copies to the device."""

    to_device = True
