"""A step as a run plays it, on tensors without storage: guard, outlier clip, clipping, the optimizers' own steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from thinwire.core.bucket import Piece
from thinwire.core.fingerprint import WeightWatch
from thinwire.core.outliers import STEP, OutlierClip
from thinwire.core.road import Send, Stage
from thinwire.network.comm import Comm
from thinwire.network.guard import Guard
from thinwire.plan.dry_run import Playback

CLIP = 1.0
"""The norm to which gradients are clipped."""


class WholeStage(Stage):
    """A stage that guards and clips as ``compress()`` makes it, which a dry run leaves out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.guard, self._inside = Guard([]), False
        parameters, card = self.method.run.parameters, self.method.card
        if card.keeps_state and card.alone_from is None and len(self.dense) < len(parameters):
            leaves = None if card.promise.of == "gradients" else STEP
            self.bound = OutlierClip(10.0, {of.name: of.local for of in parameters.values()}, leaves)

    def carry(
        self,
        flat: Tensor,
        pieces: tuple[Piece, ...],
        out: Tensor,
        send: Send | None = None,
        bound: OutlierClip | None = None,
    ) -> None:
        if self._inside or send is not None:
            super().carry(flat, pieces, out, send, bound)
            return
        self._inside = True
        self.reduce(flat, pieces, out)
        self._inside = False


class WholePlayback(Playback):
    """Plays what ``StepLoop`` and ``Wire.clip_grad_norm_`` do, too, and steps the optimizers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, stage=WholeStage)
        dense = self._road.last.dense if self.method.card.keeps_state else self.weights
        watched = [weight for name, weight in self.weights.items() if name not in dense]
        self._weight_watch = WeightWatch(self.method.name, watched, lambda: None)
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.Adam):  # what CUDA users take
                for group in optimizer.param_groups:
                    group["fused"] = True
                for state in optimizer.state.values():
                    state["step"] = torch.empty((), device=self._device)

    def exchange(self, number: int) -> dict[str, float]:
        self._clipped = False
        self._weight_watch.look(alone=False)
        return super().exchange(number)

    def agree(self, comms: Iterable[Comm]) -> None:
        """Clip once the exchange is over, and agree; later, agree for the method."""
        guard = self._road.last.guard
        if not self._clipped:
            self._clipped = True
            for name, weight in self.weights.items():
                weight.grad = self.gradients[name]
            clip = self._clip()
            guard.observe_all(self.gradients.values() if clip is None else clip)
        for stage in self._road.stages[:-1]:  # in a run they share one guard
            guard._residues += stage.guard._residues
            stage.guard.forget()
        guard.agree(self._device, comms=[self._comm(comm) for comm in comms])

    def _clip(self) -> tuple[Tensor, Tensor] | None:
        """Clip what is no step; return norm and factor, if they are of all gradients."""
        step_maker = self.method.card.step_maker
        steps, power = ((), None) if step_maker is None else (set(step_maker.names), step_maker.power())
        clipped = [weight for name, weight in self.weights.items() if name not in steps]
        norms = [get_total_norm([weight.grad for weight in clipped if weight.grad is not None])] if clipped else []
        norms += [] if power is None else [power.sqrt()]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([weight.grad for weight in clipped], factor)
        return None if steps else (norm, factor)

    def own_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def step(self, number: int) -> None:
        for stage in self._road.stages:
            if stage.bound is not None:
                stage.bound.commit()
        super().step(number)
        self._weight_watch.step_is_over()
