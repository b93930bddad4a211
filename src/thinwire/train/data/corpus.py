"""Text: read from files, Python's standard library or the hub, in pieces, and split into training and held-out text."""

from __future__ import annotations

import glob
import gzip
import importlib.util
import lzma
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from thinwire.base.errors import ThinwireError

SPAN = 1 << 15
"""Characters in a row that go to one side of the split: every ``HELD_OUT``-th span is held out."""
HELD_OUT = 20
PIECE = 1 << 22
"""Characters that are read from a file at a time."""


def read_corpus(names: Sequence[str]) -> str:
    """Read the text of files and globs (plain, .xz or .gz), of ``stdlib``, or of a hub data set ``hub:NAME``, in order.

    Raises:
        ThinwireError: a name matches nothing, cannot be read, or the text is empty.
    """
    text = "".join(read_pieces(names))
    if not text.strip():
        raise ThinwireError(f"the corpus {', '.join(names)} has no text in it")
    return text


def read_pieces(names: Sequence[str]) -> Iterator[str]:
    """Read what ``read_corpus`` reads, in pieces of at most ``PIECE`` characters, as they are asked for."""
    separator = ""
    for name in names:
        for document in _documents(name):
            yield separator
            yield from document
            separator = "\n"


def spans(text: Iterable[str]) -> Iterator[str]:
    """Cut a ``text`` that comes in pieces into spans of ``SPAN`` characters; the last one is shorter."""
    pending = ""
    for piece in text:
        pending += piece
        whole = len(pending) - len(pending) % SPAN
        yield from (pending[start : start + SPAN] for start in range(0, whole, SPAN))
        pending = pending[whole:]
    if pending:
        yield pending


def _documents(name: str) -> Iterator[Iterable[str]]:
    """Yield the texts that ``name`` stands for, each in pieces; a line's end goes between two of them."""
    if name == "stdlib":
        yield from map(_read_file, _standard_library())
    elif name.startswith("hub:"):
        yield from ((text,) for text in _read_hub(name.removeprefix("hub:")))
    else:
        yield from map(_read_file, match_paths(name))


def match_paths(name: str) -> list[Path]:
    """List the files that a name or a glob stands for, in order.

    Raises:
        ThinwireError: none matches.
    """
    paths = sorted(glob.glob(name, recursive=True)) if any(c in name for c in "*?[") else [name]
    if not paths:
        raise ThinwireError(f"no file matches the corpus '{name}'")
    return [Path(path) for path in paths]


def _read_file(path: Path) -> Iterator[str]:
    openers: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with openers.get(path.suffix, open)(path, "rt", encoding="utf-8", errors="replace") as file:
            while text := file.read(PIECE):
                yield text
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ThinwireError(f"cannot read the corpus {path}: {reason}") from None


def _standard_library() -> list[Path]:
    """List the source of Python's own standard library, without its tests: about 10 MB of text on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    if not files:
        raise ThinwireError(f"Python's standard library has no source in {root}: name files with --corpus")
    return files


def _read_hub(name: str) -> Iterable[str]:
    if importlib.util.find_spec("datasets") is None:
        raise ThinwireError(f"the corpus hub:{name} needs the 'datasets' package: pip install 'thinwire[hub]'")
    from datasets import load_dataset

    path, _, config = name.partition(":")
    try:
        rows = load_dataset(path, config or None, split="train")
    except Exception as error:  # the hub's client raises whatever its transport raises
        raise ThinwireError(f"cannot load the data set '{name}': {str(error).splitlines()[0]}") from None
    if "text" not in rows.column_names:
        raise ThinwireError(f"the data set '{name}' has no column 'text', only {', '.join(rows.column_names)}")
    return (row["text"] for row in rows)


def split(text: str) -> tuple[str, str]:
    """Return (train, valid): every 20th span of 32 Ki characters is held out; a short text gives up its last 20th."""
    if len(text) <= (HELD_OUT - 1) * SPAN:
        cut = len(text) - len(text) // HELD_OUT
        return text[:cut], text[cut:]
    sides: tuple[list[str], list[str]] = [], []
    for number, span in enumerate(spans([text])):
        sides[is_held_out(number)].append(span)
    return "".join(sides[False]), "".join(sides[True])


def is_held_out(span: int) -> bool:
    """Is the span of this number, of a text that has more than ``HELD_OUT`` - 1, not trained on?"""
    return span % HELD_OUT == HELD_OUT - 1
