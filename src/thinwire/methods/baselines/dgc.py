"""DGC: top-k of a momentum that every rank keeps for itself (Deep Gradient Compression, Lin et al., ICLR 2018)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Momentum
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import CONSERVES, Card, Density, Promise
from thinwire.core.run import Holder, Run, Step
from thinwire.core.selection import keep_dense
from thinwire.methods.baselines.topk import TopK
from thinwire.methods.parts.feedback import GRADIENTS, Gradients, Updates


@dataclass
class DGC(TopK):
    """Top-k for SGD without momentum: the method keeps the momentum of what waits (arXiv 1712.01887).

    For each tensor, on rank n: u = m u + g_n; v = v + u (arXiv 1712.01887, eq. 7); send the k largest |v|; at sent
    values u = v = 0 (section 3.3). ``momentum=0`` is ``topk``. The dense ``start`` replaces the paper's warm-up, and
    there is no local clipping: clip the mean with ``wire.clip_grad_norm_``.

    Args:
        momentum: m, from 0 to below 1; higher => a value that waits grows faster. What the optimizer receives is a
            momentum, about g / (1 - m). So an optimizer with moments of its own (AdamW) counts it twice.
    """

    name: ClassVar[str] = "dgc"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    OPTIMIZER: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.SGD
    ABSENT: ClassVar[Mapping[str, str]] = {"feedback": "its momentum keeps what is not sent; topk has this knob"}

    feedback: Gradients | Updates = GRADIENTS
    density: Density = 0.001
    momentum: Momentum = 0.9

    def describe(self) -> Card:
        promise = CONSERVES
        if self.momentum:
            lost = "where a value is sent, its momentum is dropped: momentum=0 has none to drop"
            promise = Promise("lossy", lost, {"residual": 1.0, "velocity": self.momentum})
        return replace(super().describe(), promise=promise, adds_up=False)

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._refuse_momentum(run.holders)

    def before_step(self, step: Step) -> None:
        super().before_step(step)
        self._refuse_momentum(step.holders)  # which schedules change

    def _refuse_momentum(self, holders: Mapping[str, Holder]) -> None:
        for name, (optimizer, group) in holders.items() if self.momentum else ():
            if group.get("momentum") and keep_dense(self, self.run.parameters[name]) is None:
                raise ThinwireError(
                    f"dgc keeps a momentum, and so does {type(optimizer).__name__} of {name} (momentum="
                    f"{group['momentum']:g}): take SGD with momentum=0 (in OneCycleLR cycle_momentum=False), or "
                    "dgc(momentum=0)"
                )

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        old, velocity = self.state.read("velocity", bucket), self.state.write("velocity", bucket)
        velocity.copy_(old).mul_(self.momentum).add_(bucket.rows)  # eq. 7: u = m u + g_n
        bucket.rows.copy_(velocity)
        super().compress(bucket, exchange)  # eq. 7: v = v + u; v of what was not sent
        velocity.mul_(self.state.write("residual", bucket) != 0)  # sec. 3.3: 0 where v was sent (or is 0)
