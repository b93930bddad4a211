"""The codec of one message for two kinds of rows: those of another codec, and behind its wire rows that stay dense."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.base.alignment import same_memory
from thinwire.codecs.base import Codec
from thinwire.ops import quant


@dataclass(frozen=True)
class Appended(Codec):
    """The wire of ``codec``, and float32 rows that travel behind it, unchanged.

        | wire of codec (m bytes) | dense row (k float32) |

    They are summed in rank order, with the bits that ``Fp32`` gives them in a message of their own.

    Attributes:
        rows: (R, k) what is sent behind the wires of all rows, and what ``decode`` finds there; not copied if they lie
            in the message.
        mean: (1, k) receives the mean of ``decode_sum``; what is sent behind the wire of a single row.
    """

    codec: Codec
    rows: Tensor
    mean: Tensor

    linear = False

    @property
    def takes_steps(self) -> bool:  # type: ignore[override]
        return self.codec.takes_steps

    def wire_numel(self, n: int) -> int:
        return self.codec.wire_bytes(n) + 4 * self.rows.shape[1]

    def _encode_and_keep(self, rows, out, residual, seed, space):
        wire, behind = self._split(out)
        self.codec._encode_and_keep(rows, wire, residual, seed, space)
        sent = self.rows if len(rows) == len(self.rows) else self.mean
        if not same_memory(sent, behind):
            behind.copy_(sent)

    def _decode(self, wire, out, space):
        encoded, behind = self._split(wire)
        self.codec._decode(encoded, out, space)
        if not same_memory(self.rows, behind):
            self.rows.copy_(behind)

    def _decode_sum(self, wire, out, scale, space):
        encoded, behind = self._split(wire)
        self.codec._decode_sum(encoded, out, scale, space)
        quant.sum_rows(behind, self.mean[0], scale)

    def _encode_sum(self, wire, out, n, scale, seed, space):
        (encoded, behind), (own_wire, own) = self._split(wire), self._split(out)
        self.codec._encode_sum(encoded, own_wire, n, scale, seed, space)
        quant.sum_rows(behind, own[0], scale)

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """View the wire of ``codec`` in ``message`` (R, m + 4 k), and the float32 (R, k) behind it."""
        m = message.shape[1] - 4 * self.rows.shape[1]
        return message[:, :m].view(self.codec.wire_dtype), message[:, m:].view(torch.float32)
