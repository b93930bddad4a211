"""Run a function on N gloo processes of this machine, and hand back what each returned."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "thinwire", "models"])


def _rank(rank: int, world: int, store: str, function: Callable, args: tuple, environment: dict, results: Any) -> None:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(world), **environment})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        results.put((rank, function(rank, world, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(function: Callable, world: int, *args: Any, seconds: float = 90, **environment: str) -> list[Any]:
    """``[function(rank, world, *args) for rank in range(world)]``, each in its own process.

    ``function`` lives at a module's top level; what it returns is pickled (no tensors that share memory: ``.tolist()``,
    numpy, or ``.clone()``d tensors are converted by the caller). Raises with the first rank's traceback.
    """
    results = _context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            _context.Process(target=_rank, args=(rank, world, store, function, args, environment, results), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            found: dict[int, Any] = {}
            while len(found) < world:
                if not results._reader.poll(seconds):
                    missing = sorted(set(range(world)) - set(found))
                    raise TimeoutError(f"{function.__name__}: ranks {missing} did not finish")
                rank, value, error = results.get()
                if error:
                    raise AssertionError(f"rank {rank}:\n{error}")
                found[rank] = value
            for process in ranks:
                process.join(seconds)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
    return [found[rank] for rank in range(world)]
