"""Plain torch, any device: the specification of every operation, and the oracle of its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.ops import rows as packing
from thinwire.ops.rows import Places

if TYPE_CHECKING:
    from thinwire.ops.mask import Faded

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
    before: Tensor | None = None,
) -> None:
    total = rows if residual is None else rows + residual
    flags = flags_of(words)
    if payload.numel():
        payload.copy_(total[flags].view(payload.shape))
    if residual_out is not None:
        residual_out.copy_(torch.where(flags, 0.0, total))


def scatter(payload: Tensor, words: Tensor, out: Tensor, before: Tensor | None = None) -> None:
    flags, k = flags_of(words), payload.shape[1]
    if devices.streams(payload.device) is None and bool((flags.sum(1) != k).any()):  # a GPU is not waited for
        raise ThinwireError(f"a row's mask does not have the {k} bits that its payload has room for")
    out.zero_().masked_scatter_(flags, payload)


def collect(
    row: Tensor, words: Tensor, parts: Sequence[Faded], kept: Places, message: Tensor, before: Tensor | None = None,
    by: Callable[..., None] = gather_keep,
) -> None:  # fmt: skip
    """``by`` this or another backend's ``gather_keep``."""
    for part, values, mask in each_of(message.unsqueeze(0), words, parts):
        own = row[part.start : part.start + part.numel].unsqueeze(0)
        by(torch.nn.functional.pad(own, (0, part.width - part.numel)), None, mask, values, None)
    packing.pack(row, kept, message)


def renew(
    messages: Tensor, words: Tensor, parts: Sequence[Faded], kept: Places, rows: Tensor, before: Tensor | None = None
) -> None:
    for part, values, mask in each_of(messages, words, parts):
        target, fresh = rows[:, part.start : part.start + part.numel], rows.new_zeros((len(rows), part.width))
        scatter(values, mask, fresh)
        flags, beyond = flags_of(mask).split([part.numel, part.width - part.numel], 1)
        if devices.streams(beyond.device) is None and bool(beyond.any()):
            raise not_of(part)
        target.copy_(torch.where(flags, fresh[:, : part.numel], target * part.keep))
    give(messages, kept, rows)


def not_of(part: Faded) -> ThinwireError:
    """What to raise of a mask that does not go with ``part``."""
    return ThinwireError(
        f"a row's mask does not have the {part.k} bits of its values, or one beyond {part.numel} columns"
    )


def give(messages: Tensor, kept: Places, rows: Tensor) -> None:
    """What is ``kept`` of each message, to its row."""
    for message, row in zip(messages, rows, strict=True):
        packing.unpack(message, kept, row)


def each_of(payload: Tensor, words: Tensor, parts: Sequence[Faded]) -> Iterator[tuple[Faded, Tensor, Tensor]]:
    """Every part with its values (R, k) and its mask (R, width / 64)."""
    sizes, counts = [part.k for part in parts], [part.width // WORD for part in parts]
    return zip(parts, payload[:, : sum(sizes)].split(sizes, 1), words.split(counts, 1), strict=True)


def pack(flags: Tensor, words: Tensor) -> None:
    grouped = flags.view(*words.shape, WORD).to(torch.int64)
    words.copy_((grouped << _bits(flags.device)).sum(2))  # each bit once: the sum carries nothing


def flags_of(words: Tensor) -> Tensor:
    """Mask words (..., w) as bools (..., 64 w)."""
    return ((words.unsqueeze(-1) >> _bits(words.device)) & 1).bool().flatten(-2)


def unpack(words: Tensor, flags: Tensor) -> None:
    flags.copy_(flags_of(words))


def popcount(words: Tensor) -> Tensor:
    return flags_of(words).sum(1)


def indices(words: Tensor, out: Tensor) -> None:
    out.copy_(flags_of(words).nonzero()[:, 1].view(out.shape))


def not_a_list(words: Tensor) -> ThinwireError:
    """What to raise of positions that are none of ``words``' columns."""
    return ThinwireError(
        f"a list of positions that came has one that is none of {WORD * words.shape[1]} columns, or does not rise"
    )


def from_indices(positions: Tensor, words: Tensor, rise: bool = False) -> None:
    columns = WORD * words.shape[1]
    if devices.streams(positions.device) is None and positions.numel():  # a GPU is not waited for: torch refuses there
        known = bool(((positions >= 0) & (positions < columns)).all())
        if not known or (rise and not bool((positions[:, 1:] > positions[:, :-1]).all())):
            raise not_a_list(words)
    flags = torch.zeros(words.shape[0], words.shape[1] * WORD, dtype=torch.bool, device=words.device)
    pack(flags.scatter_(1, positions.long(), True), words)


def from_lists(lists: Sequence[tuple[Tensor, slice]], words: Tensor) -> None:
    for positions, groups in lists:
        from_indices(positions, words[:, groups], rise=True)
