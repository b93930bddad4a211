"""Time limits (see ``patience.py``), how ranks share the processor, and kernels on a fresh checkout; nothing else."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import kernels
from patience import PATIENCE
from thinwire.lab import cluster

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# For this process and all that it starts: whoever is woken waits until whoever woke it sleeps, as there are more ranks
# than cores. Else a rank's message wakes its peer in its place, while it holds a lock on which gloo's own thread spins:
# most of a small model's step went there, half of it or more in the system.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# One thread, as each rank has, however the tests were started: more give products of matrices other bits.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# The library's own limits, where tests meet them.
cluster.LIMIT_S *= PATIENCE

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # "gw0"; "" where there are none, and in the one that starts them
if not WORKER:
    os.environ["THINWIRE_COLD"] = str(int(kernels.are_missing()))  # workers inherit it


def pytest_sessionstart(session: pytest.Session) -> None:
    if WORKER and os.environ["THINWIRE_COLD"] == "1":
        kernels.compile_all(backwards=int(WORKER[2:]) % 2 == 1)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # modules and tests are no garbage: each full collection would look at all of them
    gc.set_threshold(50_000)  # to look for circles took a fifth of some tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = config.getoption("timeout")
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark else float(config.getini("timeout") if given is None else given)
        item.add_marker(pytest.mark.timeout(seconds * PATIENCE), append=False)
