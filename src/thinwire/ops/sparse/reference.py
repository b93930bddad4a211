"""Plain torch, any device: the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.ops import quant
from thinwire.ops.mask import reference as masks

if TYPE_CHECKING:
    from thinwire.ops.direction import Adam
    from thinwire.ops.sparse import ListSegment, WireValues


def largest(
    rows: Tensor, residual: Tensor | None, segments: tuple[ListSegment, ...], total_out: Tensor | None,
    positions: Tensor, payload: Tensor, wire: Tensor | None = None, adam: Adam | None = None,
    values: WireValues | None = None, decoded: Tensor | None = None, guess: Tensor | None = None,
) -> None:  # fmt: skip
    if adam is not None:
        adam.take(rows)
    total = rows if residual is None else rows + residual
    if total_out is not None:
        total_out.copy_(total)
    positions.fill_(-1)
    for start, width, k, list_start in segments:
        positions[:, list_start : list_start + k] = start + _largest_columns(total[:, start : start + width], k)
    payload.copy_(total.gather(1, positions.clamp(min=0).long()).masked_fill_(positions < 0, 0))
    if wire is not None:
        pack(positions, segments, wire)
    if values is not None:
        sent = write_values(payload, values, decoded)
        if total_out is not None:
            put(payload, positions, total_out, sent)


def marked(rows: Tensor, segments: tuple[ListSegment, ...], words: Tensor) -> None:
    words.zero_()
    for start, width, k, _ in segments:
        columns = _largest_columns(rows[:, start : start + width], k)
        masks.from_indices(columns, words[:, start // masks.WORD : (start + width) // masks.WORD])


def _largest_columns(values: Tensor, k: int) -> Tensor:
    magnitudes = values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    # NaN above infinity, ties in order of position: two stable sorts, by the less important key first
    by_size = magnitudes.sort(dim=1, descending=True, stable=True).indices
    by_nan = values.isnan().gather(1, by_size).to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return by_size.gather(1, by_nan)[:, :k].sort(1).values


NOT_A_WIRE = "a message is damaged: it holds too few or too many positions, or one out of range or out of order"


def pack(positions: Tensor, segments: tuple[ListSegment, ...], wire: Tensor) -> None:
    wire.zero_()
    for segment, high, low in _split_wire(segments, wire):
        columns = positions[:, segment.list_start : segment.list_start + segment.k] - segment.start
        bits = torch.zeros(len(wire), 8 * segment.high_bytes, dtype=torch.int32, device=wire.device)
        ones = (columns >> segment.low_bits) + torch.arange(segment.k, device=wire.device)
        _write(bits.scatter_(1, ones, 1), 1, high)
        entries = columns.new_zeros(len(wire), 8 * low.shape[1] // segment.low_bits)
        entries[:, : segment.k] = columns & (1 << segment.low_bits) - 1
        _write(entries, segment.low_bits, low)


def unpack(wire: Tensor, segments: tuple[ListSegment, ...], positions: Tensor) -> None:
    positions.fill_(-1)
    for segment, high, low in _split_wire(segments, wire):
        bits, is_checked = _read(high, 1), devices.streams(wire.device) is None  # a GPU is not waited for
        if is_checked and bool((bits.sum(1) != segment.k).any()):
            raise ThinwireError(NOT_A_WIRE)
        ones = bits.nonzero()[:, 1].view(len(wire), segment.k).int()
        zeros = ones - torch.arange(segment.k, dtype=torch.int32, device=wire.device)
        columns = (zeros << segment.low_bits) + _read(low, segment.low_bits)[:, : segment.k]
        if is_checked and bool((columns >= segment.width).any() or (columns[:, 1:] <= columns[:, :-1]).any()):
            raise ThinwireError(NOT_A_WIRE)
        positions[:, segment.list_start : segment.list_start + segment.k] = columns + segment.start


def put(payload: Tensor, positions: Tensor, out: Tensor, minus: Tensor | None = None) -> None:
    payload = payload if minus is None else payload - minus
    for row, values, columns in zip(out, payload, positions, strict=True):
        row[columns[columns >= 0].long()] = values[columns >= 0]


def sum_at(payload: Tensor, positions: Tensor, segments: tuple[ListSegment, ...], out: Tensor, scale: float) -> None:
    out.zero_()
    for values, columns in zip(payload, positions, strict=True):
        out[columns[columns >= 0].long()] += values[columns >= 0]
    if scale != 1.0:
        out.mul_(scale)


def decode(
    wire: Tensor, values: WireValues, segments: tuple[ListSegment, ...], out: Tensor, scale: float | None,
    positions: Tensor, decoded: Tensor | None,
) -> None:  # fmt: skip
    unpack(wire, segments, positions)
    payload = read_values(values, decoded)
    if scale is None:
        put(payload, positions, out.zero_())
    else:
        sum_at(payload, positions, segments, out[0], scale)


def read(wire: Tensor, segments: tuple[ListSegment, ...], words: Tensor, positions: Tensor) -> None:
    unpack(wire, segments, positions)
    mark(positions, segments, words, masks.from_indices)


def mark(
    positions: Tensor, segments: tuple[ListSegment, ...], words: Tensor, from_indices: Callable[..., object]
) -> None:
    """Make ``words`` masks of ``positions``, of which -1 lie between two lists alone."""
    if positions.shape[1] == sum(segment.k for segment in segments):
        from_indices(positions, words)
        return
    for start, width, k, list_start in segments:
        own_words = words[:, start // masks.WORD : (start + width) // masks.WORD]
        from_indices(positions[:, list_start : list_start + k] - start, own_words)


def write_values(payload: Tensor, values: WireValues, decoded: Tensor | None) -> Tensor:
    """Write ``payload`` to a wire, and return what it is there: itself, or ``decoded``."""
    if values.format is None or values.scales is None:
        values.codes.copy_(payload)
        return payload
    quant.quantize(payload, values.format, values.codes, values.scales)
    return read_values(values, decoded)


def read_values(values: WireValues, decoded: Tensor | None) -> Tensor:
    """Return the values on a wire, (R, m) float32, in ``decoded`` unless they are float32 there."""
    if values.format is None or values.scales is None or decoded is None:
        return values.codes
    return quant.dequantize(values.codes, values.scales, values.format, decoded)


def _write(entries: Tensor, bits: int, octets: Tensor) -> None:
    """Write ``entries`` (R, 8 m / bits) of ``bits`` bits to ``octets`` (R, m), from each byte's lowest bit on."""
    shifts = torch.arange(0, 8, bits, device=octets.device)
    octets.copy_((entries.view(*octets.shape, len(shifts)) << shifts).sum(2))


def _read(octets: Tensor, bits: int) -> Tensor:
    """Read the entries (R, 8 m / bits), int32, of ``octets`` (R, m)."""
    return (octets.int().unsqueeze(2) >> torch.arange(0, 8, bits, device=octets.device) & (1 << bits) - 1).flatten(1)


def _split_wire(segments: tuple[ListSegment, ...], wire: Tensor) -> Iterator[tuple[ListSegment, Tensor, Tensor]]:
    """Split ``wire`` into each segment's high and lower bits, views of it."""
    first = 0
    for segment in segments:
        middle, end = first + segment.high_bytes, first + segment.nbytes
        yield segment, wire[:, first:middle], wire[:, middle:end]
        first = end
