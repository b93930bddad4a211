"""A trial takes a few optimizer steps of a run with one method, times them, and leaves no files."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from thinwire.base import device as devices
from thinwire.core.safety import Safety
from thinwire.train.config import Config
from thinwire.train.job.setup import Inputs, Ranks, make_optimizers, wrap
from thinwire.train.model.decoder import Decoder
from thinwire.wire import compress


class StepTimes(NamedTuple):
    """Seconds of a step: whole, until data were there, until the host had issued the passes, and the optimizer's."""

    step: float
    loading: float
    issuing: float
    optimizer: float


class Trial:
    """The run of ``config`` on one rank, with one method at a time. Its steps are those of ``thinwire train``."""

    def __init__(self, config: Config, ranks: Ranks, inputs: Inputs) -> None:
        self.bf16 = config.dtype == "bf16" or (config.dtype == "auto" and ranks.device.type == "cuda")
        self.config, self.ranks, self.inputs = config, ranks, inputs
        self._autocasts = self.bf16 and config.engine == "ddp"
        torch.manual_seed(config.seed)
        self.net: Any = inputs.pretrained or Decoder(config.shape(inputs.tokenizer.vocabulary))
        self.model = wrap(self.net.to(ranks.device), config, ranks, self.bf16, alike=True)
        self.optimizers = make_optimizers(self.model, config)
        self._sequences = 0

    def begin(self, method: str) -> None:
        """Exchange gradients with ``method`` from now on. Collective."""
        safety = Safety(guard=self.config.guard, max_skipped=None)
        two_level, intra = (None, None) if method == "none" else (self.config.two_level, self.config.intra)
        self.wire = compress(
            self.model, self.optimizers, method, two_level=two_level, intra=intra, steps=self.config.steps,
            seed=self.config.seed, safety=safety,
        )  # fmt: skip

    def end(self) -> None:
        self.wire.close()

    def step(self, *, apart: bool = False) -> StepTimes:
        """Take one step. ``apart``: wait for the device before the optimizer, so that its time can be told. Collective.

        The last exchange, of losses, waits for the slowest rank, as in ``thinwire train``.
        """
        config, ranks, device, wire = self.config, self.ranks, self.ranks.device, self.wire
        began, loading = time.perf_counter(), 0.0
        loss = torch.zeros(1, device=device)
        for micro in range(config.accumulate):
            asked = time.perf_counter()
            batch = self.inputs.train.batch(self._sequences + ranks.comm.rank * config.batch_size, config.batch_size)
            self._sequences += ranks.comm.size * config.batch_size
            inputs, targets = (values.to(device) for values in batch)
            loading += time.perf_counter() - asked
            with wire.accumulate(last=micro == config.accumulate - 1):
                with torch.autocast(device.type, torch.bfloat16, enabled=self._autocasts):
                    micro_loss = self.model(inputs, targets) / config.accumulate
                micro_loss.backward()
            loss += micro_loss.detach()
        issued = time.perf_counter()
        wire.clip_grad_norm_(config.clip or math.inf)
        if apart:
            devices.wait(device)
        stepped = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        if apart:
            devices.wait(device)
        seconds = time.perf_counter() - stepped
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        ranks.comm.all_reduce(loss, "mean").tolist()
        return StepTimes(time.perf_counter() - began, loading, issued - began, seconds)


def slowest(ranks: Ranks, steps: Sequence[StepTimes]) -> list[StepTimes]:
    """Return the longest times of any rank for each step; of the optimizer, which agrees with others, the shortest."""
    if not steps:
        return []
    turned = [step._replace(optimizer=-step.optimizer) for step in steps]
    times = torch.tensor(turned, dtype=torch.float64, device="cpu")
    rows = ranks.comm.all_reduce(times.to(ranks.device), "max").tolist()
    return [StepTimes(step, loading, issuing, -optimizer) for step, loading, issuing, optimizer in rows]
