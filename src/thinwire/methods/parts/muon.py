"""Muon's direction: a momentum, with all of its singular values made about 1 (Jordan et al., 2024).

    M = mu M + (1 - mu) g;  u = lr s O((1 - mu) g + mu M)        Nesterov's; without: u = lr s O(M)

O(X) is near U V^T of X = U S V^T. It starts from X / |X| and sets X = a X + (b A + c A^2) X with A = X X^T five times:
a Newton-Schulz iteration whose coefficients bring singular values between 0.7 and 1.2 soon, rather than to 1 exactly
(kellerjordan.github.io/posts/muon). lr, mu, the coefficients, their number, eps and s are those of the user's
``torch.optim.Muon``: s is sqrt(max(1, rows / columns)), or with adjust_lr_fn="match_rms_adamw" 0.2 sqrt(max(rows,
columns)), which gives a step the root mean square of Adam's (Liu et al., arXiv 2502.16982, eq. 4).

torch iterates in bfloat16, this in float32: the steps are the same up to bfloat16's rounding.

g and M are the rank's own. The mean of the ranks' orthogonalised steps is shorter than the step that Muon makes of the
mean gradient, the more so the less alike the ranks' gradients are: so short runs take up to twice the rate
(docs/quality.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.base.errors import ThinwireError
from thinwire.core.exchange import Exchange
from thinwire.core.run import Parameter, Run
from thinwire.methods.parts.own_steps import has_step_of_torch

SCALES: Mapping[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""``adjust_lr_fn`` -> s of a matrix."""


class Orthogonal:
    """Makes the steps of the matrices that the user's ``torch.optim.Muon`` holds.

    A rank needs whole matrices of its own gradient. On DDP and FSDP2 the engine's buffer holds them. On HSDP the
    gradient that travels is the node's mean, of which a rank holds a shard: the momenta of the shards are gathered
    inside the node, in float32, and every rank orthogonalises the whole.

    Attributes:
        names: of the matrices.
    """

    def __init__(self, method: str, run: Run, sent: Iterable[str]) -> None:
        """Find the matrices among the parameters ``sent``.

        Raises:
            ThinwireError: ``method`` cannot step them: a step of the optimizer's own, or a rank holds part of a matrix.
        """
        holders = run.holders
        muon = {name for name, holder in holders.items() if isinstance(holder.optimizer, torch.optim.Muon)}
        self.names = frozenset(muon).intersection(sent)
        for name in sorted(self.names):
            optimizer, group = holders[name]
            if not has_step_of_torch(optimizer):
                raise ThinwireError(
                    f"{method} computes Muon's step of {name} itself, and {type(optimizer).__name__} has a step() of "
                    "its own: pass torch.optim.Muon, or name the parameter in dense="
                )
            if group["adjust_lr_fn"] not in SCALES:
                raise ThinwireError(f"{method} does not know torch.optim.Muon's adjust_lr_fn={group['adjust_lr_fn']!r}")
            if lack := _holds_part(run, run.parameters[name]):
                raise ThinwireError(
                    f"{method}: Muon takes whole matrices, and {lack}: give {name} to torch.optim.AdamW, or name it in "
                    "dense="
                )
        self._run = run

    def take(
        self, name: str, group: Mapping[str, Any], gradients: Tensor, momentum: Tensor, momentum_out: Tensor, span: int
    ) -> None:
        """Replace g in ``gradients`` by u, and write M' to ``momentum_out``; ``momentum`` M is zeros at first.

        All are (R, w): this rank's part of the matrix ``name`` of the optimizer's ``group``, in rows of ``span`` values
        and padding.
        """
        parameter = self._run.parameters[name]
        mu = float(group["momentum"])
        torch.lerp(gradients, momentum, mu, out=momentum_out)
        ahead = momentum_out
        if group["nesterov"]:
            ahead = torch.lerp(gradients, momentum_out, mu)
        flat = ahead[:, :span].reshape(-1)
        inside, count = self._run.inside, parameter.local
        whole = flat if inside is None else _gather(inside, flat[:count])
        rows, columns = parameter.shape
        beyond = len(whole) - parameter.numel  # padding; below 0 when kernels are compiled, on a lone rank's part
        matrix = F.pad(whole, (0, -beyond)).view(rows, columns)
        step = orthogonal(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
        step.mul_(float(group["lr"]) * SCALES[group["adjust_lr_fn"]](rows, columns))
        steps = F.pad(step.reshape(-1), (0, beyond))
        if inside is not None:
            steps = F.pad(steps.view(inside.ranks, count)[inside.rank], (0, len(flat) - count))
        gradients.zero_()
        gradients[:, :span].copy_(steps.view(len(gradients), span))


def _holds_part(run: Run, parameter: Parameter) -> str:
    """Say why the rank cannot have the whole gradient of a matrix; "": it can."""
    if parameter.rank_shape != parameter.shape:
        return f"tensor parallelism splits {parameter.name}"
    placements = getattr(run.weights[parameter.name], "placements", ())
    if any(placement.is_shard() and placement.dim != 0 for placement in placements):
        return f"{parameter.name} is sharded along another dimension than the first"
    if run.chunk is not None or (run.inside is not None and run.exchange.owner):
        return f"on two levels a rank sends a part of {parameter.name} (on HSDP it would be gathered)"
    return ""


def _gather(inside: Exchange, shard: Tensor) -> Tensor:
    """Gather the equal shards (n,) of a matrix from the ranks of the node: (L * n,)."""
    rows = shard.new_empty(inside.ranks, len(shard))
    inside.gather(rows, shard)
    return rows.view(-1)


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float) -> Tensor:
    """Return O(``matrix``), (rows, columns); zeros for zeros."""
    a, b, c = coefficients
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / torch.linalg.matrix_norm(x).clamp_(min=eps)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T.contiguous()
