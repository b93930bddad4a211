"""Trackers, to which a run's numbers go besides metrics.jsonl: metrics.csv, TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.base.files import write
from thinwire.train.config import Config

COLUMNS = (
    "step", "loss", "valid_loss", "lr", "grad_norm", "step_ms", "exposed_ms", "encode_ms", "wire_ms", "decode_ms",
    "wire_bytes_inter", "wire_bytes_intra", "skipped", "tokens", "wall_s",
)  # fmt: skip
"""Columns of metrics.csv. An evaluation's row has step, valid_loss and wall_s alone."""


Log = Callable[[dict[str, Any]], object]
"""Takes one row of metrics.jsonl, of a step or of an evaluation."""


def open_trackers(config: Config, start: int, last_step: int) -> Iterator[contextlib.AbstractContextManager[Log]]:
    """Open the trackers that ``config`` names, and TensorBoard where it is installed.

    Args:
        start: the run goes on after this step, to which its metrics.jsonl has been cut back already.
        last_step: the last one in it before it was cut.
    """
    if importlib.util.find_spec("tensorboard") is not None:
        yield open_board(config.out, start)
    for name in dict.fromkeys(config.track):
        yield open_table(config.out, start) if name == "csv" else open_service(name, config, start, last_step)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Flatten the numbers in a row of metrics.jsonl: bytes by link, a skipped step as 1."""
    flat = row | {f"wire_bytes_{link}": count for link, count in row.get("wire_bytes", {}).items()}
    return {name: +value for name, value in flat.items() if isinstance(value, int | float)}


@contextlib.contextmanager
def open_table(folder: Path, start: int) -> Iterator[Log]:
    """Write metrics.csv, anew from metrics.jsonl where a run goes on, so the two always hold the same rows."""
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8", buffering=1) as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if start else []:
            table.writerow(numbers(json.loads(line)))
        yield lambda row: table.writerow(numbers(row))


@contextlib.contextmanager
def open_board(folder: Path, start: int) -> Iterator[Log]:
    """Write TensorBoard's files; those of steps after the checkpoint are hidden where a run goes on."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None) as writer:

        def log(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    writer.add_scalar(name, value, row["step"])

        yield log


@contextlib.contextmanager
def open_service(name: str, config: Config, start: int, last_step: int) -> Iterator[Log]:
    """Go on with the run that this folder has begun on Weights & Biases or Trackio, or begin one: they share an API.

    Neither takes a row back. Rows of steps that an interrupted run had sent after its checkpoint stay, and are not sent
    a second time. An error of the service ends the tracking with a warning, not the training.
    """
    api: Any = extras.load(name)
    path, folder = config.out / "tracked.json", config.out
    run_ids = json.loads(path.read_text()) if start and path.exists() else {}
    last_sent = last_step if name in run_ids else -1
    if name not in run_ids:
        run_ids[name] = uuid.uuid4().hex[:8]
        write(path, json.dumps(run_ids) + "\n")
    identity = {"name": f"{folder.name}-{run_ids[name]}"}
    if name == "wandb":
        identity = {"id": run_ids[name], "name": folder.name, "dir": str(folder)}
    try:
        run = api.init(project=config.track_project, config=config.plain(), resume="allow", **identity)
    except Exception as error:
        raise ThinwireError(f"--track {name}: {_one_line(error)}") from None

    def call(method: str, *values: Any, **options: Any) -> None:
        nonlocal run
        try:
            if run is not None:
                getattr(run, method)(*values, **options)
        except Exception as error:
            run = None
            line = f"--track {name} has ended, the run goes on: {_one_line(error)}"
            warnings.warn(line, ThinwireWarning, stacklevel=2)

    def log(row: dict[str, Any]) -> None:
        values = numbers(row)
        step = int(values.pop("step"))
        if step > last_sent:
            call("log", values, step=step)

    failed = True
    try:
        yield log
        failed = False
    finally:
        call("finish", **({"exit_code": int(failed)} if name == "wandb" else {}))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
