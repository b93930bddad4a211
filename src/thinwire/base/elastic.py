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
    place = dist.PrefixStore(f"thinwire/{meet(store, rank, size, timeout)}", store)
    dist.init_process_group(backend, timeout=timeout, store=place, rank=rank, world_size=size)


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name that the ranks of this attempt share, and none of an earlier one knew. Collective.

    Each writes a word that is new. Rank 0 publishes its own as the name, with the words that it finds, until all have
    found theirs beside it: what an earlier attempt has left holds none of them.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store.set(f"thinwire/word/{rank}", word)
    while time.monotonic() < deadline:
        if rank == 0:
            words = [word, *(store.get(f"thinwire/word/{other}").decode() for other in range(1, size))]
            store.set("thinwire/attempt", " ".join(words))
            if size == 1 or store.check([f"thinwire/seen/{word}/{other}" for other in range(1, size)]):
                return word
        else:
            words = store.get("thinwire/attempt").decode().split()
            if words[rank : rank + 1] == [word]:
                store.set(f"thinwire/seen/{words[0]}/{rank}", "")
                return words[0]
        time.sleep(POLL_S)
    raise dist.DistStoreError(f"rank {rank} timed out: not all of the {size} ranks of this attempt have come")
