"""The engine's flat buffer seen as padded rows, one row per owner, with the parameters' segments in it.

All padding happens here. A *segment* is one parameter's columns in every row; its width is padded to the codec's group,
so that one kernel launch serves a whole bucket while no group straddles two parameters.

    engine buffer (flat)                         bucket.rows (R, n)
    | w1 ............... | w2 ........ |   ->    row 0 | w1[0:a]   0 | w2[0:b]   0 |
                                                 row 1 | w1[a:2a]  0 | w2[b:2b]  0 |   ...

R is 1 where every rank gets the whole result and the network may sum (an all-reduce of a linear codec), otherwise the
number of owners.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from thinwire.base.alignment import padded, same_memory
from thinwire.base.errors import ThinwireError
from thinwire.ops import rows as ops
from thinwire.ops.direction import Adam
from thinwire.ops.norms import Bounds, Limit

if TYPE_CHECKING:
    from thinwire.network.comm import Comm

T = TypeVar("T")
Bound = Callable[[tuple[str, ...], Tensor, ops.CopyTable, Tensor], Bounds]
"""Copies an engine's buffer to rows by a table of parameters, with outliers scaled down: ``OutlierClip.pack``."""


@dataclass(frozen=True)
class Piece:
    """The place of one parameter in the engine's flat buffer.

    ``stride == 0``: ``numel`` consecutive elements from ``offset`` (DDP). Otherwise ``rows`` runs of ``numel // rows``
    elements, run r at ``offset + r * stride`` (FSDP2: run r is rank r's shard).

    ``form``: shape and strides of a DDP gradient that is dense in memory but not contiguous (channels_last,
    transposed). A bucket holds its values in the order of its indices, so a method does not see the memory format.
    """

    name: str
    offset: int
    numel: int
    rows: int = 1
    stride: int = 0
    form: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def columns(self) -> slice:
        return slice(self.offset, self.offset + self.numel)

    @property
    def stays(self) -> ops.CopySegment:
        """All values, left where they are."""
        span = self.numel // self.rows
        step, length = self.stride or span, (self.rows - 1) * self.stride + span
        return ops.CopySegment(self.offset, length, step, ops.STAYS, span, span, step, self.rows)

    def strided(self, flat: Tensor) -> Tensor:
        """The view of ``flat`` that ``form`` describes."""
        assert self.form is not None
        return flat.as_strided(*self.form, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class Segment:
    """The columns ``[start, start + width)`` of one parameter in every row; the first ``span`` of them hold values."""

    name: str
    start: int
    width: int
    span: int
    piece: Piece

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)

    def groups(self, size: int) -> slice:
        """The columns in units of ``size`` values (mask words, scales), which divides both ends."""
        return slice(self.start // size, (self.start + self.width) // size)


class Arena:
    """Scratch memory for buckets that take turns, on one thread or stream: for each use the largest need."""

    def __init__(self) -> None:
        self._memory: dict[object, Tensor] = {}
        self._views: dict[tuple[Any, ...], Tensor] = {}  # made once: to make one takes the host as long as a launch

    def borrow(self, key: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the use ``key``, not cleared: the same memory for every call with that key."""
        form = key, *shape, dtype, device
        view = self._views.get(form)
        if view is None:
            memory = self._reserve(key, math.prod(shape) * dtype.itemsize, device)
            view = self._views[form] = memory.view(dtype).view(*shape)
        return view

    def _reserve(self, key: object, size: int, device: torch.device) -> Tensor:
        memory = self._memory.get(key)
        if memory is None or memory.numel() < size or memory.device != device:
            self._memory.pop(key, None)  # before the next one is allocated
            self._views = {form: view for form, view in self._views.items() if form[0] != key}
            memory = None
            memory = self._memory[key] = torch.zeros(size, dtype=torch.uint8, device=device)
        return memory[:size]

    def clear(self) -> None:
        """Free all memory."""
        self._memory.clear()
        self._views.clear()


class Shard(NamedTuple):
    """The places of one module's parameters in a rank's shard of it, on a sharded engine.

    Attributes:
        pieces, frozen: the trained parameters, and the others.
        numel: n, values per rank, with the engine's padding. dtype: of the gathered weights.
    """

    pieces: tuple[Piece, ...]
    frozen: tuple[Piece, ...]
    numel: int
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters, which identify the module."""
        return tuple(piece.name for piece in (*self.pieces, *self.frozen))


@dataclass(frozen=True)
class Layout:
    """The buffers that an engine will hand out, as far as it knows before the first step.

    Attributes:
        buffers: the places of the parameters in each flat buffer of a backward pass, in order. dtypes: of the buffers.
        shards: one for each sharded module. comm: the ranks that the weights are sharded over.
        regathers: for each shard, among how many of them the backward pass gathers it again; 0: it stays gathered.
        held: bytes of buffers that the engine keeps because of us, beyond what the method keeps.
    """

    buffers: Sequence[tuple[Piece, ...]]
    dtypes: Sequence[torch.dtype]
    shards: Sequence[Shard] = ()
    comm: Comm | None = None
    held: int = 0
    regathers: Sequence[int] = ()


class Bucket:
    """Some parameters of one engine buffer, as rows.

    Attributes:
        rows: (R, n) the gradients to be averaged, float32 (or the engine's dtype, where nothing is encoded). They may
            lie apart in memory if the bucket was made ``apart``.
        mean: receives the result: ``rows`` itself if every rank needs all of it, (1, n) if this rank owns one row.
        segments: the parameters, in the engine's order. names: theirs.
        norms: (segments,) float32 of the rows as they were loaded; None: nobody has taken them.
        limit: cuts outliers among ``rows`` (see ``cut_outliers``); None: they have been cut.
        adam: makes steps of the gradients in ``rows`` in the pass that encodes them; None: they are what is sent.
        rider: the bucket of what stays dense in the same engine buffer, which may travel in this one's messages.
        arrived: the step's mean has come in the messages of another bucket.
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
        apart: bool = False,
    ) -> None:
        """``owner``: this rank keeps one row only. ``group``: elements that a codec takes together.

        ``spans``: values of each piece in a row; default: as few as possible. ``arena``: shared with other buckets.
        ``apart``: rows may stay in the engine's buffer, between values of other buckets.
        """
        self.group, self.owner, self._apart = group, owner, apart
        self.segments = _segments(pieces, rows, group, spans)
        self.names = tuple(segment.name for segment in self.segments)
        self.key = (self.names, rows, group)
        self.shape: Sequence[int] = (rows, sum(segment.width for segment in self.segments))
        self.dtype, self.device = dtype, device
        self.step = 0
        self.rows = self.mean = torch.empty(0, dtype=torch.float32, device="cpu")
        self.norms: Tensor | None = None
        self.limit: Limit | None = None
        self.adam: Adam | None = None
        self.rider: Bucket | None = None
        self.arrived = False
        self.copies = BucketCopies(self.segments, self.shape, device)
        self._arena = Arena() if arena is None else arena
        self._buffers: dict[object, Tensor] = {}
        self._cached: dict[object, tuple[tuple[object, ...], object]] = {}

    def buffer(self, key: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the bucket's own workspace for ``key``, a use: zeros at first and after a change of shape or dtype."""
        memory = self._buffers.get(key)
        if memory is None or memory.shape != torch.Size(shape) or memory.dtype != dtype:
            self._buffers.pop(key, None)  # before the next one is allocated
            memory = None
            memory = self._buffers[key] = torch.zeros(*shape, dtype=dtype, device=self.device)
        return memory

    def scratch(self, key: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Lend a workspace for the use ``key`` from ``load`` to ``release``, not cleared: buckets share it."""
        return self._arena.borrow(key, shape, dtype, self.device)

    def guess(self, kind: str, rows: int) -> Tensor:
        """Return memory for the sizes of what is chosen of ``rows`` of the ``kind``: see ``codecs.base.Residual``."""
        return self.buffer(("guess", kind), (rows, len(self.segments)), torch.int32)

    def once(self, key: object, make: Callable[[], T], *dependencies: object) -> T:
        """Return ``make()``, cached while ``dependencies`` stay the same (tensors: the same objects)."""
        entry = self._cached.get(key)
        if entry is None or len(entry[0]) != len(dependencies) or not all(map(_same, entry[0], dependencies)):
            entry = self._cached[key] = (dependencies, make())
        return cast(T, entry[1])

    def clear_padding(self, values: Tensor) -> Tensor:
        """Zero the padding columns of ``values`` (R, n), where a codec may have written."""
        for segment in self.segments:
            if segment.width > segment.span:
                values[:, segment.columns][:, segment.span :].zero_()
        return values

    def cut_outliers(self) -> None:
        """Cut the outliers among ``rows`` now, unless they have been cut: before anything but ``adam`` reads them."""
        if self.limit is not None:
            self.limit.cut()
            self.limit = None

    def load(self, flat: Tensor, out: Tensor, bound: Bound | None = None) -> Bounds | None:
        """Take the gradients from the engine's buffer ``flat`` (1-D), without a copy where it has the form of rows.

        Args:
            out: the later argument of ``store``: this rank's row (1-D) if ``owner``, else ``flat``.
            bound: scales the outliers among ``segments`` down, unless ``limit`` will; what it returns is returned.
        """
        first, bounds = self.segments[0].piece.offset, None
        if self.lies_in(flat):
            self.rows = flat.view(self.shape[0], -1)[:, first : first + self.shape[1]]
            if bound is not None and self.limit is None:
                bounds = bound(self.names, flat, self.copies.stay_table, flat)
        else:
            self.rows = self.scratch("rows", self.shape, self.dtype)
            bounds = pack(self.names, flat, self.copies.copy_table, self.rows.view(-1), bound)
            self.copies.pack_formed(flat, self.rows)
        if not self.owner:
            self.mean = self.rows
        elif self.copies.contiguous and out.dtype == self.dtype and (self._apart or out.numel() == self.shape[1]):
            self.mean = out[first : first + self.shape[1]].view(1, -1)
        else:
            self.mean = self.scratch("mean", (1, self.shape[1]), self.dtype)
        return bounds

    def store(self, out: Tensor) -> None:
        """Write the mean to ``out``, as in ``load``."""
        if self.owner:
            if same_memory(self.mean, out[self.segments[0].piece.offset :]):
                return
            ops.unpack(self.mean.view(-1), self.copies.own_copy_table, out)
        elif not same_memory(self.rows, out):
            self.copies.unpack(self.rows, out)

    def release(self) -> None:
        """Drop ``rows`` and ``mean``, which may be views of the engine's buffer."""
        self.rows = self.mean = torch.empty(0, dtype=torch.float32, device="cpu")
        self.norms = self.limit = self.adam = None

    def lies_in(self, flat: Tensor) -> bool:
        """Has the engine's buffer the form of rows, or, with ``apart``, rows whose columns are the bucket's?"""
        rows, n = self.shape
        distance = flat.numel() // rows
        if flat.dtype != self.dtype or flat.numel() != rows * distance or not flat.is_contiguous():
            return False
        if not self.copies.contiguous or (distance != n and not (self._apart and self.owner)):
            return False
        return rows == 1 or all(segment.piece.stride == distance for segment in self.segments)


class BucketCopies:
    """Copies a bucket's parameters between an engine's flat buffer and rows (R, n)."""

    def __init__(self, segments: Sequence[Segment], shape: Sequence[int], device: torch.device) -> None:
        self.segments, self.shape, self.device = segments, shape, device

    def pack(self, flat: Tensor, rows: Tensor) -> None:
        """Copy the engine's buffer to contiguous rows (R, n), and zero the padding."""
        ops.pack(flat, self.copy_table, rows.view(-1))
        self.pack_formed(flat, rows)

    def unpack(self, rows: Tensor, flat: Tensor) -> None:
        """Copy contiguous rows (R, n) without their padding to the engine's buffer."""
        ops.unpack(rows.view(-1), self.copy_table, flat)
        self.unpack_formed(rows, flat)

    def pack_formed(self, flat: Tensor, rows: Tensor) -> None:
        """Pack the parameters that are not contiguous in the engine's buffer."""
        for segment in self.formed:
            values = segment.piece.strided(flat).reshape(-1)  # a copy, in the order of the indices
            ops.pack(values, ops.CopyTable([self._part(segment, 0)], self.device), rows.view(-1))

    def unpack_formed(self, rows: Tensor, flat: Tensor) -> None:
        """Unpack the parameters that are not contiguous in the engine's buffer."""
        for segment in self.formed:
            values, strided = flat.new_empty(segment.piece.numel), segment.piece.strided(flat)
            ops.unpack(rows.view(-1), ops.CopyTable([self._part(segment, 0)], self.device), values)
            strided.copy_(values.view(strided.shape))

    @functools.cached_property
    def copy_table(self) -> ops.CopyTable:
        """The copies of the parameters that are contiguous in the engine's buffer; the others stay."""
        copies = [s.piece.stays if s.piece.form else self._part(s, s.piece.offset) for s in self.segments]
        return ops.CopyTable(copies, self.device)

    @functools.cached_property
    def stay_table(self) -> ops.CopyTable:
        """All parameters, left in the engine's buffer."""
        return ops.CopyTable([segment.piece.stays for segment in self.segments], self.device)

    @functools.cached_property
    def own_copy_table(self) -> ops.CopyTable:
        """The copies of all parameters in this rank's own row."""
        spans = ((s, s.span) for s in self.segments)
        copies = [ops.CopySegment(s.piece.offset, n, n, s.start, s.width, n, 0, 1) for s, n in spans]
        return ops.CopyTable(copies, self.device)

    @functools.cached_property
    def contiguous(self) -> bool:
        """Do the segments lie in a row as in the engine's buffer or shard, behind what may lie before them there?"""
        first = self.segments[0].piece.offset
        return all(
            s.width == s.span and s.piece.offset == first + s.start and s.piece.form is None for s in self.segments
        )

    @property
    def formed(self) -> list[Segment]:
        """The parameters that are not contiguous in the engine's buffer."""
        return [segment for segment in self.segments if segment.piece.form is not None]

    def _part(self, segment: Segment, offset: int) -> ops.CopySegment:
        piece, span, (rows, n) = segment.piece, segment.span, self.shape
        numel = (piece.rows - 1) * piece.stride + span if piece.stride else piece.numel
        return ops.CopySegment(offset, numel, piece.stride or span, segment.start, segment.width, span, n, rows)


def pack(
    names: tuple[str, ...], flat: Tensor, table: ops.CopyTable, rows: Tensor, bound: Bound | None
) -> Bounds | None:
    """Copy ``names`` in the engine's buffer ``flat`` to ``rows`` (1-D) by ``table``; through ``bound``, if any."""
    if bound is not None:
        return bound(names, flat, table, rows)
    ops.pack(flat, table, rows)
    return None


def _segments(pieces: Sequence[Piece], rows: int, group: int, spans: Sequence[int]) -> tuple[Segment, ...]:
    segments, start = [], 0
    for i, piece in enumerate(pieces):
        if piece.stride and piece.rows != rows:
            raise ThinwireError(f"{piece.name}: the engine has {piece.rows} shards, the bucket {rows} rows")
        span = piece.numel // rows if piece.stride else spans[i] if spans else -(-piece.numel // rows)
        segments.append(Segment(piece.name, start, padded(span, group), span, piece))
        start += segments[-1].width
    return tuple(segments)


def _same(a: object, b: object) -> bool:
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
