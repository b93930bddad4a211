"""The ``thinwire`` program. It imports a command when called, so that ``thinwire lab`` does not wait for torch."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

from thinwire.base import extras
from thinwire.base.errors import ThinwireError
from thinwire.base.version import __version__

COMMANDS = {
    "train": ("thinwire.train.cli:main", "train a language model, on ranks of this machine, torchrun, srun or mpirun"),
    "inspect": (
        "thinwire.train.checkpoint.inspect:main",
        "show what a checkpoint holds and whether it is whole, or compare two",
    ),
    "compare": ("thinwire.cli.compare:compare_main", "train with several methods on an emulated network: a verdict"),
    "doctor": ("thinwire.cli.doctor:doctor_main", "measure a job on its ranks: what bounds it, what would help"),
    "simulate": (
        "thinwire.cli.simulate:simulate_main",
        "predict step time, bytes and memory of methods on a cluster: will it help?",
    ),
    "lab": ("thinwire.cli.lab:lab_main", "run any torchrun-style command on an emulated cluster"),
    "tokenize": ("thinwire.train.data.token_files:main", "tokenize text once, for `thinwire train --corpus FOLDER`"),
    "sample": ("thinwire.train.checkpoint.trained_model:sample_main", "print text that a trained model goes on with"),
    "export": ("thinwire.train.checkpoint.trained_model:export_main", "write a trained model as a Hugging Face folder"),
    "eval": ("thinwire.train.checkpoint.evaluation:main", "run tasks of lm-evaluation-harness on a trained model"),
    "env": ("thinwire.cli.environment:main", "show versions, devices, networks and what is missing: for bug reports"),
    "selftest": ("thinwire.cli.selftest:main", "try this installation on two ranks of this machine, for half a minute"),
    "methods": ("thinwire.methods:main", "list the methods and their knobs"),
    "paper": ("thinwire.cli.paper:paper_main", "repeat an experiment of one of the five papers, beside its figures"),
    "completion": ("thinwire.cli.completion:main", "print a script that completes commands and flags, for bash or zsh"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Return the exit status: 0, 2 for unusable input, or the error's own."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print("usage: thinwire COMMAND [options]     (thinwire COMMAND --help for its options)\n")
        for command, (_, text) in COMMANDS.items():
            print(f"  {command:<12}{text}")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return 0
    word, *arguments = argv
    try:
        if word not in COMMANDS:
            raise ThinwireError(f"unknown command '{word}'; there are: {', '.join(COMMANDS)}")
        module, function = COMMANDS[word][0].split(":")
        try:
            return getattr(importlib.import_module(module), function)(arguments)
        except ModuleNotFoundError as error:
            raise extras.missing(error) from None
    except ThinwireError as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("thinwire: interrupted", file=sys.stderr)
        return 130


def program() -> NoReturn:
    """Run :func:`main` and end the process with its status."""
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # End without taking the interpreter down. A worker thread of torch's may be releasing the last collective's tensors
    # and needs Python for it: it would abort the process ("terminate called without an active exception").
    if "torch" in sys.modules:
        os._exit(status)
    sys.exit(status)
