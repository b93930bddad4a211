"""The progress of a comparison: which run it is at, and about how long the others take."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from thinwire.base.terminal import columns, say
from thinwire.lab.cluster import Cluster
from thinwire.lab.verdict import DENSE, SILENT, Run

LOOK_S = 0.5
"""Seconds between two looks at a run's metrics."""


class Progress:
    """Progress on standard error: a line for each run of a comparison and, on a terminal, a bar of the run's steps.

    Args:
        steps: of each run. labels: of all runs, in their order.
    """

    def __init__(self, steps: int, labels: Sequence[str]) -> None:
        self.steps, self._left = steps, Counter(labels)
        self._seconds: dict[str, list[float]] = {}
        self._dense = 0.0  # seconds of a dense run, estimated from the silent one
        self._begun = ""  # what stands on the line already

    @contextmanager
    def run(self, label: str, name: str, metrics: Path) -> Iterator[Callable[[], None]]:
        """Show a run, called ``name``; yield what is to be called while it trains and writes ``metrics``."""
        self._left -= Counter([label])
        self._begun = f"compare: {name} ... "
        if columns(sys.stderr) is None:
            print(self._begun, end="", file=sys.stderr, flush=True)
            self._begun = ""
            try:
                yield lambda: None
            except KeyboardInterrupt:
                print(file=sys.stderr)
                raise
            return
        console = Console(stderr=True, highlight=False, markup=False)
        rest = TextColumn("then " + self.rest if sum(self._left.values()) and self._seconds else "", markup=False)
        parts = TextColumn("{task.description}", markup=False), BarColumn(bar_width=16), MofNCompleteColumn(), rest
        with Bar(*parts, console=console, transient=True) as bar:
            task, seen = bar.add_task(name, total=self.steps), 0.0

            def watch() -> None:
                nonlocal seen
                if (now := time.monotonic()) > seen + LOOK_S:
                    seen = now
                    bar.update(task, completed=steps_in(metrics))

            yield watch

    def ended(self, label: str, run: Run, cluster: Cluster) -> None:
        """Note the seconds of a finished ``run``, and say how long the others take."""
        self._seconds.setdefault(label, []).append(run["seconds"])
        if label == SILENT:
            rate, sent = cluster.link.rate, run["summary"].get("dense_bytes_per_step", 0) * cluster.ranks_per_node
            self._dense = run["seconds"] + (self.steps * sent * 8 / rate if rate else 0.0)
        rest = self.rest
        say(f"{self._begun}{run['seconds']:.1f} s" + (f"; then {rest}" if rest else ""), sys.stderr)

    def failed(self, label: str) -> None:
        """Note that the method of ``label`` has failed: it is not run again."""
        say(f"{self._begun}failed", sys.stderr)
        del self._left[label]

    @property
    def rest(self) -> str:
        """The number of runs that are left, and about how long they take: as long as dense where nothing is known."""
        known = {label: statistics.fmean(seconds) for label, seconds in self._seconds.items()}
        count = sum(self._left.values())
        if not count:
            return ""
        unknown = known.get(DENSE) or self._dense or max(known.values(), default=0.0)
        total = sum(number * known.get(label, unknown) for label, number in self._left.items())
        words = f"{total:.0f} s" if total < 90 else f"{total / 60:.0f} min"
        bounded = unknown > known.get(SILENT, 0.0) and not set(self._left) <= set(known)
        return f"{count} more, about {words}" + " at most" * bounded


def steps_in(metrics: Path) -> int:
    """Count the steps in a run's metrics.jsonl; its evaluations are none."""
    try:
        return sum('"loss"' in line for line in metrics.read_text().splitlines())
    except OSError:
        return 0
