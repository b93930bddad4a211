"""Progress of a run, which rank 0 shows and writes: a bar, metrics.jsonl, and the trackers of --track."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.base.errors import ThinwireError
from thinwire.base.files import write
from thinwire.base.terminal import columns, fold, say, silence
from thinwire.train.config import Config
from thinwire.train.job.services import IDENTITIES, Log, open_service

COLUMNS = (
    "step", "loss", "valid_loss", "lr", "grad_norm", "step_ms", "exposed_ms", "encode_ms", "wire_ms", "decode_ms",
    "wire_bytes_inter", "wire_bytes_intra", "skipped", "tokens", "wall_s",
)  # fmt: skip
"""Columns of metrics.csv. An evaluation's row has only step, valid_loss and wall_s."""


class Earlier(NamedTuple):
    """The part of a run before the checkpoint that it goes on from, by its rows of metrics.jsonl.

    wall_s: its seconds. first_loss: of its first evaluation of as many windows; NaN: there is none. losses: of its
    last ten steps that no rank skipped. steps, skipped, sent: its steps, those that a rank skipped, and rank 0's bytes
    in them by link. last_step: of which there was a row; -1: none.
    """

    wall_s: float = 0.0
    first_loss: float = math.nan
    losses: Sequence[float] = ()
    steps: int = 0
    skipped: int = 0
    sent: Mapping[str, float] = MappingProxyType({})
    last_step: int = -1

    def first(self, loss: float) -> float:
        """Return the loss of the run's first evaluation: ``loss``, if there was none earlier."""
        return loss if math.isnan(self.first_loss) else self.first_loss


def cut_metrics(path: Path, step: int, windows: int) -> Earlier:
    """Cut a metrics.jsonl back to ``step``; its evaluation goes too, as the resumed run makes it again.

    ``windows``: of an evaluation.
    """
    lines, wall_s, first_loss, last_step = [], 0.0, math.nan, -1
    steps, skipped, losses, sent = 0, 0, deque[float](maxlen=10), Counter[str]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            last_step = max(last_step, row["step"])
            if row["step"] > step - ("valid_loss" in row):
                continue
            wall_s = float(row["wall_s"])
        except (ValueError, TypeError, KeyError):  # half a line, of a run that was killed
            continue
        lines.append(line + "\n")
        if "valid_loss" in row:
            if math.isnan(first_loss) and row.get("eval_sequences", windows) == windows:
                first_loss = row["valid_loss"]
        elif "loss" in row:
            steps += 1
            skipped += bool(row.get("skipped"))
            if math.isfinite(row["loss"]) and not row.get("skipped"):
                losses.append(row["loss"])
            sent.update(row.get("wire_bytes", {}))
    write(path, "".join(lines))
    return Earlier(wall_s, first_loss, list(losses), steps, skipped, dict(sent), last_step)


class _Console(Console):
    """A console that falls silent when its reader has gone (``| head``): the run goes on, and its files have all."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(sys.stdout)


class Display:
    """Rank 0's display (with a progress bar on a terminal) and files; other ranks show and write nothing.

    Attributes:
        earlier: on rank 0, what a resumed run had done by its checkpoint.
        last_step: of which there is a row already; -1: none.
        write_error: the reason why a row could not be written; "" while all is well.
    """

    def __init__(self, config: Config, rank: int, start: int) -> None:
        self.config, self.rank, self.start = config, rank, start
        self._open = contextlib.ExitStack()
        self._trackers: list[Log] = []
        self._console = _Console(quiet=rank != 0, highlight=False, markup=False, emoji=False)
        bar = (
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
        )
        # Open MPI gives each rank a terminal of 80 columns, wherever its output really goes.
        has_bar = rank == 0 and sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
        self._progress = Progress(*bar, console=self._console, disable=not has_bar)
        self._task = self._progress.add_task("", total=config.steps, completed=start, values="first evaluation")
        self.earlier, self.write_error, self.last_step = Earlier(), "", -1

    def __enter__(self) -> Display:
        if self.rank != 0:
            return self
        metrics = self.config.out / "metrics.jsonl"
        if self.start:
            self.earlier = cut_metrics(metrics, self.start, self.config.eval_sequences)
        else:
            (self.config.out / IDENTITIES).unlink(missing_ok=True)
        self.last_step = min(self.earlier.last_step, self.start)
        self._rows = self._open.enter_context(metrics.open("a" if self.start else "w", buffering=1))
        for name in dict.fromkeys(self.config.track):
            table = open_table(self.config.out, self.start)
            tracker = table if name == "csv" else open_service(name, self.config, self.earlier.last_step)
            self._trackers.append(self._open.enter_context(tracker))
        self._open.enter_context(self._progress)
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported
            self._open.__exit__(*error)

    @property
    def replaced(self) -> bool:
        """Is metrics.jsonl another file now? Another replica may have kept it meanwhile."""
        try:
            return self.rank == 0 and not os.path.samestat(os.fstat(self._rows.fileno()), os.stat(self._rows.name))
        except OSError:
            return True

    def say(self, line: str) -> None:
        width = columns()
        try:
            self._console.print(line if width is None else fold(line, width), soft_wrap=True)
        except OSError as error:  # the disk below it is full: as if the reader had gone
            self._console.on_broken_pipe()
            with contextlib.suppress(OSError):
                say(f"thinwire: standard output: {error.strerror}; the run goes on without it", sys.stderr)

    def step(self, row: dict[str, Any], rate: float) -> None:
        """Write one optimizer step's row of metrics.jsonl; show its ``rate`` in tokens/s."""
        self._write(row)
        values = f"loss {row['loss']:.3f}  {rate:,.0f} tokens/s"
        self._progress.update(self._task, completed=row["step"], values=values)

    def evaluation(self, row: dict[str, Any]) -> None:
        """Write and show one evaluation's row of metrics.jsonl."""
        self._write(row | {"eval_sequences": self.config.eval_sequences})
        whose = f", of {row['valid_loss_of']}" if "valid_loss_of" in row else ""
        self.say(f"step {row['step']:>6}  validation loss {row['valid_loss']:.4f}{whose}")

    def check(self) -> None:
        """Raise ThinwireError if a row could not be written. If metrics.jsonl is another file now, write into that."""
        if self.write_error:
            raise ThinwireError(self.write_error)
        if self.replaced and not self.config.elastic:
            metrics = self.config.out / "metrics.jsonl"
            self._rows = self._open.enter_context(metrics.open("a", buffering=1))
            self.say("metrics.jsonl was replaced or removed: rows written since then are lost")

    def _write(self, row: dict[str, Any]) -> None:
        if self.rank != 0:
            return
        try:
            self._rows.write(json.dumps(row) + "\n")
            for log in self._trackers:
                log(numbers(row))
        except OSError as error:
            self.write_error = f"cannot write {self.config.out / 'metrics.jsonl'}: {error.strerror}"


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in a row of metrics.jsonl, with wire_bytes flattened by link and booleans as 0 or 1."""
    flat = row | {f"wire_bytes_{link}": count for link, count in row.get("wire_bytes", {}).items()}
    return {name: +value for name, value in flat.items() if isinstance(value, int | float)}


@contextlib.contextmanager
def open_table(folder: Path, start: int) -> Iterator[Log]:
    """Open metrics.csv; a resumed run rewrites it from metrics.jsonl, so that both hold the same rows."""
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8", buffering=1) as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if start else []:
            table.writerow(numbers(json.loads(line)))
        yield table.writerow
