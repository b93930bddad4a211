"""The outlier clip of gradients that enter a method's state: a spoilt batch must not rule the steps after it.

Dense training forgets a spoilt batch (a loss ten thousand times too large, once): clipping scales its gradient down,
and the next step is an ordinary one. But a method that keeps a residual or a momentum takes up the gradient *before* it
is averaged and clipped, and sends it for a hundred steps. So a parameter's gradient on a rank that is more than
``times`` as large as usual is first scaled down to ``times`` the usual norm. If the method keeps steps or momenta,
which are clipped late or never, it is scaled down to ``STEP`` usual norms: with ten the loss was up to 14% higher
70 steps later (docs/steps.md). What is cut off is lost, on purpose, and counted; for the rest, sent + kept = input
holds. If it cuts often, the cut gradients are no accident, and it warns.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireWarning
from thinwire.core.bucket import Piece
from thinwire.ops import rows as ops
from thinwire.ops.norms import Bounds, Limit, Statistics, bound

STEP = 2.0
"""Usual norms that a cut leaves if a gradient becomes a step or a momentum before it is averaged."""
NORM_DECAY = 0.9
"""The decay per step of the usual norm: a norm counts for about ten steps."""
WATCHED = 200
"""Steps between two checks of how often gradients are cut; a check waits for the device."""
OFTEN = 0.01
"""The share of a parameter's gradients that may be cut without a warning."""
COMPOSITIONS = 256
"""Compositions of buffers whose parameters' tables are cached. A model of experts can have any number."""


class OutlierClip:
    """Scales gradients down whose norm is more than ``times`` the usual one.

    With r the running mean of a parameter's norms, R the norm of all r together, and s the parameter's share of all
    values, the usual norm is max(r, sqrt(s) R), so that gradients that begin small (behind a layer that starts at zero)
    may grow at once. In a parameter's first step nothing is cut. A norm that is too large counts as ``times`` the usual
    one, so that gradients that stay large become usual after a few steps. Norms of 0 do not count (experts, heads or
    languages have zeros in the steps that do not use them).

    Parameters that stay dense are bounded too. They keep nothing, but one norm clips all gradients: an unbounded one
    would shrink what the others send to nothing in that step.

    No host sync on CUDA, where it is a part of the pass that packs the gradients; else one pass over them.
    """

    def __init__(
        self, times: float, sizes: Mapping[str, int], leaves: float | None = None, *, apart: bool = False
    ) -> None:
        """``times``: 1 or more. ``sizes``: number of values on this rank by trained parameter. ``leaves``: the norm
        that a cut leaves, in usual norms, at most ``times``; None: ``times``. ``apart``: usual is r alone."""
        self.times = times
        self._share = 1.0 if leaves is None else min(leaves / times, 1.0)
        self._index = {name: i for i, name in enumerate(sorted(sizes))}
        total = max(sum(sizes.values()), 1)
        # On CPU until the first gradients are seen: the model may not be on its device yet.
        shares = [0.0 if apart else math.sqrt(sizes[name] / total) for name in sorted(sizes)]
        self._shares = torch.tensor(shares, dtype=torch.float32, device="cpu")
        # By parameter: the usual norm, how many gradients were seen and how many cut, the sum of the norms cut off.
        self._statistics = torch.zeros(4, len(sizes), dtype=torch.float32, device="cpu")
        self._next: Tensor | None = None
        # gradients and norm, in the run that was resumed
        self._cut_before = torch.zeros(2, dtype=torch.float32, device="cpu")
        self._steps = 0
        self._warned = False
        self._cached_columns = functools.lru_cache(COMPOSITIONS)(self._columns)
        self._cached_table = functools.lru_cache(COMPOSITIONS)(self._table)

    def apply(self, flat: Tensor, pieces: tuple[Piece, ...]) -> Bounds | None:
        """Scale the gradients in ``flat`` (1-D) down that exceed their bound; the guard handles norms not finite.

        Return the bounds of ``pieces``, in their order; None: some of them have none.
        """
        names, table = self._cached_table(pieces, flat.device)
        if not names:
            return None
        bounds = self.pack(names, flat, table, flat)
        return bounds if len(names) == len(pieces) else None

    def covers(self, pieces: tuple[Piece, ...]) -> bool:
        """Are all of ``pieces`` bounded?"""
        return all(piece.name in self._index for piece in pieces)

    def pack(self, names: tuple[str, ...], flat: Tensor, table: ops.CopyTable, rows: Tensor) -> Bounds:
        """Copy ``flat`` to ``rows`` by ``table``, with what exceeds its bound scaled down; return the cuts.

        ``table``: its segments are the parameters ``names``, each whole.
        """
        return bound(flat, table, rows, *self._held_against(names, flat.device))

    def limit(self, names: tuple[str, ...], flat: Tensor, table: ops.CopyTable) -> Limit:
        """Return what cuts the parameters ``names`` later, which ``table`` leaves in ``flat``."""
        return Limit.make(flat, table, *self._held_against(names, flat.device))

    def _held_against(self, names: tuple[str, ...], device: torch.device) -> tuple[Tensor, Statistics]:
        """Return the columns of ``names`` in the statistics, and these."""
        if self._statistics.device != device:
            self._shares, self._statistics = self._shares.to(device), self._statistics.to(device)
        if self._next is None:
            self._next = self._statistics.clone()
        statistics = Statistics(self._statistics, self._next, self._shares, float(self.times), self._share, NORM_DECAY)
        return self._cached_columns(names, device), statistics

    def commit(self) -> None:
        """Keep the step's norms and counts."""
        if self._next is not None:
            self._statistics, self._next = self._next, None
            self._steps += 1
            if self._steps % WATCHED == 0 and not self._warned:
                self._warn()

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Forget the step's norms and counts, of the parameters ``names`` or of all (None)."""
        if names is None:
            self._next = None
        elif self._next is not None:
            for i in (self._index[name] for name in names if name in self._index):
                self._next[:, i] = self._statistics[:, i]

    def _warn(self) -> None:
        _, counted, cut, _ = self._statistics.cpu()
        often = [name for name, i in self._index.items() if cut[i] > max(OFTEN * counted[i], 1)]
        if often:
            self._warned = True
            i = self._index[often[0]]
            also = f" (also for {len(often) - 1} more parameters)" if often[1:] else ""
            warnings.warn(
                f"{int(cut[i])} of {int(counted[i])} gradients of {often[0]} on this rank were more than "
                f"{self.times:g} times as large as usual, and were cut to that size{also}. What is cut off is lost: if "
                "gradients are often that large here, pass safety=Safety(outlier_clip=...), a higher number or None",
                ThinwireWarning, stacklevel=2,
            )  # fmt: skip

    def facts(self) -> dict[str, float]:
        """Report ``cut``, the gradients of parameters cut on this rank, and ``norm``, the sum of the norms cut off."""
        count, norm = self._cut.tolist()
        return {"cut": int(count), "norm": norm}

    @property
    def _cut(self) -> Tensor:
        """The number of parameters' gradients that were cut, and the norm cut off: (2,)."""
        return self._cut_before.to(self._statistics.device) + self._statistics[2:].sum(1)

    def state_dict(self) -> dict[str, Tensor]:
        usual = {f"usual norm/{name}": self._statistics[0, i].clone() for name, i in self._index.items()}
        return {**usual, "cut": self._cut}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load ``state_dict``'s result. A parameter that is not in it starts without a usual norm."""
        self._next = None
        self._statistics.zero_()
        for name, i in self._index.items():
            self._statistics[0, i] = state.get(f"usual norm/{name}", 0.0)
        if "cut" in state:
            self._cut_before.copy_(state["cut"])

    def _columns(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Return the columns of ``names`` in ``_statistics``, int64."""
        return torch.tensor([self._index[name] for name in names], dtype=torch.int64, device=device)

    def _table(self, pieces: tuple[Piece, ...], device: torch.device) -> tuple[tuple[str, ...], ops.CopyTable]:
        """Return the names of those of ``pieces`` that are bounded, and the table that leaves them where they are."""
        bounded = [piece for piece in pieces if piece.name in self._index]
        return tuple(piece.name for piece in bounded), ops.CopyTable([piece.stays for piece in bounded], device)
