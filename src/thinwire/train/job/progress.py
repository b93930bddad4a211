"""Progress of a run, which rank 0 shows and writes while it goes: a bar, metrics.jsonl, and the trackers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.base.errors import ThinwireError
from thinwire.base.files import write
from thinwire.train.config import Config
from thinwire.train.job.trackers import Log, open_trackers


def cut_metrics(path: Path, step: int) -> tuple[float, int]:
    """Cut a metrics.jsonl back to the rows that a run at ``step`` had written.

    The evaluation at ``step`` goes too: a run that goes on from there makes it again.

    Returns:
        the seconds that it had run then, and the last step in the file as it was (-1: none).
    """
    rows, wall_s, last_step = [], 0.0, -1
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            last_step = max(last_step, row["step"])
            if row["step"] > step - ("valid_loss" in row):
                continue
            wall_s = float(row["wall_s"])
        except (ValueError, TypeError, KeyError):  # half a line, of a run that was killed
            continue
        rows.append(line + "\n")
    write(path, "".join(rows))
    return wall_s, last_step


class Display:
    """Rank 0's display and files; on other ranks everything here does nothing.

    On a terminal: a progress bar. Elsewhere: a line at the start, per evaluation and at the end.

    Attributes:
        wall_s: seconds that the run had taken when it was interrupted, where it goes on.
        write_error: why a row could not be written; "" while all is well.
    """

    def __init__(self, config: Config, rank: int, start: int) -> None:
        self.config, self.rank, self.start = config, rank, start
        self._open = contextlib.ExitStack()
        self._logs: list[Log] = []
        self._progress: Progress | None = None
        self._task: Any = None
        self.wall_s, self.write_error = 0.0, ""

    def __enter__(self) -> Display:
        if self.rank != 0:
            return self
        metrics = self.config.out / "metrics.jsonl"
        last_step = -1
        if self.start:
            self.wall_s, last_step = cut_metrics(metrics, self.start)
        file = self._open.enter_context(metrics.open("a" if self.start else "w", buffering=1))
        self._logs = [lambda row: file.write(json.dumps(row) + "\n")]
        self._logs += map(self._open.enter_context, open_trackers(self.config, self.start, last_step))
        # Open MPI gives each rank a terminal of 80 columns, wherever its output really goes.
        if sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            numbers = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s")
            self._progress = self._open.enter_context(Progress(*columns, numbers))
            self._task = self._progress.add_task(
                "training", total=self.config.steps, completed=self.start, loss=0.0, rate=0.0
            )
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk has been told of
            self._open.__exit__(*error)

    def say(self, line: str) -> None:
        """Show a line to the user."""
        if self.rank != 0:
            return
        if self._progress is not None:
            self._progress.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def step(self, row: dict[str, Any], rate: float) -> None:
        """Write one optimizer step's row of metrics.jsonl."""
        self._write(row)
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], loss=row["loss"], rate=rate)

    def evaluation(self, row: dict[str, Any]) -> None:
        """Write one evaluation's row of metrics.jsonl."""
        self._write(row)
        self.say(f"step {row['step']:>6}  validation loss {row['valid_loss']:.4f}")

    def check(self) -> None:
        """Raise ThinwireError where a row could not be written."""
        if self.write_error:
            raise ThinwireError(self.write_error)

    def _write(self, row: dict[str, Any]) -> None:
        try:
            for log in self._logs:
                log(row)
        except OSError as error:
            self.write_error = f"cannot write {self.config.out / 'metrics.jsonl'}: {error.strerror}"
