"""Turns a rank's shard of a module's weights into a message and back: some parameters in few bits, others unchanged.

*Encoded* parameters lie beside each other in the message's codes and scales (``ops.quant``), each in whole groups;
*copied* ones lie elsewhere in it, in the shard's dtype. Two tables (``ops.rows``) of one row map the shard: ``encoded``
to the columns to encode, ``copied`` to the message. ``reference``, made of ``ops.quant`` and ``ops.rows``, runs on CPUs
too; ``triton`` takes one launch each way. Both give the same bits.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.base.random import Seeds
from thinwire.ops.backends import backend
from thinwire.ops.quant import Format
from thinwire.ops.rows import CopyTable

__all__ = ["PER_PROGRAM", "read", "write"]

PER_PROGRAM = 4096
"""Columns of an encoded parameter per program of a GPU, at least one group: for its copy table."""

_backend = backend("thinwire.ops.shards", cpu="reference")


def write(
    own: Tensor, resident: Tensor | None, encoded: CopyTable, copied: CopyTable, format: Format, codes: Tensor,
    scales: Tensor, message: Tensor, drawn: Seeds | None = None,
) -> None:  # fmt: skip
    """Write the shard ``own`` (n,): ``codes`` and ``scales`` of ``own`` - ``resident`` (n,), the rest to ``message``.

    Args:
        resident: None to encode ``own`` itself. codes, scales: (1, columns), as ``quant.quantize`` writes them.
        message: (m,) in the dtype of ``own``, float32 or bfloat16, to which the difference is rounded, too.
        drawn: seeds of random bits, one for each encoded parameter; None: round to the nearest.
    """
    if encoded.segments or copied.segments:
        _backend(own).write(own, resident, encoded, copied, format, codes, scales, message, drawn)


def read(
    codes: Tensor, scales: Tensor, messages: Tensor, encoded: CopyTable, copied: CopyTable, format: Format,
    rows: Tensor, own_row: int = -1, resident: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Read P messages into ``rows`` (P, n); with ``resident``, encoded values are added to ``rows``.

    Args:
        codes, scales: (P, columns). messages: (P, m). See ``write``.
        resident: (n,), to which the message ``own_row`` is added; the row ``own_row`` becomes a copy of it.
    """
    if rows.numel() and (encoded.segments or copied.segments):
        _backend(rows).read(codes, scales, messages, encoded, copied, format, rows, own_row, resident)
    return rows
