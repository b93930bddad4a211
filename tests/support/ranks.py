"""Run a function on N gloo processes of this machine, and hand back what each returned."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any
from unittest import mock

from patience import PATIENCE

_context = mp.get_context("forkserver")
_servers: dict[str, forkserver.ForkServer] = {}


def _fork_server(warm: str) -> forkserver.ForkServer:
    """By hand: it finds ``warm`` along PYTHONPATH only, and must not have more than one thread."""
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    server = _servers.setdefault(warm, forkserver.ForkServer())
    server.set_forkserver_preload([warm])
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        server.ensure_running()
    return server


def _end_with_pytest() -> None:
    """However pytest ends, its ranks end too: they would wait for each other, and the fork server for them."""
    mp.parent_process().join()
    os._exit(1)


def _rank(rank: int, world: int, store: str, function: Callable, args: tuple, environment: dict, results: Any) -> None:
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(world), **environment})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=240 * PATIENCE)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
        dist.barrier()  # a rank that fails at once would otherwise take its connections from one still connecting
        results.put((rank, pickle.dumps(function(rank, world, *args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _alone(function: Callable, args: tuple, environment: dict, results: Any) -> None:
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environment})
    try:
        results.put((0, pickle.dumps(function(*args)), None))
    except BaseException:
        results.put((0, None, traceback.format_exc()))


def _collect(ranks: list[Any], results: Any, seconds: float, name: str) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        missing = [rank for rank in range(len(ranks)) if rank not in found]
        if not wait([results._reader, *(ranks[rank].sentinel for rank in missing)], seconds):
            raise TimeoutError(f"{name}: ranks {missing} did not finish")
        if not results._reader.poll():  # one has ended, and whatever it had put here before has been read
            dead = {rank: ranks[rank].exitcode for rank in missing if not ranks[rank].is_alive()}
            raise AssertionError(f"{name} returned nothing; exit status by rank: {dead}")
        rank, value, error = results.get()
        if error:
            raise AssertionError(f"rank {rank}:\n{error}")
        found[rank] = pickle.loads(value)
    return [found[rank] for rank in range(len(ranks))]


def run(
    function: Callable, world: int, *args: Any, seconds: float = 300, warm: str = "warm", **environment: str
) -> list[Any]:
    """``[function(rank, world, *args) for rank in range(world)]``, each in its own process.

    ``function`` lives at a module's top level; what it returns is pickled, tensors by value: to share memory, as
    ``multiprocessing`` does, the rank would have to live until it is read. Raises with the first rank's traceback, and
    when no rank has finished for ``seconds`` times THINWIRE_PATIENCE. ``warm``: the module that ranks are born with.
    """
    results = _context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            _context.Process(target=_rank, args=(rank, world, store, function, args, environment, results), daemon=True)
            for rank in range(world)
        ]
        return _results(ranks, results, seconds * PATIENCE, function.__name__, warm)


def alone(function: Callable, *args: Any, seconds: float = 300, warm: str = "warm", **environment: str) -> Any:
    """``function(*args)`` in one process, which is no rank and may start some. Else as ``run``."""
    results = _context.SimpleQueue()
    process = _context.Process(target=_alone, args=(function, args, environment, results))
    return _results([process], results, seconds * PATIENCE, function.__name__, warm)[0]


def _results(processes: list[Any], results: Any, seconds: float, name: str, warm: str) -> list[Any]:
    """What they put; they are started here, and ended."""
    server = _fork_server(warm)
    with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        for process in processes:
            process.start()
    try:
        found = _collect(processes, results, seconds, name)
        for process in processes:
            process.join(seconds)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return found
