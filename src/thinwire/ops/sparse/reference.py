"""Plain torch, any device: the specification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.ops.mask import reference as masks

if TYPE_CHECKING:
    from thinwire.ops.sparse import Part


def largest(
    rows: Tensor, old: Tensor | None, parts: tuple[Part, ...], new: Tensor | None, found: Tensor, payload: Tensor
) -> None:
    total = rows if old is None else rows + old
    if new is not None:
        new.copy_(total)
    found.fill_(-1)
    for start, width, k, place in parts:
        words = torch.empty(len(rows), width // masks.WORD, dtype=torch.int64, device=rows.device)
        masks.topk_mask(total[:, start : start + width], k, words)
        masks.indices(words, found[:, place : place + k])
        found[:, place : place + k] += start
    payload.copy_(total.gather(1, found.clamp(min=0).long()).masked_fill_(found < 0, 0))


def marked(rows: Tensor, parts: tuple[Part, ...], words: Tensor) -> None:
    words.zero_()
    for start, width, k, _ in parts:
        own = words[:, start // masks.WORD : (start + width) // masks.WORD]
        masks.topk_mask(rows[:, start : start + width], k, own)


NOT_A_WIRE = "a wire of positions does not hold as many as it should, or one beyond its columns, or out of order"


def pack(found: Tensor, parts: tuple[Part, ...], wire: Tensor) -> None:
    wire.zero_()
    for part, string, low in _places(parts, wire):
        at = found[:, part.place : part.place + part.k] - part.start
        bits = torch.zeros(len(wire), 8 * part.string, dtype=torch.int32, device=wire.device)
        _write(bits.scatter_(1, ((at >> part.low) + _count(at)).long(), 1), 1, string)
        lower = at.new_zeros(len(wire), 8 * low.shape[1] // part.low)
        lower[:, : part.k] = at & (1 << part.low) - 1
        _write(lower, part.low, low)


def unpack(wire: Tensor, parts: tuple[Part, ...], found: Tensor) -> None:
    found.fill_(-1)
    for part, string, low in _places(parts, wire):
        bits, seen = _read(string, 1), devices.streams(wire.device) is None  # a GPU is not waited for
        if seen and bool((bits.sum(1) != part.k).any()):
            raise ThinwireError(NOT_A_WIRE)
        at = bits.nonzero()[:, 1].view(len(wire), part.k).int()
        columns = (at - _count(at) << part.low) + _read(low, part.low)[:, : part.k]
        if seen and bool((columns >= part.width).any() or (columns[:, 1:] <= columns[:, :-1]).any()):
            raise ThinwireError(NOT_A_WIRE)
        found[:, part.place : part.place + part.k] = columns + part.start


def put(payload: Tensor, found: Tensor, out: Tensor) -> None:
    for row, values, at in zip(out, payload, found, strict=True):
        row[at[at >= 0].long()] = values[at >= 0]


def sum_at(payload: Tensor, found: Tensor, parts: tuple[Part, ...], out: Tensor, scale: float) -> None:
    out.zero_()
    for values, at in zip(payload, found, strict=True):
        out[at[at >= 0].long()] += values[at >= 0]
    if scale != 1.0:
        out.mul_(scale)


def _count(at: Tensor) -> Tensor:
    return torch.arange(at.shape[1], dtype=torch.int32, device=at.device)


def _write(entries: Tensor, bits: int, octets: Tensor) -> None:
    """``octets`` (R, m) = ``entries`` (R, 8 m / bits) of so many bits, the first in a byte's lowest."""
    shifts = torch.arange(0, 8, bits, device=octets.device)
    octets.copy_((entries.view(*octets.shape, len(shifts)) << shifts).sum(2))


def _read(octets: Tensor, bits: int) -> Tensor:
    """The entries, int32."""
    return (octets.int().unsqueeze(2) >> torch.arange(0, 8, bits, device=octets.device) & (1 << bits) - 1).flatten(1)


def _places(parts: tuple[Part, ...], wire: Tensor) -> Iterator[tuple[Part, Tensor, Tensor]]:
    """Of each part its string and its lower bits, views of ``wire``."""
    first = 0
    for part in parts:
        low, end = first + part.string, first + part.nbytes
        yield part, wire[:, first:low], wire[:, low:end]
        first = end
