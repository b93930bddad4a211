"""PowerSGD: rank-r gradients by one step of power iteration (Vogels et al., NeurIPS 2019, arXiv 1905.13727).

Alg. 1 and 2 on rank n, for each gradient seen as a matrix M (rows, cols):

    M_n = g_n + e_n                                  (Alg. 2, l. 7)
    P = mean_n M_n Q;   P = orthonormal(P)           (Alg. 1, l. 3-5)
    Q_n = M_n^T P                                    (Alg. 1, l. 6)
    e_n = M_n - P Q_n^T                              (Alg. 2, l. 9)
    Q = mean_n Q_n, also the next step's start       (Alg. 1, l. 7)
    the gradient is P Q^T                            (Alg. 1, l. 11)

With sharded weights (FSDP2) a rank has the whole gradient before the exchange: P and Q are averaged as on DDP, and the
owner multiplies out its own rows. With HSDP each shard is a separate matrix.

Where M has a rank below r, a column of P is zero, not the direction of rounding errors. The next step starts that
column of Q from the first step's random numbers: a column of zeros would never send anything again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Within
from thinwire.base.random import random_normal, seed_of
from thinwire.core.bucket import Bucket, Segment
from thinwire.core.exchange import Exchange
from thinwire.core.method import EQUAL, Card, Parameter
from thinwire.methods.parts.feedback import GRADIENTS, Gradients, Lossy, Updates

TINY = 2.0**-126
"""The least length by which a column is divided, so that zeros stay zeros."""
NOISE = 2.0**-16
"""Length below which a column (of length 1 at first) without its part along earlier columns is rounding error."""
ALIGNED = 16
"""Every matrix begins at a multiple of so many float32 values (64 bytes): a product's last bits may depend on where its
factors lie, and a resumed run's first buckets hold other matrices beside them."""


HALF_MOMENTUM = Updates(beta1=0.5)
"""Half of Adam's momentum improves powersgd alone of all methods, as measured (docs/quality.md)."""


@dataclass
class PowerSGD(Lossy):
    """Low-rank gradients with error feedback: r (rows + cols) values for rows * cols (arXiv 1905.13727, Alg. 1-2).

    By default g_n is AdamW's step with half of its momentum (``feedback``, ``beta1``); "powersgd:paper" sends gradients
    of every matrix, for any optimizer.

    Args:
        rank: r, of the matrices sent; higher => more bytes, less error.
    """

    name: ClassVar[str] = "powersgd"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"feedback": GRADIENTS, "smallest": 0},
    }

    feedback: Gradients | Updates = HALF_MOMENTUM
    rank: Annotated[int, Within(lambda rank: rank >= 1, "is a number of columns, 1 or more")] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._starts: dict[str, Tensor] = {}

    def describe(self) -> Card:
        card = super().describe()
        # Each rank orthonormalizes the mean of P for itself.
        return replace(card, group=ALIGNED, same_arithmetic=True, state_kinds={**card.state_kinds, "q": EQUAL})

    def policy(self, parameter: Parameter) -> str | None:
        reason = super().policy(parameter)
        if reason is None:
            cols = self._cols(parameter)
            rows = parameter.local // cols
            if self.rank * (rows + cols) >= rows * cols:
                return f"rank {self.rank} saves nothing"
        return reason

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        bucket.rows.add_(self.state.read("residual", bucket))  # Alg. 2, l. 7
        residual = self.state.write("residual", bucket)
        sizes = [self._sizes(bucket, segment) for segment in bucket.segments]
        r, whole = self.rank, len(bucket.rows)
        lefts, rights = [whole * rows * r for rows, _ in sizes], [cols * r for _, cols in sizes]
        p_memory = bucket.scratch("P", (sum(padded(size, ALIGNED) for size in lefts),), torch.float32)
        right = bucket.scratch("Q", (sum(padded(size, ALIGNED) for size in rights),), torch.float32)
        ps = [flat_p.view(whole, -1, r) for flat_p in _split(p_memory, lefts)]
        qs = [flat_p.view(-1, r) for flat_p in _split(right, rights)]
        matrices = [self._matrix(bucket.rows, s, cols) for s, (_, cols) in zip(bucket.segments, sizes, strict=True)]
        with exchange.span("encode", bucket.rows):
            for segment, matrix, p, q in zip(bucket.segments, matrices, ps, qs, strict=True):
                saved_q = self.state.get("q", segment.name)
                q.copy_(self._start(segment.name, q) if saved_q is None else saved_q)
                q.div_(_largest(q).clamp_(min=TINY))  # else M Q squares the size of M, which leaves float32 earlier
                for rows, out in zip(matrix, p, strict=True):
                    torch.mm(rows, q, out=out)  # Alg. 1, l. 3
        exchange.all_mean(p_memory)  # Alg. 1, l. 4
        with exchange.span("encode", bucket.rows):
            for matrix, p, q in zip(matrices, ps, qs, strict=True):
                _orthonormalize(p.view(-1, r))  # Alg. 1, l. 5
                q.zero_()
                for rows, p_row in zip(matrix, p, strict=True):
                    q.addmm_(rows.T, p_row)  # Alg. 1, l. 6
            for segment, matrix, p, q in zip(bucket.segments, matrices, ps, qs, strict=True):
                residual_rows = self._matrix(residual, segment, q.shape[0])
                for rows, p_row, out in zip(matrix, p, residual_rows, strict=True):
                    torch.addmm(rows, p_row, q.T, alpha=-1, out=out)  # Alg. 2, l. 9
        exchange.all_mean(right)  # Alg. 1, l. 7
        with exchange.span("decode", bucket.rows):
            for segment, p, q in zip(bucket.segments, ps, qs, strict=True):
                mean_rows = self._matrix(bucket.mean, segment, q.shape[0])
                for p_row, out in zip(p[exchange.own_rows], mean_rows, strict=True):
                    torch.mm(p_row, q.T, out=out)  # Alg. 1, l. 11
                self.state.put("q", segment.name, torch.where(_largest(q) == 0, self._start(segment.name, q), q))

    def _cols(self, parameter: Parameter) -> int:
        return math.prod(parameter.rank_shape[1:])

    def _sizes(self, bucket: Bucket, segment: Segment) -> tuple[int, int]:
        """Return how many matrix rows one of the bucket's rows holds, and the number of columns."""
        cols = self._cols(self.run.parameters[segment.name])
        if segment.span % cols:
            raise ThinwireError(f"powersgd: {segment.name} is not sharded along dim 0: do so, or keep it dense")
        return segment.span // cols, cols

    @staticmethod
    def _matrix(values: Tensor, segment: Segment, cols: int) -> Tensor:
        """``segment``'s columns of ``values`` (R, n) as matrix rows (R, rows, cols), a view."""
        return values[:, segment.start : segment.start + segment.span].unflatten(1, (-1, cols))

    def _start(self, name: str, q: Tensor) -> Tensor:
        """Return random columns, (cols, r), drawn once."""
        if name not in self._starts:
            self._starts[name] = random_normal(seed_of(self.run.seed, name), q.numel(), q.device).view(q.shape)
        return self._starts[name]


def _split(values: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Zero ``values`` (1-D) and split them into aligned tensors of ``sizes``."""
    spans = values.zero_().split([padded(size, ALIGNED) for size in sizes])
    return [span[:size] for span, size in zip(spans, sizes, strict=True)]


def _orthonormalize(matrix: Tensor) -> None:
    """Run Gram-Schmidt on the columns of ``matrix`` (rows, r) in place: the same bits on ranks of one kind.

    Each column loses its part along the earlier columns twice, which is enough (Parlett 1980): once leaves rounding
    errors that are not small beside what is left of a column almost in their span.
    """
    columns = matrix.T.contiguous()
    for order in (torch.inf, 2):  # the largest is 1 first, so that squares neither overflow nor vanish
        columns.div_(torch.linalg.vector_norm(columns, order, 1, keepdim=True).clamp_(min=TINY))
    for i in range(1, len(columns)):
        column, earlier = columns[i], columns[:i]
        for _ in range(2):
            column.addmv_(earlier.T, earlier @ column, alpha=-1)
        length = torch.linalg.vector_norm(column)
        column.div_(torch.where(length > NOISE, length, torch.inf))
    matrix.copy_(columns.T)


def _largest(matrix: Tensor) -> Tensor:  # of each column
    return torch.linalg.vector_norm(matrix, torch.inf, 0)
