"""The services of ``--track``: each begins a run or goes on with it, takes numbers by step, and is told its end."""

from __future__ import annotations

import contextlib
import json
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, ThinwireWarning, in_words
from thinwire.base.files import write
from thinwire.train.config import Config

Log = Callable[[dict[str, float]], object]
"""Takes the numbers of one row of metrics.jsonl."""


IDENTITIES = "tracked.json"
"""The file in --out that holds the name of this run at each service."""


class Service(NamedTuple):
    """A run that a service keeps: its name there, and what it is told. ``finish(failed)`` ends it."""

    run_id: str
    log: Callable[[dict[str, float], int], object]
    finish: Callable[[bool], object]


def _begin_wandb(api: Any, config: Config, run_id: str | None) -> Service:
    run_id = run_id or uuid.uuid4().hex[:8]
    run = api.init(
        project=config.track_project, config=config.plain(), resume="allow", id=run_id, name=config.out.name,
        dir=str(config.out),
    )  # fmt: skip
    return Service(run_id, run.log, lambda failed: run.finish(exit_code=int(failed)))


def _begin_trackio(api: Any, config: Config, run_id: str | None) -> Service:
    run_id = run_id or uuid.uuid4().hex[:8]
    run = api.init(
        project=config.track_project, config=config.plain(), resume="allow", name=f"{config.out.name}-{run_id}"
    )
    return Service(run_id, run.log, lambda failed: run.finish())


def _begin_mlflow(api: Any, config: Config, run_id: str | None) -> Service:
    """MLFLOW_TRACKING_URI says where to. A project is an experiment there, and the service names runs by itself."""
    api.set_experiment(config.track_project)
    run = api.start_run(run_id=run_id, run_name=config.out.name)
    if run_id is None:
        api.log_params(config.plain())
    return Service(run.info.run_id, api.log_metrics, lambda failed: api.end_run("FAILED" if failed else "FINISHED"))


BEGIN: dict[str, Callable[[Any, Config, str | None], Service]] = {
    "wandb": _begin_wandb,
    "trackio": _begin_trackio,
    "mlflow": _begin_mlflow,
}
"""Package -> how it begins a run with the settings of ``config``, or goes on with run ``run_id``."""


@contextlib.contextmanager
def open_service(name: str, config: Config, last_step: int) -> Iterator[Log]:
    """Begin this folder's run on a service of ``BEGIN``, or go on with the one of ``IDENTITIES``.

    No service takes a row back: rows that an interrupted run had sent after its checkpoint stay, and are not sent
    again. An error of the service ends the tracking with a warning, but not the training.
    """
    path = config.out / IDENTITIES
    run_ids = json.loads(path.read_text()) if path.exists() else {}
    last_sent = last_step if name in run_ids else -1
    try:
        service = BEGIN[name](extras.load(name), config, run_ids.get(name))
    except ThinwireError:
        raise
    except Exception as error:
        raise ThinwireError(f"--track {name}: {in_words(error)}") from None
    write(path, json.dumps(run_ids | {name: service.run_id}) + "\n")
    lost = False

    def call(tell: Callable[..., object], *values: Any) -> None:
        nonlocal lost
        try:
            if not lost:
                tell(*values)
        except Exception as error:
            lost = True
            line = f"--track {name} failed, and the run goes on without it: {in_words(error)}"
            warnings.warn(line, ThinwireWarning, stacklevel=2)

    def log(row: dict[str, float]) -> None:
        step = int(row.pop("step"))
        if step > last_sent:
            call(service.log, row, step)

    failed = True
    try:
        yield log
        failed = False
    finally:
        call(service.finish, failed)
