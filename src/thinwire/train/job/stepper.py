"""The optimizer steps of one rank of a run: its passes over the text, and what they move."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.core.safety import Safety
from thinwire.train.config import Config
from thinwire.train.data.windows import IGNORED
from thinwire.train.job.setup import Inputs, Ranks, set_rate
from thinwire.train.model.decoder import Decoder
from thinwire.wire import compress


class Stepper:
    """Takes the optimizer steps of a run, once ``model``, ``optimizers`` and ``wire`` are there.

    Attributes:
        net: the model without DDP's wrapper. model: as the engine has it. runner: what computes it.
        step: optimizer steps that are done.
        sequences: sequences of the shuffled text that all ranks together have trained on.
        seconds: of the last step: until its data were there, until the host had issued the passes, the optimizers'.
    """

    model: Any
    runner: Any
    wire: Any
    optimizers: tuple[torch.optim.Optimizer, ...]
    seconds: tuple[float, float, float]

    def __init__(self, config: Config, ranks: Ranks, inputs: Inputs) -> None:
        self.config, self.ranks, self.inputs = config, ranks, inputs
        torch.manual_seed(config.seed)
        net = inputs.pretrained or Decoder(config.shape(inputs.tokenizer.vocabulary))
        self.net: Any = net.to(ranks.device).train()  # transformers loads models in eval mode, without dropout
        self.step = self.sequences = 0

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number among those that share the text of a step, and how many they are."""
        return self.ranks.comm.rank, self.ranks.comm.size

    @property
    def sequences_per_step(self) -> int:
        return self.place[1] * self.config.batch_size * self.config.accumulate

    def cast(self) -> torch.autocast:
        """Return the context in which the model computes: autocast to bf16, or none, as FSDP2 casts by itself."""
        casts = self.config.engine == "ddp" and self.ranks.computes_in_bf16(self.config)
        return torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=casts)

    def exchange_with(
        self, method: str, *, two_level: bool | None, intra: str | None, check_every: int | None = None
    ) -> None:  # fmt: skip
        """Exchange the gradients of ``model`` with ``method`` from now on, until ``wire.close()``. Collective."""
        config = self.config
        self.wire = compress(
            self.model, self.optimizers, method, two_level=two_level, intra=intra, steps=config.steps, seed=config.seed,
            # The trainer counts skipped steps itself, together with losses that are not finite.
            safety=Safety(guard=config.guard, max_skipped=None, check_every=check_every),
        )  # fmt: skip
        self.runner = torch.compile(self.model) if config.compile else self.model

    def _take_step(self, *, apart: bool = False) -> tuple[Tensor, Tensor]:
        """Take one optimizer step; return this rank's loss, (1,) fp32, and the gradients' norm.

        ``apart``: wait for the device before and after the optimizers, so that their time can be told.
        """
        device, began = self.ranks.device, time.perf_counter()
        set_rate(self.optimizers, self.config.learning_rate(self.step))
        loss, loading = self._accumulate_gradients()
        issuing = time.perf_counter() - began
        norm = self.wire.clip_grad_norm_(self.config.clip or math.inf)
        if apart:
            devices.wait(device)
        began = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        if apart:
            devices.wait(device)
        self.seconds = loading, issuing, time.perf_counter() - began
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _accumulate_gradients(self) -> tuple[Tensor, float]:
        """Run forward and backward passes over this rank's micro-batches; return the loss, and seconds of loading."""
        config, device, windows = self.config, self.ranks.device, self.inputs.train
        rank, size = self.place
        loss, loading = torch.zeros(1, dtype=torch.float32, device=device), 0.0
        learnt = windows.count_learnt(self.sequences, self.sequences_per_step)
        for micro in range(config.accumulate):
            began, first = time.perf_counter(), self.sequences + rank * config.batch_size
            inputs, targets = windows.batch(first, config.batch_size)
            share = int((targets != IGNORED).sum()) * self.sequences_per_step / (learnt * config.batch_size)
            inputs, targets = inputs.to(device), targets.to(device)
            loading += time.perf_counter() - began
            if self.inputs.pretrained:  # its dropout, if any, draws by the place in the text alone
                torch.manual_seed(config.seed * 1_000_003 + first)
            self.sequences += size * config.batch_size
            with self.wire.accumulate(last=micro == config.accumulate - 1):
                with self.cast():
                    micro_loss = self.runner(inputs, targets) * share / config.accumulate
                micro_loss.backward()
            loss += micro_loss.detach()
        return loss, loading
