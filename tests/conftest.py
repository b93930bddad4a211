"""Time limits, and nothing else: see ``patience.py``."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from patience import PATIENCE
from thinwire.lab import cluster
from thinwire.testing import Threads

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# The library's own limits, where tests meet them.
cluster.LIMIT_S *= PATIENCE
Threads.__init__.__defaults__ = (60 * PATIENCE,)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = config.getoption("timeout")
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark else float(config.getini("timeout") if given is None else given)
        item.add_marker(pytest.mark.timeout(seconds * PATIENCE), append=False)
