"""Runs exchanges beside the computing: on a thread on CPUs, on a side stream on GPUs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.network.ledger import Ledger


class Worker:
    """Runs jobs in the order in which they come, beside the computing.

    On CPU, one thread alone talks on its process group, so that exchanges of several stages never interleave
    (collectives inside a future's callback hang on gloo). On CUDA, the calling thread fills one side stream.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        self._last: torch.futures.Future | None = None
        self._failed: BaseException | None = None

    def submit(self, job: Callable[[], Tensor], device: torch.device, *, last: bool) -> torch.futures.Future:
        """Queue ``job`` and return its future. ``last``: the engine now waits for it (exposed time)."""
        if devices.streams(device) is not None:
            return self._enqueue(job, device, last)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="thinwire")
            self._thread.start()
        self._last = future = devices.future(device)
        self._jobs.put((job, future, time.perf_counter() if last else None))
        return future

    def drain(self) -> None:
        """Wait for all jobs. Raise what a job has raised; the jobs behind it were not run."""
        try:
            if self._last is not None:
                self._last.wait()
        finally:
            self._last = self._failed = None

    def close(self) -> None:
        """Finish all jobs and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future, waiting_since = entry
            if self._failed is None:
                try:
                    result = job()
                except BaseException as error:
                    self._failed = error
            if self._failed is not None:
                future.set_exception(self._failed)
                continue
            if waiting_since is not None:
                self._ledger.add("exposed", time.perf_counter() - waiting_since)
            future.set_result(result)

    def _enqueue(self, job: Callable[[], Tensor], device: torch.device, last: bool) -> torch.futures.Future:
        streams = devices.streams(device)
        if self._stream is None:
            self._stream = streams.Stream(device, priority=-1)  # as FSDP2's: its small kernels go before the model's
        start = devices.mark(device) if last else None
        self._stream.wait_stream(streams.current_stream(device))
        future = devices.future(device)
        with streams.stream(self._stream):
            result = job()
            if last:
                self._ledger.between("exposed", start, devices.mark(device))
            future.set_result(result)
        return future
