"""A rank's shard of a module's weights <-> its message: some parameters in few bits, the others as they are.

Those that are *encoded* lie beside each other in the message's codes and scales (``ops.quant``), each in whole groups;
those that are *kept* lie elsewhere in it, in the shard's own dtype. Where the first are in a shard, and in the columns
that are encoded, and the others in a shard and in a message, their places (``ops.rows``) say, of one row.

``reference``, which is ``ops.quant`` and ``ops.rows``, runs on CPUs too; ``triton`` takes one launch each way, and the
results are the same bits.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.base.random import Drawn
from thinwire.ops.backends import backend
from thinwire.ops.quant import Format
from thinwire.ops.rows import Places

__all__ = ["PER_PROGRAM", "read", "write"]

PER_PROGRAM = 4096
"""Columns of an encoded parameter that one program of a GPU takes, at least one group: of its places."""

_backend = backend("thinwire.ops.shards", cpu="reference")


def write(
    own: Tensor, held: Tensor | None, encoded: Places, kept: Places, format: Format, codes: Tensor, scales: Tensor,
    message: Tensor, drawn: Drawn | None = None,
) -> None:  # fmt: skip
    """Of the shard ``own`` (n,): ``codes`` and ``scales`` of ``own`` - ``held`` (n,), and in ``message`` what is kept.

    Args:
        held: None: of ``own`` itself. codes, scales: (1, columns) of them, as ``quant.quantize`` writes them.
        message: (m,) in the dtype of ``own``, float32 or bfloat16, in which the difference is rounded, too.
        drawn: where random bits come from, for each encoded parameter apart; None: rounded to the nearest.
    """
    if encoded.parts or kept.parts:
        _backend(own).write(own, held, encoded, kept, format, codes, scales, message, drawn)


def read(
    codes: Tensor, scales: Tensor, messages: Tensor, encoded: Places, kept: Places, format: Format, rows: Tensor,
    mine: int = -1, held: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``rows`` (P, n) = what P messages say; with ``held`` encoded values are added to what is there.

    Args:
        codes, scales: (P, columns), and ``messages``: (P, m), of the same memory: see ``write``.
        held: (n,) to it the message ``mine`` is added, and row ``mine``, whatever it was, becomes the same.
    """
    if rows.numel() and (encoded.parts or kept.parts):
        _backend(rows).read(codes, scales, messages, encoded, kept, format, rows, mine, held)
    return rows
