"""``thinwire compare``."""

from __future__ import annotations

import shlex
from dataclasses import replace

from thinwire.base.errors import ThinwireError
from thinwire.base.options import read_options
from thinwire.base.terminal import ends_at_once
from thinwire.cli.lab import split
from thinwire.lab.compare import Comparison, compare
from thinwire.train.config import from_arguments

OURS = {
    **dict.fromkeys(("--preset", "--steps", "--out", "--ranks-per-node"), "write it before --"),
    "--method": "write --methods before --",
    "--ranks": "write --nodes and --ranks-per-node before --",
}
"""The flags of ``thinwire train`` that ``thinwire compare`` sets itself, and what to do instead."""


def compare_main(argv: list[str]) -> int:
    """Run ``thinwire compare ... [-- flags of thinwire train]``. Return the exit status."""
    options, extra = split(argv)
    settings = read_options(Comparison, options, "thinwire compare", after="[-- options of thinwire train]")
    settings = replace(settings, extra=tuple(extra), command=shlex.join(["thinwire", "compare", *argv]))
    with ends_at_once():
        first_seed = check_flags(settings)
    return compare(replace(settings, first_seed=first_seed))


def check_flags(settings: Comparison) -> int:
    """Refuse flags that a comparison sets itself or that ``thinwire train`` would refuse. Return the first seed."""
    entries = settings.entries().values()
    for source, words in (("after --", settings.extra), *((f"of {entry.method}", entry.flags) for entry in entries)):
        for word in words:
            flag = word.partition("=")[0].replace("_", "-")
            if flag in OURS:
                raise ThinwireError(f"{flag} {source}: thinwire compare sets it itself; {OURS[flag]}")
            if flag == "--seed" and words is not settings.extra:
                raise ThinwireError(f"--seed {source}: every method has the same seeds; write --seed after --")
    for entry in entries:
        config = from_arguments(settings.flags(entry, None, settings.out)).check()
    return config.seed
