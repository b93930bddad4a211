"""Codecs that spread every value over 32 by a Hadamard transform before they quantize."""

from __future__ import annotations

from torch import Tensor

from thinwire.codecs.intquant import Integers
from thinwire.errors import ThinwireError
from thinwire.ops import quant


class _Hadamard(Integers):
    """Every 32 neighbours are transformed (``ops.quant``). ``group`` (elements, a power of two from 32 to 4096) holds
    whole ones, so that an outlier stays within the values that share its scale.
    """

    def __init__(self, group: int = 128, rounding: str = "nearest") -> None:
        super().__init__(group, rounding)
        if group % quant.ORDER:
            raise ThinwireError(
                f"{type(self).__name__}: group must be a power of two from {quant.ORDER} to 4096 elements, "
                f"got {group}; use 128"
            )


class HadamardInt8(_Hadamard):
    """:class:`Int8` of the Hadamard transform of the values (SDP4Bit, arXiv 2410.15526, sections 3.2 and 3.3).

    The transform makes 32 neighbours alike in size: the error of heavy-tailed values falls, that of Gaussian values
    stays. It is orthonormal, so errors have the same length on either side, but an error bound holds for the
    transformed values only. A group with a NaN or an infinity decodes to NaN throughout.

    The wire is that of :class:`Int8` with the same ``group``: where that decodes or sums it, the result is
    transformed values, which another hop may quantize with :class:`Int8` or :class:`Int4` as they are.
    """

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        return self._quantize(quant.hadamard_quantize_int8, rows, out)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        return quant.hadamard_dequantize_int8(*self._parts(wire, out.shape[1]), self.per_scale, out)

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        """As for every codec, but one transform of the sum: equal to the sum of the decodes up to float32 rounding."""
        self._check_sum(wire, out)
        return quant.hadamard_dequantize_sum_int8(*self._parts(wire, out.shape[0]), self.per_scale, out, scale)


class HadamardInt4(_Hadamard):
    """:class:`Int4` of the Hadamard transform of the values; see :class:`HadamardInt8`."""

    bits = 4

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        return self._quantize(quant.hadamard_quantize_int4, rows, out)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        return quant.hadamard_dequantize_int4(*self._parts(wire, out.shape[1]), self.per_scale, out)

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        """As for every codec, but one transform of the sum: equal to the sum of the decodes up to float32 rounding."""
        self._check_sum(wire, out)
        return quant.hadamard_dequantize_sum_int4(*self._parts(wire, out.shape[0]), self.per_scale, out, scale)
