"""Time limits (see ``patience.py``), and how the processor is shared; nothing else."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from patience import PATIENCE
from thinwire.lab import cluster
from thinwire.testing import Threads

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# For this process and all that it starts: whoever is woken waits until whoever woke it sleeps, as there are more ranks
# than cores. Else a rank's message wakes its peer in its place, while it holds a lock on which gloo's own thread spins:
# most of a small model's step went there, half of it or more in the system.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# The library's own limits, where tests meet them.
cluster.LIMIT_S *= PATIENCE
Threads.__init__.__defaults__ = (60 * PATIENCE,)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = config.getoption("timeout")
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark else float(config.getini("timeout") if given is None else given)
        item.add_marker(pytest.mark.timeout(seconds * PATIENCE), append=False)
