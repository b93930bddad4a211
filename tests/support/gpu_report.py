"""All that needs a GPU, on the GPUs of this machine, and one report of it that can be attached to an issue.

    make test-gpu                                   # or: python tests/support/gpu_report.py --out report.md
    python tests/support/gpu_report.py --rows report.md        # the report's tables, as docs/gpu.md takes them

On one GPU several ranks share it and talk by gloo; where there are more, each rank has its own, up to 8, and they talk
by NCCL. Every part runs to its end or its limit of time, whatever became of those before it, and all of them for 15
minutes (``--minutes``): what teaches most comes first. Exit status: 0 if all of them passed, 1 if one did not, 2
without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PASSED, FAILED = 80, 400
"""Last lines of a part's output that the report takes."""


class Part(NamedTuple):
    """Arguments of Python's, and how long they may take in seconds."""

    name: str
    arguments: tuple[str, ...]
    limit: float


def parts(capability: int, gpus: int) -> list[Part]:
    """What is run from the root of the checkout, on ``gpus`` GPUs of this compute capability (90: an H100).

    Where each rank has a GPU, few cases run at once: they take turns on it, and a collective waits for all turns.
    """
    jobs = max(1, min((os.cpu_count() or 1) // 2, 8 if gpus < 2 else 2))
    return [
        Part("operations beside the CPU's", ("-m", "pytest", "tests/ops", "-m", "gpu", "-q", "-rfEs"), 180),
        Part("engines and methods", ("tests/support/gpu_cases.py", "--jobs", str(jobs)), 480),
        Part("codecs", ("benchmarks/speed/codecs.py", "--device", "cuda", "--sizes", "8", "128"), 90),
        Part("kernels as compiled", ("tests/support/aot.py", str(capability)), 180),
        Part("the other tests", ("-m", "pytest", "-m", "gpu", "-q", "-rfEs", "--ignore", "tests/ops"), 180),
    ]


def tables(report: str) -> str:
    """The tables of a report's lines of JSON: what became of each method, what it cost, what kernels became."""
    found = []
    for line in report.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                print(f"passed over, not whole: {line[:60]}", file=sys.stderr)
    cases = [case for case in found if "engine" in case]
    unset = {True: "", False: ", no set_device()"}
    steps = [[f"`{case['method']}`", case["engine"] + unset[case["sets_device"]], f"{case['world']}, {case['backend']}",
              case["what"], *_values(case["result"], "ended waits launches seconds")]
             for case in cases if case["what"] != "speed"]  # fmt: skip
    speeds = [[f"`{case['method']}`", f"{case['world']}, {case['backend']}", *_values(case["result"], SPEED)]
              for case in cases if case["what"] == "speed"]  # fmt: skip
    kernels = [[f"`{of['kernel']}`", *_values(of, "registers stack shared")] for of in found if "registers" in of]
    blocks = (
        ("method, engine, ranks, what, ended, host waits, launches, s", steps),
        ("method, ranks, " + ", ".join(name.replace("_", " ") for name in SPEED.split()), speeds),
        ("kernel, registers, stack, shared bytes", kernels),
    )
    return "\n".join(_table(head.split(", "), rows) for head, rows in blocks if rows)


SPEED = "ended step_ms host_ms encode_ms wire_ms decode_ms exposed_ms peak_MB planned_MB"


def _values(of: dict[str, Any], names: str) -> list[str]:
    return ["" if of.get(name) is None else str(of[name]) for name in names.split()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


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
    ways = _said("nvidia-smi", "topo", "-m").splitlines()
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    return [
        ", ".join(versions), f"CUDA {torch.version.cuda}, driver {' '.join(driver)}, NCCL {nccl}", *cards,
        platform.platform(), f"commit {commit.strip() or 'unknown'}", "", "```", *ways, "```",
    ]  # fmt: skip


def without_a_gpu() -> str:
    """Why torch sees none, in a line."""
    import torch

    seen = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()[:1]
    found = f"no GPU: torch {torch.__version__} "
    if not seen or seen[0].startswith("no "):
        return f"{found}sees no CUDA device on this machine, and nvidia-smi lists none"
    if torch.version.cuda is None:
        return f"{found}is built for CPUs, and here is {seen[0]}: remove {sys.prefix}, and take torch's wheels for CUDA"
    return (
        f"{found}does not see {seen[0]}: a driver older than CUDA {torch.version.cuda}? Newer ones, or "
        "make -B setup TORCH_INDEX= with the index of torch's wheels for an older CUDA"
    )


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no {command[0]}: {type(error).__name__}"


def run(part: Part) -> tuple[bool, str]:
    """Did it pass, and its section of the report."""
    began = time.monotonic()
    words = [sys.executable, *part.arguments]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=part.limit)
            passed, ended = process.returncode == 0, f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            passed, ended = False, f"ended after {part.limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too, which would hold the GPUs
        if ended.startswith("ended"):
            output, _ = process.communicate()
    lines = output.splitlines()
    lines = [line for line in lines if line.startswith("{")] + [line for line in lines if not line.startswith("{")][
        -(PASSED if passed else FAILED) :
    ]
    verdict = f"{'passed' if passed else 'FAILED'}, {ended}, {time.monotonic() - began:.0f} s"
    command = " ".join(("python", *part.arguments))
    return passed, "\n".join([f"## {part.name}: {verdict}", "", f"    {command}", "", "```", *lines, "```", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"), help="the report (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=15, help="that all parts take together (default: %(default)s)")
    parser.add_argument("--rows", type=Path, metavar="REPORT", help="print the tables of a report, and run nothing")
    options = parser.parse_args(arguments)
    if options.rows is not None:
        if not options.rows.is_file():
            print(f"no report: there is no file {options.rows}", file=sys.stderr)
            return 1
        print(tables(options.rows.read_text()), end="")
        return 0
    import torch

    if not torch.cuda.is_available():
        print(without_a_gpu(), file=sys.stderr)
        return 2
    from thinwire.base.extras import missing_for_triton

    if lacks := missing_for_triton():  # nothing would run, and each part would say so at length
        print(lacks, file=sys.stderr)
        return 2
    sections, passed = ["# Thinwire on GPUs", "", *machine(), ""], True
    ends = time.monotonic() + 60 * options.minutes
    major, minor = torch.cuda.get_device_capability()
    for part in parts(10 * major + minor, torch.cuda.device_count()):
        print(part.name, flush=True)
        well, section = run(part._replace(limit=max(min(part.limit, ends - time.monotonic()), 1)))
        passed = passed and well
        sections.append(section)
        options.out.write_text("\n".join(sections))
    print(f"{'all passed' if passed else 'something FAILED'}: attach {options.out} to an issue")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
