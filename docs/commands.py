"""Runs the commands of a page, and writes what they print into it.

    python docs/commands.py docs/start.md

Every ```bash block of a page is run, in order, in one folder that is empty at first, and what it prints becomes the
```text block behind it. Where one fails, the rest of the page stays as it was.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"^```bash\n(?P<commands>.*?)^```\n(?:\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)
PLAIN = {"TERM": "dumb", "COLUMNS": "160", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": ""}
"""So that programs print plain lines, whatever terminal this is run in, and a file is compiled once, as is usual."""
BAR = re.compile(r"^\n?.*(?:\d%\||\d examples \[).*\n\n?", re.MULTILINE)
"""A progress bar, each state of which is a line where there is no terminal."""


def printed(commands: str, folder: str) -> str:
    """What a shell prints that runs ``commands`` in ``folder``, on both streams, but progress bars.

    Raises:
        SystemExit: one of them fails.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=folder, env={**os.environ, **PLAIN, "PATH": path},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{commands}{done.stdout}exit status {done.returncode}")
    return "".join(f"{line.rstrip()}\n" for line in BAR.sub("", done.stdout).strip("\n").splitlines())


def refresh(page: Path) -> None:
    """Run the commands of a ``page``, and write what each prints."""
    text, at = page.read_text(), 0
    with tempfile.TemporaryDirectory(prefix="thinwire-docs-") as folder:
        while block := BLOCK.search(text, at):
            print(block["commands"], end="", flush=True)
            output = printed(block["commands"], folder)
            now = f"```bash\n{block['commands']}```\n" + (f"\n```text\n{output}```\n" if output else "")
            text, at = text[: block.start()] + now + text[block.end() :], block.start() + len(now)
            page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        refresh(Path(name))
