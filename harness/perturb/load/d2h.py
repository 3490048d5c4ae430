"""The load ``d2h``: keeps the way to the host busy."""

from __future__ import annotations

from harness.perturb.load.copies import Copies


class Downloads(Copies):
    """Copies to the host."""

    to_device = False
