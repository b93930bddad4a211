"""AdamS: the first moment is its own normalizer (Zhang et al., EMNLP 2025), as SCAPE, section II-C, restates it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire.base.errors import ThinwireError
from thinwire.ops.adams import adams


class AdamS(Optimizer):
    """Adam without a second moment: half of its state, and steadier where gradients arrive late or sparse.

    Step t, for each weight w with gradient g and first moment m:

        v = b2 m^2 + (1-b2) g^2             from the moment *before* this step; v is not kept
        m = b1 m + (1-b1) g
        w = w - lr (m^ / (sqrt(v^) + eps) + decay w),  m^ = m / (1 - b1^t),  v^ = v / (1 - b2^t)

    v and w are l. 19-21 of SCAPE's Alg. 1, which has no bias corrections (m^ = m, v^ = v).

    Without bias correction, a weight whose moment is 0 moves by lr (1-b1)/sqrt(1-b2) whatever its gradient's size:
    0.45 lr at b2 = 0.95, the default for this reason, and 3.2 lr at 0.999.

    Parameters may be DTensors (FSDP2, TP): every rank updates its own shard. The moment has the parameter's dtype and
    placement; ``state_dict`` has torch's form, with ``step`` and ``exp_avg`` for each parameter.

    Args:
        lr: learning rate, 0 or more. betas: (b1, b2), each from 0 up to but not 1. eps: added to the root, 0 or more.
            weight_decay: decoupled, as AdamW's, 0 or more.
        bias_correction: divide by 1 - b^t. False: as SCAPE's Alg. 1 prints it.

    Raises:
        ThinwireError: a knob out of its range; sparse gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
    ) -> None:
        if not float(lr) >= 0:
            raise ThinwireError(f"AdamS: lr must be 0 or more, got {lr}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ThinwireError(f"AdamS: betas are two numbers from 0 up to but not 1, got {betas}")
        if not eps >= 0 or not weight_decay >= 0:
            raise ThinwireError(f"AdamS: eps and weight_decay must be 0 or more, got {eps} and {weight_decay}")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.next_moments: dict[Tensor, Tensor] = {}
        """Parameter -> m after the next step, (numel of this rank's shard,), 0 off a mask, in place of b1 m + (1-b1) g.
        On the mask the gradient must give the same to rounding; if it was clipped since, what it gives is m. A step
        empties the dict."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.next_moments = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            torch.compiler.disable(self._step)(group)  # one kernel for each parameter already; Dynamo cannot trace them
        self.next_moments.clear()
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise ThinwireError("AdamS does not take sparse gradients: use Embedding(sparse=False)")
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["step"] += 1
            t = int(state["step"])
            c1, c2 = (1 - b1**t, 1 - b2**t) if group["bias_correction"] else (1.0, 1.0)
            weight, moment, gradient = (_local(tensor) for tensor in (parameter, state["exp_avg"], parameter.grad))
            w, m, g = (tensor.contiguous().view(-1) for tensor in (weight, moment, gradient))
            adams(
                w, m, g, self.next_moments.get(parameter), lr=float(group["lr"]), beta1=b1, beta2=b2, eps=group["eps"],
                decay=group["weight_decay"], correction1=c1, correction2=c2,
            )  # fmt: skip
            for tensor, updated in ((weight, w), (moment, m)):
                if not tensor.is_contiguous():
                    tensor.copy_(updated.view(tensor.shape))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
