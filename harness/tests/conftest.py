"""What the harness's own tests have in common: none may hang, and none takes more than its share of the cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.campaign.options import Options
from harness.campaign.session import Session
from harness.perturb.hold import HoldLength

TIMEOUT_S = 300
_HOLD_MS = 30.0
"""On a GPU, of holds that nobody has fitted to a case."""
_HERE = Path(__file__).parent

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Guards each of these tests with pytest-timeout; repetitions of cases have their own watchdog."""
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="module")
def tapped_session(pytestconfig: pytest.Config) -> Iterator[Session]:
    """A session whose synchronizations are seen: on the simulator, or with ``--device cuda`` on a GPU."""
    session = Session(Options(device="cuda" if pytestconfig.option.device.startswith("cuda") else "sim", twins=True))
    session.set_hold(HoldLength(_HOLD_MS, fixed=True))
    yield session
    session.close()
    if session.simulated:
        from harness.tests.simulator_support import registered

        registered()  # the other tests' ignored prefixes
