"""A stranger types what README and docs/start.md name: from the built wheel, in an empty folder, in 80 columns.

    python benchmarks/proofs/stranger.py                    # all of it (half an hour on two cores)
    python benchmarks/proofs/stranger.py train compare      # these commands alone; refused, clone: the two last parts
    python benchmarks/proofs/stranger.py --keys             # without the runs to their end

The wheel is built of this checkout and installed beside the packages of the Python that runs this; the checkout
itself is not on the path. Then commands that cannot be followed, since what they need is missing or is another thing,
and a clone of the checkout, whose ``make train`` uses that environment. Of each command: seconds until its first line
and until its end, the longest time in which nothing was printed, the widest line, the status. Then the same command
with Ctrl-C after 0.2, 1, 3 and 8 seconds, and into ``| head -1``. Wrong, with exit status 1: a first line after more
than 10 s, a line of more than 80 columns (but of what a model writes), a traceback, a hidden cursor, a process or
a temporary file that is left, a status that is not the command's own, 130, or 2 for what cannot be followed. A Ctrl-C
that meets Python itself before it has started is Python's to answer, and make's where it loses its program. Evaluation
needs ``pip install 'thinwire[eval]'``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

import terminals  # noqa: E402
from terminals import COLUMNS, Seen  # noqa: E402

FIRST_S = 10
"""Seconds to a first line at most."""
KEYS_S = (0.2, 1, 3, 8)
"""When Ctrl-C is typed, in seconds after the start."""
CTRL_C = 3
LEFT_S = 10
"""How long processes may take to go after their command."""
MARK = "THINWIRE_STRANGER"
"""A variable of the environment by which a command's processes are found, wherever they have gone."""
TORCHS = ("torchinductor_", "torchelastic_")
"""What torch leaves among temporary files: a user's cache of compiled code, and the folder that each torchrun makes for
its ranks' logs, with Thinwire or without. No command of ours starts a torchrun."""
MAKES = "make: *** wait: No child processes."
"""What make 4.3 says now and then, with status 2, where Ctrl-C ends its program at once: of ``sleep 3``, too."""
RUN = "--preset tiny --steps 40"
COMMANDS = [
    "thinwire", "thinwire --help", "thinwire --version", "thinwire env", "thinwire methods", "thinwire methods trickle",
    "thinwire train --help",
    "thinwire simulate --model gpt-1.3b --cluster l40s-1g --nodes 8", "thinwire selftest",
    f"thinwire train {RUN} --method int8(smallest=4096) --out runs/first",
    "thinwire train --preset tiny --steps 60 --method int8(smallest=4096) --out runs/first --resume auto",
    "thinwire train --config runs/first/config.yaml --method trickle --out runs/second",
    "thinwire sample runs/first --prompt 'def main(' --tokens 60 --seed 1", "thinwire inspect runs/first",
    "thinwire export runs/first hf", "thinwire tokenize text.txt --tokenizer bpe:1024 --out tokens",
    "thinwire train --corpus tokens --preset tiny --steps 20 --out runs/own",
    "thinwire train --init hf --data sums.jsonl --seq-len 16 --batch-size 16 --steps 20 --lr 3e-3 --out runs/sums",
    "thinwire eval runs/sums --tasks sums --include tasks --limit 20",
    "thinwire doctor --seconds 20 --preset tiny",
    "thinwire compare --methods dense,int8(smallest=4096) --preset tiny --link 5mbit --steps 6 --out runs/compare",
    "thinwire lab run --link 200mbit --nodes 2 -- hostname",
    "thinwire lab run --link 200mbit --nodes 2 -- thinwire train --preset tiny --steps 20 --out runs/lab",
    "thinwire completion bash",
]  # fmt: skip
"""In an order in which each finds what it needs."""
REFUSED = [
    "thinwire train --preset tiny --steps 40 --out runs/first", "thinwire train --out text.txt",
    "thinwire train --preset tiny --steps 80 --method sdp4bit --out runs/first --resume auto",
    "thinwire train --preset tiny --corpus sums --out runs/none", "thinwire train --data text.txt --out runs/none",
    "thinwire train --preset tiny --corpus text.txt --tokenizer bpe:7 --out runs/none",
    "thinwire train --preset tiny --method int8(group=7) --out runs/none",
    "thinwire status runs/first", "thinwire status text.txt", "thinwire inspect text.txt",
    "thinwire inspect runs/first runs/own", "thinwire sample runs/compare --prompt x", "thinwire export runs/first hf",
    "thinwire sample hf --prompt x --temperature -1", "thinwire tokenize sums.jsonl --tokenizer gpt9 --out tokens2",
    "thinwire eval runs/sums --tasks nowhere --include tasks",
    "thinwire eval runs/sums --tasks sums --include text.txt",
    "thinwire compare --methods dense,int9 --out runs/none", "thinwire compare --out runs/compare --steps 0",
    "thinwire lab run --nodes 2 -- no-such-program", "thinwire simulate --model text.txt --cluster l40s-1g",
    "thinwire simulate --model small --cluster text.txt", "thinwire doctor --seconds 20 --preset huge",
    "thinwire methods trikle",
]  # fmt: skip
"""After all of them."""
CLONED = [
    "make help", "make train", "thinwire paper", "thinwire sample runs/first --prompt def",
    "env OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 examples/ddp.py",
]  # fmt: skip
"""In a clone."""
OWN = {"thinwire inspect runs/first runs/own": 1, "thinwire lab run --nodes 2 -- no-such-program": 127}
"""Statuses of their own: two checkpoints differ; what a shell says of no such program."""
FOR_PROGRAMS = ("thinwire completion bash",)
"""Its lines are read by a shell."""
TASK = """task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt.rstrip()}}"
doc_to_choice: "{{[completion.strip(), '1' + completion.strip()]}}"
doc_to_target: "{{0}}"
metric_list: [{metric: acc}]
"""


class Typed(NamedTuple):
    """What became of a command. ``first_s``: seconds until its first line; None: it printed none.

    ``silent_s``: the longest time in which nothing was printed.
    """

    seen: Seen
    first_s: float | None
    silent_s: float
    seconds: float
    left: list[str]
    key_typed: bool = False


def install(folder: Path) -> Path:
    """Build the wheel and install it into a new environment in ``folder``; return the environment's programs."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))
    (wheel,) = folder.glob("*.whl")
    target = ["--target", str(site), "--no-deps", "--no-index", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *target, str(wheel)], check=True)
    program = folder / "venv" / "bin" / "thinwire"
    python = folder / "venv" / "bin" / "python"
    program.write_text(f"#!{python}\nfrom thinwire.__main__ import start\nstart()\n")
    program.chmod(0o755)
    return program.parent


def prepare(folder: Path) -> None:
    """What docs/start.md makes by hand: a text, rows of sums, a task."""
    source = Path(os.__file__).parent
    (folder / "text.txt").write_text("".join(path.read_text() for path in sorted(source.glob("a*.py"))))
    rows = (f'{{"prompt": "{a} + {b} = ", "completion": "{a + b}\\n"}}\n' for a in range(40) for b in range(40))
    (folder / "sums.jsonl").write_text("".join(rows))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "sums.yaml").write_text(TASK)


def processes(mark: str) -> list[str]:
    """The command lines of processes that have ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def given(mark: str, bin_: Path) -> dict[str, str]:
    """A command's environment: the programs of ``bin_``, and a folder of its own for temporary files."""
    temporary = tempfile.mkdtemp(prefix="t-", dir=bin_.parents[1])
    return {MARK: mark, "TMPDIR": temporary, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}


def left_of(mark: str, temporary: str) -> list[str]:
    """Wait until the processes of ``mark`` have gone; return those that have not, and the files in ``temporary``."""
    end = time.monotonic() + LEFT_S
    while (found := processes(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    files = sorted(path.name for path in Path(temporary).iterdir() if not path.name.startswith(TORCHS))
    shutil.rmtree(temporary)
    return found + files


def type_in(words: Sequence[str], bin_: Path, folder: Path, key_s: float | None = None, limit: float = 900) -> Typed:
    """Type a command in ``folder``, and Ctrl-C after ``key_s`` seconds."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = given(mark, bin_)
    first: list[float] = []
    typed: list[float] = []
    length, silences = 0, [0.0]
    printed_s = 0.0

    def start() -> int:
        os.chdir(folder)
        for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
            os.environ.pop(name, None)
        os.environ |= environment
        os.execvp(words[0], list(words))

    def after(seen: str, seconds: float) -> int | None:
        nonlocal length, printed_s
        if len(seen) != length:
            length, printed_s = len(seen), seconds
        silences.append(seconds - printed_s)
        if not first and "\n" in seen:
            first.append(seconds)
        if key_s is not None and seconds >= key_s and not typed:
            typed.append(seconds)
            return CTRL_C
        return None

    began = time.monotonic()
    seen = terminals.on_terminal(start, after=after, limit=limit)._replace(words=tuple(words))
    seconds = time.monotonic() - began
    first_s = first[0] if first else (seconds if seen.output else None)
    return Typed(seen, first_s, max(silences), seconds, left_of(mark, environment["TMPDIR"]), bool(typed))


def faults(typed: Typed, statuses: Sequence[int], wide: bool = False) -> Iterator[str]:
    seen = typed.seen
    if "KeyboardInterrupt" in seen.output and not re.search(r"/thinwire/\w+\.py|/thinwire/\w+/", seen.output):
        return  # Python's own answer, while it was starting
    if "Traceback" in seen.output:
        yield "a traceback"
    if len(seen.widest) > COLUMNS and not wide:
        yield f"a line of {len(seen.widest)} columns: {seen.widest}"
    if not seen.cursor_shown:
        yield "the cursor stays hidden"
    if typed.left:
        yield f"left behind: {typed.left}"
    if seen.status not in statuses and MAKES not in seen.output:
        yield f"status {seen.status}"


def head(words: Sequence[str], bin_: Path, folder: Path) -> list[str]:
    """What is wrong with ``COMMAND | head -1``."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | given(mark, bin_)
    piped = ["bash", "-c", f"{shlex.join(words)} | head -1; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(piped, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    found = [f"left behind: {left}"] if (left := left_of(mark, environment["TMPDIR"])) else []
    said = done.stdout + done.stderr
    if "Traceback" in said or "BrokenPipe" in said:
        found.append(f"| head: {said}")
    return found


def once(text: str, bin_: Path, folder: Path, statuses: Sequence[int] = (0,)) -> list[str]:
    """Type one command to its end; print its row; return what is wrong."""
    typed = type_in(shlex.split(text), bin_, folder)
    wide = text in FOR_PROGRAMS or text.startswith("thinwire sample")
    found = list(faults(typed, [2] if text == "thinwire" else statuses, wide))
    if typed.first_s is None or typed.first_s > FIRST_S:
        found.append(f"a first line after {typed.first_s} s")
    first = "-" if typed.first_s is None else f"{typed.first_s:.1f}"
    row = f"{first:>5} {typed.seconds:7.1f} {typed.silent_s:6.1f} {len(typed.seen.widest):4} {typed.seen.status:6}"
    print(f"{row}  {text}", flush=True)
    if found:
        print(typed.seen.output[-3000:])
    return found


def interrupted(text: str, number: int, bin_: Path, folder: Path) -> list[str]:
    """Type one command with Ctrl-C at each of the times, and into ``head``; return what is wrong."""
    words, found = shlex.split(text), []
    for key_s in KEYS_S:
        if "--out" in words:  # each into a folder of its own; --resume goes on in the old one
            place = words.index("--out") + 1
            resumes = "--resume" in words
            words = [*words[:place], words[place] if resumes else f"keys/{number}-{key_s}", *words[place + 1 :]]
        typed = type_in(words, bin_, folder, key_s)
        over = not typed.key_typed or (typed.seen.status != 130 and typed.seconds < key_s + 0.1)  # before, or just then
        wrong = list(faults(typed, (0, 2, 130) if over else (130,)))
        if wrong:
            found += [f"Ctrl-C after {key_s} s: {fault}" for fault in wrong]
            print(typed.seen.output[-3000:])
        ended = "over before" if over else f"{typed.seconds - key_s:.1f} s later"
        print(f"      Ctrl-C after {key_s} s: {ended}, status {typed.seen.status}", flush=True)
        if not typed.key_typed:
            break
    if "--out" in words and "--resume" not in words:
        words = [*words[: words.index("--out") + 1], f"keys/{number}-head", *words[words.index("--out") + 2 :]]
    return found + head(words, bin_, folder)


def clone(folder: Path) -> Path:
    """Clone the checkout into ``folder``, with the environment of ``install`` as that of make."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
    (folder / "clone" / ".venv").symlink_to(folder / "venv")
    (folder / "venv" / ".ready").touch()
    return folder / "clone"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", help="train, compare, ..., refused, clone: only these")
    parser.add_argument("--keys", action="store_true", help="Ctrl-C and head alone")
    parser.add_argument("--no-keys", action="store_true", help="no Ctrl-C and no head")
    parser.add_argument(
        "--folder", type=Path, help="go on in this folder, where an earlier call has installed the wheel"
    )
    options = parser.parse_args()
    place = options.folder or Path(tempfile.mkdtemp(prefix="thinwire-stranger-"))
    place.mkdir(exist_ok=True)
    bin_, work = place / "venv" / "bin", place / "work"
    if not work.exists():
        bin_ = install(place)
        work.mkdir()
        prepare(work)
    print(f"in {place}\nfirst     end silent wide status  command   (seconds, columns)", flush=True)
    wrong = []
    for number, text in enumerate(COMMANDS):
        if options.commands and not set(options.commands) & set(shlex.split(text)[1:2]):
            continue
        found = [] if options.keys else once(text, bin_, work)
        if not options.no_keys and text not in FOR_PROGRAMS:
            found += interrupted(text, number, bin_, work)
        wrong += [f"{text}: {fault}" for fault in found]
    parts = () if options.keys else options.commands or ("refused", "clone")
    for text in REFUSED if "refused" in parts else ():
        wrong += [f"{text}: {fault}" for fault in once(text, bin_, work, statuses=(OWN.get(text, 2),))]
    if "clone" in parts:
        cloned = clone(place)
        for text in CLONED:
            ours = text.startswith(("make", "thinwire"))  # a program of one's own answers as Python does
            found = interrupted(text, 0, bin_, cloned) if ours and not options.no_keys else []
            wrong += [f"in a clone, {text}: {fault}" for fault in [*found, *once(text, bin_, cloned)]]
    print("\n".join(wrong) or "nothing is wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
