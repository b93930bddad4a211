"""The ``thinwire`` program. It imports a command when called, so that ``thinwire lab`` does not wait for torch."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from typing import NoReturn

from thinwire.base import extras
from thinwire.base.errors import ThinwireError
from thinwire.base.files import in_one_line
from thinwire.base.terminal import begin_line, ends_at_once, lost_readers, note, say, silence
from thinwire.base.version import __version__

COMMANDS = {
    "train": ("thinwire.cli.train:main", "train a language model on several ranks"),
    "status": ("thinwire.train.job.status:main", "show the replicas of a `train --elastic` run, and what was lost"),
    "inspect": ("thinwire.train.checkpoint.inspect:main", "show and check a checkpoint, or compare two"),
    "compare": ("thinwire.cli.compare:compare_main", "compare methods: train with each on an emulated slow link"),
    "doctor": ("thinwire.cli.doctor:doctor_main", "measure a job: what limits it, and which method would help"),
    "simulate": ("thinwire.cli.simulate:simulate_main", "predict time, bytes and memory of methods on a cluster"),
    "lab": ("thinwire.cli.lab:lab_main", "run a program of your own on an emulated slow link"),
    "tokenize": ("thinwire.train.data.token_files:main", "tokenize a text once, for `thinwire train --corpus FOLDER`"),
    "sample": ("thinwire.train.checkpoint.trained_model:sample_main", "let a trained model continue a text"),
    "export": ("thinwire.train.checkpoint.trained_model:export_main", "write a trained model as a Hugging Face folder"),
    "eval": ("thinwire.train.checkpoint.evaluation:main", "run tasks of lm-evaluation-harness on a trained model"),
    "env": ("thinwire.cli.environment:main", "show versions, devices and what is missing: for bug reports"),
    "selftest": ("thinwire.cli.selftest:main", "test this installation on two ranks (half a minute)"),
    "methods": ("thinwire.methods:main", "list the methods; methods NAME: what each of its knobs does"),
    "paper": ("thinwire.cli.paper:paper_main", "repeat an experiment of one of five papers on this machine"),
    "completion": ("thinwire.cli.completion:main", "print a script that completes commands, for bash or zsh"),
}
LOADS_TORCH = ("compare", "simulate", "inspect", "sample", "export", "methods", "completion")
"""Commands that load torch before they can say anything, which takes seconds."""
USAGE = "usage: thinwire COMMAND [options]      (thinwire COMMAND --help: its options)"
BROKEN_PIPE = 128 + signal.SIGPIPE
"""The exit status when the reader of the output has gone, as of programs that the signal ends."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Return the exit status: 0, 2 for unusable input, or the error's own."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        lost = lost_readers()
        if not lost:  # it was another pipe that broke
            raise
        for stream in lost:
            silence(stream)
        return BROKEN_PIPE


def _run(argv: list[str]) -> int:
    """Run one command, and say in one line why it failed."""
    try:
        # A launcher of ranks blocks it until here, so that a Ctrl-C meets no half-started interpreter.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            status = run_command(argv)
        except SystemExit as stop:  # a help page was printed, or rich met a pipe whose reader has gone
            status = BROKEN_PIPE if stop.code else 0
        sys.stdout.flush()
        return status
    except (ThinwireError, OSError) as error:
        if isinstance(error, ConnectionError | TimeoutError):  # of a pipe, or of a network, and not of a file
            raise
        try:
            sys.stdout.flush()
        except OSError:  # what could not be written is in its buffer yet
            silence(sys.stdout)
            if isinstance(error, OSError):
                error.filename = error.filename or "standard output"
        say(f"thinwire: {in_one_line(error)}", sys.stderr)
        return getattr(error, "status", ThinwireError.status)
    except KeyboardInterrupt as stop:
        number = next((signal.Signals(what) for what in stop.args if isinstance(what, int)), signal.SIGINT)
        begin_line(sys.stderr)
        say("thinwire: interrupted" + f" by {number.name}" * (number != signal.SIGINT), sys.stderr)
        return 128 + number


def run_command(argv: list[str]) -> int:
    """Run one command; errors are raised."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE + "\n")
        for command, (_, text) in COMMANDS.items():
            print(f"  {command:<12}{text}")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return 0
    word, *arguments = argv
    if word not in COMMANDS:
        near = difflib.get_close_matches(word, COMMANDS, 1)
        guess = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        raise ThinwireError(f"unknown command '{word}'; {guess}")
    if word in LOADS_TORCH and not {"-h", "--help"} & set(arguments):
        note("loading torch")
    name, function = COMMANDS[word][0].split(":")
    try:
        with ends_at_once():
            module = importlib.import_module(name)
        if hasattr(module, "HELP") and {"-h", "--help"} & set(arguments):
            print(module.HELP)
            return 0
        return getattr(module, function)(arguments)
    except ModuleNotFoundError as error:
        raise extras.missing(error) from None


def program() -> NoReturn:
    """Run :func:`main` and end the process with its status."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # thinwire/__main__.py has set it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict":  # of an encoding that lacks a letter of ours
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    status = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python would flush it again
            silence(stream)
    # End without taking the interpreter down. A worker thread of torch's may be releasing the last collective's tensors
    # and needs Python for it: it would abort the process ("terminate called without an active exception").
    if "torch" in sys.modules:
        os._exit(status)
    sys.exit(status)
