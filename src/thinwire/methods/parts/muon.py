"""Muon's direction: a momentum, with all of its singular values made about 1 (Jordan et al., 2024).

    M = mu M + g;  u = lr 0.2 sqrt(max(rows, columns)) O(g + mu M)          mu = 0.95, Nesterov's

O(X) is near U V^T of X = U S V^T. It starts from X / |X| and sets X = a X + (b A + c A^2) X with A = X X^T five times:
a Newton-Schulz iteration whose coefficients bring singular values between 0.7 and 1.2 soon, rather than to 1 exactly
(kellerjordan.github.io/posts/muon). The factor gives a step the root mean square of Adam's, so that lr and decay are
AdamW's (Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, eq. 4).

g and M are the rank's own. The mean of the ranks' orthogonalised steps is shorter than the step that Muon makes of the
mean gradient, the more so the less alike the ranks' gradients are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NESTEROV = 0.95
"""mu."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c."""
ITERATIONS = 5
SCALE = 0.2
"""Root mean square of a step at lr 1."""


def muon(values: Tensor, momentum: Tensor, momentum_out: Tensor, shape: tuple[int, ...], span: int, lr: float) -> None:
    """Replace g in ``values`` by u, and write M' to ``momentum_out``; ``momentum`` M is zeros at first.

    All are (R, w): a matrix of ``shape`` in rows of ``span`` values and padding.
    """
    numel, flat = math.prod(shape), values[:, :span].reshape(-1)
    torch.add(values, momentum, alpha=NESTEROV, out=momentum_out)
    ahead = torch.add(flat, momentum_out[:, :span].reshape(-1), alpha=NESTEROV)
    step = orthogonal(ahead[:numel].view(shape)).mul_(lr * SCALE * math.sqrt(max(shape)))
    values.zero_()
    values[:, :span].copy_(torch.nn.functional.pad(step.view(-1), (0, len(flat) - numel)).view(len(values), span))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return O(``matrix``), (rows, columns); zeros for zeros."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / torch.linalg.matrix_norm(x).clamp_(min=torch.finfo(torch.float32).tiny)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T.contiguous()
