"""What one step may put into a method's state: a spoilt batch must not rule the steps after it.

Dense training forgets a spoilt batch (a loss ten thousand times too large, once): clipping scales its gradient down,
and the next step is an ordinary one. A method that keeps a residual or a momentum takes the gradient up *before* it is
averaged and clipped, and sends it for a hundred steps. So a gradient of a parameter on a rank that is more than
``times`` as large as usual is first scaled down to its usual norm. What that cuts off is lost, on purpose, and counted:
for the rest, sent + kept = input holds as before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire import device as devices
from thinwire.bucket import Piece
from thinwire.errors import ThinwireError

MEMORY = 0.9
"""Of the usual norm: a norm counts for about ten steps."""
COMPOSITIONS = 256
"""Compositions of buffers whose parameters' places are kept. A model of experts can have any number."""


class Bound:
    """Scales gradients that are more than ``times`` as large as usual for their parameter on this rank down to that.

    With r the running mean of a parameter's norms, R the norm of all r together, and s the parameter's share of all
    values, usual is max(r, sqrt(s) R): a parameter whose gradients begin small (behind a layer that starts at zero) may
    grow at once. Where nothing is usual yet, in a parameter's first step, nothing is cut. A norm that is too large
    counts as ``times`` the usual one: if gradients stay as large, that is what is usual after a few steps.

    Parameters that stay dense are bounded too. They would forget by themselves, but one norm clips all: left as it is,
    theirs would shrink what the others send to nothing in that step.

    No host sync, and one pass over the gradients (two on CUDA).
    """

    def __init__(self, times: float, sizes: Mapping[str, int]) -> None:
        """``sizes``: name -> values on this rank, of all trained parameters.

        Raises:
            ThinwireError: ``times`` is not a finite number from 1 on.
        """
        if isinstance(times, bool) or not isinstance(times, int | float) or not 1 <= times < math.inf:
            raise ThinwireError(f"bound is a number of usual norms, 1 or more, or None for no bound, got {times!r}")
        self.times = times
        self._index = {name: i for i, name in enumerate(sorted(sizes))}
        total = max(sum(sizes.values()), 1)
        # On CPU until the first gradients are seen: the model may not be on its device yet.
        shares = [math.sqrt(sizes[name] / total) for name in sorted(sizes)]
        self._shares = torch.tensor(shares, dtype=torch.float32)
        self._usual = torch.zeros(len(sizes), dtype=torch.float32)
        self._cut = torch.zeros(2, dtype=torch.float32)  # how many parameters' gradients, and the norm cut off
        self._next: tuple[Tensor, Tensor] | None = None
        self._places: dict[tuple[Piece, ...], tuple[list[Piece], Tensor]] = {}

    def apply(self, flat: Tensor, pieces: tuple[Piece, ...]) -> None:
        """Scale the parameters in ``flat`` (1-D) down where they exceed their bound.

        Where a norm is not finite nothing is scaled: such a step is the guard's.
        """
        if self._usual.device != flat.device:
            self._shares, self._usual, self._cut = (
                values.to(flat.device) for values in (self._shares, self._usual, self._cut)
            )
        mine, places = self._find(pieces, flat.device)
        if not mine:
            return
        views = [_values(flat, piece) for piece in mine]
        norms = torch.stack(torch._foreach_norm(views)).float()
        if self._next is None:
            self._next = self._usual.clone(), self._cut.clone()
        usual, cut = self._next
        before = self._usual[places]
        size = torch.maximum(before, self._shares[places] * torch.linalg.vector_norm(self._usual))
        over = (norms > self.times * size) & (before > 0) & norms.isfinite()
        factors = torch.where(over, size / norms, 1.0)
        # On CPU a look costs nothing and mostly saves a pass; on a GPU it would wait for the device.
        if devices.streams(flat.device) is not None or bool(over.any()):
            torch._foreach_mul_(views, list(factors.to(flat.dtype).unbind()))
        found = torch.where(over, self.times * size, torch.where(norms.isfinite(), norms, before))
        usual[places] = torch.where(before > 0, MEMORY * before + (1 - MEMORY) * found, found)
        cut += torch.stack([over.sum().float(), torch.where(over, norms * (1 - factors), 0.0).sum()])

    def commit(self) -> None:
        """The step counts."""
        if self._next is not None:
            self._usual, self._cut = self._next
            self._next = None

    def rollback(self) -> None:
        """The step does not count."""
        self._next = None

    def facts(self) -> dict[str, float]:
        """``cut``: gradients of parameters cut on this rank so far; ``norm``: the sum of the norms cut off."""
        count, norm = self._cut.tolist()
        return {"cut": int(count), "norm": norm}

    def state_dict(self) -> dict[str, Tensor]:
        """Usual norms by parameter, and what was cut."""
        usual = {f"usual norm/{name}": self._usual[i].clone() for name, i in self._index.items()}
        return {**usual, "cut": self._cut.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what ``state_dict`` gave. A parameter that is not in it starts without a usual norm."""
        self._next = None
        for name, i in self._index.items():
            found = state.get(f"usual norm/{name}")
            self._usual[i] = 0.0 if found is None else found
        if "cut" in state:
            self._cut.copy_(state["cut"])

    def _find(self, pieces: tuple[Piece, ...], device: torch.device) -> tuple[list[Piece], Tensor]:
        """Those of ``pieces`` that are bounded, and their numbers."""
        if pieces not in self._places:
            if len(self._places) >= COMPOSITIONS:
                self._places.clear()
            mine = [piece for piece in pieces if piece.name in self._index]
            numbers: Sequence[int] = [self._index[piece.name] for piece in mine]
            self._places[pieces] = mine, torch.tensor(numbers, dtype=torch.int64, device=device)
        return self._places[pieces]


def _values(flat: Tensor, piece: Piece) -> Tensor:
    """A view of all of a parameter's values in an engine's buffer, in whatever order."""
    if piece.stride:
        size, strides = (piece.rows, piece.numel // piece.rows), (piece.stride, 1)
        return flat.as_strided(size, strides, flat.storage_offset() + piece.offset)
    return flat[piece.offset : piece.offset + piece.numel]
