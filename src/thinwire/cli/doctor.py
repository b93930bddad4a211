"""``thinwire doctor``: measures a job on its own ranks, and says what bounds it and what would help."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from thinwire.base.errors import ThinwireError
from thinwire.base.files import refuse_unwritable
from thinwire.base.options import read_options
from thinwire.base.terminal import ends_at_once, note
from thinwire.cli.lab import split
from thinwire.train.cli import begin_rank, run_ranks, under_torchrun

LONGEST_S = 600.0


@dataclass(frozen=True)
class Doctor:
    """Measure a job in a minute, on its own ranks: its links, its computing and the methods' kernels.

    Start it as you start `thinwire train`, and give the options of your run after --. Prints what takes the time, what
    would help and by how much, and what to type; then a table of methods. Writes what it measured of the cluster to a
    file, for `thinwire simulate --cluster FILE`.

    $ torchrun --nnodes 2 --nproc-per-node 8 -m thinwire doctor --preset gpt-125m -- --batch-size 16
    """

    methods: str = "dense,bf16,int8,sdp4bit,powersgd,trickle,trickle:merged"
    """Methods to try besides dense, separated by commas, with or without knobs."""
    preset: str | None = None
    """The model; see thinwire train --help. Default: that of a --config after --, or net20m."""
    out: Path = Path("cluster.toml")
    """File for what was measured of the cluster."""
    seconds: float = 55.0
    """Time for all measurements, 10 to 600. Less: fewer message sizes, steps and methods' kernels are measured."""

    def names(self) -> list[str]:
        """Check the settings (``ThinwireError``) and return the methods, dense first."""
        from thinwire.lab.entries import method_names
        from thinwire.methods import resolve

        names = list(dict.fromkeys(["dense", *method_names(self.methods)]))
        for name in names:
            resolve(name)
        if not 10 <= self.seconds <= LONGEST_S:
            raise ThinwireError(f"--seconds is from 10 to {LONGEST_S:g}, got {self.seconds:g}")
        refuse_unwritable(self.out, "--out")
        if not self.out.parent.is_dir():
            raise ThinwireError(f"--out {self.out}: there is no folder {self.out.parent}: make it, or name another")
        return names


def doctor_main(argv: list[str]) -> int:
    """Run ``thinwire doctor ... [-- flags of thinwire train]`` as one rank, or start ranks here."""
    began = time.monotonic()
    begin_rank()
    from thinwire.lab.entries import is_among, preset_flags
    from thinwire.train.config import from_arguments

    options, extra = split(argv)
    settings = read_options(Doctor, options, "thinwire doctor", after="[-- options of thinwire train]")
    if any(is_among(flag, extra) for flag in ("--method", "--out", "--preset")):
        raise ThinwireError("write --methods, --out and --preset before --: they are options of thinwire doctor")
    words = [*preset_flags(settings.preset, extra), *extra]
    config = from_arguments(words)
    if not under_torchrun():
        note(f"loading torch, starting the ranks, then measuring: {settings.seconds:g} s in all")
    with ends_at_once():
        config.check()
    names = settings.names()
    command = shlex.join(["thinwire", "train", *words, "--method"])

    def work() -> None:
        from thinwire.train.job.examination import Examination
        from thinwire.train.job.setup import join_ranks

        with join_ranks(config) as ranks:
            Examination(
                config, ranks, names, settings.out, seconds=settings.seconds, began=began, command=command
            ).run()

    return run_ranks(["doctor", *argv], config, work)
