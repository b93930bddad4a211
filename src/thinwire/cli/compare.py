"""``thinwire compare``."""

from __future__ import annotations

import shlex
from dataclasses import replace

from thinwire.base.errors import ThinwireError
from thinwire.base.options import read_options
from thinwire.base.terminal import ends_at_once
from thinwire.cli.lab import split
from thinwire.lab.compare import Comparison, compare
from thinwire.train.config import SHAPE, Config, from_arguments

OURS = {
    **dict.fromkeys(("--preset", "--steps", "--out", "--ranks-per-node"), "write it before --"),
    "--method": "write --methods before --",
    "--ranks": "write --nodes and --ranks-per-node before --",
}
"""The flags of ``thinwire train`` that ``thinwire compare`` sets itself, and what to do instead."""
SAME = (
    *SHAPE, "seq_len", "init", "data", "lora", "lora_targets", "corpus", "valid", "tokenizer", "batch_size",
    "accumulate", "eval_sequences", "seed",
)  # fmt: skip
"""Settings that all methods share: the model, the text, and the tokens of a step and of the last evaluation. Times per
step, losses after as many steps, and those of the same windows of text say nothing otherwise."""


def compare_main(argv: list[str]) -> int:
    """Run ``thinwire compare ... [-- flags of thinwire train]``. Return the exit status."""
    options, extra = split(argv)
    settings = read_options(Comparison, options, "thinwire compare", after="[-- options of thinwire train]")
    settings = replace(settings, extra=tuple(extra), command=shlex.join(["thinwire", "compare", *argv]))
    with ends_at_once():
        config = check_flags(settings)
    return compare(replace(settings, first_seed=config.seed, model=config.model, preset=config.preset))


def check_flags(settings: Comparison) -> Config:
    """Refuse flags that a comparison sets itself or that ``thinwire train`` would refuse. Return the first run's."""
    entries = settings.entries().values()
    for source, words in (("after --", settings.extra), *((f"of {entry.method}", entry.flags) for entry in entries)):
        for word in words:
            flag = word.partition("=")[0].replace("_", "-")
            if flag == "--config" and words is not settings.extra:
                raise ThinwireError(f"--config {source}: write it after --, for all methods")
            if flag in OURS:
                raise ThinwireError(f"{flag} {source}: thinwire compare sets it itself; {OURS[flag]}")
    program = settings.program[2:]  # flags behind `thinwire train`
    configs = [from_arguments([*program, *settings.flags(entry, None, settings.out)]).check() for entry in entries]
    for entry, config in zip(entries, configs, strict=True):
        for name in SAME:
            if getattr(config, name) != getattr(configs[0], name):  # that of the silent run, without flags of its own
                raise ThinwireError(
                    f"--{name.replace('_', '-')} of {entry.method}: every method trains the same model on the same "
                    "text, with the same seeds and as many tokens in a step; write it after --, for all methods"
                )
    for config in configs:
        if config.elastic:
            raise ThinwireError("--elastic: thinwire compare trains on ranks that stay; leave it out")
        config.check_files()
    return configs[0]
