"""The command ``thinwire train``: starts ranks, or is one of them."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

from thinwire.base.errors import ThinwireError, ThinwireWarning


def main(argv: list[str]) -> int:
    """Train: as one rank of a job that somebody started (torchrun, srun, mpirun), or on ranks started here."""
    # Before torch is imported: its sockets print stack traces of their own beside our one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from thinwire.train.config import from_arguments
    from thinwire.train.job.launch import start_ranks, under_torchrun
    from thinwire.train.job.scheduler import forgotten_srun, torchrun_variables

    config = from_arguments(argv).check()
    if not under_torchrun():
        os.environ |= torchrun_variables(os.environ)
    if not under_torchrun():
        if line := forgotten_srun(os.environ):
            print(f"thinwire: {line}", file=sys.stderr)
        ranks = config.ranks or _default_ranks(config.device)
        per_node = config.ranks_per_node or ranks
        if ranks % per_node:
            raise ThinwireError(f"--ranks-per-node {per_node} does not divide the {ranks} ranks")
        return start_ranks(argv, ranks, per_node)
    from thinwire.train.job.signals import end_at_once
    from thinwire.train.loop import train

    end_at_once()
    warnings.formatwarning = _one_line
    train(config)
    return 0


_format_usually = warnings.formatwarning


def _one_line(message: Warning | str, category: type[Warning], *place: Any, **named_place: Any) -> str:
    """Format our warnings without file and line, which are in our own code; others as ever."""
    if issubclass(category, ThinwireWarning):
        return f"thinwire: {message}\n"
    return _format_usually(message, category, *place, **named_place)


def _default_ranks(device: str) -> int:
    """Choose one rank per GPU; without a GPU, two if there are two cores."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(2, os.cpu_count() or 1)
