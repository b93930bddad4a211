"""A method's buckets: how they are made, and how all that waits of them is delivered or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from thinwire.bucket import Arena, Bucket, Piece
from thinwire.collectives import Exchange

if TYPE_CHECKING:
    from thinwire.methods.base import Method


def bucket_of(
    method: Method, pieces: Sequence[Piece], exchange: Exchange, device: torch.device, arena: Arena | None = None,
    dtype: torch.dtype = torch.float32,
) -> Bucket:  # fmt: skip
    """For ``pieces`` that ``method`` reduces over ``exchange``. ``arena``: that it shares with other buckets."""
    return Bucket(
        pieces, rows=exchange.bucket_rows(method.card.summed_by_network), owner=exchange.owner,
        group=method.card.group, dtype=dtype, device=device, arena=arena,
    )  # fmt: skip


def send_all(method: Method, bucket: Bucket, exchange: Exchange) -> None:
    """``bucket.mean`` = the mean over ranks of ``bucket.rows`` and of all that waits; nothing waits then.

    One dense exchange. The rows are in the unit of what waits; between steps they are zeros.
    """
    state = method.state
    for kind, counts in method.card.promise.waits.items():
        old = state.held(kind, bucket)
        if old is None:
            continue
        if len(old) == len(bucket.rows):
            bucket.rows.add_(old, alpha=counts)
        else:  # an owner's, which stands for all ranks
            bucket.rows[exchange.rank].add_(old[0], alpha=exchange.rows * counts)
        state.write(kind, bucket, len(old)).zero_()
        state.put_back(kind, bucket)
    bucket.clear_padding(bucket.rows)
    exchange.mean(bucket)


def drop_waiting(method: Method) -> None:
    """Drop what waits on this rank, and what else belongs to weights that are no more."""
    for kind in method.card.promise.waits:
        method.state.drop(kind)
    for kind, word in method.card.state_kinds.items():
        for _, name, _ in method.state.found(kind) if word.of_weights else ():
            method.state.discard(kind, name)
