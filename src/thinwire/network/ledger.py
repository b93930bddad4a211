"""What was sent and how long it took: bytes by link, and encode / wire / decode / exposed time, step by step."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.base import device as devices

LINKS = ("inter", "intra")
KINDS = ("encode", "wire", "decode", "exposed")
WINDOW = 1000
"""Steps of which times are kept; bytes are summed over all. So a long run takes no more memory than a short one."""


@dataclass
class Account:
    """One optimizer step of this rank: what it sent by link, collectives called by kind, and its times."""

    bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: list[tuple[str, Any, Any]] = field(default_factory=list)
    weight_bytes: float = 0.0
    dense_bytes: float = 0.0
    skipped: bool = False

    def settle(self) -> None:
        """Turn device events into seconds (waits for the device, so: at the end of a step's life, not inside it)."""
        for kind, start, end in self.events:
            end.synchronize()
            self.seconds[kind] += max(start.elapsed_time(end), 0.0) / 1e3  # the end may have come first
        self.events.clear()


class Ledger:
    """Bytes sent by this rank and time spent, per step.

    ``inter`` are links between nodes, ``intra`` links within one. Bytes are payload: what the collective's algorithm
    hands to the network for this rank, without TCP/IP framing (``thinwire.lab.framing`` has that arithmetic).
    Times: *encode*, *wire*, *decode* are spent in those stages (on another thread or stream than the backward pass
    where the engine allows it); *exposed* is what of them the training loop had to wait for. By the clock, *wire* is
    the time in which anything was under way: weights and gradients that travel side by side do not count twice.
    """

    def __init__(self) -> None:
        self.now = Account()
        self.last = Account()
        self.steps: deque[Account] = deque(maxlen=WINDOW)
        self.total, self.closed, self.skipped = Account(), 0, 0  # of all steps since the last reset
        self._lock = threading.Lock()  # gradients may travel on one thread while weights do on another
        self._here = threading.local()
        self._under_way, self._since = 0, 0.0  # messages, and up to when their time is counted

    def count(self, link: str, nbytes: float) -> None:
        """Add ``nbytes`` sent by this rank on ``link``."""
        with self._lock:
            self.now.bytes[link] += nbytes
            if getattr(self._here, "weights", False):
                self.now.weight_bytes += nbytes

    def call(self, kind: str) -> None:
        """Add one collective: "all_reduce", "reduce_scatter", "all_gather" or "all_to_all"."""
        with self._lock:
            self.now.calls[kind] += 1

    @contextmanager
    def weights(self) -> Iterator[None]:
        """What this thread counts inside are weights (sharded engines gather them), not gradients."""
        before, self._here.weights = getattr(self._here, "weights", False), True
        try:
            yield
        finally:
            self._here.weights = before

    def count_dense(self, nbytes: float) -> None:
        """Add what dense training of the engine's own would have sent instead."""
        with self._lock:
            self.now.dense_bytes += nbytes

    def add(self, kind: str, seconds: float) -> None:
        with self._lock:
            self.now.seconds[kind] += seconds

    @contextmanager
    def span(self, kind: str, tensor: torch.Tensor | None = None) -> Iterator[None]:
        """Time a stage: by events on the current stream on a GPU (no host sync), by the clock otherwise."""
        step = self.now
        start = None if tensor is None else devices.mark(tensor.device)
        if tensor is not None and start is not None:
            yield
            step.events.append((kind, start, devices.mark(tensor.device)))
        elif kind == "wire":
            self._under_way_now(1)
            try:
                yield
            finally:
                self._under_way_now(-1)
        else:
            began = time.perf_counter()
            yield
            with self._lock:
                step.seconds[kind] += time.perf_counter() - began

    def _under_way_now(self, more: int) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._under_way:
                self.now.seconds["wire"] += now - self._since
            self._since = now
            self._under_way += more

    def between(self, kind: str, start: Any, end: Any) -> None:
        """Add the time from one event to another, nothing where the other came first."""
        self.now.events.append((kind, start, end))

    def close_step(self, *, skipped: bool = False) -> None:
        """End the current step: what follows belongs to the next."""
        self.last.settle()
        self._under_way_now(0)
        self.now.skipped = skipped
        self.last, self.now = self.now, Account()
        self.steps.append(self.last)
        _add(self.total, self.last)
        self.closed, self.skipped = self.closed + 1, self.skipped + skipped

    def reset(self) -> None:
        """Forget the closed steps (not the one under way)."""
        self.steps.clear()
        self.total, self.closed, self.skipped = Account(), 0, 0

    def stats(self, steps: list[Account] | None = None) -> dict:
        """Per step, over ``steps`` (default: all since the last :meth:`reset`): mean bytes, median times.

        Medians, because the first step also pays for compiling kernels and filling caches; of ``WINDOW`` steps at most.
        """
        total, count, skipped = self.total, self.closed, self.skipped
        if steps is not None:
            total, count, skipped = Account(), len(steps), sum(step.skipped for step in steps)
            for step in steps:
                _add(total, step)
        timed = list(self.steps if steps is None else steps)
        for step in timed:
            step.settle()
        each = max(count, 1)
        return {
            "steps": count,
            "skipped": skipped,
            "wire_bytes_per_step": {link: total.bytes[link] / each for link in LINKS},
            "weight_bytes_per_step": total.weight_bytes / each,
            "dense_bytes_per_step": total.dense_bytes / each,
            **{
                f"{kind}_ms": 1e3 * statistics.median([step.seconds[kind] for step in timed] or [0.0]) for kind in KINDS
            },
        }


def _add(total: Account, step: Account) -> None:
    """Add what ``step`` has sent."""
    for link, nbytes in step.bytes.items():
        total.bytes[link] += nbytes
    total.weight_bytes += step.weight_bytes
    total.dense_bytes += step.dense_bytes
