"""Text from files, Python's standard library or the hub, read in pieces and split into training and held-out text."""

from __future__ import annotations

import codecs
import glob
import gzip
import itertools
import lzma
import os
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, ThinwireWarning, first_line

SPAN = 1 << 15  # characters in a row that go to one side of the split
HELD_OUT = 20  # every 20th span is held out
PIECE = 1 << 22  # characters read from a file at a time


def read_corpus(names: Sequence[str], *, held_out: bool = False) -> str:
    """Read the text of files and globs (plain, .xz or .gz), of ``stdlib``, or of a hub data set ``hub:NAME``, in order.

    ``held_out``: of a data set read the split "validation", else "test"; if it has neither, or by default, "train".

    Raises:
        ThinwireError: a name matches nothing, cannot be read, or the text is empty.
    """
    return "".join(read_pieces(names, held_out=held_out))


def read_pieces(names: Sequence[str], *, held_out: bool = False) -> Iterator[str]:
    """Yield the text of ``read_corpus`` lazily, in pieces: up to ``PIECE`` characters of a file, a row of the hub."""
    separator, empty = "", True
    for document in itertools.chain.from_iterable(_documents(name, held_out) for name in names):
        yield separator
        for piece in document:
            empty = empty and not piece.strip()
            yield piece
        separator = "\n"
    if empty:
        raise ThinwireError(f"the corpus {', '.join(names)} has no text in it")


def spans(text: Iterable[str]) -> Iterator[str]:
    """Cut a ``text`` that comes in pieces into spans of ``SPAN`` characters; the last one may be shorter."""
    pending = ""
    for piece in text:
        pending += piece
        whole = len(pending) - len(pending) % SPAN
        yield from (pending[start : start + SPAN] for start in range(0, whole, SPAN))
        pending = pending[whole:]
    if pending:
        yield pending


def _documents(name: str, held_out: bool) -> Iterable[Iterable[str]]:
    """Return the texts that ``name`` stands for, each in pieces."""
    if name.startswith("hub:"):
        return _read_hub(name.removeprefix("hub:"), held_out)
    return map(_read_file, _standard_library() if name == "stdlib" else match_paths(name))


def match_paths(name: str) -> list[Path]:
    """List the files that a name or a glob stands for, in order.

    Raises:
        ThinwireError: none matches.
    """
    paths = sorted(glob.glob(name, recursive=True)) if any(c in name for c in "*?[") else [name]
    if not paths:
        raise ThinwireError(f"no file matches the corpus '{name}'")
    return [Path(path) for path in paths]


def check_there(names: Sequence[str]) -> None:
    """Raise what ``match_paths`` and reading raise if one of these files is not there; of a glob the first is tried."""
    for name in names:
        if name.startswith("hub:"):
            extras.package_folder("datasets")
        elif name != "stdlib":
            path = match_paths(name)[0]
            with reading(path), path.open("rb"):
                pass


def check_apart(names: Sequence[str], valid: Sequence[str]) -> None:
    """Refuse text that would be trained on and evaluated on; the hub's has its own held-out splits.

    Raises:
        ThinwireError: a text is of both ``names`` and ``valid``, or, without ``valid``, twice in ``names``.
    """
    if list(names) == ["stdlib"] and not valid:
        return  # it takes half a second to look through
    held_out = {source for source in _sources(valid) if not source.startswith("hub:")}
    seen: set[str] = set()
    for source in _sources(names):
        if source in held_out:
            raise ThinwireError(f"{source} is in --valid and would be trained on, too: leave it out of one of them")
        if source in seen and not valid:
            raise ThinwireError(
                f"{source} is there twice, and what is held out of it would be trained on: name it once, or beside a "
                "--valid of its own"
            )
        seen.add(source)


def _sources(names: Sequence[str]) -> Iterator[str]:
    """Name each file, with no link on its way, and what is no file, or more than one may name."""
    for name in names:
        if name == "stdlib" or name.startswith("hub:"):
            yield name
        if not name.startswith("hub:"):
            yield from map(os.path.realpath, _standard_library() if name == "stdlib" else match_paths(name))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say in one line what keeps a file of the corpus from being read."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ThinwireError(f"cannot read the corpus {path}: {reason}") from None


def _read_file(path: Path) -> Iterator[str]:
    openers: dict[str, Callable[..., IO[Any]]] = {".xz": lzma.open, ".gz": gzip.open}
    opener = openers.get(path.suffix, open)
    try:
        with reading(path), opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            while text := file.read(PIECE):
                yield text
    except UnicodeDecodeError:
        with opener(path, "rb") as file:
            place = _first_that_is_not_utf8(file)
        raise ThinwireError(
            f"{path} is not UTF-8 text: byte {place:,} cannot be read. Convert it (iconv -f LATIN1 -t UTF-8), or drop "
            "such bytes (iconv -c -f UTF-8 -t UTF-8)"
        ) from None


def _first_that_is_not_utf8(file: IO[bytes]) -> int:
    """Return the number of the first byte, from 0, that is not part of UTF-8 text."""
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        block, pending = file.read(PIECE), len(decoder.getstate()[0])
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            return before - pending + error.start
        before += len(block)


def _standard_library() -> list[Path]:
    """List the source of Python's own standard library, without its tests: about 10 MB of text on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths = (path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    return sorted({os.path.realpath(path): path for path in paths}.values())  # Debian's has links to its own files


def _read_hub(name: str, held_out: bool) -> Iterable[Iterable[str]]:
    datasets = extras.load("datasets")
    path, _, config = name.partition(":")
    try:
        splits = datasets.get_dataset_split_names(path, config or None) if held_out else ()
        part = next((part for part in ("validation", "test") if part in splits), "train")
        rows = datasets.load_dataset(path, config or None, split=part)
    except Exception as error:  # the hub's client raises whatever its transport raises
        raise ThinwireError(f"cannot load the data set '{name}': {first_line(error)}") from None
    if "text" not in rows.column_names:
        raise ThinwireError(f"the data set '{name}' has no column 'text', only {', '.join(rows.column_names)}")
    if held_out and part == "train":
        line = f"the data set '{name}' has no split validation or test: --valid reads its split train"
        warnings.warn(line, ThinwireWarning, stacklevel=2)
    return ((row["text"],) for row in rows)


def split(text: str) -> tuple[str, str]:
    """Return (train, valid): every 20th span of 32 Ki characters is held out; a short text gives up its last 20th."""
    sides: tuple[list[str], list[str]] = [], []
    for held_out, span in split_spans([text]):
        sides[held_out].append(span)
    return "".join(sides[False]), "".join(sides[True])


def split_spans(text: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """Yield (is held out, span) for each span of a ``text`` that comes in pieces, divided as by ``split``."""
    text = spans(text)
    start = list(itertools.islice(text, HELD_OUT))
    size = sum(map(len, start))
    if size < HELD_OUT * SPAN:
        whole, cut = "".join(start), size - size // HELD_OUT
        yield from ((False, span) for span in spans([whole[:cut]]))
        yield from ((True, span) for span in spans([whole[cut:]]))
    else:
        for number, span in enumerate(itertools.chain(start, text)):
            yield number % HELD_OUT == HELD_OUT - 1, span
