"""``thinwire tokenize``, and the token files that it writes: text is tokenized once, and then read as it is needed.

    FOLDER/train.bin      tokens one behind the other, little endian, and nothing else: as nanoGPT writes them (uint16)
    FOLDER/valid.bin
    FOLDER/tokens.json    the tokenizer, dtype, number of tokens and a hash of each file
    FOLDER/tokenizer-bpe-SIZE.json

``--corpus FOLDER`` trains on such a folder. ``--corpus "train-*.bin" --tokenizer ids:50304`` trains on files without a
``tokens.json``: nanoGPT's and NumPy's ``.npy``. Memory does not grow with the corpus. Torch is imported when tokens are
read: what is wrong with files and names is said before.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from thinwire.base.errors import ThinwireError
from thinwire.base.files import naming, whole_or_empty, write
from thinwire.base.options import read_options
from thinwire.base.terminal import note, say
from thinwire.train.data.corpus import HELD_OUT, check_apart, match_paths, read_pieces, reading, split_spans
from thinwire.train.data.tokenizer import Tokenizer, tokenizer_file

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, META, SIDES = 1, "tokens.json", ("train", "valid")
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "int32")}
CHUNK = 1 << 22  # tokens hashed at a time
CHECKED = 1 << 28
"""Bytes of the largest file of a folder whose hash is checked as it is opened: larger ones take seconds."""


@dataclass(frozen=True)
class FileRange:
    """Tokens of a file: ``count`` of them, of ``dtype``, from byte ``first`` on."""

    path: Path
    first: int
    count: int
    dtype: np.dtype


class TokenFiles:
    """The joined tokens of some files, like a 1-D tensor: it has a length, and slices are read.

    Files are read, not mapped: pages of a map that have been touched once count as this process's memory.
    """

    def __init__(self, ranges: Sequence[FileRange], vocabulary: int, digest: str | None = None) -> None:
        self._vocabulary = vocabulary
        self._paths = [file.path for file in ranges]
        self._files = [(os.open(file.path, os.O_RDONLY), file.first, file.dtype) for file in ranges]
        self._starts = [0, *itertools.accumulate(file.count for file in ranges)]
        self._digest = digest

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, wanted: slice) -> Tensor:
        start, stop, _ = wanted.indices(len(self))
        import torch

        arrays, file = [np.empty(0, np.int64)], bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[file + 1])
            arrays.append(self._read(file, start - self._starts[file], end - start))
            start, file = end, file + 1
        return torch.from_numpy(np.concatenate(arrays))

    def _read(self, file: int, first: int, count: int) -> np.ndarray:
        handle, start, dtype = self._files[file]
        data = os.pread(handle, count * dtype.itemsize, start + first * dtype.itemsize)
        if len(data) != count * dtype.itemsize:
            raise ThinwireError(f"{self._paths[file]} has become shorter since the run began")
        tokens = np.frombuffer(data, dtype).astype(np.int64)
        if count and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            worst = tokens.max() if tokens.min() >= 0 else tokens.min()
            raise ThinwireError(f"the corpus holds token {worst}, but the tokenizer has only {self._vocabulary} tokens")
        return tokens

    def digest(self) -> str:
        """Return a hash of all tokens."""
        if self._digest is not None:
            return self._digest
        digest = hashlib.blake2b(digest_size=8)
        for start in range(0, len(self), CHUNK):
            digest.update(self[start : start + CHUNK].numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class TokenCorpus:
    """A corpus of token files. ``folder`` holds its ``tokens.json`` and tokenizer; None: it has none."""

    tokenizer: str
    train: TokenFiles
    valid: TokenFiles
    folder: Path | None


def find_token_files(
    corpus: Sequence[str], valid: Sequence[str], tokenizer: str, model: tuple[Tokenizer, int] | None = None
) -> TokenCorpus | None:  # fmt: skip
    """Open the token files that ``--corpus``, ``--valid`` and ``--tokenizer`` mean; None: the corpus is text.

    ``model``: the tokenizer and vocabulary of --init, with which the files must have been made.

    Raises:
        ThinwireError: the files are damaged, or do not fit each other.
    """
    if len(corpus) == 1 and Path(corpus[0]).is_dir():
        return _open_folder(Path(corpus[0]), valid, tokenizer, model)
    are_tokens = [name.endswith((".bin", ".npy")) for name in (*corpus, *valid)]
    if not any(are_tokens):
        return None
    if not all(are_tokens):
        raise ThinwireError("--corpus and --valid are token files (.bin, .npy) or text, not both")
    if model is not None:
        tokenizer = f"ids:{model[1]}"
    if not tokenizer.startswith("ids:"):
        raise ThinwireError(
            f"token files hold numbers: pass the size of the vocabulary, --tokenizer ids:SIZE (nanoGPT: ids:50304), "
            f"not {tokenizer}"
        )
    size = Tokenizer(tokenizer, ()).vocabulary
    if size > 1 << 16 and any(name.endswith(".bin") for name in (*corpus, *valid)):
        raise ThinwireError(f".bin holds tokens of 16 bits, and {tokenizer} has larger ones: write them as .npy")
    train, held_out = ([_whole_file(path) for name in names for path in match_paths(name)] for names in (corpus, valid))
    if not valid:  # the end of the last file is held out
        last = train[-1]
        count = min(sum(file.count for file in train) // HELD_OUT, last.count)
        train[-1] = replace(last, count=last.count - count)
        held_out = [replace(last, first=last.first + train[-1].count * last.dtype.itemsize, count=count)]
    return TokenCorpus(tokenizer, TokenFiles(train, size), TokenFiles(held_out, size), None)


def _open_folder(
    folder: Path, valid: Sequence[str], tokenizer: str, model: tuple[Tokenizer, int] | None
) -> TokenCorpus:
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        name, dtype, size = str(meta["tokenizer"]), DTYPES[meta["dtype"]], int(meta["vocabulary"])
        sides = {side: (int(meta[side]["tokens"]), str(meta[side]["hash"])) for side in SIDES}
        if meta["format"] != FORMAT:
            raise ThinwireError(f"{folder / META} has format {meta['format']}, this version reads {FORMAT}")
    except OSError as error:
        reason = f"{META}: {error.strerror}"
        raise ThinwireError(f"--corpus {folder} is a folder without token files ({reason})") from None
    except (ValueError, KeyError, TypeError):
        raise ThinwireError(f"{folder / META} is damaged: tokenize the text anew") from None
    if valid:
        raise ThinwireError(f"--corpus {folder} has its own held-out text: leave --valid out")
    if tokenizer not in ("bytes", name):
        raise ThinwireError(f"--corpus {folder} was tokenized with {name}: leave --tokenizer {tokenizer} out")
    files = {}
    for side, (count, digest) in sides.items():
        path = folder / f"{side}.bin"
        actual, needed = path.stat().st_size if path.exists() else 0, count * dtype.itemsize
        if actual != needed:
            raise ThinwireError(f"{path} is damaged: it has {actual} bytes in place of {needed}")
        if needed <= CHECKED and _hash(path) != digest:
            raise ThinwireError(f"{path} is damaged: its bytes are others than were written; tokenize the text anew")
        files[side] = TokenFiles([FileRange(path, 0, count, dtype)], size, digest)
    if model is not None:
        made_with = Tokenizer(name, folder).as_hub()
        if model[0].as_hub().get_vocab() != made_with.get_vocab():
            raise ThinwireError(
                f"--corpus {folder} was tokenized with {name}, not with the tokenizer of --init: "
                f"thinwire tokenize --tokenizer {model[0].name}"
            )
    return TokenCorpus(name, files["train"], files["valid"], folder)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _whole_file(path: Path) -> FileRange:
    """Find all tokens of a .bin (uint16) or .npy file."""
    try:
        with reading(path):
            if path.suffix == ".bin":
                count, odd = divmod(path.stat().st_size, 2)
                if odd:
                    raise ThinwireError(f"{path} ends within a token: each has 16 bits")
                return FileRange(path, 0, count, np.dtype("<u2"))
            array = np.lib.format.open_memmap(path, mode="r")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ThinwireError(f"{path} holds {array.dtype} {array.shape}: tokens are integers in one dimension")
        return FileRange(path, array.offset, len(array), array.dtype)
    except ValueError:
        raise ThinwireError(f"{path} is no .npy file") from None


def tokenize(corpus: Sequence[str], tokenizer: str, folder: Path) -> dict[str, Any]:
    """Write the token files of a ``corpus`` (see ``read_corpus``) to ``folder``; return what tokens.json holds.

    Split and tokens are the same as those of ``thinwire train`` on the text itself.

    Raises:
        ThinwireError: the text cannot be read or is empty, the folder cannot be written to, or holds such files.
    """
    check_apart(corpus, ())
    kept = tokenizer_file(tokenizer, folder)
    ours = [folder / META, *(folder / f"{side}.bin" for side in SIDES), *([kept] if kept else [])]
    for path in ours:
        if path.exists():
            raise ThinwireError(f"{path} is there already: name another folder")
    with whole_or_empty(folder) as hidden, naming(folder):
        train = (span for held_out, span in split_spans(read_pieces(corpus)) if not held_out)
        encoder = Tokenizer(tokenizer, train)
        dtype = next(name for name, kind in DTYPES.items() if encoder.vocabulary - 1 <= np.iinfo(kind).max)
        paths = [hidden / f"{side}.bin" for side in SIDES]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in paths]
            runs = itertools.groupby(split_spans(read_pieces(corpus)), lambda pair: pair[0])
            for number, (held_out, run) in enumerate(runs):
                for tokens in encoder.encode_spans((span for _, span in run), begins=number < 2):  # of either side
                    files[held_out].write(tokens.astype(DTYPES[dtype]).data)
        meta = {"format": FORMAT, "tokenizer": tokenizer, "vocabulary": encoder.vocabulary, "dtype": dtype}
        for side, path in zip(SIDES, paths, strict=True):
            meta[side] = {"tokens": path.stat().st_size // DTYPES[dtype].itemsize, "hash": _hash(path)}
        encoder.save(hidden)
        write(hidden / META, json.dumps(meta, indent=2) + "\n")
    return meta


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
    options: Any = read_options(Options, argv, "thinwire tokenize")
    note(f"tokenizing {' '.join(options.corpus)} with {options.tokenizer}")
    meta = tokenize(options.corpus, options.tokenizer, options.out)
    say(
        f"{meta['train']['tokens']:,} tokens to train on and {meta['valid']['tokens']:,} held out, "
        f"{meta['dtype']}, vocabulary {meta['vocabulary']:,}: thinwire train --corpus {options.out}"
    )
    return 0
