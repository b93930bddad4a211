"""``thinwire tokenize``, and the token files that it writes: text that is tokenized once, and read as it is needed.

    FOLDER/train.bin      tokens one behind the other, little endian, and nothing else: as nanoGPT writes them (uint16)
    FOLDER/valid.bin
    FOLDER/tokens.json    the tokenizer, dtype, number of tokens and a hash of each file
    FOLDER/tokenizer-bpe-SIZE.json

``--corpus FOLDER`` trains on such a folder. Files without a ``tokens.json``, nanoGPT's and NumPy's ``.npy``, are
``--corpus "train-*.bin" --tokenizer ids:50304``. Memory does not grow with the corpus.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import torch
import tyro
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.files import write
from thinwire.base.options import parsed
from thinwire.train.data.corpus import HELD_OUT, SPAN, is_held_out, paths_of, pieces, spans, split
from thinwire.train.data.tokenizer import Tokenizer, tokenizer_file

FORMAT, ABOUT, PARTS = 1, "tokens.json", ("train", "valid")
DTYPES: dict[str, Any] = {"uint8": np.uint8, "uint16": np.uint16, "int32": np.int32}
CHUNK = 1 << 22
"""Bytes that are hashed at a time."""


class TokenFiles:
    """The tokens of some files, one behind the other, like a 1-D tensor: it has a length, and slices are read.

    Read, not mapped: the pages of a map that have been touched once count as this process's memory.
    """

    def __init__(
        self, files: Sequence[tuple[Path, int, int, np.dtype]], vocabulary: int, digest: str | None = None
    ) -> None:
        """``files``: path, first byte, number of tokens, dtype of each. ``digest``: of all, where it is known."""
        self._vocabulary = vocabulary
        self._files = [(os.open(path, os.O_RDONLY), first, dtype) for path, first, _, dtype in files]
        self._starts = [0, *itertools.accumulate(count for _, _, count, _ in files)]
        self._digest = digest

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, wanted: slice) -> Tensor:
        start, stop, _ = wanted.indices(len(self))
        parts, file = [], bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[file + 1])
            parts.append(self._read(file, start - self._starts[file], end - start))
            start, file = end, file + 1
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))

    def _read(self, file: int, first: int, count: int) -> np.ndarray:
        handle, begins, dtype = self._files[file]
        data = os.pread(handle, count * dtype.itemsize, begins + first * dtype.itemsize)
        if len(data) != count * dtype.itemsize:
            raise ThinwireError("a token file has become shorter since the run began")
        tokens = np.frombuffer(data, dtype).astype(np.int64)
        if count and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            worst = tokens.max() if tokens.min() >= 0 else tokens.min()
            raise ThinwireError(f"the corpus holds token {worst}, and the tokenizer has {self._vocabulary} of them")
        return tokens

    def digest(self) -> str:
        """A hash of all tokens."""
        if self._digest is None:
            found = hashlib.blake2b(digest_size=8)
            for start in range(0, len(self), CHUNK):
                found.update(self[start : start + CHUNK].numpy().data)
            self._digest = found.hexdigest()
        return self._digest


@dataclass(frozen=True)
class Tokenized:
    """A corpus of token files. ``folder``: of its ``tokens.json``, where its tokenizer is too; None: it has none."""

    tokenizer: str
    train: TokenFiles
    valid: TokenFiles
    folder: Path | None


def find(
    corpus: Sequence[str], valid: Sequence[str], tokenizer: str, model: tuple[Tokenizer, int] | None = None
) -> Tokenized | None:  # fmt: skip
    """The token files that ``--corpus``, ``--valid`` and ``--tokenizer`` mean; None: it is text.

    ``model``: the tokenizer and the vocabulary of a model that has them already; files must be made with that.

    Raises:
        ThinwireError: they are damaged, or do not fit each other.
    """
    if len(corpus) == 1 and Path(corpus[0]).is_dir():
        found = _folder(Path(corpus[0]), valid, tokenizer)
        if model is not None:
            ours, theirs = model[0].as_hub(), Tokenizer(found.tokenizer, (), Path(corpus[0]), trains=False).as_hub()
            if ours.get_vocab() != theirs.get_vocab():
                raise ThinwireError(f"--corpus {corpus[0]} was tokenized with {found.tokenizer}, not as --init does: "
                                    f"thinwire tokenize --tokenizer {model[0].name}")  # fmt: skip
        return found
    names = [*corpus, *valid]
    if not any(name.endswith((".bin", ".npy")) for name in names):
        return None
    if not all(name.endswith((".bin", ".npy")) for name in names):
        raise ThinwireError("--corpus and --valid are token files (.bin, .npy) or text, not both")
    if model is not None:
        tokenizer = f"ids:{model[1]}"
    if not tokenizer.startswith("ids:"):
        raise ThinwireError(
            f"token files hold numbers: say how many there are with --tokenizer ids:SIZE (nanoGPT: ids:50304), "
            f"not {tokenizer}"
        )
    size = Tokenizer(tokenizer, (), Path()).vocabulary
    train = _described(corpus)
    if valid:
        return Tokenized(tokenizer, TokenFiles(train, size), TokenFiles(_described(valid), size), None)
    path, first, count, dtype = train[-1]
    held = min(sum(of[2] for of in train) // HELD_OUT, count)
    rest = (path, first, count - held, dtype)
    ours = (path, first + (count - held) * dtype.itemsize, held, dtype)
    return Tokenized(tokenizer, TokenFiles([*train[:-1], rest], size), TokenFiles([ours], size), None)


def _folder(folder: Path, valid: Sequence[str], tokenizer: str) -> Tokenized:
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        name, dtype, size = str(about["tokenizer"]), np.dtype(DTYPES[about["dtype"]]), int(about["vocabulary"])
        parts = {part: (int(about[part]["tokens"]), str(about[part]["hash"])) for part in PARTS}
        if about["format"] != FORMAT:
            raise ThinwireError(f"{folder / ABOUT} has format {about['format']}, this version reads {FORMAT}")
    except OSError as error:
        why = f"{ABOUT}: {error.strerror}"
        raise ThinwireError(f"--corpus {folder} is a folder, and no token files are there ({why})") from None
    except (ValueError, KeyError, TypeError):
        raise ThinwireError(f"{folder / ABOUT} is damaged: tokenize the text anew") from None
    if valid:
        raise ThinwireError(f"--corpus {folder} has its own held-out text: leave --valid out")
    if tokenizer not in ("bytes", name):
        raise ThinwireError(f"--corpus {folder} was tokenized with {name}: leave --tokenizer {tokenizer} out")
    found = {}
    for part, (count, digest) in parts.items():
        path = folder / f"{part}.bin"
        there, needed = path.stat().st_size if path.exists() else 0, count * dtype.itemsize
        if there != needed:
            raise ThinwireError(f"{path} is damaged: it has {there} bytes in place of {needed}")
        found[part] = TokenFiles([(path, 0, count, dtype)], size, digest)
    return Tokenized(name, found["train"], found["valid"], folder)


def _described(names: Sequence[str]) -> list[tuple[Path, int, int, np.dtype]]:
    return [_describe(path) for name in names for path in paths_of(name)]


def _describe(path: Path) -> tuple[Path, int, int, np.dtype]:
    """Path, first byte, tokens and dtype of a file."""
    try:
        if path.suffix == ".bin":
            return path, 0, path.stat().st_size // 2, np.dtype("<u2")
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            if len(shape) != 1 or dtype.kind not in "iu":
                raise ThinwireError(f"{path} holds {dtype} {shape}: tokens are integers in one dimension")
            return path, file.tell(), shape[0], dtype
    except OSError as error:
        raise ThinwireError(f"cannot read the token file {path}: {error.strerror}") from None
    except ValueError:
        raise ThinwireError(f"{path} is no .npy file") from None


def tokenize(corpus: Sequence[str], tokenizer: str, folder: Path) -> dict[str, Any]:
    """Write the token files of a ``corpus`` (see ``read_corpus``) to ``folder``. Returns what tokens.json holds.

    The same text is held out, and the tokens are the same, as where ``thinwire train`` reads the text itself.

    Raises:
        ThinwireError: the text cannot be read or is empty, the folder cannot be written to, or holds token files.
    """
    if (folder / ABOUT).exists():
        raise ThinwireError(f"{folder} holds token files already: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = Tokenizer(tokenizer, (text for part, text in _parts(corpus) if part == "train"), folder)
        dtype = next(name for name, kind in DTYPES.items() if made.vocabulary - 1 <= np.iinfo(kind).max)
        with ExitStack() as stack:
            out = {part: _Out(stack.enter_context((folder / f"{part}.bin").open("wb")), dtype) for part in PARTS}
            for part, run in itertools.groupby(_parts(corpus), lambda pair: pair[0]):
                for tokens in made.encoded(text for _, text in run):
                    out[part].write(tokens)
        about = {
            "format": FORMAT, "tokenizer": tokenizer, "vocabulary": made.vocabulary, "dtype": dtype,
            **{part: out[part].about() for part in PARTS},
        }  # fmt: skip
        write(folder / ABOUT, json.dumps(about, indent=2) + "\n")
    except OSError as error:
        raise ThinwireError(f"cannot write to {folder}: {error.strerror}") from None
    return about


def _parts(corpus: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The spans of a corpus, each with the part that it belongs to; ``split`` says the same of a text in memory."""
    text = spans(pieces(corpus))
    first = list(itertools.islice(text, HELD_OUT))
    if sum(map(len, first)) <= (HELD_OUT - 1) * SPAN:
        whole = "".join(first)
        if not whole.strip():
            raise ThinwireError(f"the corpus {', '.join(corpus)} has no text in it")
        for part, kept in zip(PARTS, split(whole), strict=True):
            yield from ((part, span) for span in spans([kept]))
        return
    for number, span in enumerate(itertools.chain(first, text)):
        yield PARTS[is_held_out(number)], span


class _Out:
    """A token file that is being written."""

    def __init__(self, file: BinaryIO, dtype: str) -> None:
        self._file, self._dtype, self._tokens, self._hash = file, dtype, 0, hashlib.blake2b(digest_size=8)

    def write(self, tokens: np.ndarray) -> None:
        data = tokens.astype(np.dtype(DTYPES[self._dtype]).newbyteorder("<")).data
        self._file.write(data)
        self._hash.update(data)
        self._tokens += len(tokens)

    def about(self) -> dict[str, Any]:
        return {"tokens": self._tokens, "hash": self._hash.hexdigest()}


def keep_tokenizer(found: Tokenized, run: Path) -> None:
    """Put the tokenizer of a corpus beside the run that trains on it."""
    source = None if found.folder is None else tokenizer_file(found.tokenizer, found.folder)
    if source is not None:
        shutil.copyfile(source, run / source.name)


@dataclass(frozen=True)
class Options:
    """Tokenize text once, for `thinwire train --corpus FOLDER`."""

    corpus: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Files or globs (.xz and .gz too), "stdlib" or "hub:NAME"."""
    out: Path
    """The folder to write."""
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE (trained on the text), folder:PATH (of a Hugging Face model, for --init) or hub:NAME."""


def main(argv: list[str]) -> int:
    """``thinwire tokenize CORPUS ... --out FOLDER``."""
    options: Any = parsed(Options, argv, "thinwire tokenize")
    about = tokenize(options.corpus, options.tokenizer, options.out)
    print(f"{about['train']['tokens']:,} tokens to train on and {about['valid']['tokens']:,} held out, "
          f"{about['dtype']}, vocabulary {about['vocabulary']:,}: thinwire train --corpus {options.out}")  # fmt: skip
    return 0

