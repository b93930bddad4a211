"""``thinwire train``: on ranks, or with --elastic on replicas that come and go."""

from __future__ import annotations

import os

from thinwire.base import extras
from thinwire.base.errors import ThinwireError
from thinwire.base.terminal import ends_at_once, note
from thinwire.train.cli import begin_rank, run_ranks, under_torchrun
from thinwire.train.job.replica_log import REPLICA


def main(argv: list[str]) -> int:
    """Train. Return the exit status."""
    begin_rank()
    from thinwire.train.config import from_arguments
    from thinwire.train.job.run_folder import refuse
    from thinwire.train.job.scheduler import torchrun_variables

    config = from_arguments(argv)
    supervises = config.elastic and REPLICA not in os.environ
    if supervises and under_torchrun():
        raise ThinwireError("--elastic starts its replicas itself: run it once on each machine, without torchrun")
    with ends_at_once():
        config.check_options()
        if not under_torchrun():
            if not torchrun_variables(os.environ):  # this process starts all that read and write these files
                if not config.elastic:
                    refuse(config.out, anew=config.overwrite, goes_on=config.resume is not None)
                config.check_files()
            note(f"loading torch, then starting the {'replicas' if config.elastic else 'ranks'}: some seconds")
        config.check_methods()
        if config.elastic:
            extras.package_folder("torchft")
    if supervises:
        from thinwire.train.supervisor import supervise

        return supervise(["train", *argv], config)

    def work() -> int:
        if config.elastic:
            from thinwire.adapters.torchft import compress, open_manager
            from thinwire.train.replica import train_replica

            return train_replica(config, os.environ[REPLICA], open_manager, compress)
        from thinwire.train.loop import train

        train(config)
        return 0

    return run_ranks(["train", *argv], config, work)
