"""Plain torch, any device: the specification of every operation, and the oracle of its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.ops import rows as packing
from thinwire.ops.rows import CopyTable

if TYPE_CHECKING:
    from thinwire.ops.mask import MaskedSegment

WORD = 64


def _bits(device: torch.device) -> Tensor:
    return torch.arange(WORD, dtype=torch.int64, device=device)


def topk_mask(values: Tensor, k: int, words: Tensor) -> None:
    magnitudes = values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    # NaN above infinity, ties in order of position: two stable sorts, the less important key first
    by_size = magnitudes.sort(dim=1, descending=True, stable=True).indices
    by_nan = values.isnan().gather(1, by_size).to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    flags = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    flags.scatter_(1, by_size.gather(1, by_nan)[:, :k], True)
    pack(flags, words)


def directory(words: Tensor) -> None:
    """None is needed."""


def gather_keep(
    rows: Tensor,
    residual: Tensor | None,
    words: Tensor,
    payload: Tensor,
    residual_out: Tensor | None,
    bit_offsets: Tensor | None = None,
) -> None:
    total = rows if residual is None else rows + residual
    flags = flags_of(words)
    if payload.numel():
        payload.copy_(total[flags].view(payload.shape))
    if residual_out is not None:
        residual_out.copy_(torch.where(flags, 0.0, total))


def scatter(payload: Tensor, words: Tensor, out: Tensor, bit_offsets: Tensor | None = None) -> None:
    flags, k = flags_of(words), payload.shape[1]
    if devices.streams(payload.device) is None and bool((flags.sum(1) != k).any()):  # a GPU is not waited for
        raise ThinwireError(f"a row's mask does not have the {k} bits that its payload has room for")
    out.zero_().masked_scatter_(flags, payload)


def scatter_segment(payload: Tensor, words: Tensor, columns: Tensor, factor: float) -> bool:
    """``columns`` (R, numel) = ``payload`` at the mask and ``factor`` times ``columns`` off it; is the mask within?"""
    fresh = columns.new_zeros((len(columns), WORD * words.shape[1]))
    scatter(payload, words, fresh)
    flags, beyond = flags_of(words).tensor_split([columns.shape[1]], 1)
    if devices.streams(beyond.device) is None and bool(beyond.any()):
        return False
    columns.copy_(torch.where(flags, fresh[:, : columns.shape[1]], columns * factor))
    return True


def collect(
    row: Tensor, words: Tensor, segments: Sequence[MaskedSegment], copied: CopyTable, message: Tensor,
    bit_offsets: Tensor | None = None, gather: Callable[..., None] = gather_keep,
) -> None:  # fmt: skip
    """``gather``: this or another backend's ``gather_keep``."""
    for segment, payload, mask in split_segments(message.unsqueeze(0), words, segments):
        values = row[segment.start : segment.start + segment.numel].unsqueeze(0)
        gather(torch.nn.functional.pad(values, (0, segment.width - segment.numel)), None, mask, payload, None)
    packing.pack(row, copied, message)


def renew(
    messages: Tensor, words: Tensor, segments: Sequence[MaskedSegment], copied: CopyTable, rows: Tensor,
    bit_offsets: Tensor | None = None, scatter_segment: Callable[..., bool] = scatter_segment,
) -> None:  # fmt: skip
    """``scatter_segment``: this or another backend's."""
    for segment, payload, mask in split_segments(messages, words, segments):
        columns = rows[:, segment.start : segment.start + segment.numel]
        if not scatter_segment(payload, mask, columns, segment.factor):
            raise ThinwireError(
                f"a row's mask does not have the {segment.k} bits of its values, or one beyond {segment.numel} columns"
            )
    for message, row in zip(messages, rows, strict=True):
        packing.unpack(message, copied, row)


def split_segments(
    payload: Tensor, words: Tensor, segments: Sequence[MaskedSegment]
) -> Iterator[tuple[MaskedSegment, Tensor, Tensor]]:
    """Yield every segment with its values (R, k) and its mask (R, width / 64)."""
    sizes, counts = [segment.k for segment in segments], [segment.width // WORD for segment in segments]
    return zip(segments, payload[:, : sum(sizes)].split(sizes, 1), words.split(counts, 1), strict=True)


def pack(flags: Tensor, words: Tensor) -> None:
    grouped = flags.view(*words.shape, WORD).to(torch.int64)
    words.copy_((grouped << _bits(flags.device)).sum(2))  # each bit once: the sum carries nothing


def flags_of(words: Tensor) -> Tensor:
    """Unpack mask words (..., w) to bools (..., 64 w)."""
    return ((words.unsqueeze(-1) >> _bits(words.device)) & 1).bool().flatten(-2)


def popcount(words: Tensor) -> Tensor:
    return flags_of(words).sum(1)


def indices(words: Tensor, out: Tensor) -> None:
    out.copy_(flags_of(words).nonzero()[:, 1].view(out.shape))


def list_error(words: Tensor) -> ThinwireError:
    """Make the error to raise where positions are none of the columns of ``words``."""
    return ThinwireError(
        f"a list of positions that came has one that is none of {WORD * words.shape[1]} columns, or does not rise"
    )


def from_indices(positions: Tensor, words: Tensor, rise: bool = False) -> None:
    columns = WORD * words.shape[1]
    if devices.streams(positions.device) is None and positions.numel():  # a GPU is not waited for: torch refuses there
        inside = bool(((positions >= 0) & (positions < columns)).all())
        if not inside or (rise and not bool((positions[:, 1:] > positions[:, :-1]).all())):
            raise list_error(words)
    flags = torch.zeros(words.shape[0], words.shape[1] * WORD, dtype=torch.bool, device=words.device)
    pack(flags.scatter_(1, positions.long(), True), words)


def from_lists(lists: Sequence[tuple[Tensor, slice]], words: Tensor) -> None:
    for positions, columns in lists:
        from_indices(positions, words[:, columns], rise=True)
