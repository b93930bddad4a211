"""Finding each other again after ``torchrun --max-restarts`` has started all ranks anew.

torchrun keeps one store for all attempts, and torch (2.13) lets every attempt write to the same place in it: a rank may
find the addresses of the attempt before, and tries in vain to reach those. So the ranks of an attempt first agree on a
place of their own. The number of the attempt would not do: each node's agent counts by itself, and one that only
follows another's restart does not count.
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
    """``torch.distributed.init_process_group`` in torchrun's environment, which works in every attempt of a job.

    Collective.

    Args:
        backend: as torch has it. timeout: how long a rank waits for the others, here and in every collective.

    Raises:
        torch.distributed.DistError: the others did not come in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the store is rank 0's own, and new
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    attempt_store = dist.PrefixStore(f"thinwire/{meet(store, rank, size, timeout)}", store)
    dist.init_process_group(backend, timeout=timeout, store=attempt_store, rank=rank, world_size=size)


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Agree on a name that the ranks of this attempt share, and none of an earlier one knew. Collective.

    Each rank writes a token that is new. Rank 0 publishes its own as the name, with the tokens that it finds, until all
    ranks have found theirs beside it: the entries of an earlier attempt hold none of them.
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
    raise dist.DistStoreError(f"rank {rank} timed out: not all of the {size} ranks of this attempt have come")
