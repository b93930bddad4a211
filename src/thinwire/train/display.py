"""What a run shows and writes while it goes: progress on rank 0, metrics.jsonl, TensorBoard where it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.errors import ThinwireError
from thinwire.train.folder import write


def cut(path: Path, step: int) -> float:
    """Leave of a metrics.jsonl what a run at ``step`` had written; the seconds that it had run then.

    The evaluation at ``step`` goes too: a run that goes on from there makes it again.
    """
    kept, wall = [], 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            if row["step"] > step - ("valid_loss" in row):
                continue
            wall = float(row["wall_s"])
        except (ValueError, TypeError, KeyError):  # half a line, of a run that was killed
            continue
        kept.append(line + "\n")
    write(path, "".join(kept))
    return wall


class Display:
    """Rank 0's display and files; on other ranks everything here does nothing.

    On a terminal: a progress bar. Elsewhere: a line at the start, per evaluation and at the end.

    Attributes:
        wall: seconds that the run had taken when it was interrupted, where it goes on.
        trouble: why a row could not be written; "" while all is well.
    """

    def __init__(self, folder: Path, rank: int, steps: int, start: int) -> None:
        self.folder, self.rank, self.steps, self.start = folder, rank, steps, start
        self._file: TextIO | None = None
        self._board: Any = None
        self._progress: Progress | None = None
        self._task: Any = None
        self.wall, self.trouble = 0.0, ""

    def __enter__(self) -> Display:
        if self.rank != 0:
            return self
        metrics = self.folder / "metrics.jsonl"
        if self.start:
            self.wall = cut(metrics, self.start)
        self._file = metrics.open("a" if self.start else "w", buffering=1)
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            purge = self.start + 1 if self.start else None
            self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge)
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
                with contextlib.suppress(OSError):  # a full disk has been told of
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

    def check(self) -> None:
        """Raises ThinwireError where a row could not be written."""
        if self.trouble:
            raise ThinwireError(self.trouble)

    def _write(self, row: dict[str, Any]) -> None:
        try:
            if self._file is not None:
                self._file.write(json.dumps(row) + "\n")
            if self._board is not None:
                for name, value in row.items():
                    if isinstance(value, int | float) and name != "step":
                        self._board.add_scalar(name, value, row["step"])
        except OSError as error:
            self.trouble = f"cannot write {self.folder / 'metrics.jsonl'}: {error.strerror}"
