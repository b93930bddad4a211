"""Spectra of gradients, and of the Hessian of a model's loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def of_gradient(gradient: Tensor) -> Tensor:
    """Return the eigenvalues of G G^T, the largest first, of ``gradient`` (rows, columns)."""
    return torch.linalg.svdvals(gradient.double()).square()


def effective_rank(values: Tensor) -> float:
    """Return (sum of eigenvalues)^2 / sum of their squares: k for k equal ones."""
    return float(values.sum().square() / values.square().sum())


def density(model: nn.Module, batch: tuple[Tensor, Tensor], steps: int) -> tuple[list[float], list[float]]:
    """Return places and weights of the Hessian's eigenvalues, by ``steps`` steps of Lanczos from a random vector.

    The weights sum to 1. A weight is the share of eigenvalues near its place, in the mean over starting vectors.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):  # the only one whose backward pass has a derivative
        loss = model(*batch)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)

        def times(vector: Tensor) -> Tensor:
            product = sum(
                (gradient * part.view_as(gradient)).sum()
                for gradient, part in zip(gradients, vector.split([p.numel() for p in parameters]), strict=True)
            )
            found = torch.autograd.grad(product, parameters, retain_graph=True)
            return torch.cat([part.reshape(-1) for part in found])

        size = sum(parameter.numel() for parameter in parameters)
        vectors = [torch.nn.functional.normalize(torch.randn(size), dim=0)]
        diagonal, beside = list[float](), list[float]()
        for _ in range(steps):
            image = times(vectors[-1])
            diagonal.append(float(image @ vectors[-1]))
            for vector in vectors:  # orthogonal to all before, which rounding undoes
                image -= (image @ vector) * vector
            beside.append(float(image.norm()))
            vectors.append(image / image.norm())
    triangle = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off = torch.tensor(beside[:-1], dtype=torch.float64)
    triangle += torch.diag(off, 1) + torch.diag(off, -1)
    places, frames = torch.linalg.eigh(triangle)
    return places.tolist(), frames[0].square().tolist()
