"""``thinwire selftest``: a line per check, and an exit status that tells a broken installation from a whole one."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from breadth import ALL
from ranks import run
from thinwire.base.errors import LostRank, ThinwireError
from thinwire.cli import program
from thinwire.cli.selftest import Selftest, main
from thinwire.methods import Int8


@dataclass
class Deaf(Int8):
    """Every mean is nothing: ranks agree, and do not learn."""

    name: ClassVar[str] = "deaf"

    def reduce(self, bucket, exchange):
        bucket.rows.zero_()
        super().reduce(bucket, exchange)


def checks(rank: int, world: int, *methods: type) -> tuple[int, list[str]]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = Selftest().run(methods)
    return status, printed.getvalue().splitlines()


def test_what_works_and_what_does_not_has_a_line_each_and_both_ranks_know() -> None:
    (status, lines), other = run(checks, 2, Int8, Deaf)
    assert status == 1 and other == (1, [])
    assert [line.split()[:3] for line in lines[:-1]] == [
        ["ok", "ddp", "dense"], ["ok", "ddp", "int8"], ["FAILED", "ddp", "deaf"],
        ["ok", "fsdp2", "dense"], ["ok", "fsdp2", "int8"], ["FAILED", "fsdp2", "deaf"],
        ["ok", "laws", "int8"], ["FAILED", "laws", "deaf"],
    ]  # fmt: skip
    assert "bit for bit" in lines[0] and "of dense's bytes" in lines[1] and "its loss fell by" in lines[2]
    assert all(len(line) <= 80 for line in lines if line.startswith("ok"))
    assert lines[-1].startswith("3 FAILED, 5 well, ")


def _loses_the_other(rank: int, world: int) -> tuple[str, str]:
    """Rank 0 goes, as a rank whose reader has gone does; rank 1's exchange with it fails."""
    tested = Selftest()
    if rank == 0:
        return "", ""

    def work() -> str:
        raise RuntimeError("Connection closed by peer")

    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(LostRank) as caught:
        tested.check("ddp    int8", work)
    return printed.getvalue(), str(caught.value)


def test_a_rank_that_was_left_alone_says_so_without_a_traceback() -> None:
    printed, said = run(_loses_the_other, 2)[1]
    assert printed == "" and "rank 0" in said


def test_help_and_unknown_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["selftest", "--help"]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    with pytest.raises(ThinwireError, match="takes no options, got 'now'"):
        main(["now"])


@pytest.mark.skipif(not ALL, reason="half a minute: with THINWIRE_TESTS=all, and by make test-wheel")
def test_the_whole_program() -> None:
    done = subprocess.run([sys.executable, "-m", "thinwire", "selftest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and " well, " in done.stdout.splitlines()[-1]
