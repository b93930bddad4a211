"""Codecs that send a random projection of every block of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import ThinwireError
from thinwire.ops import projection
from thinwire.streams import random_normal, random_order, random_signs, seed_of

UNBIASED = ("paper",)
"""Estimators with E C(h) = h and E |C(h) - h|^2 = w |h|^2; the others contract: E |C(h) - h|^2 < |h|^2."""
ESTIMATORS = ("cyclic_srht", "srht", "orthonormal", "shrunk", "paper")
SRHT = ("cyclic_srht", "srht")


@dataclass
class Feedback:
    """Error feedback of one encoding: h = rows + ``read``; ``write`` = keep * read + (1 - keep) * (h - C(h)).

    ``read`` and ``write`` are (R, n) and may be the same tensor. ``keep`` = 0 is plain error feedback.
    """

    read: Tensor
    write: Tensor
    keep: float = 0.0


class Projection(Codec):
    """m = block / ratio values for every block, by a random matrix that all ranks share and that changes every step.

    Linear: the network may sum the wire. ``C(h) = decode(encode(h))`` with M (block, m) Gaussian, P (m, block) of
    orthonormal rows:

    * ``paper``: p = h M, C(h) = p M^T / m. Unbiased; the error is w = (block + 1) / m (about the ratio) times |h|^2.
    * ``shrunk``: the same times m / (m + block + 1): the contraction that loses least.
    * ``orthonormal``: P from the QR decomposition of a Gaussian matrix, C(h) = P^T P h: an orthogonal projection.
    * ``srht``: P = rows of H D, drawn anew each step: a projection without a stored matrix, in B log B.
    * ``cyclic_srht``: one H D for ``ratio`` steps, each of which sends other rows of it: after a cycle every
      direction was sent once.

    Attributes:
        feedback: see :class:`Feedback`; None: the rows are encoded as they are.
    """

    linear = True
    wire_dtype = torch.float32

    def __init__(
        self, segments: Sequence[tuple[str, int, int]], *, ratio: int, block: int, estimator: str, seed: int
    ) -> None:
        """``segments``: (name, start, width) of a row's columns, each with random numbers of its own."""
        super().__init__()
        if estimator not in ESTIMATORS:
            raise ThinwireError(f"no estimator '{estimator}'; there are: {', '.join(ESTIMATORS)}")
        if ratio < 1 or block < 2 or block & (block - 1) or block % ratio:
            raise ThinwireError(
                f"a block of {block} values (a power of two) cannot be sent as block / ratio = {block}/{ratio} of them"
            )
        self.segments, self.ratio, self.block, self.estimator, self.seed = segments, ratio, block, estimator, seed
        self.group = granule(estimator, block)
        self.feedback: Feedback | None = None
        self._step = -1
        self._drawn: dict[str, tuple[int, tuple[Tensor, ...]]] = {}
        self._spaces: dict[tuple[str, torch.device], Tensor] = {}

    @property
    def kept(self) -> int:
        """m: values sent per block."""
        return self.block // self.ratio

    def wire_numel(self, n: int) -> int:
        return n // self.ratio

    def set_step(self, step: int) -> None:
        """Use the random numbers of optimizer step ``step``."""
        self._step = step

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        self._check_encode(rows, out)
        rows = rows.float()  # itself, where it is float32, as a bucket's are
        for name, columns, sent in self._parts():
            values, payload = rows[:, columns], out[:, sent]
            feedback = self.feedback
            if feedback is None:
                self._project(name, values, payload)
                continue
            read, write = feedback.read[:, columns], feedback.write[:, columns]
            if self.estimator in SRHT and feedback.keep == 0:
                projection.srht_project(values, read, *self._rotation(name, rows.device), payload, write)
                continue
            total = torch.add(values, read, out=self._space("total", values))
            self._project(name, total, payload)
            rest = self._reconstruct(name, payload, self._space("rest", values))
            torch.sub(total, rest, out=rest)
            torch.lerp(rest, read, feedback.keep, out=write)
        return out

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        for name, columns, sent in self._parts():
            self._reconstruct(name, wire[:, sent], out[:, columns])
        return out

    def matrix(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """(block, m) this step's matrix for ``name``: a block x is sent as x @ matrix. For tests and for study."""
        if self.estimator in SRHT:
            signs, chosen = self._rotation(name, torch.device(device))
            # each unit vector sits in lane 0 of a tile of its own
            tiles = torch.zeros(self.block, self.block, projection.LANES, device=device)
            tiles[:, :, 0] = torch.eye(self.block, device=device)
            payload = torch.empty(1, tiles.numel() // self.ratio, device=device)
            projection.srht_project(tiles.reshape(1, -1), None, signs, chosen, payload, None)
            return payload.view(self.block, self.kept, projection.LANES)[:, :, 0]
        return self._gaussian(name, torch.device(device))

    def _parts(self) -> list[tuple[str, slice, slice]]:
        """Name, columns of the row and columns of the wire, segment by segment."""
        return [
            (name, slice(start, start + width), slice(start // self.ratio, (start + width) // self.ratio))
            for name, start, width in self.segments
        ]

    def _space(self, use: str, like: Tensor) -> Tensor:
        """Uninitialized float32 memory of the shape of ``like``, contiguous: one piece per use, as long as needed."""
        key = (use, like.device)
        space = self._spaces.get(key)
        if space is None or space.numel() < like.numel():
            space = self._spaces[key] = torch.empty(like.numel(), device=like.device)
        return space[: like.numel()].view(like.shape)

    def _project(self, name: str, values: Tensor, payload: Tensor) -> None:
        if self.estimator in SRHT:
            projection.srht_project(values, None, *self._rotation(name, values.device), payload, None)
            return
        sent = self._space("sent", payload)
        blocks = values.reshape(-1, self.block)  # a view, if ``values`` is one row or workspace
        torch.mm(blocks, self._gaussian(name, values.device), out=sent.view(-1, self.kept))
        payload.copy_(sent)

    def _reconstruct(self, name: str, payload: Tensor, out: Tensor) -> Tensor:
        if self.estimator in SRHT:
            return projection.srht_reconstruct(payload, *self._rotation(name, out.device), out)
        scale = {"paper": 1 / self.kept, "shrunk": 1 / (self.kept + self.block + 1), "orthonormal": 1.0}[self.estimator]
        blocks = self._space("blocks", out)
        matrix = self._gaussian(name, out.device)
        torch.mm(payload.reshape(-1, self.kept), matrix.T, out=blocks.view(-1, self.block))
        return torch.mul(blocks, scale, out=out)

    def _once(self, name: str, period: int, draw: Callable[[int], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What ``draw(seed)`` gives for ``name`` in this period; drawn again only when the period changes."""
        if self._step < 0:
            raise ThinwireError("set_step() first: the random numbers of a projection belong to a step")
        known = self._drawn.get(name)
        if known is None or known[0] != period:
            known = self._drawn[name] = (period, draw(seed_of(self.seed, name, period)))
        return known[1]

    def _gaussian(self, name: str, device: torch.device) -> Tensor:
        """M (block, m): Gaussian, or with orthonormal columns."""

        def draw(seed: int) -> tuple[Tensor]:
            matrix = random_normal(seed, self.block * self.kept, device).view(self.block, self.kept)
            return (torch.linalg.qr(matrix).Q.contiguous() if self.estimator == "orthonormal" else matrix,)

        return self._once(name, self._step, draw)[0]

    def _rotation(self, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Signs (block,) and the rows (m,) of H D that this step sends."""

        def draw(seed: int) -> tuple[Tensor, Tensor]:
            signs = random_signs(seed, self.block, device)
            return signs, random_order(seed_of(seed, "order"), self.block, device)

        cyclic = self.estimator == "cyclic_srht"
        period, turn = divmod(self._step, self.ratio) if cyclic else (self._step, 0)
        signs, order = self._once(name, period, draw)
        return signs, order[turn * self.kept : (turn + 1) * self.kept]


def granule(estimator: str, block: int) -> int:
    """Values that are encoded together: SRHT takes 16 blocks side by side."""
    return block * (projection.LANES if estimator in SRHT else 1)
