"""Text to tokens to batches. The batch of a step is a function of (seed, step, rank) alone: resuming needs the step."""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib.util
import itertools
import lzma
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinwire.base.errors import ThinwireError
from thinwire.train.folder import write

SPAN = 1 << 15
"""Characters in a row that go to one side of the split: every ``HELD_OUT``-th span is held out."""
HELD_OUT = 20
PIECE = 1 << 22
"""Characters that are read from a file at a time."""
IGNORED = -100
"""In place of a target that is not learnt: torch's cross entropy leaves it out."""
BATCH = 16
"""Spans that are tokenized at a time: tokenizers keeps about 100 bytes for each byte of them."""
DRAWN = 1 << 20
"""Windows up to which the order of an epoch is drawn at once, and kept: 8 bytes each."""


_PRINTED = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = [chr(byte if byte in _PRINTED else 256 + _HIDDEN.index(byte)) for byte in range(256)]
"""The character that stands for each byte in byte-level BPE: itself, or from U+0100 on where it is not shown."""


def read_corpus(names: Sequence[str]) -> str:
    """The text of files and globs (plain, .xz or .gz), of ``stdlib``, or of a hub data set ``hub:NAME``, in order.

    Raises:
        ThinwireError: a name matches nothing, cannot be read, or the text is empty.
    """
    text = "".join(pieces(names))
    if not text.strip():
        raise ThinwireError(f"the corpus {', '.join(names)} has no text in it")
    return text


def pieces(names: Sequence[str]) -> Iterator[str]:
    """``read_corpus`` in pieces of at most ``PIECE`` characters, read as they are asked for."""
    between = ""
    for name in names:
        for document in _documents(name):
            yield between
            yield from document
            between = "\n"


def spans(text: Iterable[str]) -> Iterator[str]:
    """A ``text`` in pieces of any size, cut into spans: ``SPAN`` characters each, the last one what is left."""
    kept = ""
    for piece in text:
        kept += piece
        whole = len(kept) - len(kept) % SPAN
        yield from (kept[start : start + SPAN] for start in range(0, whole, SPAN))
        kept = kept[whole:]
    if kept:
        yield kept


def _documents(name: str) -> Iterator[Iterable[str]]:
    """The texts that ``name`` stands for, each in pieces; a line's end goes between two of them."""
    if name == "stdlib":
        yield from map(_read_file, _standard_library())
    elif name.startswith("hub:"):
        yield from ((text,) for text in _hub(name.removeprefix("hub:")))
    else:
        yield from map(_read_file, paths_of(name))


def paths_of(name: str) -> list[Path]:
    """The files that a name or a glob stands for, in order.

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
    """The source of Python's own standard library, without its tests: about 10 MB of real text on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    if not files:
        raise ThinwireError(f"Python's standard library has no source in {root}: name files with --corpus")
    return files


def _hub(name: str) -> Iterable[str]:
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
    """(train, valid): every 20th span of 32 Ki characters is held out; a short text gives up its last 20th."""
    if len(text) <= (HELD_OUT - 1) * SPAN:
        cut = len(text) - len(text) // HELD_OUT
        return text[:cut], text[cut:]
    cut_up = list(spans([text]))
    return "".join(span for i, span in enumerate(cut_up) if not is_held_out(i)), "".join(
        span for i, span in enumerate(cut_up) if is_held_out(i)
    )


def is_held_out(span: int) -> bool:
    """Is the span of this number, of a text that has more than ``HELD_OUT`` - 1, not trained on?"""
    return span % HELD_OUT == HELD_OUT - 1


def tokenizer_file(name: str, folder: Path) -> Path | None:
    """Where the tokenizer ``name`` keeps what it is made of; None: nothing."""
    kind, _, size = name.partition(":")
    return {"bpe": folder / f"tokenizer-bpe-{size}.json", "folder": folder / "tokenizer.json"}.get(kind)


class Tokenizer:
    """``bytes``; ``bpe:SIZE``, trained on the training text and kept in ``folder``; ``folder:PATH``, the tokenizer.json
    of a Hugging Face folder, kept likewise; ``hub:NAME``; or ``ids:SIZE``, of which only the number of tokens is known.

    Attributes:
        name: as above. vocabulary: number of tokens.
    """

    def __init__(
        self, name: str, train: Iterable[str], folder: Path, *, trains: bool = True, anew: bool = False
    ) -> None:
        """``train``: the training text, in spans. ``trains``: this rank trains a BPE, or copies that of a folder, if
        there is none yet, or ``anew``; the others load what it wrote."""
        self.name, self._tokenizer = name, None
        kind, _, rest = name.partition(":")
        self._marks = kind != "folder"
        if name == "bytes" or (kind == "ids" and rest.isdigit() and int(rest) > 0):
            self.vocabulary = 256 if name == "bytes" else int(rest)
            return
        if kind == "bpe":
            self._tokenizer = self._bpe(rest, train, folder, trains, anew)
        elif kind == "folder" and rest:
            self._tokenizer = self._from_folder(Path(rest), folder, trains, anew)
        elif kind == "hub" and rest:
            self._tokenizer = self._from_hub(rest)
        else:
            kinds = "bytes, bpe:SIZE, folder:PATH, hub:NAME, ids:SIZE"
            raise ThinwireError(f"unknown tokenizer '{name}'; there are: {kinds}")
        self.vocabulary = self._tokenizer.get_vocab_size()

    @staticmethod
    def _bpe(size: str, train: Iterable[str], folder: Path, trains: bool, anew: bool):
        from tokenizers import Tokenizer as HubTokenizer
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if not size.isdigit() or int(size) < 257:
            raise ThinwireError(f"bpe:{size}: the size must be a number of 257 tokens or more")
        path = tokenizer_file(f"bpe:{size}", folder)
        assert path is not None
        if trains and (anew or not path.exists()):
            tokenizer = HubTokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=int(size), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
            )
            tokenizer.train_from_iterator(train, trainer)
            folder.mkdir(parents=True, exist_ok=True)
            write(path, tokenizer.to_str(pretty=True))
        try:
            return HubTokenizer.from_file(str(path))
        except Exception as error:  # whatever its parser raises
            raise ThinwireError(f"{path} is damaged: remove it, and it is trained anew ({error})") from None

    @staticmethod
    def _from_folder(source: Path, folder: Path, trains: bool, anew: bool):
        from tokenizers import Tokenizer as HubTokenizer

        path = folder / "tokenizer.json"
        try:
            if trains and (anew or not path.exists()):
                found = HubTokenizer.from_str((source / "tokenizer.json").read_text(encoding="utf-8"))
                folder.mkdir(parents=True, exist_ok=True)
                write(path, found.to_str(pretty=True))
            return HubTokenizer.from_file(str(path))
        except OSError as error:
            raise ThinwireError(f"cannot read {source / 'tokenizer.json'}: {error.strerror}") from None
        except Exception as error:  # whatever its parser raises
            raise ThinwireError(f"{source / 'tokenizer.json'} is no tokenizer: {str(error).splitlines()[0]}") from None

    @staticmethod
    def _from_hub(name: str):
        from tokenizers import Tokenizer as HubTokenizer

        try:
            return HubTokenizer.from_pretrained(name)
        except Exception as error:  # the hub's client raises whatever its transport raises
            raise ThinwireError(f"cannot load the tokenizer '{name}': {str(error).splitlines()[0]}") from None

    def as_hub(self) -> Any:
        """A ``tokenizers.Tokenizer`` that gives the same tokens."""
        self._needs_text()
        if self._tokenizer is not None:
            return self._tokenizer
        from tokenizers import Tokenizer as HubTokenizer
        from tokenizers import decoders, models, pre_tokenizers

        # BPE without merges, over the characters by which it writes bytes.
        numbers = {letter: byte for byte, letter in enumerate(_BYTES)}
        hub = HubTokenizer(models.BPE(vocab=numbers, merges=[]))
        hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        hub.decoder = decoders.ByteLevel()
        return hub

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``; bytes that are no UTF-8 become U+FFFD."""
        self._needs_text()
        if self._tokenizer is None:
            return bytes(tokens).decode("utf-8", errors="replace")
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def encode(self, text: str) -> Tensor:
        """Tokens, (T,), in the smallest integer dtype of torch's that holds them."""
        return torch.from_numpy(np.concatenate([*self.encoded(spans([text])), np.empty(0, self.dtype)]))

    def _needs_text(self) -> None:
        if self.name.startswith("ids:"):
            raise ThinwireError(f"--tokenizer {self.name} knows numbers only: no text can be made of them, or read")

    @property
    def dtype(self) -> type[np.integer]:
        """Of the tokens: uint8, or int32."""
        return np.uint8 if self.vocabulary <= 256 else np.int32

    def encoded(self, text: Iterable[str]) -> Iterator[np.ndarray]:
        """The tokens of a text in spans, span by span, each (T,)."""
        self._needs_text()
        if self._tokenizer is None:
            yield from (np.frombuffer(span.encode("utf-8"), np.uint8) for span in text)
            return
        text = iter(text)
        while batch := list(itertools.islice(text, BATCH)):
            # A folder's tokenizer would put its begin-of-text token before every span.
            encoded = self._tokenizer.encode_batch_fast(batch, add_special_tokens=self._marks)
            yield from (np.array(found.ids, self.dtype) for found in encoded)


class TokenSequence(Protocol):
    """Token ids of any length, of which a slice is a tensor: files that are read as they are needed."""

    def __len__(self) -> int: ...

    def __getitem__(self, wanted: slice) -> Tensor: ...

    def digest(self) -> str:
        """A hash of the tokens."""


@dataclass
class Windows:
    """Windows of ``length`` + 1 tokens, each starting where the last one's targets ended, in an order per epoch.

    Within an epoch no window comes twice; each epoch has an order of its own.

    Attributes:
        count: of the windows. each: targets in one, on average.
    """

    tokens: Tensor | TokenSequence
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.count = (len(self.tokens) - 1) // self.length
        self.each: float = self.length
        self._epoch, self._order = -1, torch.empty(0)
        if self.count < 1:
            raise ThinwireError(
                f"the corpus is too short: {len(self.tokens)} tokens, one sequence needs {self.length + 1}: "
                "name more text with --corpus, or a shorter --seq-len"
            )

    @property
    def order(self) -> str | None:
        """How the order of an epoch comes about; None: it is drawn at once."""
        return "permuted" if self.count > DRAWN else None

    def at(self, index: int) -> Tensor:
        """Window number ``index`` of the text, (length + 1,)."""
        start = index * self.length
        return self.tokens[start : start + self.length + 1]

    def take(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), (count, length) int64 each: places ``first`` ... of the endless shuffled order."""
        return _inputs_and_targets([self.at(index) for index in self.places(first, count)])

    def learnt(self, first: int, count: int) -> int:
        """How many targets there are in those places that are learnt."""
        return count * self.length

    def places(self, first: int, count: int) -> Iterator[int]:
        """The windows in places ``first`` ... of the order."""
        for place in range(first, first + count):
            epoch, within = divmod(place, self.count)
            seed = self.seed * 1_000_003 + epoch
            if self.order == "permuted":
                yield permuted(within, self.count, seed)
                continue
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(seed)
                self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator)
            yield int(self._order[within])

    def spread(self, number: int) -> list[Tensor]:
        """``number`` windows spread evenly over the text: always the same."""
        return [self.at(i * self.count // number) for i in range(number)]


def permuted(index: int, count: int, seed: int) -> int:
    """Where a permutation of ``range(count)`` puts ``index``, without its being kept anywhere.

    A Feistel network of four rounds permutes the numbers of as many bits; a number beyond ``count`` is put through it
    again (Black and Rogaway, 2002: "cycle walking").
    """
    half = (count.bit_length() + 1) // 2
    while True:
        left, right = divmod(index, 1 << half)
        for turn in range(4):
            drawn = hashlib.blake2b(f"{seed} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(drawn) % (1 << half)
        index = (left << half) + right
        if index < count:
            return index


def _inputs_and_targets(windows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Shorter ones are padded at the end; what is not learnt, a token's complement, is a token and no target."""
    block = pad_sequence([window.long() for window in windows], batch_first=True, padding_value=~0)
    inputs, targets = block[:, :-1], block[:, 1:]
    return torch.where(inputs < 0, ~inputs, inputs).contiguous(), targets.masked_fill(targets < 0, IGNORED)


def batches(windows: Sequence[Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    """Windows in batches of ``size``, as (inputs, targets)."""
    return [_inputs_and_targets(windows[i : i + size]) for i in range(0, len(windows), size)]
