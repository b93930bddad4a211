"""``thinwire completion``: a shell script that completes commands, flags of their ``--help``, and words of flags."""

from __future__ import annotations

import contextlib
import io
import os
import re
from unittest import mock

from thinwire.base.errors import ThinwireError
from thinwire.cli import program
from thinwire.methods import names
from thinwire.train.model.shapes import PRESETS

SHELLS = ("bash", "zsh")
HELP = """usage: thinwire completion bash|zsh

Print a script that completes commands, options and the words that they take.

  thinwire completion bash > ~/.local/share/bash-completion/completions/thinwire
  thinwire completion zsh > ~/.thinwire.zsh    (and in ~/.zshrc, after compinit:
                                                source ~/.thinwire.zsh)"""
FLAGS = re.compile(r"^[\s│]*(?:-h, )?(--[a-z][\w-]*(?:, --[a-z][\w-]*)*)(?: \{([\w,]+)\})?", re.MULTILINE)


def main(argv: list[str]) -> int:
    """Print the script. Return the exit status."""
    if not argv:
        print(HELP)
        return 2
    if len(argv) > 1 or argv[0] not in SHELLS:
        raise ThinwireError(f"completion is for {' or '.join(SHELLS)}, got '{' '.join(argv)}'")
    print(script(argv[0]))
    return 0


def options(command: str) -> dict[str, list[str]]:
    """Return the flags in ``thinwire COMMAND --help``, each with the words that the help lists for it."""
    printed = io.StringIO()
    wide = mock.patch.dict(os.environ, {"COLUMNS": "1000"})  # nothing is wrapped
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit), wide:
        program.main([command, "--help"])
    return {
        flag: [word for word in words.split(",") if word and word != "None"]
        for flags, words in FLAGS.findall(printed.getvalue())
        for flag in flags.split(", ")
    }


def script(shell: str) -> str:
    """Write the script for bash; zsh runs it through ``bashcompinit``."""
    choices = {"--method": names(), "--methods": names(), "--intra": names(), "--preset": list(PRESETS)}
    cases = [f'"completion completion") words="{" ".join(SHELLS)}" ;;', '"lab lab") words="run" ;;']
    for command in program.COMMANDS:
        flag_words = options(command)
        for flag, listed in flag_words.items():
            if words := choices.get(flag, listed):
                cases.append(f'"{command} {flag}") words="{" ".join(words)}" ;;')
        cases.append(f'"{command} "*) [[ "$word" == -* ]] && words="{" ".join(flag_words)}" ;;')
    lines = [
        *(["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []),
        "_thinwire() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        words="{" ".join(program.COMMANDS)}"',
        '    else case "${COMP_WORDS[1]} $before" in',
        *(f"        {case}" for case in cases),
        "    esac; fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _thinwire thinwire",
    ]
    return "\n".join(lines)
