"""Plain torch, any device: the specification."""

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


def directory(words: Tensor) -> None:
    """Return None: this backend needs no directory."""


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


def write_at(payload: Tensor, words: Tensor, out: Tensor, factor: float | None) -> bool:
    """Write ``payload`` at the mask to ``out`` (R, n); off the mask 0, or ``factor`` times ``out`` if given.

    Return False, ``out`` undefined, if a row's mask has not as many bits as its payload, or bits beyond the columns.
    """
    flags, beyond = flags_of(words).tensor_split([out.shape[1]], 1)
    is_checked = devices.streams(out.device) is None  # a GPU is not waited for
    if is_checked and bool((flags.sum(1) != payload.shape[1]).any() | beyond.any()):
        return False
    off = out.zero_() if factor is None else out.mul_(factor)
    off.masked_scatter_(flags, payload)
    return True


def size_error(payload: Tensor) -> ThinwireError:
    """Return the error for a mask with another number of bits than its ``payload``."""
    return ThinwireError(f"a mask is damaged: it does not have the {payload.shape[1]} bits of its values")


def scatter(
    payload: Tensor, words: Tensor, out: Tensor, bit_offsets: Tensor | None = None,
    write_at: Callable[..., bool] = write_at,
) -> None:  # fmt: skip
    if not write_at(payload, words, out, None):
        raise size_error(payload)


def collect(
    row: Tensor, words: Tensor, segments: Sequence[MaskedSegment], copied: CopyTable, message: Tensor,
    bit_offsets: Tensor | None = None, gather: Callable[..., None] = gather_keep,
) -> None:  # fmt: skip
    for segment, payload, mask in split_segments(message.unsqueeze(0), words, segments):
        values = row[segment.start : segment.start + segment.numel].unsqueeze(0)
        gather(torch.nn.functional.pad(values, (0, segment.width - segment.numel)), None, mask, payload, None)
    packing.pack(row, copied, message)


def renew(
    messages: Tensor, words: Tensor, segments: Sequence[MaskedSegment], copied: CopyTable, rows: Tensor,
    bit_offsets: Tensor | None = None, write_at: Callable[..., bool] = write_at,
) -> None:  # fmt: skip
    for segment, payload, mask in split_segments(messages, words, segments):
        columns = rows[:, segment.start : segment.start + segment.numel]
        if not write_at(payload, mask, columns, segment.factor):
            raise ThinwireError(
                f"a message is damaged: its mask does not have the {segment.k} bits of its values, or has one beyond "
                f"{segment.numel} columns"
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
    words.copy_((grouped << torch.arange(WORD, device=flags.device)).sum(2))  # each bit once: the sum carries nothing


def flags_of(words: Tensor) -> Tensor:
    """Unpack mask words (..., w) to bools (..., 64 w)."""
    return ((words.unsqueeze(-1) >> torch.arange(WORD, device=words.device)) & 1).bool().flatten(-2)


def list_error(words: Tensor) -> ThinwireError:
    """Return the error for positions that are not columns of ``words``, or do not rise."""
    return ThinwireError(
        f"a message is damaged: its positions do not rise, or one is outside the {WORD * words.shape[1]} columns"
    )


def from_indices(positions: Tensor, words: Tensor, rise: bool = False) -> None:
    columns = WORD * words.shape[1]
    if devices.streams(positions.device) is None and positions.numel():  # a GPU is not waited for: torch refuses there
        inside = bool(((positions >= 0) & (positions < columns)).all())
        if not inside or (rise and not bool((positions[:, 1:] > positions[:, :-1]).all())):
            raise list_error(words)
    flags = torch.zeros(words.shape[0], words.shape[1] * WORD, dtype=torch.bool, device=words.device)
    pack(flags.scatter_(1, positions.long(), True), words)


def from_lists(
    lists: Sequence[tuple[Tensor, slice]], words: Tensor, from_indices: Callable[..., None] = from_indices
) -> None:
    for positions, columns in lists:
        from_indices(positions, words[:, columns], rise=True)
