"""What a person at a terminal of 80 columns meets: help in groups, lines that fit, plain errors, Ctrl-C, ``| head``.

The law is over all commands: one that is new is in it by its name, once it is in ``COMMANDS``.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
import tyro

import ranks
import terminals
import thinwire
from patience import PATIENCE
from terminals import COLUMNS, Seen
from thinwire.base.errors import ThinwireError
from thinwire.base.help import field_docs, list_options
from thinwire.base.knobs import knob_docs, knobs_of
from thinwire.base.options import explain, read_options
from thinwire.base.terminal import fold, fold_command
from thinwire.cli.doctor import Doctor
from thinwire.cli.lab import LabRun
from thinwire.cli.program import BROKEN_PIPE, COMMANDS, main, program
from thinwire.cli.simulate import SimulateOptions
from thinwire.lab.compare import Comparison
from thinwire.methods import TABLE, names
from thinwire.train.checkpoint.evaluation import Options as EvalOptions
from thinwire.train.checkpoint.trained_model import ExportOptions, SampleOptions
from thinwire.train.config import Config
from thinwire.train.data.token_files import Options as TokenizeOptions

CTRL_C = 3
SOURCE = Path(thinwire.__file__).resolve().parents[1]
SETTINGS = (
    Config, Comparison, Doctor, SimulateOptions, LabRun, TokenizeOptions, SampleOptions, ExportOptions, EvalOptions,
)  # fmt: skip
HELP = [[], ["--help"], *([command, "--help"] for command in COMMANDS)] + [
    ["lab", "run", "--help"], ["paper", "radius"], ["paper", "sdp4bit", "--help"],
    ["paper", "radius", "table-2", "--help"], ["methods"], *(["methods", name] for name in names()),
]  # fmt: skip
WRONG = [
    ["nothing"], ["trian"],
    *([command, "--nonsense"] for command in COMMANDS), *([command, "no", "such", "words"] for command in COMMANDS),
    ["train", "--steps", "many"], ["train", "--steps"], ["train", "--preset", "huge"], ["train", "--method", "int7"],
    ["train", "--method", "int8(group=x)"], ["train", "--config"], ["train", "--config", "nowhere.yaml"],
    ["train", "--lora", "8"], ["train", "--engine", "horovod"], ["train", "--betas", "0.9"],
    ["train", "--ranks", "3", "--engine", "hsdp", "--shard-size", "2"],
    ["compare", "--link", "fast"], ["compare", "--methods", ""], ["compare", "--", "--out", "x"],
    ["doctor", "--seconds", "1"], ["doctor", "--", "--method", "int8"],
    ["simulate"], ["simulate", "--cluster", "moon"], ["simulate", "--cluster", "l40s-10g", "--nodes", "0"],
    ["lab"], ["lab", "walk"], ["lab", "run"], ["lab", "run", "--link", "fast", "--", "true"],
    ["tokenize"], ["tokenize", "nowhere.txt", "--out", "tokens"],
    ["sample"], ["sample", "nowhere"], ["sample", "nowhere", "--tokens", "-1"], ["export", "nowhere"],
    ["export", "nowhere", "there"], ["eval", "nowhere"], ["inspect"], ["inspect", "nowhere"], ["methods", "int7"],
    ["paper", "nature"], ["paper", "radius", "table-9"], ["paper", "radius", "table-2", "--seeds", "0"],
    ["completion", "fish"],
]  # fmt: skip
SHOWN = [
    ["simulate", "--model", "small", "--cluster", "l40s-10g", "--method", "int8,trickle:merged(density=0.02)"],
    ["--version"], ["methods", "--json"],
]  # fmt: skip


def check(seen: Seen) -> None:
    """No line is wider than the terminal, and Python does not speak."""
    assert "Traceback" not in seen.output and "Error:" not in seen.output, seen
    assert len(seen.widest) <= COLUMNS, (seen.words, seen.widest)
    assert seen.cursor_shown, seen


def test_help_fits_in_80_columns() -> None:
    for seen in ranks.alone(terminals.each_on_terminal, HELP):
        check(seen)
        assert seen.status == (0 if seen.words else 2), seen
        if "--help" in seen.words:
            assert any(line.startswith("usage: thinwire") for line in seen.lines), seen


def test_what_commands_show_fits_in_80_columns() -> None:
    for seen in ranks.alone(terminals.each_on_terminal, SHOWN):
        if seen.words != ("methods", "--json"):  # for programs
            check(seen)
        assert seen.status == 0, seen


def test_wrong_input_is_answered_in_a_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seen in ranks.alone(_in, str(tmp_path), WRONG):
        check(seen)
        assert seen.status == 2, seen
        said = [line for line in seen.lines if line]
        begins = [line for line in said if line.startswith(("thinwire: ", "usage: "))]
        assert len(begins) == 1 and len(said) <= 25, seen
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    """Of any command: ``compare`` meets one, the others are played."""
    (tmp_path / "file").touch()
    assert main(["compare", "--out", str(tmp_path / "file" / "runs")]) == 2
    assert capsys.readouterr().err == f"thinwire: cannot use {tmp_path}/file/runs: Not a directory\n"
    for error, said in (
        (PermissionError(13, "Permission denied", "x.csv"), "thinwire: cannot use x.csv: Permission denied\n"),
        (
            OSError(28, "No space left on device"),
            "thinwire: cannot use a file or standard output: No space left on device\n",
        ),
    ):
        monkeypatch.setattr("thinwire.cli.program.run_command", mock.Mock(side_effect=error))
        assert main(["doctor"]) == 2
        assert capsys.readouterr().err == said
    monkeypatch.setattr("thinwire.cli.program.run_command", mock.Mock(side_effect=ConnectionRefusedError(111, "no")))
    with pytest.raises(ConnectionRefusedError):  # a fault of no file
        main(["doctor"])


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["methods"], ["completion", "bash"], ["train", "--help"],
                                   ["nonsense"], SHOWN[0], [*SHOWN[0], "--json"]])  # fmt: skip
def test_a_full_disk_below_standard_output_is_one_line(words, monkeypatch, capfd) -> None:
    with monkeypatch.context() as patched, Path("/dev/full").open("w") as full:
        patched.setattr(sys, "stdout", full)
        patched.setattr(os, "_exit", sys.exit)
        patched.setattr(sys, "argv", ["thinwire", *words])
        with pytest.raises(SystemExit, match="2"):
            program()
        full.flush()  # as Python does at its end, with status 120 if that fails
    line = "standard output: No space left on device" if words != ["nonsense"] else "unknown command 'nonsense'"
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("thinwire: ") and line in said


@pytest.mark.parametrize(
    ("words", "status"),
    [("lab run --link loopback -- true", 0), ("lab run --link loopback -- false", 1), ("nonsense", 2)],
)
def test_a_full_disk_below_standard_error_changes_no_status(words, status) -> None:
    environment = os.environ | {"PYTHONPATH": SOURCE}
    command = f"{sys.executable} -m thinwire {words} 2>/dev/full"
    assert subprocess.run(command, shell=True, env=environment).returncode == status


def test_what_loads_torch_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [
        ["export", "nowhere", "there"], ["sample", "nowhere"], ["methods"], ["methods", "trikle"],
        ["compare", "--methods", "int9"], ["simulate", "--cluster", "moon"],
    ]  # fmt: skip
    for seen in ranks.alone(_in, str(tmp_path), commands):
        assert seen.lines[0] == "loading torch", seen


def _in(folder: str, commands: list[list[str]]) -> list[Seen]:
    os.chdir(folder)
    return terminals.each_on_terminal(commands)


@pytest.mark.parametrize(
    ("closed", "words", "status"),
    [(">&-", "methods", 0), ("2>&-", "nonsense", 2), ("<&- >&- 2>&-", "train --corpus text --valid held", 0)],
)
def test_closed_streams_change_neither_what_is_done_nor_the_status(closed, words, status, tmp_path):
    """Ranks too have nowhere to write. What is opened next does not get the stream's number."""
    for name, sentence in (("text", "a rank sends, a network waits. "), ("held", "a network waits, ranks do. ")):
        (tmp_path / name).write_text(sentence * 100)
    if words.startswith("train"):
        words += " --preset tiny --layers 1 --width 32 --heads 1 --seq-len 16 --steps 2 --eval-sequences 1 --ranks 1"
    environment = os.environ | {"PYTHONPATH": SOURCE}
    program = f"{sys.executable} -m thinwire {words} {closed}"
    assert subprocess.run(program, shell=True, cwd=tmp_path, env=environment).returncode == status
    assert len(list(tmp_path.rglob("summary.json"))) == words.startswith("train")


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in ``thinwire train --help | head``: the status is that of any program that SIGPIPE ends."""
    commands = [
        ["--help"],
        ["train", "--help"],
        ["inspect", "-h"],
        ["methods"],
        ["methods", "--json"],
        SHOWN[0],
        ["paper"],
    ]
    for seen in ranks.alone(terminals.each_unread, commands):
        assert (seen.status, seen.output) == (BROKEN_PIPE, ""), seen


def test_letters_that_an_output_has_not_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have rules, and texts that a model continues any letter: neither may end a command in a traceback."""
    written = {name: io.TextIOWrapper(io.BytesIO(), encoding="latin-1") for name in ("stdout", "stderr")}
    for name, stream in written.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr("thinwire.cli.program.main", lambda: print("é €─") or print("─", file=sys.stderr) or 3)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="3"):
        program()
    assert [stream.buffer.getvalue() for stream in written.values()] == [b"\xe9 ??\n", b"?\n"]


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_every_option_says_what_it_does_under_a_title_of_its_own(kind: type) -> None:
    shown = [field.name for field in fields(kind) if "Suppress" not in str(field.type)]
    documented = field_docs(kind)
    assert [name for name in shown if not documented.get(name)] == []
    groups = list_options(kind)
    assert sum(map(len, groups.values())) == len(shown)
    assert all(len(options) <= 12 for options in groups.values()), "a group is too long to be looked through"
    assert (len(shown) <= 12) == (len(groups) == 1) or len(groups) > 1
    for option in (option for options in groups.values() for option in options):
        assert option.text.count("efault:") <= 1 and "None" not in option.typed + option.text, option


@pytest.mark.parametrize("cls", TABLE, ids=lambda cls: cls.name)
def test_every_knob_has_a_sentence(cls) -> None:
    documented = knob_docs(cls)
    assert list(documented) == [knob.name for knob in knobs_of(cls)]
    assert [name for name, text in documented.items() if len(text) < 20] == []


def test_make_help_fits_in_80_columns() -> None:
    makefile = Path(__file__).resolve().parents[2] / "Makefile"
    if not makefile.exists() or not shutil.which("make"):
        pytest.skip("not a checkout, or no make")
    command = ["make", "--no-print-directory", "-f", str(makefile), "help"]  # "make test" says its own folder
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.startswith("make train ") and max(map(len, told.splitlines())) <= COLUMNS


def test_help_names_the_file_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    from thinwire.cli.program import main

    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--config FILE" in printed and "\nCheckpoints\n" in printed
    assert tyro.cli(Config, args=["--steps", "3"]).steps == 3


def test_lines_are_folded_between_words_and_commands_can_still_be_copied() -> None:
    assert fold("a bb ccc\n  x yy zzz", 6) == "a bb\n  ccc\n  x yy\n    zzz"
    long = "/a/very/long/path/that/has/no/spaces"
    assert fold(f"see {long}", 20) == f"see\n  {long}"
    command = "thinwire train --preset small --method int8 --steps 300 --out runs/there"
    folded = fold_command(command, 40)
    assert max(map(len, folded.splitlines())) <= 40
    assert " ".join(folded.replace("\\\n", " ").split()) == command


# A run of one rank, in this process, as torchrun starts it


def _one_rank(folder: str, words: list[str], key_at: str) -> Seen:
    """Train as one rank; type Ctrl-C once ``key_at`` is on the terminal."""
    typed = []

    def run() -> int:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return terminals.command(["train", "--preset", "tiny", "--corpus", *words, "--out", folder])()

    def after(seen: str, seconds: float) -> int | None:
        if key_at and key_at in seen and not typed:
            typed.append(seconds)
            return CTRL_C
        return None

    from thinwire.base.processes import free_port

    return terminals.on_terminal(run, after=after)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return str(path)


def test_a_run_on_a_terminal(tmp_path: Path, text: str) -> None:
    words = [text, "--steps", "4", "--eval-every", "2", "--eval-sequences", "2", "--method", "int8(smallest=4096)"]
    seen = ranks.alone(_one_rank, str(tmp_path / "run"), words, "")
    check(seen)
    assert seen.status == 0 and terminals.HIDE in seen.output, seen
    assert "validation loss" in seen.output and f"reading {text}" in " ".join(seen.lines).replace("   ", " "), seen
    assert all(len(line) <= 120 for line in (tmp_path / "run" / "plan.txt").read_text().splitlines())


def test_ctrl_c_in_a_step_saves_and_gives_the_cursor_back(tmp_path: Path, text: str) -> None:
    words = [text, "--steps", "100000", "--eval-sequences", "2"]
    seen = ranks.alone(_one_rank, str(tmp_path / "run"), words, "tokens/s")
    check(seen)
    assert seen.status == 130 and "ended by SIGINT after step" in " ".join(" ".join(seen.lines).split()), seen


# A run as a person starts it, which starts its ranks


EARLIEST = """
import os, sys

class Key:
    def find_spec(name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), 2)

sys.meta_path.insert(0, Key)
sys.modules.pop("signal", None)
from thinwire.__main__ import start
sys.argv = ["thinwire", "--version"]
start()
"""


@pytest.mark.parametrize("module", ["signal", "thinwire.cli.program", "difflib", "thinwire.base.extras"])
def test_ctrl_c_while_the_program_itself_is_imported_is_silent(module: str) -> None:
    words = [sys.executable, "-c", EARLIEST.format(module=module)]
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=_hears_ctrl_c)
    status = 130 if module == "signal" else -signal.SIGINT  # which are the same to a shell
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def _hears_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs of a shell in the background begin without it


def test_the_package_imports_nothing_of_pythons_own() -> None:
    """Each import is a time in which a Ctrl-C meets Python alone, and a traceback."""
    program = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); before = {{*sys.modules}}; import thinwire; "
        "print(*{*sys.modules} - before)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)
    found = [name for name in done.stdout.split() if not name.startswith("thinwire")]
    assert (found, done.stderr) == (["__future__"], "")


@pytest.mark.parametrize("seconds", [0.02, 0.6, 2.5])
def test_an_early_ctrl_c_leaves_one_clean_line(tmp_path: Path, text: str, seconds: float) -> None:
    def run() -> int:
        words = [
            "-m",
            "thinwire",
            "train",
            "--preset",
            "tiny",
            "--corpus",
            text,
            "--steps",
            "100000",
            "--out",
            str(tmp_path / "run"),
        ]
        os.execv(sys.executable, [sys.executable, *words])

    typed: list[float] = []

    def after(seen: str, now: float) -> int | None:
        # The interpreter itself takes some hundredths of a second until it can answer.
        started = seen if seconds < 1 else "starting" in seen
        if started and not typed:
            typed.append(now)
        if typed and len(typed) == 1 and now - typed[0] > seconds:
            typed.append(now)
            return CTRL_C
        return None

    began = time.monotonic()
    seen = terminals.on_terminal(run, after=after)
    check(seen)
    assert seen.status == 128 + signal.SIGINT and time.monotonic() - began < 60 * PATIENCE, seen
    last = [line for line in seen.lines if line][-1]
    assert last.startswith("thinwire: ") or "thinwire: interrupted" in seen.lines or "ended by SIGINT" in seen.output, (
        seen
    )


@pytest.mark.parametrize(
    ("kind", "words", "line"),
    [
        (Config, "--steps", "--steps needs a value"), (Config, "--betas 0.9", "--betas needs 2 values"),
        (Config, "--steps many", "--steps is a whole number, got 'many'"),
        (Config, "--layers 1.5", "--layers is a whole number, got '1.5'"),
        (Config, "--lr x", "--lr is a number, got 'x'"),
        (Config, "--stpes 3", "thinwire x does not know '--stpes': did you mean --steps?"),
        (Config, "--steps 3 4", "thinwire x does not know '4': see its --help"),
        (Config, "--engine pipe", "--engine is one of ddp, fsdp2, hsdp, got 'pipe'"),
        (Config, "--two-level maybe", "--two-level is one of True, False, got 'maybe'"),
        (EvalOptions, "run", "thinwire x needs --tasks TEXT ...: Names of tasks or of groups of tasks, or files "
         "(.yaml) that describe a task."),
        (ExportOptions, "run", "thinwire x needs FOLDER: The folder to write."),
        (ExportOptions, "", "thinwire x needs RUN and FOLDER: Folder of a run, or of one of its checkpoints."),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_in_one_line(kind: type, words: str, line: str) -> None:
    for width in ("40", "200"):
        with pytest.raises(ThinwireError) as caught, mock.patch.dict(os.environ, COLUMNS=width):
            read_options(kind, words.split(), "thinwire x")
        assert str(caught.value) == line


def test_tyros_box_is_read_with_and_without_lines_to_draw() -> None:
    boxes = (
        "╭─ Missing argument\n│ Missing value for  │\n│ argument '--steps'. Expected 1 values. │\n│ ─ │\n│ x │\n╰─╯",
        " Missing argument \n ------- \n  Missing value for \n  argument '--steps'. Expected 1 values. \n ---\n  x\n",
    )
    assert {explain(box, Config, "thinwire train") for box in boxes} == {"--steps needs a value"}
