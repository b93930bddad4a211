"""The road of one engine buffer: split it into buckets, let the method reduce each, put the means back.

    engine hook -> Bucket -> Method.reduce -> exchange(rows, codec) -> back into the engine

A hop is a stage of the road. Most roads have one. With several nodes of several ranks, a first stage may average inside
the node, and the second, which is the method's own, across nodes:

    HSDP    my node's rows -> reduce-scatter -> my shard -> all-reduce across; torch calls each stage itself
    DDP     the same, then an all-gather of the shards inside the node
    FSDP2   rows -> reduce-scatter inside -> my node's rows -> reduce-scatter across -> my row
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.core.bucket import Arena, Bucket, Piece
from thinwire.core.exchange import Exchange, dense_bytes, on_comm
from thinwire.core.group import BucketGroup
from thinwire.core.method import Fp32, Method, Parameter, bucket_of
from thinwire.core.outliers import OutlierClip
from thinwire.network.comm import Comm
from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger

T = TypeVar("T")
Pieces = tuple[Piece, ...]
Carry = Callable[[Tensor, Pieces, Tensor], object]
"""A stage as a function of an engine's buffer, its pieces, and the tensor that receives the means."""
Send = Callable[[Bucket, Exchange], None]
"""Exchanges a bucket of zeros in place of ``Method.reduce``."""


@dataclass
class Stage:
    """A hop: a method, and the topology that it is handed.

    Attributes:
        dense: names of the parameters that travel in fp32 beside the compressed ones.
        counts_dense: the engine without us would send this buffer over this hop, too.
        bound: limits what a step may put into the method's state.
        scale: gives the factor, 0-dim, that a GradScaler has multiplied the gradients with; it is divided out before
            the method sees them. None: there is no GradScaler.
        step: optimizer steps taken so far; skipped ones do not count.
        flush_at: the step whose exchange is dense and delivers all waiting values. round_delivers: it was in a round,
            whose end delivers them.
    """

    method: Method
    dense: frozenset[str]
    exchange: Exchange
    guard: Guard
    ledger: Ledger
    counts_dense: bool = True
    bound: OutlierClip | None = None
    scale: Callable[[torch.device], Tensor] | None = None
    step: int = 0
    flush_at: int | None = None
    round_delivers: bool = False

    def __post_init__(self) -> None:
        self._buckets: _Compositions[list[_PackedBuckets]] = _Compositions()
        # Parameters that stay dense are summed in rank order too: then no bit depends on how the engine happened to cut
        # its buckets, and a resumed run is the same run.
        self._side = Fp32()

    def renew(self) -> None:
        """Forget all buckets, whose rows depend on the ranks that take part, and what methods cached with them."""
        self._buckets = _Compositions()

    def free_scratch(self) -> None:
        """Free the memory in which buckets take turns: the next ones take what they need."""
        self._buckets.arena.clear()

    def reduce(self, flat: Tensor, pieces: Pieces, out: Tensor) -> None:
        """Average ``flat`` (1-D, the parameters of ``pieces``) over the ranks of this hop.

        Write the mean to ``out``: ``flat`` itself, or this rank's row where each rank gets one row. Record no gradients
        and cast nothing, whatever mode the engine's hook runs in.
        """
        with torch.no_grad(), without_autocast(flat.device.type):
            if self.scale is not None or (self.bound is None and self.hides_what_is_not_finite):
                self.guard.observe(flat)
            if self.counts_dense:
                self.ledger.count_dense(dense_bytes(self.exchange, flat.numel(), flat.dtype))
            loss_scale = None if self.scale is None else self.scale(flat.device)
            if loss_scale is not None:
                flat.div_(loss_scale)
            bound = self.bound
            if bound is not None and (devices.streams(flat.device) is None or not bound.covers(pieces)):
                bounds, bound = bound.apply(flat, pieces), None
                if bounds is None:
                    self.guard.observe(flat)
                else:
                    self.guard.note(bounds.residues)
            self.carry(flat, pieces, out, bound=bound)
            if loss_scale is not None:
                out.mul_(loss_scale)

    @property
    def hides_what_is_not_finite(self) -> bool:
        """May the mean be finite where a gradient was not? No state and no mask: then the guard sees it in the mean."""
        card = self.method.card
        return card.keeps_state or card.promise.kind == "lossy"

    def carry(
        self, flat: Tensor, pieces: Pieces, out: Tensor, send: Send | None = None, bound: OutlierClip | None = None
    ) -> None:
        """Reduce without checking the values or counting bytes.

        Args:
            send: exchanges the method's buckets in its place, between steps; the means of dense parameters become zero.
            bound: scales outliers down as they are packed, and tells the guard; the buckets get the norms that it took.
        """
        alone = send is None and self.method.card.alone(self.step)
        if alone and self.flush_at != self.step:
            self.renew()  # the memory of the steps before: each rank keeps its own gradients now
            return
        for packed, buckets in self._packed(flat, pieces):
            self.load(packed, buckets, flat, out, bound)
            first, last = buckets[0][1], buckets[-1][1]
            first.rider = last if send is None and last is not first else None
            for method, bucket in buckets:
                if bucket.arrived:
                    continue
                if send is None:
                    delivers = self.flush_at == self.step and method is self.method
                    (method.deliver if delivers else method.reduce)(bucket, self.exchange)
                elif method is self.method:
                    send(bucket, self.exchange)
                else:
                    bucket.mean.zero_()
                assert bucket.limit is None, f"{method.name} has read gradients before outliers were cut"
            packed.store(out)
            packed.release()
        if alone:  # the method delivers at the end of its round: a rank that skips this step does not ask again
            self.flush_at, self.round_delivers = None, True

    def load(
        self, packed: Bucket | BucketGroup, buckets: Sequence[tuple[Method, Bucket]], flat: Tensor, out: Tensor,
        bound: OutlierClip | None,
    ) -> None:  # fmt: skip
        """Load the buckets, and cut outliers: but for rows that need no copy, if a method makes steps of them.

        That takes norms in another order of sums. So it is done where the engine's buffers stay what they are: DDP cuts
        its buckets anew after its first pass, and a resumed run is the same run.
        """
        for _, bucket in buckets:  # whatever an error has left
            bucket.norms, bucket.limit, bucket.step, bucket.arrived = None, None, self.step, False
        method, first = buckets[0]
        if bound is not None and method.card.step_maker is not None and first.owner and first.lies_in(flat):
            first.limit = bound.limit(first.names, flat, first.copies.stay_table)
            first.norms = first.limit.bounds.norms
            self.guard.note(first.limit.bounds.residues)
        bounds = packed.load(flat, out, None if bound is None else bound.pack)
        if bounds is not None:
            self.guard.note(bounds.residues)
            cut = [bucket for _, bucket in buckets if bucket.limit is None]
            for bucket, norms in zip(cut, bounds.norms.split([len(bucket.segments) for bucket in cut]), strict=True):
                bucket.norms = norms

    def _packed(self, flat: Tensor, pieces: Pieces) -> list[_PackedBuckets]:
        return self._buckets.once(pieces, flat.dtype, lambda: self._split(flat, pieces))

    def _split(self, flat: Tensor, pieces: Pieces) -> list[_PackedBuckets]:
        """Make a bucket for the compressed parameters, and one for the dense ones."""
        compressed = [piece for piece in pieces if piece.name not in self.dense]
        dense = [piece for piece in pieces if piece.name in self.dense]
        by_method = ((self.method, compressed), (self._side, dense))
        buckets = [(method, self._bucket(chosen, flat, method)) for method, chosen in by_method if chosen]
        alike = len({bucket.dtype for _, bucket in buckets}) == 1
        if len(buckets) > 1 and alike:
            first, codec = buckets[0][1], self.method.card.row_codec
            ahead = 0 if codec is None else codec.wire_bytes(first.shape[1])
            group = BucketGroup([bucket for _, bucket in buckets], in_place=first.lies_in(flat), ahead=ahead)
            return [_PackedBuckets(group, buckets)]
        return [_PackedBuckets(bucket, [(method, bucket)]) for method, bucket in buckets]

    def _bucket(self, pieces: list[Piece], flat: Tensor, method: Method) -> Bucket:
        if method.card.native:  # the buffer goes out as it is
            pieces = [replace(piece, form=None) for piece in pieces]
        dtype = flat.dtype if method.card.native else torch.float32
        return bucket_of(method, pieces, self.exchange, flat.device, self._buckets.arena, dtype)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Leave autocast for the body, if it is on: to enter and leave it takes the host as long as some launches."""
    on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


class _PackedBuckets(NamedTuple):
    """Buckets of a buffer that are packed and unpacked together, each with the method that reduces it."""

    packed: Bucket | BucketGroup
    buckets: Sequence[tuple[Method, Bucket]]


class _Compositions(Generic[T]):
    """A cache by the composition of a buffer, and an arena: a stage's buffers take turns, on one thread or stream."""

    def __init__(self) -> None:
        self.arena = Arena()
        self._cached: dict[tuple[Pieces, torch.dtype], T] = {}
        self._same: dict[tuple[int, torch.dtype], tuple[Pieces, T]] = {}  # by address: engines hand in what they keep

    def once(self, pieces: Pieces, dtype: torch.dtype, make: Callable[[], T]) -> T:
        """Return ``make()``, cached; free older entries with any of these parameters (DDP rebuilds buckets once)."""
        same = self._same.get((id(pieces), dtype))
        if same is not None:
            return same[1]
        key = (pieces, dtype)
        if key not in self._cached:
            names = {piece.name for piece in pieces}
            for old in [old for old in self._cached if names & {piece.name for piece in old[0]}]:
                del self._cached[old]
                self._same.clear()
                self.arena.clear()
            self._cached[key] = make()
        if len(self._same) > len(self._cached):
            self._same.clear()
        self._same[id(pieces), dtype] = pieces, self._cached[key]
        return self._cached[key]


@dataclass
class Road:
    """The stages of all buffers, in order; the last one is the method's.

    Attributes:
        levels: takes a buffer through two stages. None: there is one stage, or the engine calls each by itself (HSDP).
    """

    stages: Sequence[Stage]
    levels: Levels | None = None

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    @property
    def step(self) -> int:
        return self.last.step

    @step.setter
    def step(self, number: int) -> None:
        for stage in self.stages:
            if stage.step < stage.method.card.steady <= number:
                stage.free_scratch()  # a start or warm-up sends most in its first steps
            stage.step = number

    def reduce(self, flat: Tensor, pieces: Pieces, out: Tensor | None = None) -> Tensor:
        """Average ``flat`` (1-D, the parameters of ``pieces``) over the ranks, stage by stage.

        Return ``flat``, overwritten by the mean; or ``out``, this rank's row, where each rank gets one row.
        """
        out = flat if out is None else out
        if self.levels is not None:
            self.last.ledger.count_dense(dense_bytes(self.levels.stock, flat.numel(), flat.dtype))
        with torch.no_grad():
            self._through(flat, pieces, out, [stage.reduce for stage in self.stages])
        return out

    def carry(self, flat: Tensor, pieces: Pieces, out: Tensor, send: Send | None = None) -> None:
        """Reduce as ``Stage.carry`` does, stage by stage; ``send`` is for the last one."""
        last = functools.partial(self.last.carry, send=send)
        self._through(flat, pieces, out, [*(stage.carry for stage in self.stages[:-1]), last])

    def end_pass(self, gradients: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Finish a backward pass, all of whose buffers have been reduced. Collective.

        ``gradients``: the parameters' in these buffers, if the user has not seen them yet (``Engine.shows_late``).
        """
        if (step_maker := self.last.method.card.step_maker) is not None:
            step_maker.end_pass(gradients)

    def _through(self, flat: Tensor, pieces: Pieces, out: Tensor, stages: Sequence[Carry]) -> None:
        if self.levels is not None:
            native = all(stage.method.card.native for stage in self.stages)
            self.levels.through(flat, pieces, out, stages[0], stages[1], flat.dtype if native else torch.float32)
            return
        for stage in stages[:-1]:
            stage(flat, pieces, out)
            flat, pieces = out, shard_of(pieces)
        stages[-1](flat, pieces, out)

    def piece(self, parameter: Parameter) -> Piece:
        """Place ``parameter`` in a buffer of its own, as the engine would hand it out."""
        entry = self.stages[0].exchange if self.levels is None else self.levels.stock
        if entry.owner:
            return Piece(parameter.name, 0, parameter.local * entry.ranks, entry.ranks, parameter.local)
        return Piece(parameter.name, 0, math.prod(parameter.rank_shape))

    def dense_bytes(self, parameter: Parameter) -> float:
        """Count the bytes that the engine without us would send of ``parameter``."""
        dtype = parameter.dtype
        if self.levels is not None:
            return dense_bytes(self.levels.stock, self.piece(parameter).numel, dtype)
        hops = [stage.exchange for stage in self.stages]
        return sum(dense_bytes(hop, parameter.local * (hop.ranks if hop.owner else 1), dtype) for hop in hops)


def shard_of(pieces: Pieces) -> Pieces:
    """Return the pieces of the one row that a reduce-scatter of ``pieces`` leaves."""
    return tuple(Piece(piece.name, piece.offset, piece.numel // piece.rows) for piece in pieces)


@dataclass
class Levels(ABC):
    """Takes an engine's buffer through two stages. ``stock``: the engine's own exchange, one hop over all ranks."""

    stock: Exchange

    def __post_init__(self) -> None:
        self._compositions: _Compositions[Any] = _Compositions()

    @abstractmethod
    def through(
        self, flat: Tensor, pieces: Pieces, out: Tensor, first: Carry, second: Carry, dtype: torch.dtype
    ) -> None:
        """Carry ``flat`` inside the node (``first``), then across nodes; buffers in between are of ``dtype``."""

    def on(self, double: Callable[[Comm], Comm]) -> Levels:
        """Return a copy that uses ``double`` of each group."""
        return replace(self, stock=on_comm(self.stock, double(self.stock.comm)))


@dataclass
class ScatterAndShare(Levels):
    """DDP: each of a node's L ranks averages a shard of every parameter across nodes, and then shares the mean.

    A shard is one of L equal chunks of dim 0, the last one padded with zeros, as with FSDP2: so traffic and waiting
    values across nodes are those of HSDP. The means are shared uncompressed.

    Attributes:
        intra: the ranks of this node. widths: values of each parameter's shard, by name.
    """

    intra: Comm
    widths: Mapping[str, int]

    def through(self, flat, pieces, out, first, second, dtype):
        bucket, inside, across = self._compositions.once(pieces, dtype, lambda: self._make(flat, pieces, dtype))
        rows = bucket.scratch("rows", bucket.shape, dtype)
        shard = bucket.scratch("shard", (bucket.shape[1],), dtype)
        bucket.copies.pack(flat, rows)
        first(rows.view(-1), inside, shard)
        second(shard, across, shard)
        self.intra.all_gather(rows, shard)
        bucket.copies.unpack(rows, flat)

    def on(self, double):
        return replace(self, stock=on_comm(self.stock, double(self.stock.comm)), intra=double(self.intra))

    def _make(self, flat: Tensor, pieces: Pieces, dtype: torch.dtype) -> tuple[Bucket, Pieces, Pieces]:
        """Make the bucket that packs ``flat`` as rows (L, n), and the pieces of the rows and of one shard."""
        ranks, spans = self.intra.size, [self.widths[piece.name] for piece in pieces]
        bucket = Bucket(
            pieces, rows=ranks, owner=False, group=1, dtype=dtype, device=flat.device, spans=spans,
            arena=self._compositions.arena,
        )  # fmt: skip
        n = bucket.shape[1]
        inside = tuple(Piece(s.name, s.start, s.span * ranks, ranks, n) for s in bucket.segments)
        return bucket, inside, shard_of(inside)


@dataclass
class Regroup(Levels):
    """FSDP2: puts the shards of local rank l of all nodes side by side for stage one, as rows for stage two.

    With L = ``local`` ranks per node and M = ``nodes``, row a * L + l belongs to local rank l of node a.
    """

    local: int
    nodes: int

    def through(self, flat, pieces, out, first, second, dtype):
        local, nodes = self.local, self.nodes
        inside, across = self._compositions.once(pieces, dtype, lambda: self._make(flat, pieces))
        n = flat.numel() // (local * nodes)
        rows, row, node_rows = (
            self._compositions.arena.borrow(use, shape, dtype, flat.device)
            for use, shape in (("rows", (local, nodes * n)), ("row", (nodes * n,)), ("apart", (nodes, n)))
        )
        spans = [(piece.offset, piece.numel // piece.rows) for piece in pieces]
        for offset, span in spans:
            source = flat.view(nodes, local, -1)[:, :, offset : offset + span]
            rows[:, nodes * offset : nodes * (offset + span)].view(local, nodes, span).copy_(source.transpose(0, 1))
        first(rows.view(-1), inside, row)
        for offset, span in spans:
            node_rows[:, offset : offset + span].copy_(row[nodes * offset : nodes * (offset + span)].view(nodes, span))
        second(node_rows.view(-1), across, out)

    def _make(self, flat: Tensor, pieces: Pieces) -> tuple[Pieces, Pieces]:
        """Return the pieces in the first stage's rows (L, M * n), and in the second one's (M, n)."""
        local, nodes = self.local, self.nodes
        n = flat.numel() // (local * nodes)
        inside, across = [], []
        for piece in pieces:
            offset, span = piece.offset, piece.numel // piece.rows
            inside.append(Piece(piece.name, nodes * offset, nodes * span * local, local, nodes * n))
            across.append(Piece(piece.name, offset, span * nodes, nodes, n))
        return tuple(inside), tuple(across)
