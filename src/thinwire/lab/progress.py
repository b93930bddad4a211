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
        self.steps, self._ahead = steps, Counter(labels)
        self._seconds: dict[str, list[float]] = {}
        self._dense = 0.0  # seconds of a dense run, estimated from the silent one
        self._begun = ""  # what stands on the line already

    @contextmanager
    def run(self, label: str, name: str, metrics: Path) -> Iterator[Callable[[], None]]:
        """Show a run, called ``name``; yield what is to be called while it trains and writes ``metrics``."""
        self._ahead -= Counter([label])
        self._begun = f"compare: {name} ... "
        if columns(sys.stderr) is None:
            say(self._begun, sys.stderr, end="")
            self._begun = ""
            try:
                yield lambda: None
            except KeyboardInterrupt:
                say("", sys.stderr)
                raise
            return
        console = Console(stderr=True, highlight=False, markup=False)
        outlook = TextColumn(
            "then " + self.outlook if sum(self._ahead.values()) and self._seconds else "", markup=False
        )
        name_column = TextColumn("{task.description}", markup=False)
        fields = name_column, BarColumn(bar_width=16), MofNCompleteColumn(), outlook
        with Bar(*fields, console=console, transient=True) as bar:
            task, looked = bar.add_task(name, total=self.steps), 0.0

            def watch() -> None:
                nonlocal looked
                if (clock := time.monotonic()) > looked + LOOK_S:
                    looked = clock
                    bar.update(task, completed=steps_in(metrics))

            yield watch

    def ended(self, label: str, run: Run, cluster: Cluster) -> None:
        """Note the seconds of a finished ``run``, and say how long the others take."""
        self._seconds.setdefault(label, []).append(run["seconds"])
        if label == SILENT:
            rate, sent = cluster.link.rate, run["summary"].get("dense_bytes_per_step", 0) * cluster.ranks_per_node
            self._dense = run["seconds"] + (self.steps * sent * 8 / rate if rate else 0.0)
        outlook = self.outlook
        say(f"{self._begun}{run['seconds']:.1f} s" + (f"; then {outlook}" if outlook else ""), sys.stderr)

    def failed(self, label: str) -> None:
        """Note that the method of ``label`` has failed: it is not run again."""
        say(f"{self._begun}failed", sys.stderr)
        del self._ahead[label]

    @property
    def outlook(self) -> str:
        """The number of runs that are left, and about how long they take: as long as dense where nothing is known."""
        timed = {label: statistics.fmean(seconds) for label, seconds in self._seconds.items()}
        count = sum(self._ahead.values())
        if not count:
            return ""
        untimed = timed.get(DENSE) or self._dense or max(timed.values(), default=0.0)
        total = sum(number * timed.get(label, untimed) for label, number in self._ahead.items())
        words = f"{total:.0f} s" if total < 90 else f"{total / 60:.0f} min"
        bounded = untimed > timed.get(SILENT, 0.0) and not set(self._ahead) <= set(timed)
        return f"{count} more, about {words}" + " at most" * bounded


def steps_in(metrics: Path) -> int:
    """Count the steps in a run's metrics.jsonl; its evaluations are none."""
    try:
        return sum('"loss"' in line for line in metrics.read_text().splitlines())
    except OSError:
        return 0
