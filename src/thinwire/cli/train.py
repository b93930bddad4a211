"""``thinwire train``: on ranks, or with --elastic on replicas that come and go."""

from __future__ import annotations

import importlib.util
import os

from thinwire.base import extras
from thinwire.base.errors import ThinwireError
from thinwire.base.terminal import ends_at_once, note
from thinwire.train.cli import begin_rank, run_ranks, train_on_ranks, under_torchrun
from thinwire.train.job.replica_log import REPLICA


def main(argv: list[str]) -> int:
    """Train. Return the exit status."""
    begin_rank()
    from thinwire.train.config import from_arguments

    config = from_arguments(argv)
    if not config.elastic:
        return train_on_ranks(argv, config)
    if REPLICA not in os.environ:
        if under_torchrun():
            raise ThinwireError("--elastic starts its replicas itself: run it once on each machine, without torchrun")
        note("loading torch, then starting the replicas: some seconds")
    with ends_at_once():
        config.check()
        if importlib.util.find_spec("torchft") is None:
            raise extras.missing(ModuleNotFoundError(name="torchft"))
    if REPLICA not in os.environ:
        from thinwire.train.supervisor import supervise

        return supervise(["train", *argv], config)

    def work() -> int:
        from thinwire.adapters.torchft import compress, open_manager
        from thinwire.train.replica import train_replica

        return train_replica(config, os.environ[REPLICA], open_manager, compress)

    return run_ranks([], config, work)
