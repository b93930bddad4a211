"""A trial takes a few optimizer steps of a run with one method, times them, and leaves no files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from thinwire.train.config import Config
from thinwire.train.job.setup import Inputs, Ranks, make_optimizers, wrap
from thinwire.train.job.stepper import Stepper


class StepTimes(NamedTuple):
    """Seconds of a step: whole, until data were there, until the host had issued the passes, and the optimizer's."""

    step: float
    loading: float
    issuing: float
    optimizer: float


class Trial(Stepper):
    """The run of ``config`` on one rank, with one method at a time."""

    def __init__(self, config: Config, ranks: Ranks, inputs: Inputs) -> None:
        super().__init__(config, ranks, inputs)
        self.model = wrap(self.net, config, ranks, alike=True)
        self.optimizers = make_optimizers(self.model, config)

    def begin(self, method: str) -> None:
        """Exchange gradients with ``method`` from now on, until ``wire.close()``. Collective."""
        two_level, intra = (None, None) if method == "none" else (self.config.two_level, self.config.intra)
        self.exchange_with(method, two_level=two_level, intra=intra)

    def time_step(self, *, apart: bool = False) -> StepTimes:
        """Take one step. ``apart``: wait for the device before the optimizer, so that its time can be told. Collective.

        The last exchange, of losses, waits for the slowest rank, as in ``thinwire train``.
        """
        began = time.perf_counter()
        loss, _ = self._take_step(apart=apart)
        self.ranks.comm.all_reduce(loss, "mean").tolist()
        return StepTimes(time.perf_counter() - began, *self.seconds)


def slowest(ranks: Ranks, steps: Sequence[StepTimes]) -> list[StepTimes]:
    """Return the longest times of any rank for each step; of the optimizer, which agrees with others, the shortest."""
    if not steps:
        return []
    turned = [step._replace(optimizer=-step.optimizer) for step in steps]
    times = torch.tensor(turned, dtype=torch.float64, device="cpu")
    rows = ranks.comm.all_reduce(times.to(ranks.device), "max").tolist()
    return [StepTimes(step, loading, issuing, -optimizer) for step, loading, issuing, optimizer in rows]
