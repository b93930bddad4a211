"""``thinwire completion``: what a shell offers after the words so far."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from thinwire.base.errors import ThinwireError
from thinwire.cli.completion import SHELLS, main, script
from thinwire.cli.program import COMMANDS
from thinwire.methods import names

ASK = """
offered() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _thinwire; echo "${COMPREPLY[*]}"; }
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return {shell: script(shell) for shell in SHELLS}


def test_bash_offers_commands_flags_and_what_flags_take(scripts: dict[str, str]) -> None:
    asked = {
        "''": " ".join(COMMANDS), "exp": "export", "train --eng": "--engine", "train --engine ''": "ddp fsdp2 hsdp",
        "train --method ''": " ".join(names()), "train --no-g": "--no-guard", "compare --preset ti": "tiny",
        "lab ''": "run", "lab run --li": "--link", "sample ''": "", "completion z": "zsh", "train --out runs/": "",
    }  # fmt: skip
    program = scripts["bash"] + ASK + "\n".join(f"offered thinwire {words}" for words in asked)
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    assert dict(zip(asked, done.stdout.split("\n"), strict=False)) == asked


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_it_for_thinwire(scripts: dict[str, str]) -> None:
    program = f"autoload -U compinit && compinit -u -D\n{scripts['zsh']}\necho $_comps[thinwire]"
    done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True)
    assert (done.stderr, done.stdout.strip()) == ("", "_bash_complete -o default -F _thinwire")


def test_another_shell_is_refused() -> None:
    with pytest.raises(ThinwireError, match="completion is for bash or zsh, got 'fish'"):
        main(["fish"])
