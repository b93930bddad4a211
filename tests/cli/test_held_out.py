"""Laws of all kinds of text: what a run is evaluated on, it is not trained on."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from thinwire.base.errors import ThinwireError
from thinwire.cli import program
from thinwire.train.config import Config
from thinwire.train.job.setup import read_inputs

ALONE = SimpleNamespace(rank=0, do=lambda work: work(), broadcast=lambda value: value)
SHARED = [("{a} {b}", "{b}"), ("{glob}", "{a}"), ("{a}", "{link}"), ("{link} {b}", "{a}"), ("{a} {a}", ""),
          ("{glob}", ""), ("{b} {a} {dots}", "")]  # fmt: skip
APART = [("{a}", ""), ("{a} {b}", ""), ("{a}", "{b}"), ("{a} {link}", "{b}")]


def _config(kind: str, names: str, valid: str, folder) -> Config:
    """Settings of a text of this ``kind``, in the files a and b, and a link to a."""
    end = {"data": ".jsonl", "tokens": ".bin", "text": ".txt"}[kind]
    for name in "ab":
        line = '{"prompt": "2", "completion": "4"}\n'
        content = np.arange(500, dtype=np.uint16).tobytes() if kind == "tokens" else line.encode() * 40
        (folder / f"{name}{end}").write_bytes(content)
    (folder / f"link{end}").symlink_to(folder / f"a{end}")
    words = {name: f"{folder}/{name}{end}" for name in ("a", "b", "link")}
    words |= {"glob": f"{folder}/*{end}", "dots": f"{folder}/../{folder.name}/a{end}"}
    names, valid = (tuple(text.format(**words).split()) for text in (names, valid))
    if kind == "data":
        return Config(init=str(folder), data=names, valid=valid)
    return Config(corpus=names, valid=valid, seq_len=8, tokenizer="bytes" if kind == "text" else "ids:500")


@pytest.mark.parametrize("kind", ["text", "tokens", "data"])
@pytest.mark.parametrize(("names", "valid"), SHARED)
def test_text_to_evaluate_on_is_not_trained_on(kind, names, valid, tmp_path):
    config = _config(kind, names, valid, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for check in (config.check_files, lambda: read_inputs(config, ALONE, None)):
        with pytest.raises(ThinwireError, match=r"/a\..* would be trained on|/b\..* would be trained on") as refused:
            check()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["text", "tokens"])
@pytest.mark.parametrize(("names", "valid"), APART)
def test_other_text_may_be_repeated(kind, names, valid, tmp_path):
    config = _config(kind, names, valid, tmp_path)
    config.check_files()
    assert len(read_inputs(config, ALONE, None).valid.tokens)


def test_tokenize_refuses_what_would_be_on_both_sides(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text " * 50)
    command = ["tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    assert program.main([*command[:2], str(tmp_path / "*.txt"), *command[2:]]) == 2
    assert "a.txt is there twice" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert program.main(command) == 0
