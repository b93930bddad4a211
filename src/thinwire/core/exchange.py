"""Codec x topology: only this module knows how a codec's wire travels.

* :class:`AllReduce`: every rank gets every row of the mean (DDP; HSDP across nodes).
* :class:`ReduceScatter`: rank r gets row r of the mean (FSDP2).

The network itself sums the wires of a *linear* codec. Other wires, and linear ones if the sum is wanted in fp32, go
all-to-all, are decoded and summed in fp32 in rank order, and, for an all-reduce, are encoded again and all-gathered:
all ranks decode the same bytes and so hold the same bits. What stays dense of the same engine buffer travels behind
these wires (``codecs/appended.py``). Without a codec, the network sums in the engine's own dtype: the dense baseline,
bit for bit what the stock engine does.

``residual.new`` receives the encoding's error (input minus what the peers can decode), plus N times the second
encoding's error in this rank's row of the mean (the next mean divides it by N again). So nothing is lost: the sum over
ranks of input + old - new is N times the mean that all ranks got.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.base.alignment import same_memory
from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.codecs.appended import Appended
from thinwire.codecs.base import Codec, Residual, Space
from thinwire.core.bucket import Bucket
from thinwire.network.comm import Comm, Work


@dataclass
class Payload:
    """Values exchanged in place of a bucket's, with the bucket's scratch memory under other keys.

    Attributes:
        rows: (R, k) the values sent of each row. mean: receives the mean: ``rows`` itself, or (1, k) at a row's owner.
    """

    rows: Tensor
    mean: Tensor
    bucket: Bucket

    def scratch(self, key: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.bucket.scratch(("serve", key), shape, dtype)


Rows = Bucket | Payload


def scratch(bucket: Rows) -> Space:
    """Return a codec's access to the scratch memory of ``bucket``."""
    return lambda use, shape, dtype: bucket.scratch(("codec", use), shape, dtype)


class Exchange(ABC):
    """A topology, which the engine hands to the method: a method is written once, for any topology.

    Attributes:
        owner: this rank keeps only one row of the result.
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
        return self.comm.rank

    @property
    def own_row(self) -> int:
        """The first row of a bucket whose mean this rank gets."""
        return self.rank if self.owner else 0

    @property
    def own_rows(self) -> slice:
        """The rows of a bucket whose mean this rank gets: its own, or all."""
        return slice(self.rank, self.rank + 1) if self.owner else slice(None)

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
            codec: None: the network sums in the engine's own dtype.
            on_wire: let the network sum a linear codec's wire; if the codec is not linear and every rank gets the whole
                mean, each rank sends its one row (R == 1) to all ranks and sums all rows. False: sum in fp32 at the
                owner of each row (R == N).
            seed: for a codec that draws random bits.
            shared: without a codec, ``bucket.rows`` are already multiplied by ``prescale``.
        """
        if codec is None:
            if residual is not None:  # without a codec there is no error
                if residual.step is not None:
                    residual.step.take(bucket.rows)
                if residual.old is not None:
                    bucket.rows.add_(residual.old)
                residual.new.zero_()
            self._reduce(bucket.rows.contiguous(), bucket.mean, "mean", shared=shared)
            return
        by_network = codec.linear and on_wire
        may_carry = not by_network and (self.owner or not on_wire)
        if may_carry and isinstance(bucket, Bucket) and bucket.rider is not None:
            codec = self._with_rider(codec, codec.wire_bytes(bucket.shape[1]), bucket.rider)
        packed = isinstance(codec, Appended) and 4 * codec.rows.stride(0) == codec.wire_numel(bucket.rows.shape[1])
        wire = self._encode(bucket, bucket.rows, codec, "rows" if packed else "wire", residual, seed)
        if by_network:
            exact = codec.wire_dtype == torch.float32 and codec.divisible  # divided at the same place as dense
            reduced = bucket.scratch("row", (1, wire.shape[1]), wire.dtype) if self.owner else wire
            self._reduce(wire, reduced, "mean" if exact else "sum")
            self._decode(bucket, reduced, codec, bucket.mean, 1.0 if exact else 1 / self.ranks)
        else:
            self._sum_at_ranks(bucket, wire, codec, on_wire=on_wire, residual=residual, seed=seed)

    def _with_rider(self, codec: Codec, wire_bytes: int, rider: Bucket) -> Codec:
        """Append the rows of ``rider`` to the wire of ``codec``: they need no exchange of their own then.

        They travel alone if a part would begin within a word: padding would be bytes that no parameter's plan counts.
        """
        if rider.arrived or wire_bytes % 4 or (wire_bytes + 4 * rider.shape[1]) % codec.word:
            return codec
        rider.arrived = True
        return Appended(codec, rider.rows, rider.mean if self.owner else rider.rows[self.rank : self.rank + 1])

    @abstractmethod
    def _reduce(self, values: Tensor, out: Tensor, op: str, *, shared: bool = False) -> None:
        """Let the network reduce ``values`` (R, m) by ``op``, "sum" or "mean", to ``out``.

        ``out`` is ``values``, or an owner's (1, m). ``shared``: ``values`` are already multiplied by ``prescale``.
        """

    @abstractmethod
    def _sum_at_ranks(
        self, bucket: Rows, wire: Tensor, codec: Codec, *, on_wire: bool, residual: Residual | None, seed: Seeds | None
    ) -> None:
        """Send ``wire`` (R, m), sum all ranks' wires in fp32, and write their mean to ``bucket.mean``."""

    def _encode(
        self, bucket: Rows, values: Tensor, codec: Codec, key: str, residual: Residual | None, seed: Seeds | None
    ) -> Tensor:
        """Encode ``values`` (R, n) into a wire (R, m): scratch memory of the bucket, or ``values`` themselves."""
        if codec.verbatim and residual is None and values.dtype == codec.wire_dtype and values.is_contiguous():
            return values
        wire = bucket.scratch(key, (len(values), codec.wire_numel(values.shape[1])), codec.wire_dtype)
        with self.span("encode", values):
            return codec.encode(values, wire, residual=residual, seed=seed, space=scratch(bucket))

    def _decode(self, bucket: Rows, wire: Tensor, codec: Codec, out: Tensor, scale: float = 1.0) -> None:
        with self.span("decode", out):
            if not (codec.verbatim and same_memory(wire, out)):
                codec.decode(wire, out, space=scratch(bucket))
            if scale != 1.0:
                out.mul_(scale)

    def _decode_mean(self, bucket: Rows, wires: Tensor, codec: Codec, out: Tensor) -> None:
        """Decode all ranks' ``wires`` (N, m) of a row, sum them in rank order, and write the mean to ``out`` (1, n)."""
        with self.span("decode", out[0]):
            codec.decode_sum(wires, out[0], 1 / self.ranks, space=scratch(bucket))

    def _from_peers(self, bucket: Rows, wire: Tensor) -> Tensor:
        """Exchange ``wire`` (N, m) all-to-all; return all ranks' wires of this rank's row, in rank order."""
        received = bucket.scratch("received", wire.shape, wire.dtype)
        return self.comm.all_to_all(received, wire)

    def serve(self, bucket: Bucket, codec: Codec, *, residual: Residual | None = None) -> Tensor:
        """Return the mean (1, n) of this rank's own row alone, on any topology.

        Each rank sends row j of its rows, encoded, to rank j, which sums in fp32.
        """
        if self.owner:
            self.mean(bucket, codec, residual=residual, on_wire=False)
            return bucket.mean
        mean = bucket.scratch("served", (1, bucket.shape[1]), torch.float32)
        ReduceScatter(self.comm).mean(Payload(bucket.rows, mean, bucket), codec, on_wire=False, residual=residual)
        return mean

    def span(self, kind: str, tensor: Tensor) -> AbstractContextManager[None]:
        """Time a method's own work on ``tensor`` as ``kind`` ("encode", "decode", "exposed") in the ledger."""
        return self.comm.ledger.span(kind, tensor)

    def union(self, bucket: Rows, words: Tensor) -> Tensor:
        """Return the bitwise or (R, w) of all ranks' integer ``words`` (R, w), in scratch memory of ``bucket``.

        Rank r reduces the r-th of N chunks, and all ranks gather the chunks: the bytes of an all-reduce. (NCCL has no
        bitwise reduction.)
        """
        comm = self.comm
        shape = comm.size, -(-words.nbytes // comm.size)
        chunks = bucket.scratch("chunks", shape, torch.uint8)
        received = bucket.scratch("received chunks", shape, torch.uint8)
        result = chunks.view(-1)[: words.nbytes].view(words.dtype).view(words.shape)
        result.copy_(words)
        comm.all_to_all(received, chunks)
        remaining = comm.size
        while remaining > 1:  # by halves: few launches
            half = -(-remaining // 2)
            received[: remaining - half] |= received[half:remaining]
            remaining = half
        comm.all_gather(chunks, received[0])
        return result

    def share(self, rows: Tensor) -> Tensor:
        """Replace row r of ``rows`` (R, w) by rank r's row r, in place, where each rank owns a row."""
        if self.owner:
            comm = self.comm
            comm.all_gather(rows, rows[comm.rank].clone())
        return rows

    def gather(self, out: Tensor, row: Tensor, *, async_op: bool = False) -> Work | None:
        """Gather all ranks' ``row`` (m,) into ``out`` (N, m). With ``async_op``, wait for the work first."""
        return self.comm.all_gather(out, row, async_op=async_op)

    def all_mean(self, values: Tensor, *, divided: bool = False) -> Tensor:
        """Average ``values`` (any shape, float32) over all ranks, in place, to the same bits on every rank.

        ``divided``: they are divided by the number of ranks already.
        """
        return self.comm.all_reduce(values if divided else values.mul_(1 / self.ranks))

    def all_max(self, values: Tensor) -> Tensor:
        """Take the maximum of ``values`` (any shape, float32) over all ranks, in place."""
        return self.comm.all_reduce(values, "max")


class AllReduce(Exchange):
    """Every rank gets the whole mean."""

    def __init__(self, comm: Comm, divide: str = "before") -> None:
        super().__init__(comm)
        self.divide = divide

    def _reduce(self, values, out, op, *, shared=False):
        if op == "mean" and self.divide == "before":
            op = "sum"
            if not shared:
                values.mul_(1 / self.ranks)
        self.comm.all_reduce(values, op)

    def _sum_at_ranks(self, bucket, wire, codec, *, on_wire, residual, seed):
        if on_wire:
            wires = bucket.scratch("all wires", (self.ranks, wire.shape[1]), wire.dtype)
            self.comm.all_gather(wires, wire[0])
            self._decode_mean(bucket, wires, codec, bucket.mean)
            return
        if len(wire) != self.ranks:
            raise ThinwireError(
                f"a sum in fp32 over {self.ranks} ranks needs {self.ranks} rows, the bucket has {len(wire)}"
            )
        received = self._from_peers(bucket, wire)
        mean_wire = self._encode_mean(bucket, received, codec, residual, None if seed is None else seed.next())
        self.comm.all_gather(wire, mean_wire[0])
        self._decode(bucket, wire, codec, bucket.mean)

    def _encode_mean(
        self, bucket: Rows, received: Tensor, codec: Codec, residual: Residual | None, seed: Seeds | None
    ) -> Tensor:
        """Encode this rank's row of the mean of all ranks' wires ``received`` (N, m) into a wire (1, m)."""
        shape = 1, bucket.rows.shape[1]
        if residual is None:
            mean_wire = bucket.scratch("mean wire", (1, received.shape[1]), received.dtype)
            with self.span("encode", received):
                return codec.encode_sum(received, mean_wire, shape[1], 1 / self.ranks, seed=seed, space=scratch(bucket))
        mean, error = (bucket.scratch(use, shape, torch.float32) for use in ("mean row", "mean row's error"))
        self._decode_mean(bucket, received, codec, mean)
        mean_wire = self._encode(bucket, mean, codec, "mean wire", Residual(None, error), seed)
        residual.new[self.rank].add_(error[0], alpha=self.ranks)
        return mean_wire


class ReduceScatter(Exchange):
    """Rank r gets row r of the mean. It sends row j of its rows to rank j, nothing else."""

    owner = True

    def _reduce(self, values, out, op, *, shared=False):
        self.comm.reduce_scatter(out[0], values, op)

    def _sum_at_ranks(self, bucket, wire, codec, *, on_wire, residual, seed):
        self._decode_mean(bucket, self._from_peers(bucket, wire), codec, bucket.mean)


# Functions for buckets, plans and dry runs.


def bucket_rows(exchange: Exchange, on_wire: bool) -> int:
    """Count the rows of a bucket for ``exchange``; ``on_wire``: the network sums, not the ranks."""
    return exchange.ranks if exchange.owner or not on_wire else 1


def count_columns(exchange: Exchange, local: int, rows: int) -> int:
    """Count the unpadded columns of a parameter in a bucket of ``rows``; this rank has ``local`` of its values."""
    return local if exchange.owner else -(-local // rows)


def prescale(exchange: Exchange) -> float:
    """Return the factor of a rank's values before the network sums them for a mean."""
    return 1 / exchange.ranks if exchange.divide == "before" else 1.0


def dense_bytes(exchange: Exchange, numel: int, dtype: torch.dtype) -> float:
    """Count the bytes that one rank sends for an uncompressed engine buffer of ``numel`` values."""
    verb = "reduce_scatter" if exchange.owner else "all_reduce"
    return exchange.comm.ring_bytes(verb, numel * dtype.itemsize)


def on_comm(exchange: Exchange, comm: Comm) -> Exchange:
    """Copy ``exchange`` onto another ``comm``."""
    double = copy.copy(exchange)
    double.comm = comm
    return double
