"""Codec x topology: the only place that knows how a codec's wire travels.

* :class:`AllReduce`: every rank gets every row of the mean (DDP; HSDP across nodes).
* :class:`ReduceScatter`: rank r gets row r of the mean (FSDP2).

A *linear* codec rides the network's own sum. The others, and the linear ones if the sum is wanted in fp32, go
all-to-all, are decoded and summed in fp32 in rank order, and, for an all-reduce, are encoded again and all-gathered:
all ranks decode the same bytes and so hold the same bits. No codec at all means the engine's own dtype and the
network's own sum: the dense baseline, bit for bit what the stock engine does.

Nothing is lost: with ``residual``, what a rank's encoding left out (input minus what its peers can decode) is written
to its ``new``, and what the second encoding left out of this rank's row of the mean is added, N times (the next mean
divides it by N again). So the sum over ranks of input + old - new is N times the mean that everybody got.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.codecs.base import Codec, Residual, Space
from thinwire.core.bucket import Bucket, Rows, same_memory
from thinwire.network.comm import Comm, CountingComm, Work
from thinwire.network.ledger import Ledger


def _encode(
    comm: Comm,
    bucket: Rows,
    values: Tensor,
    codec: Codec,
    key: str,
    residual: Residual | None = None,
    seed: Seeds | None = None,
) -> Tensor:
    """Encode ``values`` (R, n) into a wire (R, m): a workspace of the bucket, or ``values`` themselves."""
    if codec.verbatim and residual is None and values.dtype == codec.wire_dtype and values.is_contiguous():
        return values
    wire = bucket.scratch(key, (len(values), codec.wire_numel(values.shape[1])), codec.wire_dtype)
    with comm.ledger.span("encode", values):
        return codec.encode(values, wire, residual=residual, seed=seed, space=scratch(bucket))


def _decode(comm: Comm, bucket: Rows, wire: Tensor, codec: Codec, out: Tensor, scale: float = 1.0) -> None:
    with comm.ledger.span("decode", out):
        if not (codec.verbatim and same_memory(wire, out)):
            codec.decode(wire, out, space=scratch(bucket))
        if scale != 1.0:
            out.mul_(scale)


def _decode_sum(comm: Comm, bucket: Rows, wire: Tensor, codec: Codec, out: Tensor, scale: float) -> None:
    with comm.ledger.span("decode", out):
        codec.decode_sum(wire, out, scale, space=scratch(bucket))


def scratch(bucket: Rows) -> Space:
    """Return what gives a codec the scratch memory of ``bucket``."""
    return lambda use, shape, dtype: bucket.scratch(("codec", use), shape, dtype)


def _from_peers(comm: Comm, bucket: Rows, wire: Tensor) -> Tensor:
    """Exchange ``wire`` (N, m) all-to-all; return the peers' wires of this rank's row, in rank order."""
    received = bucket.scratch("received", wire.shape, wire.dtype)
    comm.all_to_all(received, wire)
    return received


def _encode_sum(
    comm: Comm, bucket: Rows, received: Tensor, codec: Codec, scale: float, residual: Residual | None,
    seed: Seeds | None,
) -> Tensor:  # fmt: skip
    """Encode this rank's row of the mean, from its peers' wires ``received`` (N, m), into a wire (1, m)."""
    shape = 1, bucket.shape[1]
    if residual is None:
        mean_wire = bucket.scratch("mean wire", (1, received.shape[1]), received.dtype)
        with comm.ledger.span("encode", received):
            return codec.encode_sum(received, mean_wire, shape[1], scale, seed=seed, space=scratch(bucket))
    mean, error = (bucket.scratch(use, shape, torch.float32) for use in ("mean row", "mean row's error"))
    _decode_sum(comm, bucket, received, codec, mean[0], scale)
    mean_wire = _encode(comm, bucket, mean, codec, "mean wire", Residual(None, error), seed)
    residual.new[comm.rank].add_(error[0], alpha=comm.size)
    return mean_wire


def _send_all(rows: Tensor, residual: Residual | None) -> None:
    """Add ``residual.old`` to ``rows``: without a codec nothing is left out."""
    if residual is not None:
        if residual.old is not None:
            rows.add_(residual.old)
        residual.new.zero_()


def _dense_all_reduce(comm: Comm, values: Tensor, divide: str, *, shared: bool = False) -> None:
    """Average by the network's own sum, with the engine's order of dividing and adding.

    ``shared``: ``values`` are divided already, where that comes before the sum.
    """
    if divide == "before":
        if not shared:
            values.mul_(1 / comm.size)
        comm.all_reduce(values)
    else:
        comm.all_reduce(values, "mean")


class Exchange(ABC):
    """A topology, handed to the method by the engine: a method is written once and does not ask which it is.

    Attributes:
        comm: the ranks that it connects.
        owner: this rank keeps one row of the result only.
        divide: without a codec, the mean's 1/N comes "before" the network's sum (stock DDP) or "after" it (FSDP2).
    """

    owner: bool = False
    divide: str = "after"

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    @property
    def ranks(self) -> int:
        """The number of ranks, N."""
        return self.comm.size

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        return self.comm.rank

    @property
    def own_row(self) -> int:
        """The row of a bucket whose mean this rank gets: its own, or the first where every rank gets all rows."""
        return self.rank if self.owner else 0

    @property
    def own_rows(self) -> slice:
        """The rows of a bucket whose mean this rank gets: its own, or all."""
        return slice(self.rank, self.rank + 1) if self.owner else slice(None)

    @abstractmethod
    def mean(
        self,
        bucket: Rows,
        codec: Codec | None = None,
        *,
        on_wire: bool = True,
        residual: Residual | None = None,
        seed: Seeds | None = None,
        shared: bool = False,
    ) -> None:
        """Write the mean over ranks of ``bucket.rows`` + ``residual.old`` to ``bucket.mean``.

        ``residual.new`` becomes what the encoding left out.

        Args:
            codec: None for the engine's own dtype, summed by the network.
            on_wire: let the network sum a linear codec's wire; where every rank gets the whole mean, a codec that is
                not linear sends its one row to everybody, who sums them all (R == 1). False: sum in fp32 at the owner
                of each row (R == N).
            seed: of a codec that draws random bits.
            shared: without a codec, ``bucket.rows`` are ``prescale`` times the values already.
        """

    def serve(self, bucket: Bucket, codec: Codec, *, residual: Residual | None = None) -> Tensor:
        """Return (1, n), the mean of this rank's own row alone, on any topology: for a method that goes on from there.

        Rank r sends row j of its rows to rank j, encoded, where they are summed in fp32.
        """
        mean = bucket.mean if self.owner else bucket.scratch("served", (1, bucket.shape[1]), torch.float32)
        ReduceScatter(self.comm).mean(_Served(bucket.rows, mean, bucket), codec, on_wire=False, residual=residual)
        return mean

    def span(self, kind: str, tensor: Tensor) -> AbstractContextManager[None]:
        """Count what a method does itself to ``tensor`` as ``kind`` ("encode", "decode", "exposed") in the ledger."""
        return self.comm.ledger.span(kind, tensor)

    def union(self, bucket: Rows, words: Tensor) -> Tensor:
        """Return (R, w), the bitwise or of all ranks' ``words`` (R, w), integers: a workspace of ``bucket``.

        Rank r makes the r-th of N chunks of it, and all gather these: what an all-reduce sends. (NCCL reduces numbers,
        not bits.)
        """
        comm = self.comm
        shape = comm.size, -(-words.nbytes // comm.size)
        chunks = bucket.scratch("chunks", shape, torch.uint8)
        received = bucket.scratch("received chunks", shape, torch.uint8)
        result = chunks.view(-1)[: words.nbytes].view(words.dtype).view(words.shape)
        result.copy_(words)
        comm.all_to_all(received, chunks)
        remaining = comm.size
        while remaining > 1:  # halves, so that there are few launches
            half = -(-remaining // 2)
            received[: remaining - half] |= received[half:remaining]
            remaining = half
        comm.all_gather(chunks, received[0])
        return result

    def share(self, rows: Tensor) -> Tensor:
        """Give row r of every rank's ``rows`` (R, w) the values of rank r, in place, where each rank owns a row."""
        if self.owner:
            comm = self.comm
            comm.all_gather(rows, rows[comm.rank].clone())
        return rows

    def gather(self, out: Tensor, row: Tensor, *, async_op: bool = False) -> Work | None:
        """Gather all ranks' ``row`` (m,) into ``out`` (N, m). With ``async_op``, wait for the work first."""
        return self.comm.all_gather(out, row, async_op=async_op)

    def all_mean(self, values: Tensor) -> Tensor:
        """Average ``values`` (any shape, float32) over all ranks, in place, to the same bits on every rank."""
        _dense_all_reduce(self.comm, values, "before")
        return values

    def all_max(self, values: Tensor) -> Tensor:
        """Take the maximum of ``values`` (any shape, float32) over all ranks, in place."""
        return self.comm.all_reduce(values, "max")


class AllReduce(Exchange):
    """Every rank gets the whole mean."""

    def __init__(self, comm: Comm, divide: str = "before") -> None:
        """``divide``: see :class:`Exchange`."""
        super().__init__(comm)
        self.divide = divide

    def mean(self, bucket, codec=None, *, on_wire=True, residual=None, seed=None, shared=False):
        comm, rows, scale = self.comm, bucket.rows, 1 / self.comm.size
        if codec is None:
            _send_all(rows, residual)
            _dense_all_reduce(comm, rows, self.divide, shared=shared)
            return
        wire = _encode(comm, bucket, rows, codec, "wire", residual, seed)
        if codec.linear and on_wire:
            if codec.wire_dtype == torch.float32 and codec.divisible:
                _dense_all_reduce(comm, wire, self.divide)
                scale = 1.0
            else:
                comm.all_reduce(wire)
            _decode(comm, bucket, wire, codec, bucket.mean, scale)
            return
        if on_wire:
            wires = bucket.scratch("all wires", (comm.size, wire.shape[1]), wire.dtype)
            comm.all_gather(wires, wire[0])
            _decode_sum(comm, bucket, wires, codec, bucket.mean[0], scale)
            return
        if len(rows) != comm.size:
            raise ThinwireError(
                f"a sum in fp32 over {comm.size} ranks needs {comm.size} rows, the bucket has {len(rows)}"
            )
        received = _from_peers(comm, bucket, wire)
        mean_wire = _encode_sum(comm, bucket, received, codec, scale, residual, None if seed is None else seed.next())
        comm.all_gather(wire, mean_wire[0])
        _decode(comm, bucket, wire, codec, bucket.mean)


class ReduceScatter(Exchange):
    """Rank r gets row r of the mean. It sends row j of its rows to rank j, nothing else."""

    owner = True

    def mean(self, bucket, codec=None, *, on_wire=True, residual=None, seed=None, shared=False):
        comm, rows, mean = self.comm, bucket.rows, bucket.mean
        if codec is None:
            _send_all(rows, residual)
            comm.reduce_scatter(mean[0], rows, "mean")
            return
        wire = _encode(comm, bucket, rows, codec, "wire", residual, seed)
        if codec.linear and on_wire:
            row = bucket.scratch("row", (1, wire.shape[1]), wire.dtype)
            exact = codec.wire_dtype == torch.float32 and codec.divisible  # divided where dense divides
            comm.reduce_scatter(row[0], wire, "mean" if exact else "sum")
            _decode(comm, bucket, row, codec, mean, 1.0 if exact else 1 / comm.size)
        else:
            _decode_sum(comm, bucket, _from_peers(comm, bucket, wire), codec, mean[0], 1 / comm.size)


@dataclass
class Payload:
    """Values that go out as they are, without a codec and so without a workspace: a method has encoded them already.

    Attributes:
        rows: (R, k) the values sent of each row. mean: receives the mean: ``rows`` itself, or (1, k) at a row's owner.
    """

    rows: Tensor
    mean: Tensor

    @property
    def shape(self) -> Sequence[int]:
        return self.rows.shape

    def scratch(self, key: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


@dataclass
class _Served(Payload):
    """A bucket whose mean goes elsewhere: the same rows, its workspace under other keys."""

    bucket: Bucket

    def scratch(self, key: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.bucket.scratch(("serve", key), shape, dtype)


# What a topology means for buckets, plans and dry runs.


def bucket_rows(exchange: Exchange, on_wire: bool) -> int:
    """Count the rows that a bucket needs for ``exchange``, if the network sums (``on_wire``) or the ranks do."""
    return exchange.ranks if exchange.owner or not on_wire else 1


def count_columns(exchange: Exchange, local: int, rows: int) -> int:
    """Count the columns in a bucket of ``rows`` of a parameter of which this rank has ``local`` values, unpadded."""
    return local if exchange.owner else -(-local // rows)


def prescale(exchange: Exchange) -> float:
    """Return what a rank's values are multiplied by before the network sums them, where it is asked for their mean."""
    return 1 / exchange.ranks if exchange.divide == "before" else 1.0


def dense_bytes(exchange: Exchange, numel: int, dtype: torch.dtype) -> float:
    """Count the bytes that one rank sends of an engine's buffer of ``numel`` values that goes out as it is."""
    ledger, rows = Ledger(), exchange.ranks if exchange.owner else 1
    values = torch.empty((rows, numel // rows), dtype=dtype, device="meta")
    payload = Payload(values, values[:1] if exchange.owner else values)
    on_comm(exchange, CountingComm.like(exchange.comm, ledger)).mean(payload)
    return sum(ledger.current.bytes.values())


def on_comm(exchange: Exchange, comm: Comm) -> Exchange:
    """Return the same topology on another ``comm``."""
    double = copy.copy(exchange)
    double.comm = comm
    return double
