"""The engine's flat buffer seen as padded rows, one row per owner, with the parameters' segments in it.

All padding happens here. A *segment* is one parameter's columns in every row; its width is padded to the codec's group,
so that one kernel launch serves a whole bucket while no group ever straddles two parameters.

    engine buffer (flat)                         bucket.rows (R, n)
    | w1 ............... | w2 ........ |   ->    row 0 | w1[0:a]   0 | w2[0:b]   0 |
                                                 row 1 | w1[a:2a]  0 | w2[b:2b]  0 |   ...

R is 1 where the result belongs to everybody and the network may sum (an all-reduce of a linear codec), the number of
owners otherwise.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.ops import rows as ops

if TYPE_CHECKING:
    from thinwire.network.comm import Comm

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Where one parameter lies in the engine's flat buffer.

    ``stride == 0``: ``numel`` consecutive elements from ``offset`` (DDP). Otherwise ``rows`` runs of ``numel // rows``
    elements, run r at ``offset + r * stride`` (FSDP2: run r is rank r's shard).

    ``form``: shape and strides of a DDP gradient that is dense in memory but not contiguous (channels_last,
    transposed). In a bucket its values are in the order of its indices, as everywhere else: what a method makes of a
    parameter does not depend on how that lies in memory.
    """

    name: str
    offset: int
    numel: int
    rows: int = 1
    stride: int = 0
    form: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def columns(self) -> slice:
        """Its consecutive elements."""
        return slice(self.offset, self.offset + self.numel)

    def strided(self, flat: Tensor) -> Tensor:
        """The view of ``flat`` that ``form`` describes."""
        assert self.form is not None
        return flat.as_strided(*self.form, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class Segment:
    """One parameter's columns ``[start, start + width)`` in every row; the first ``span`` of them hold values."""

    name: str
    start: int
    width: int
    span: int
    piece: Piece

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)

    def groups(self, size: int) -> slice:
        """The columns counted in groups of ``size`` values (mask words, scales); their ends are multiples of it."""
        return slice(self.start // size, (self.start + self.width) // size)


class Rows(Protocol):
    """What an exchange needs to know of a bucket."""

    rows: Tensor
    mean: Tensor

    @property
    def shape(self) -> Sequence[int]: ...

    def scratch(self, key: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


class Arena:
    """Scratch memory for buckets that take turns, on one thread or stream: of each use, what the largest one needs."""

    def __init__(self) -> None:
        self._held: dict[object, Tensor] = {}

    def take(self, key: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the use ``key``, which holds whatever it held: the same for all who ask with that key."""
        size = math.prod(shape) * dtype.itemsize
        held = self._held.get(key)
        if held is None or held.numel() < size or held.device != device:
            self._held.pop(key, None)  # before the next one is allocated
            held = None
            held = self._held[key] = torch.zeros(size, dtype=torch.uint8, device=device)
        return held[:size].view(dtype).view(*shape)

    def clear(self) -> None:
        """Free it all: it grows again to what is needed."""
        self._held.clear()


class Shard(NamedTuple):
    """Where the parameters of one module of a sharded engine lie in a rank's shard of it.

    Attributes:
        pieces: the trained ones. frozen: the others.
        numel: n, values per rank, with the engine's padding. dtype: in which they are gathered.
    """

    pieces: tuple[Piece, ...]
    frozen: tuple[Piece, ...]
    numel: int
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parameters: by them a module is known."""
        return tuple(piece.name for piece in (*self.pieces, *self.frozen))


@dataclass(frozen=True)
class Layout:
    """What an engine will hand out, as far as it knows before the first step.

    Attributes:
        buffers: where the parameters lie in each flat buffer of a backward pass, in order. dtypes: of each.
        shards: one of each sharded module.
        comm: the ranks that the weights are sharded over.
    """

    buffers: Sequence[tuple[Piece, ...]]
    dtypes: Sequence[torch.dtype]
    shards: Sequence[Shard] = ()
    comm: Comm | None = None


class Bucket:
    """Some parameters of one engine buffer, as rows.

    Attributes:
        rows: (R, n) the gradients to be averaged, float32 (or the engine's dtype, where nothing is encoded).
        mean: where the exchange writes the result: ``rows`` itself if every rank needs all of it, (1, n) if this rank
            owns one row.
        segments: the parameters, in the engine's order.
        step: optimizer steps taken before this one, for random streams.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        rows: int,
        owner: bool,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
        spans: Sequence[int] = (),
        arena: Arena | None = None,
    ) -> None:
        """``rows`` owners; ``owner``: this rank keeps one row only; ``group``: elements that a codec takes together.

        ``spans``: of the pieces in a row, where they are not to be as short as can be. ``arena``: that it shares with
        other buckets.
        """
        self.group, self.owner = group, owner
        self.segments = self._place(pieces, rows, group, spans)
        self.key = (tuple(segment.name for segment in self.segments), rows, group)
        self.shape: Sequence[int] = (rows, sum(segment.width for segment in self.segments))
        self.dtype, self.device = dtype, device
        self.step = 0
        self.rows: Tensor = torch.empty(0)
        self.mean: Tensor = torch.empty(0)
        self._arena = Arena() if arena is None else arena
        self._buffers: dict[object, Tensor] = {}
        self._made: dict[object, tuple[tuple[object, ...], object]] = {}

    @staticmethod
    def _place(pieces: Sequence[Piece], rows: int, group: int, spans: Sequence[int]) -> tuple[Segment, ...]:
        segments, start = [], 0
        for i, piece in enumerate(pieces):
            if piece.stride and piece.rows != rows:
                raise ThinwireError(f"{piece.name}: the engine has {piece.rows} shards, the bucket {rows} rows")
            span = piece.numel // rows if piece.stride else spans[i] if spans else -(-piece.numel // rows)
            segments.append(Segment(piece.name, start, padded(span, group), span, piece))
            start += segments[-1].width
        return tuple(segments)

    def buffer(self, key: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A workspace that lives as long as the bucket: the same tensor for the same ``key``, a use.

        Zeros at first, and whenever it was asked for in another shape or dtype than before.
        """
        known = self._buffers.get(key)
        if known is None or known.shape != torch.Size(shape) or known.dtype != dtype:
            self._buffers.pop(key, None)  # before the next one is allocated
            known = None
            known = self._buffers[key] = torch.zeros(*shape, dtype=dtype, device=self.device)
        return known

    def scratch(self, key: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A workspace for the use ``key`` between ``load`` and ``release``. Others have it next: it is not zeros."""
        return self._arena.take(key, shape, dtype, self.device)

    def once(self, key: object, make: Callable[[], T], *of: object) -> T:
        """What ``make()`` gave, kept as long as the bucket lives and ``of``, which it depends on, stay the same.

        Tensors are the same if they are one object: what a method puts into its state anew is another one.
        """
        known = self._made.get(key)
        if known is None or len(known[0]) != len(of) or not all(map(_same, known[0], of)):
            known = self._made[key] = (of, make())
        return cast(T, known[1])

    def columns(self, values: Tensor, segment: Segment) -> Tensor:
        """``segment``'s columns of ``values`` (R, n): a view (R, width)."""
        return values[:, segment.columns]

    def clear_padding(self, values: Tensor) -> Tensor:
        """Zeros in the columns of ``values`` (R, n) that stand for no parameter, where a codec may have written."""
        for segment in self.segments:
            if segment.width > segment.span:
                self.columns(values, segment)[:, segment.span :].zero_()
        return values

    def load(self, flat: Tensor, out: Tensor) -> None:
        """Take the gradients from the engine's buffer ``flat`` (1-D); without a copy where it already has our form.

        ``out``: where ``store`` will be asked to put the mean; this rank's row (1-D) if ``owner``, else ``flat``.
        """
        if self._same_form(flat):
            self.rows = flat.view(self.shape)
        else:
            self.rows = self.scratch("rows", self.shape, self.dtype)
            self.pack(flat, self.rows)
        if not self.owner:
            self.mean = self.rows
        elif out.numel() == self.shape[1] and out.dtype == self.dtype and self._contiguous:
            self.mean = out.view(1, -1)
        else:
            self.mean = self.scratch("mean", (1, self.shape[1]), self.dtype)

    def store(self, out: Tensor) -> None:
        """Give the mean back: to the engine's buffer (as in ``load``), or to this rank's own row (1-D) if ``owner``."""
        if self.owner:
            if same_memory(self.mean, out):
                return
            ops.unpack(self.mean.view(-1), self.own_copy_table, out)
        elif not same_memory(self.rows, out):
            self.unpack(self.rows, out)

    def release(self) -> None:
        """Let go of the engine's buffer, which would live on in ``rows`` or ``mean``."""
        self.rows = self.mean = torch.empty(0)

    def pack(self, flat: Tensor, rows: Tensor) -> None:
        """Engine buffer -> rows (R, n), contiguous; zeros in the padding."""
        ops.pack(flat, self.copy_table, rows.view(-1))
        self.pack_formed(flat, rows)

    def unpack(self, rows: Tensor, flat: Tensor) -> None:
        """Rows (R, n), contiguous -> engine buffer; the padding is left out."""
        ops.unpack(rows.view(-1), self.copy_table, flat)
        self.unpack_formed(rows, flat)

    def pack_formed(self, flat: Tensor, rows: Tensor) -> None:
        """``pack`` of the parameters that are not contiguous in the engine's buffer."""
        for segment in self._formed:
            values = segment.piece.strided(flat).reshape(-1)  # a copy, in the order of the indices
            ops.pack(values, ops.CopyTable([self._part(segment, 0)], self.device), rows.view(-1))

    def unpack_formed(self, rows: Tensor, flat: Tensor) -> None:
        for segment in self._formed:
            piece = segment.piece
            values = torch.empty(piece.numel, dtype=flat.dtype, device=flat.device)
            ops.unpack(rows.view(-1), ops.CopyTable([self._part(segment, 0)], self.device), values)
            assert piece.form is not None
            piece.strided(flat).copy_(values.view(piece.form[0]))

    @functools.cached_property
    def copy_table(self) -> ops.CopyTable:
        """Of the parameters that are contiguous in the engine's buffer."""
        known = [self._part(segment, segment.piece.offset) for segment in self.segments if segment.piece.form is None]
        return ops.CopyTable(known, self.device)

    @functools.cached_property
    def own_copy_table(self) -> ops.CopyTable:
        """Of all of them, in the row that the engine takes."""
        segments = [
            ops.CopySegment(of.piece.offset, of.span, of.span, of.start, of.width, of.span, 0, 1)
            for of in self.segments
        ]
        return ops.CopyTable(segments, self.device)

    @property
    def _formed(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.piece.form is not None]

    def _part(self, segment: Segment, offset: int) -> ops.CopySegment:
        piece, span, (rows, n) = segment.piece, segment.span, self.shape
        numel = (piece.rows - 1) * piece.stride + span if piece.stride else piece.numel
        return ops.CopySegment(offset, numel, piece.stride or span, segment.start, segment.width, span, n, rows)

    def _same_form(self, flat: Tensor) -> bool:
        if flat.dtype != self.dtype or flat.numel() != self.shape[0] * self.shape[1] or not flat.is_contiguous():
            return False
        return self._contiguous and (self.shape[0] == 1 or all(s.piece.stride == self.shape[1] for s in self.segments))

    @property
    def _contiguous(self) -> bool:
        """Do the segments lie in a row just as they lie in the engine's buffer or shard?"""
        return all(s.width == s.span and s.piece.offset == s.start and s.piece.form is None for s in self.segments)


class BucketGroup:
    """The buckets of one engine buffer, several: their rows lie in one memory, packed and unpacked in one pass."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """``buckets``: of one dtype, with one arena."""
        self._buckets = buckets
        self._rows, self._means = _Layout([of.shape for of in buckets]), _Layout([(1, of.shape[1]) for of in buckets])
        self._copy_table = self._rows.copy_table([of.copy_table for of in buckets])
        self._own_copy_table = self._means.copy_table([of.own_copy_table for of in buckets])

    def load(self, flat: Tensor, out: Tensor) -> None:
        """As ``Bucket.load``, of all."""
        first = self._buckets[0]
        memory = first.scratch("rows", (self._rows.size,), first.dtype)
        ops.pack(flat, self._copy_table, memory)
        for bucket, rows in zip(self._buckets, self._rows.parts(memory), strict=True):
            bucket.rows = bucket.mean = rows
            bucket.pack_formed(flat, rows)
        if first.owner:
            memory = first.scratch("mean", (self._means.size,), first.dtype)
            for bucket, mean in zip(self._buckets, self._means.parts(memory), strict=True):
                bucket.mean = mean

    def store(self, out: Tensor) -> None:
        """As ``Bucket.store``, of all."""
        first = self._buckets[0]
        if first.owner:
            ops.unpack(first.scratch("mean", (self._means.size,), first.dtype), self._own_copy_table, out)
            return
        ops.unpack(first.scratch("rows", (self._rows.size,), first.dtype), self._copy_table, out)
        for bucket in self._buckets:
            bucket.unpack_formed(bucket.rows, out)

    def release(self) -> None:
        """As ``Bucket.release``, of all."""
        for bucket in self._buckets:
            bucket.release()


class _Layout:
    """Rows of several ``shapes`` (R, n) in one memory, each from a multiple of 64 elements on."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._shapes = shapes
        *self._firsts, self.size = itertools.accumulate((padded(rows * n, 64) for rows, n in shapes), initial=0)

    def parts(self, memory: Tensor) -> list[Tensor]:
        return [memory[at : at + r * n].view(r, n) for at, (r, n) in zip(self._firsts, self._shapes, strict=True)]

    def copy_table(self, each: Sequence[ops.CopyTable]) -> ops.CopyTable:
        """``each``: of those alone."""
        parts = [
            part._replace(start=first + part.start)
            for first, of in zip(self._firsts, each, strict=True)
            for part in of.segments
        ]
        return ops.CopyTable(parts, each[0].device)


def _same(a: object, b: object) -> bool:
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def same_memory(values: Tensor, out: Tensor) -> bool:
    """Do they begin at one place of the same memory? (Tensors without storage have no address.)"""
    alike = values.untyped_storage()._cdata == out.untyped_storage()._cdata
    return alike and values.storage_offset() == out.storage_offset()
