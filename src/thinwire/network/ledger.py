"""Records of each step: bytes sent by link, and encode / wire / decode / exposed time."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.base import device as devices

LINKS = ("inter", "intra")
KINDS = ("encode", "wire", "decode", "exposed")
WINDOW = 1000
"""The number of steps whose times are kept, so that memory stays bounded; bytes are summed over all steps."""
SAMPLED = 8
"""On a GPU the stages of the first so many steps are timed, and then those of one step in so many: an event takes the
host as long as a launch, and a step has hundreds."""
_UNTIMED = nullcontext()


@dataclass
class Account:
    """Bytes by link, collective calls by kind, and times of optimizer ``steps`` on this rank.

    timed: *encode*, *wire* and *decode* were measured; *exposed* always is. passing: those bytes of weights, by link,
    that serve one forward pass only.
    """

    steps: int = 1
    timed: bool = True
    skipped: int = 0
    bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: list[tuple[str, Any, Any]] = field(default_factory=list)
    weight_bytes: float = 0.0
    dense_bytes: float = 0.0
    passing: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def read_events(self, *, wait: bool = False) -> None:
        """Convert pairs of device events to seconds, and keep those that are not over, or ``wait`` for them.

        The start may be the later one: weights were there before they were needed.
        """
        pending = []
        for kind, start, end in self.events:
            if wait:
                start.synchronize()
                end.synchronize()
            if start.query() and end.query():
                self.seconds[kind] += max(start.elapsed_time(end), 0.0) / 1e3
            else:
                pending.append((kind, start, end))
        self.events = pending

    def add(self, step: Account) -> None:
        """Add ``step`` without its calls and times."""
        self.steps, self.skipped = self.steps + step.steps, self.skipped + step.skipped
        for link, nbytes in step.bytes.items():
            self.bytes[link] += nbytes
        self.weight_bytes += step.weight_bytes
        self.dense_bytes += step.dense_bytes


class _Thread(threading.local):
    """The state of one thread: does it send weights ("stay", "pass"), and is it left out of the books?"""

    weights = ""
    aside = False


class Ledger:
    """Bytes sent by this rank and time spent, per step.

    ``inter`` are links between nodes, ``intra`` links within one. Bytes are payload: what the collective's algorithm
    hands to the network for this rank, without TCP/IP framing (``thinwire.lab.framing`` computes that).
    *encode*, *wire* and *decode* times are spent in those stages (beside the backward pass where the engine allows it);
    the training loop waited for the *exposed* part of them. By the clock, *wire* is the time with any message under
    way: weights and gradients that travel side by side do not count twice. On a GPU all but *exposed* are measured in
    some steps only (``SAMPLED``).
    """

    def __init__(self) -> None:
        self.current = Account()
        self.last = self._last_timed = Account()
        self.reset()
        self._lock = threading.Lock()  # an exchange may be under way on one thread while another ends the step
        self._thread_state = _Thread()
        self._by_events = False  # stages are timed by events, which not every step has
        self._under_way, self._since = 0, 0.0  # messages, and the time up to which they are counted
        self._unread: list[Account] = []  # closed steps with events that were not over yet

    def count(self, link: str, nbytes: float) -> None:
        """Add ``nbytes`` sent by this rank on ``link``."""
        if self._thread_state.aside:
            return
        with self._lock:
            self.current.bytes[link] += nbytes
            if self._thread_state.weights:
                self.current.weight_bytes += nbytes
            if self._thread_state.weights == "pass":
                self.current.passing[link] += nbytes

    def call(self, kind: str) -> None:
        """Add one collective: "all_reduce", "reduce_scatter", "all_gather" or "all_to_all"."""
        with self._lock:
            self.current.calls[kind] += not self._thread_state.aside

    @contextmanager
    def weights(self, *, stay: bool = False) -> Iterator[None]:
        """Count bytes of this thread inside as weights (sharded engines gather them), not gradients.

        ``stay``: the next forward pass finds them, so that they are the next step's even if an evaluation asks first.
        """
        state = self._thread_state
        outer = state.weights, state.aside
        state.weights, state.aside = "stay" if stay else "pass", state.aside and not stay
        try:
            yield
        finally:
            state.weights, state.aside = outer

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count nothing of what this thread does inside, but weights that stay."""
        outer, self._thread_state.aside = self._thread_state.aside, True
        try:
            yield
        finally:
            self._thread_state.aside = outer

    def evaluation(self) -> AbstractContextManager[None]:
        """As ``aside``, between two passes: what was sent for one forward pass of the next is the evaluation's, too."""
        with self._lock:
            for link, nbytes in self.current.passing.items():
                self.current.bytes[link] -= nbytes
                self.current.weight_bytes -= nbytes
            self.current.passing.clear()
        return self.aside()

    def count_dense(self, nbytes: float) -> None:
        """Add the bytes that the engine's own dense training would have sent."""
        with self._lock:
            self.current.dense_bytes += 0 if self._thread_state.aside else nbytes

    def add(self, kind: str, seconds: float) -> None:
        with self._lock:
            self.current.seconds[kind] += 0 if self._thread_state.aside else seconds

    def span(self, kind: str, tensor: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """Time a stage: on a GPU by events on the current stream (no host sync), otherwise by the clock."""
        if self._thread_state.aside:
            return _UNTIMED
        on_device = tensor is not None and devices.streams(tensor.device) is not None
        if on_device and kind != "exposed":
            self._by_events = True
            if not self._samples:
                return _UNTIMED
        return self._span(kind, tensor)

    @contextmanager
    def _span(self, kind: str, tensor: torch.Tensor | None) -> Iterator[None]:
        step = self.current
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

    def _under_way_now(self, change: int) -> None:
        with self._lock:
            time_now = time.perf_counter()
            if self._under_way:
                self.current.seconds["wire"] += time_now - self._since
            self._since = time_now
            self._under_way += change

    def between(self, kind: str, start: Any, end: Any) -> None:
        """Add the time from ``start`` to ``end``, zero if ``end`` came first."""
        if not self._thread_state.aside:
            self.current.events.append((kind, start, end))

    def close_step(self, *, skipped: bool = False) -> None:
        """End the current step."""
        self._unread.append(self.last)
        for step in self._unread:
            step.read_events()
        self._unread = [step for step in self._unread if step.events]
        self._under_way_now(0)
        with self._lock:
            self.current.skipped = int(skipped)
            self.last = self.current
            self.steps.append(self.last)
            self.total.add(self.last)
            self._last_timed = self.last if self.last.timed else self._last_timed
            # Irregular, by the golden ratio: a method's cycle could coincide with every eighth step.
            self._samples = self.total.steps < SAMPLED or self.total.steps * 0.618034 % 1 < 1 / SAMPLED
            # Of steps without an exchange as of others: else they would outweigh those in the medians.
            self.current = Account(timed=self._samples or not self._by_events)

    def reset(self) -> None:
        """Forget the closed steps (not the one under way)."""
        self.steps: deque[Account] = deque(maxlen=WINDOW)
        self.total = Account(steps=0)
        self._samples = True

    def stats(self, *, last: bool = False, round_steps: int = 1) -> dict:
        """Report mean bytes and median times per step since the last :meth:`reset`, or of the ``last`` step alone.

        Medians, over at most ``WINDOW`` steps, of more than four without the first two, which in a new run compile
        kernels and fill caches. They are of the means of rounds of ``round_steps`` steps. Of stages that were not
        measured in the ``last`` step, times are of the last step in which they were.
        """
        total, steps = (self.last, [self.last]) if last else (self.total, list(self.steps))
        timed = [self._last_timed] if last else [step for step in steps if step.timed]
        for step in [*steps, *timed]:
            step.read_events(wait=True)
        divisor = max(total.steps, 1)
        seconds = {kind: [step.seconds[kind] for step in (steps if kind == "exposed" else timed)] for kind in KINDS}
        return {
            "steps": total.steps,
            "skipped": total.skipped,
            "wire_bytes_per_step": {link: total.bytes[link] / divisor for link in LINKS},
            "weight_bytes_per_step": total.weight_bytes / divisor,
            "dense_bytes_per_step": total.dense_bytes / divisor,
            **{f"{kind}_ms": 1e3 * statistics.median(settled_rounds(seconds[kind], round_steps)) for kind in KINDS},
        }


def whole_rounds(times: Sequence[float], round_steps: int) -> list[float]:
    """Return the mean step of each whole round of ``times``; of all steps, if no round is whole. 0 of no steps.

    A median of steps would leave out the one step of a round that waits for the network.
    """
    firsts = range(0, len(times) - round_steps + 1, round_steps)
    return [statistics.fmean(times[at : at + round_steps]) for at in firsts] or [statistics.fmean(times or [0.0])]


def settled_rounds(times: Sequence[float], round_steps: int) -> list[float]:
    """Return ``whole_rounds`` without the first two steps, which warm up, where there are more than four."""
    return whole_rounds(times[2:] if len(times) > 4 else times, round_steps)
