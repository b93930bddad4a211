"""What a run shows and writes while it goes: progress on rank 0, metrics.jsonl, TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Rank 0's display and files; on other ranks everything here does nothing.

    On a terminal: a progress bar. Elsewhere: a line at the start, per evaluation and at the end.
    """

    def __init__(self, folder: Path, rank: int, steps: int, start: int) -> None:
        self.folder, self.rank, self.steps, self.start = folder, rank, steps, start
        self._file: TextIO | None = None
        self._board: Any = None
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Display:
        if self.rank != 0:
            return self
        self._file = (self.folder / "metrics.jsonl").open("a" if self.start else "w", buffering=1)
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder / "tensorboard"))
        if sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
            )  # fmt: skip
            self._task = self._progress.add_task("training", total=self.steps, completed=self.start, loss=0.0, rate=0.0)
            self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
        for part in (self._board, self._file):
            if part is not None:
                part.close()

    def say(self, line: str) -> None:
        """A line for the user."""
        if self.rank != 0:
            return
        if self._progress is not None:
            self._progress.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def step(self, row: dict[str, Any], rate: float) -> None:
        """One optimizer step's row of metrics.jsonl."""
        self._write(row)
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], loss=row["loss"], rate=rate)

    def evaluation(self, row: dict[str, Any]) -> None:
        """One evaluation's row of metrics.jsonl."""
        self._write(row)
        self.say(f"step {row['step']:>6}  validation loss {row['valid_loss']:.4f}")

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, row["step"])
