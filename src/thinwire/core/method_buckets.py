"""The buckets of a method: how they are made, and how what waits of them is delivered or dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.core.bucket import Arena, Bucket, Piece
from thinwire.core.card import Card
from thinwire.core.exchange import Exchange, bucket_rows
from thinwire.core.state import State, find_entries, put_back, read_existing


def bucket_of(
    card: Card, pieces: Sequence[Piece], exchange: Exchange, device: torch.device, arena: Arena | None = None,
    dtype: torch.dtype = torch.float32,
) -> Bucket:  # fmt: skip
    """Make the bucket for ``pieces`` that the method of ``card`` reduces over ``exchange``.

    ``arena``: the memory that the bucket shares with others.
    """
    return Bucket(
        pieces, rows=bucket_rows(exchange, card.summed_by_network), owner=exchange.owner, group=card.group, dtype=dtype,
        device=device, arena=arena,
    )  # fmt: skip


def send_all(card: Card, state: State, bucket: Bucket, exchange: Exchange) -> None:
    """Set ``bucket.mean`` to the mean over ranks of ``bucket.rows`` and of all that waits; nothing waits then.

    It is one dense exchange. The rows are in the unit of what waits; between steps they are zeros.
    """
    for kind, weight in card.promise.waits.items():
        waiting = read_existing(state, kind, bucket)
        if waiting is None:
            continue
        if len(waiting) == len(bucket.rows):
            bucket.rows.add_(waiting, alpha=weight)
        else:  # an owner's, which stands for all ranks
            bucket.rows[exchange.rank].add_(waiting[0], alpha=exchange.ranks * weight)
        state.write(kind, bucket, len(waiting)).zero_()
        put_back(state, kind, bucket)
    bucket.clear_padding(bucket.rows)
    exchange.mean(bucket)


def drop_waiting(card: Card, state: State) -> None:
    """Drop what waits on this rank, and what else belongs to weights that are no more."""
    for kind in card.promise.waits:
        state.drop(kind)
    for pattern, kinds in card.state_kinds.items():
        for _, name, _ in find_entries(state, pattern) if kinds.of_weights else ():
            state.keep(pattern, name, None)
