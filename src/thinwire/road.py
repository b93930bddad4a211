"""The road of one engine buffer: split it into buckets, let the method reduce each, put the means back.

    engine hook -> Bucket -> Method.reduce -> exchange(rows, codec) -> back into the engine
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.bound import Bound
from thinwire.bucket import Bucket, Piece
from thinwire.collectives import Exchange
from thinwire.guard import Guard
from thinwire.ledger import Ledger
from thinwire.methods.base import Method, Parameter
from thinwire.methods.baselines import Fp32


@dataclass
class Road:
    """Everything that an engine needs to send a buffer, and nothing of the engine.

    Attributes:
        dense: names of the parameters that travel beside the compressed ones, in fp32.
        stock: what the engine would do by itself, if that is not ``exchange``.
        step: optimizer steps taken so far; skipped ones do not count.
        bound: of what a step may put into the method's state, if it has any.
        scale: what a GradScaler multiplies the gradients with now, 0-dim; None: nothing. The method sees them without.
    """

    method: Method
    dense: frozenset[str]
    exchange: Exchange
    guard: Guard
    ledger: Ledger
    stock: Exchange | None = None
    step: int = 0
    bound: Bound | None = None
    scale: Callable[[torch.device], Tensor] | None = None

    def __post_init__(self) -> None:
        self._parts: dict[tuple[tuple[Piece, ...], torch.dtype], list[tuple[Method, Bucket]]] = {}
        # What stays dense beside compressed parameters is summed in rank order too: then no bit depends on how the
        # engine happened to cut its buckets, and a resumed run is the same run.
        self._side = Fp32()
        self._stock_bytes = functools.cache((self.stock or self.exchange).dense_bytes)

    def reduce(self, flat: Tensor, pieces: tuple[Piece, ...], out: Tensor | None = None) -> Tensor:
        """Average ``flat`` (1-D, the parameters of ``pieces``) over the ranks.

        Returns ``flat``, overwritten by the mean; or ``out`` (this rank's row) if the exchange leaves one row to each.
        Neither gradients are recorded nor is anything cast, whatever mode the engine's hook runs in.
        """
        out = flat if out is None else out
        with torch.no_grad(), torch.autocast(flat.device.type, enabled=False):
            self.guard.observe(flat)
            self.ledger.count_dense(self._stock_bytes(flat.numel(), flat.dtype))
            scale = None if self.scale is None else self.scale(flat.device)
            if scale is not None:
                flat.div_(scale)
            if self.bound is not None:
                self.bound.apply(flat, pieces)
            self.carry(flat, pieces, out)
            if scale is not None:
                out.mul_(scale)
        return out

    def stock_bytes(self, parameter: Parameter, dtype: torch.dtype) -> float:
        """Bytes that the engine by itself would send of ``parameter`` on this hop."""
        stock = self.stock or self.exchange
        return stock.dense_bytes(parameter.local * (stock.rows if stock.owner else 1), dtype)

    def carry(self, flat: Tensor, pieces: tuple[Piece, ...], out: Tensor) -> None:
        """``reduce``, without what looks at the values and counts."""
        for method, bucket in self._split(flat, pieces):
            bucket.step = self.step
            bucket.load(flat, out)
            method.reduce(bucket, self.exchange)
            bucket.store(out)
            bucket.release()

    def _split(self, flat: Tensor, pieces: tuple[Piece, ...]) -> list[tuple[Method, Bucket]]:
        """One bucket for what is compressed, one beside it for what stays dense; made once per composition."""
        key = (pieces, flat.dtype)
        if key not in self._parts:
            self._forget({piece.name for piece in pieces})
            sent = [piece for piece in pieces if piece.name not in self.dense]
            kept = [piece for piece in pieces if piece.name in self.dense]
            parts = []
            if sent:
                parts.append((self.method, self._bucket(sent, flat, self.method)))
            if kept:
                parts.append((self._side, self._bucket(kept, flat, self._side)))
            self._parts[key] = parts
        return self._parts[key]

    def _forget(self, names: set[str]) -> None:
        """Free what is kept for older compositions with any of these parameters: DDP rebuilds its buckets once."""
        for key in [key for key in self._parts if names & {piece.name for piece in key[0]}]:
            del self._parts[key]

    def _bucket(self, pieces: list[Piece], flat: Tensor, method: Method) -> Bucket:
        if method.native:  # the buffer goes out as it is
            pieces = [replace(piece, form=None) for piece in pieces]
        return Bucket(
            pieces,
            rows=self.exchange.bucket_rows(method.on_wire),
            owner=self.exchange.owner,
            group=method.granule,
            dtype=flat.dtype if method.native else torch.float32,
            device=flat.device,
        )


class Worker:
    """Runs jobs in the order in which they come, beside the backward pass.

    On CPU: one thread, which alone talks on its process group, so that exchanges of several stages never interleave
    (collectives inside a future's callback hang on gloo). On CUDA: one side stream, filled from the calling thread.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def submit(self, job: Callable[[], Tensor], device: torch.device, *, last: bool) -> torch.futures.Future:
        """A future of ``job()``. ``last``: no more jobs in this step; from now on the engine waits (exposed time)."""
        if device.type == "cuda":
            return self._enqueue(job, device, last)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="thinwire")
            self._thread.start()
        future: torch.futures.Future = torch.futures.Future()
        self._jobs.put((job, future, time.perf_counter() if last else None))
        return future

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future, waiting_since = entry
            try:
                result = job()
            except BaseException as error:
                # DDP casts what it finds in the future: it shows the message, whatever the exception's type.
                future.set_exception(RuntimeError(f"thinwire: {error}"))
                continue
            if waiting_since is not None:
                self._ledger.add("exposed", time.perf_counter() - waiting_since)
            future.set_result(result)

    def _enqueue(self, job: Callable[[], Tensor], device: torch.device, last: bool) -> torch.futures.Future:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        future: torch.futures.Future = torch.futures.Future(devices=[device])
        with torch.cuda.stream(self._stream):
            result = job()
            if last:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                self._ledger.now.events.append(("exposed", start, end))
            future.set_result(result)
        return future
