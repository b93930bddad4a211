"""Trackers, to which a run's numbers go besides metrics.jsonl: metrics.csv, TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import csv
import importlib.util
import json
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.base.files import write
from thinwire.train.config import Config

CSV = "metrics.csv"
IDENTITY = "tracked.json"
COLUMNS = (
    "step", "loss", "valid_loss", "lr", "grad_norm", "step_ms", "exposed_ms", "encode_ms", "wire_ms", "decode_ms",
    "wire_bytes_inter", "wire_bytes_intra", "skipped", "tokens", "wall_s",
)  # fmt: skip
"""Columns of metrics.csv. An evaluation's row has step, valid_loss and wall_s alone."""


class Tracker(Protocol):
    def log(self, row: dict[str, Any]) -> None:
        """Take one row of metrics.jsonl, of a step or of an evaluation."""

    def close(self, failed: bool) -> None: ...


def open_trackers(config: Config, start: int, last_step: int) -> Iterator[Tracker]:
    """Open the trackers that ``config`` names, and TensorBoard where it is installed.

    Args:
        start: the run goes on after this step, to which its metrics.jsonl has been cut back already.
        last_step: the last one in it before it was cut.
    """
    if importlib.util.find_spec("tensorboard") is not None:
        yield Board(config.out, start)
    for name in dict.fromkeys(config.track):
        yield Table(config.out, start) if name == "csv" else Service(name, config, start, last_step)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Flatten the numbers in a row of metrics.jsonl: bytes by link, a skipped step as 1."""
    flat = row | {f"wire_bytes_{link}": count for link, count in row.get("wire_bytes", {}).items()}
    return {name: +value for name, value in flat.items() if isinstance(value, int | float)}


class Table:
    """metrics.csv: written anew from metrics.jsonl where a run goes on, so the two always hold the same rows."""

    def __init__(self, folder: Path, start: int) -> None:
        self._file = (folder / CSV).open("w", newline="", encoding="utf-8", buffering=1)
        self._rows = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        self._rows.writeheader()
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if start else []:
            self.log(json.loads(line))

    def log(self, row: dict[str, Any]) -> None:
        self._rows.writerow(numbers(row))

    def close(self, failed: bool) -> None:
        self._file.close()


class Board:
    """TensorBoard's files; those of steps after the checkpoint are hidden where a run goes on."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def log(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self, failed: bool) -> None:
        self._writer.close()


class Service:
    """Weights & Biases or Trackio, which share an interface: the run that was begun in this folder, or a new one.

    Neither takes a row back. Rows of steps that an interrupted run had sent after its checkpoint stay, and are not sent
    a second time. An error of the service ends the tracking with a warning, not the training.
    """

    def __init__(self, name: str, config: Config, start: int, last_step: int) -> None:
        api: Any = extras.load(name)
        path, folder = config.out / IDENTITY, config.out
        run_ids = json.loads(path.read_text()) if start and path.exists() else {}
        self.name, self._last_sent = name, last_step if name in run_ids else -1
        if name not in run_ids:
            run_ids[name] = uuid.uuid4().hex[:8]
            write(path, json.dumps(run_ids) + "\n")
        options: dict[str, Any] = {"project": config.track_project, "config": config.plain(), "resume": "allow"}
        if name == "wandb":
            options |= {"id": run_ids[name], "name": folder.name, "dir": str(folder)}
        else:
            options |= {"name": f"{folder.name}-{run_ids[name]}"}
        try:
            self._run: Any = api.init(**options)
        except Exception as error:
            raise ThinwireError(f"--track {name}: {_one_line(error)}") from None

    def log(self, row: dict[str, Any]) -> None:
        values = numbers(row)
        step = int(values.pop("step"))
        if step > self._last_sent:
            self._try(lambda run: run.log(values, step=step))

    def close(self, failed: bool) -> None:
        options = {"exit_code": int(failed)} if self.name == "wandb" else {}
        self._try(lambda run: run.finish(**options))

    def _try(self, call: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:
            self._run = None
            line = f"--track {self.name} has ended, the run goes on: {_one_line(error)}"
            warnings.warn(line, ThinwireWarning, stacklevel=2)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
