"""All that needs a GPU, on the GPUs of this machine, and one report of it that can be attached to an issue.

    make test-gpu                                   # or: python tests/support/gpu_report.py --out report.md

On one GPU several ranks share it and talk by gloo; where there are more, each rank has its own, up to 8, and they talk
by NCCL. Every part runs to its end or its limit of time, whatever became of those before it. Exit status: 0 if all of
them passed, 1 if one did not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PASSED, FAILED = 80, 400
"""Last lines of a part's output that the report takes."""


class Part(NamedTuple):
    """Arguments of Python's, and how long they may take in seconds."""

    name: str
    arguments: tuple[str, ...]
    limit: float = 1800


def parts(gpus: int) -> list[Part]:
    """What is run on so many GPUs, from the root of the checkout."""
    found = [
        Part("tests", ("-m", "pytest", "-m", "gpu", "-q", "-rfEs")),
        Part("codecs", ("benchmarks/speed/codecs.py", "--device", "cuda")),
    ]
    if gpus > 1:
        ranks = str(min(gpus, 8))
        shape = ("--preset", "gpt-125m", "--device", "cuda", "--ranks", ranks)
        found.append(Part(f"memory, {ranks} GPUs", ("benchmarks/speed/memory.py", *shape)))
        for method in ("dense", "int8", "sdp4bit"):
            run = ("train", "--method", method, "--steps", "50", "--out", f"runs/gpu/{method}", "--overwrite")
            found.append(Part(f"{method}, {ranks} GPUs", ("-m", "thinwire", *run, *shape)))
    return found


def machine() -> list[str]:
    """What it ran on, a line each."""
    import torch

    versions = [f"Python {platform.python_version()}"]
    for name in ("thinwire", "torch", "triton", "numpy"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    cards = [f"{of.name}, sm{of.major}{of.minor}, {of.total_memory / 2**30:.0f} GiB" for of in gpus]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    return [
        ", ".join(versions), f"CUDA {torch.version.cuda}, NCCL {nccl}", *cards, platform.platform(),
        f"commit {commit.strip() or 'unknown'}",
    ]  # fmt: skip


def run(part: Part) -> tuple[bool, str]:
    """Did it pass, and its section of the report."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *part.arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=part.limit,
        )  # fmt: skip
        output, ended = done.stdout, f"exit status {done.returncode}"
        passed = done.returncode == 0
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        output = said.decode(errors="replace") if isinstance(said, bytes) else said
        passed, ended = False, f"ended after {part.limit:.0f} s"
    lines = output.splitlines()[-(PASSED if passed else FAILED) :]
    verdict = f"{'passed' if passed else 'FAILED'}, {ended}, {time.monotonic() - began:.0f} s"
    command = " ".join(("python", *part.arguments))
    return passed, "\n".join([f"## {part.name}: {verdict}", "", f"    {command}", "", "```", *lines, "```", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"), help="the report (default: %(default)s)")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device on this machine", file=sys.stderr)
        return 2
    sections, passed = ["# Thinwire on GPUs", "", *machine(), ""], True
    for part in parts(torch.cuda.device_count()):
        print(part.name, flush=True)
        well, section = run(part)
        passed = passed and well
        sections.append(section)
        options.out.write_text("\n".join(sections))
    print(f"{'all passed' if passed else 'something FAILED'}: attach {options.out} to an issue")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
