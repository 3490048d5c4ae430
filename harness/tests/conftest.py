"""What the harness's own tests have in common: none may hang, and none takes more than its share of the cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

TIMEOUT_S = 300
_HERE = Path(__file__).parent

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Guards each of these tests with pytest-timeout; repetitions of cases have their own watchdog."""
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
