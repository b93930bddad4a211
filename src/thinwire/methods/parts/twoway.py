"""The mean by servers, encoded both ways, with an error kept at either end.

Rank j is the server of row j of the bucket. With C the codec, x_n the rows of worker n, and e_n and s what waits:

    send C[x_n + e_n], row j to server j;  e_n = x_n + e_n - C[x_n + e_n]
    y = mean_n C[x_n + e_n] + s, on each server;  s = y - C[y]
    everybody gets C[y] from all servers

(DoubleSqueeze, Tang et al., ICML 2019, arXiv 1905.05957; dist-EF-SGD, Zheng et al., NeurIPS 2019, arXiv 1905.10936;
1-bit Adam.) Nothing is lost: mean x_n + mean e_n + s = C[y] + mean e_n' + s'.

The server keeps s apart from e_n. The exchange's ``residual`` would add N s to the server's own e instead: the same
sum, but N times as large as the rest of one worker's message, it would pass through C once more and set its group's
scale. For a codec with a small error the two forms agree to first order; the error of these is as large as the value.

The way back may have its own codec C': the mean of many workers' few largest values has more of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Residual
from thinwire.codecs.sign import Sign
from thinwire.core.bucket import Bucket, Segment
from thinwire.core.exchange import Exchange, scratch
from thinwire.core.state import State


def mean_both_ways(
    bucket: Bucket,
    exchange: Exchange,
    codec: Codec,
    state: State,
    *,
    server_codec: Codec | None = None,
    back: bool = True,
) -> Tensor | None:
    """Set ``bucket.mean`` to C'[mean_n C[``bucket.rows`` + e_n] + s], and overwrite ``bucket.rows`` (N, n).

    Args:
        codec: C, not linear.
        state: where e_n, "residual" (N, n), and s, "server" (1, n), wait.
        server_codec: C'; None: C.
        back: False: servers keep the mean of what arrived, without s; only where each rank owns its row.

    Returns:
        the wires (N, m) of all servers in the bucket's scratch memory, the same bytes on every rank; None without back.
    """
    served = serve(bucket, exchange, codec, state)
    rank, n = exchange.rank, bucket.shape[1]
    if not back:
        _clear_padding(codec, bucket, served, rank)
        return None
    server_codec = codec if server_codec is None else server_codec
    error = _error(codec, bucket, served, "server", state, rank)
    m, dtype = server_codec.wire_numel(n), server_codec.wire_dtype
    wires, own_wire = (bucket.scratch(use, (r, m), dtype) for use, r in (("served wires", exchange.ranks), ("own", 1)))
    with exchange.span("encode", served):
        _with_shares(server_codec, bucket, slice(rank, rank + 1)).encode(
            served, own_wire, residual=error, space=scratch(bucket)
        )
    exchange.gather(wires, own_wire[0])
    with exchange.span("decode", bucket.mean):
        server_codec.decode(wires[exchange.own_rows], bucket.mean, space=scratch(bucket))
    return wires


def serve(bucket: Bucket, exchange: Exchange, codec: Codec, state: State) -> Tensor:
    """Return mean_n C[``bucket.rows`` + e_n] of this rank's row, (1, n), and keep what C leaves out in e_n."""
    error = _error(codec, bucket, bucket.rows, "residual", state)
    return exchange.serve(bucket, _with_shares(codec, bucket), residual=error)


def _error(codec: Codec, bucket: Bucket, values: Tensor, kind: str, state: State, first: int = 0) -> Residual:
    """Return the memory ``kind`` of the error of ``values``, the bucket's rows from ``first`` on.

    What waits is added in the pass that encodes; to what signs encode, first, as they have filled the padding with it.
    """
    rows = len(values)
    old, new = state.read(kind, bucket, rows=rows), state.write(kind, bucket, rows=rows)
    if isinstance(codec, Sign):
        values.add_(old)
        _clear_padding(codec, bucket, values, first)
        return Residual(None, new)
    return Residual(old, new, bucket.adam if kind == "residual" else None, bucket.guess(kind, rows))


def _with_shares(codec: Codec, bucket: Bucket, rows: slice = slice(None)) -> Codec:
    """Return ``codec`` for ``rows``; for signs, whose scale is a mean over values, with padding left out of it."""
    if not isinstance(codec, Sign):
        return codec
    shares = bucket.once("shares", lambda: _shares(bucket, codec.group), codec.group)
    return replace(codec, shares=shares[rows])


def _clear_padding(codec: Codec, bucket: Bucket, values: Tensor, first: int = 0) -> None:
    """Zero the padding in ``values``, the bucket's rows from ``first`` on, if signs have filled it, which have no zero.

    Any other codec leaves the zeros with which it was packed.
    """
    if not isinstance(codec, Sign):
        return
    bucket.clear_padding(values)
    for segment in bucket.segments:
        if segment.piece.stride:
            continue
        columns = values[:, segment.columns][:, : segment.span]
        whole, last_span = divmod(segment.piece.numel, segment.span)
        if first <= whole < first + len(values):
            columns[whole - first, last_span:].zero_()
        if whole + 1 - first < len(values):  # what is empty would be launched, too
            columns[max(whole + 1 - first, 0) :].zero_()


def _shares(bucket: Bucket, group: int) -> Tensor:
    """Return (R, n / group): one over the number of values in each group that are not padding."""
    rows, n = bucket.shape
    counts = torch.zeros(rows, n // group, dtype=torch.float32, device="cpu")
    for segment in bucket.segments:
        starts = torch.arange(0, segment.width, group, device="cpu")
        values = torch.tensor([_count(segment, row) for row in range(rows)], device="cpu")
        counts[:, segment.groups(group)] = (values.unsqueeze(1) - starts).clamp(1, group).float()
    return (1 / counts).to(bucket.device)


def _count(segment: Segment, row: int) -> int:
    """Count ``segment``'s columns in ``row`` that hold values. Rows padded by the engine count as full."""
    return segment.span if segment.piece.stride else min(max(segment.piece.numel - row * segment.span, 0), segment.span)
