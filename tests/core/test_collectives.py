"""Exchanges alone: every codec over every topology, held against sums of what was given; on ranks as threads."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.codecs import Bf16, Fp32, Int8
from thinwire.codecs.base import Codec, Residual
from thinwire.core.bucket import Bucket, Piece
from thinwire.core.exchange import (
    AllReduce,
    Exchange,
    ReduceScatter,
    bucket_rows,
    count_columns,
    dense_bytes,
    on_comm,
    prescale,
)
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, Threads

NUMEL = 1152
EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "before": AllReduce, "after": functools.partial(AllReduce, divide="after"), "owner": ReduceScatter,
}  # fmt: skip


def given(rank: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def on_ranks(size: int, kind: str, body: Callable[[Exchange], object]) -> list:
    world = Threads(size)
    return world.run(lambda rank: body(EXCHANGES[kind](ThreadComm(world, rank, Ledger()))))


def loaded(exchange: Exchange, flat: Tensor, *, on_wire: bool, group: int = 1) -> Bucket:
    rows, owner = bucket_rows(exchange, on_wire), exchange.owner
    piece = Piece("w", 0, len(flat), rows, len(flat) // rows) if owner else Piece("w", 0, len(flat))
    bucket = Bucket([piece], rows=rows, owner=owner, group=group, dtype=torch.float32, device=torch.device("cpu"))
    bucket.load(flat, torch.full((len(flat) // rows,), torch.nan) if owner else flat)
    return bucket


def mean_of(exchange: Exchange, codec: Codec | None, *, on_wire: bool = True) -> Tensor:
    bucket = loaded(exchange, given(exchange.rank), on_wire=on_wire, group=codec.group if codec else 1)
    exchange.mean(bucket, codec, on_wire=on_wire)
    return bucket.mean.flatten().clone()


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("kind", EXCHANGES)
def test_fp32_that_the_network_sums_is_dense_bit_for_bit(kind, size):
    """It is divided where dense is divided."""
    for dense, fp32 in zip(
        on_ranks(size, kind, lambda exchange: mean_of(exchange, None)),
        on_ranks(size, kind, lambda exchange: mean_of(exchange, Fp32())),
        strict=True,
    ):
        assert torch.equal(dense, fp32)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize(
    ("codec", "on_wire"), [(None, True), (Fp32(), True), (Fp32(), False), (Bf16(), False), (Int8(64), False)]
)
def test_what_came_in_is_what_arrived_and_what_is_left(kind, size, codec, on_wire):
    """Over all ranks, whether something waited before or not, and whatever was where the rest is written."""
    group = codec.group if codec else 1

    def body(exchange: Exchange, waiting: bool) -> tuple[Tensor, Tensor, Tensor]:
        bucket = loaded(exchange, given(exchange.rank), on_wire=on_wire, group=group)
        old = 0.1 * given(9 + exchange.rank).view(bucket.shape)
        new, came = torch.full(bucket.shape, torch.nan), bucket.rows.double() + waiting * old
        exchange.mean(bucket, codec, on_wire=on_wire, residual=Residual(old if waiting else None, new))
        return came.flatten(), bucket.mean.flatten().double(), new.flatten()

    for waiting in (False, True):
        came, means, left = zip(*on_ranks(size, kind, functools.partial(body, waiting=waiting)), strict=True)
        mean = torch.cat(means) if kind == "owner" else means[0]
        assert all(torch.equal(other, mean) for other in means) or kind == "owner"
        assert (sum(came) - sum(left) - size * mean).abs().max() < 1e-5 * size
        assert any(rest.any() for rest in left) == (codec is not None and not isinstance(codec, Fp32))


@pytest.mark.parametrize("size", [1, 3])
def test_the_stock_engines_bytes_are_those_of_its_own_collective(size):
    """Of any number of values, in its dtype: an all-reduce is a reduce-scatter and an all-gather."""
    share = (size - 1) / size
    for dtype in (torch.float32, torch.bfloat16):
        for exchange in [EXCHANGES[kind](ThreadComm(Threads(size), 0, Ledger())) for kind in ("before", "after")]:
            assert dense_bytes(exchange, 7, dtype) == pytest.approx(2 * share * 7 * dtype.itemsize)
            assert not exchange.comm.ledger.current.bytes
        owner = ReduceScatter(ThreadComm(Threads(size), 0, Ledger()))
        assert dense_bytes(owner, 6, dtype) == pytest.approx(share * 6 * dtype.itemsize)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", EXCHANGES)
def test_the_other_verbs_are_what_they_say(kind, size):
    """Union, share, gather, all_mean, all_max, own rows and columns: of tensors with a few values, on every rank."""
    words = [(given(rank, 14) * 2**29).int().view(2, 7) for rank in range(size)]
    rows = [given(rank, 4 * size).view(size, 4) for rank in range(size)]

    def body(exchange: Exchange) -> None:
        rank, owner = exchange.rank, kind == "owner"
        bucket = loaded(exchange, torch.zeros(4 * size), on_wire=False)
        assert torch.equal(exchange.union(bucket, words[rank]), functools.reduce(operator.or_, words))
        shared = exchange.share(rows[rank].clone())
        assert torch.equal(shared, torch.stack([rows[r][r] for r in range(size)]) if owner else rows[rank])
        exchange.gather(out := torch.empty(size, 4), rows[rank][0])
        assert torch.equal(out, torch.stack([of[0] for of in rows]))
        values = rows[rank].clone()
        assert exchange.all_mean(values) is values
        assert torch.allclose(values, torch.stack(rows).mean(0), atol=1e-6)
        exchange.all_max(values := rows[rank].clone())
        assert torch.equal(values, torch.stack(rows).amax(0))
        assert torch.equal(rows[0][exchange.own_rows], rows[0][rank : rank + 1] if owner else rows[0])
        assert exchange.own_row == (rank if owner else 0) and exchange.ranks == size
        assert count_columns(exchange, 10, 3) == (10 if owner else 4)
        assert prescale(exchange) == (1 / size if kind == "before" else 1.0)
        other = ThreadComm(Threads(size), rank, Ledger())
        double = on_comm(exchange, other)
        assert double.comm is other and exchange.comm is not other and type(double) is type(exchange)

    on_ranks(size, kind, body)


@pytest.mark.parametrize("kind", EXCHANGES)
def test_each_owner_is_served_the_mean_of_its_own_row(kind):
    """On any topology; what is left of all rows stays with whoever sent them."""

    def body(exchange: Exchange) -> tuple[Tensor, Tensor]:
        bucket = loaded(exchange, given(exchange.rank), on_wire=False, group=64)
        new = torch.full(bucket.shape, torch.nan)
        return exchange.serve(bucket, Int8(64), residual=Residual(None, new)).clone(), new

    served, left = zip(*on_ranks(3, kind, body), strict=True)
    came = sum(given(rank).view(3, -1).double() for rank in range(3))
    assert all(row.shape == (1, NUMEL // 3) for row in served) and torch.stack(left).any()
    assert (came - sum(left) - 3 * torch.cat(served)).abs().max() < 1e-5


def test_a_sum_in_fp32_needs_a_row_for_each_rank():
    def body(exchange: Exchange) -> None:
        bucket = loaded(exchange, given(0), on_wire=True)
        with pytest.raises(ThinwireError, match="a sum in fp32 over 2 ranks needs 2 rows, the bucket has 1"):
            exchange.mean(bucket, Fp32(), on_wire=False)

    on_ranks(2, "before", body)
