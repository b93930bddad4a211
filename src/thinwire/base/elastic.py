"""Lets ranks find each other again after ``torchrun --max-restarts`` has restarted all of them.

torchrun keeps one store for all attempts, and torch (2.13) lets every attempt write to the same place in it: a rank may
find the addresses of an earlier attempt and try in vain to reach them. So the ranks of an attempt first agree on a
place of their own. The attempt's number would not do: each node's agent counts only the restarts that it begins itself.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLL_S = 0.02
DEFAULT = timedelta(minutes=30)


def init_process_group(backend: str | None = None, *, timeout: timedelta = DEFAULT) -> None:
    """Call ``torch.distributed.init_process_group`` so that it works in every attempt of a torchrun job. Collective.

    Args:
        backend: as in torch. timeout: how long a rank waits for the others, here and in every collective.

    Raises:
        torch.distributed.DistError: the others did not come in time.
    """
    store, rank, size = find_store(timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)


def find_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of this attempt's ranks, this rank and their number, as torchrun's variables say. Collective."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # rank 0 makes a new store
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        return store, rank, size
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    return dist.PrefixStore(f"thinwire/{meet(store, rank, size, timeout)}", store), rank, size


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Agree on a name that only the ranks of this attempt know. Collective.

    Each rank writes a new token. Rank 0 publishes its own as the name, with the tokens that it finds, until all ranks
    have found theirs beside it; entries of earlier attempts hold none of them.
    """
    token, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store.set(f"thinwire/word/{rank}", token)
    while time.monotonic() < deadline:
        if rank == 0:
            tokens = [token, *(store.get(f"thinwire/word/{peer}").decode() for peer in range(1, size))]
            store.set("thinwire/attempt", " ".join(tokens))
            if size == 1 or store.check([f"thinwire/seen/{token}/{peer}" for peer in range(1, size)]):
                return token
        else:
            tokens = store.get("thinwire/attempt").decode().split()
            if tokens[rank : rank + 1] == [token]:
                store.set(f"thinwire/seen/{tokens[0]}/{rank}", "")
                return tokens[0]
        time.sleep(POLL_S)
    raise dist.DistStoreError(f"rank {rank} timed out: some of the {size} ranks of this attempt did not connect")
