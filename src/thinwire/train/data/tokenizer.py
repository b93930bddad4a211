"""Tokenizers: bytes, byte-pair encodings trained here, and those of Hugging Face."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from thinwire.base.errors import ThinwireError, first_line
from thinwire.base.files import write
from thinwire.train.data.corpus import spans

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 16  # spans tokenized at a time: the library tokenizers keeps about 100 bytes for each byte of them
ANSWER_S = 5.0  # seconds in which the hub answers, or is taken to be out of reach
Encode = Callable[[str], list[int]]  # a text: its tokens
LEADS = ("\n", "a", "0")  # no tokenizer merges all three with what follows


def tokenizer_file(name: str, folder: Path) -> Path | None:
    """Return the file that keeps the tokenizer ``name`` in ``folder``; None: it needs no file."""
    kind, _, size = name.partition(":")
    return {"bpe": folder / f"tokenizer-bpe-{size}.json", "folder": folder / "tokenizer.json"}.get(kind)


def is_kept(name: str, folder: Path | None) -> bool:
    """Is the tokenizer ``name`` in ``folder``?"""
    path = tokenizer_file(name, folder) if folder else None
    return path is not None and path.exists()


def check_tokenizer(name: str, folder: Path | None) -> None:
    """Raise what ``Tokenizer`` raises of a name that is none, or of a Hugging Face folder, unless ``folder`` has it."""
    kind, argument = _read_name(name)
    if kind == "folder" and not is_kept(name, folder):
        _load(Path(argument, "tokenizer.json"))


def _read_name(name: str) -> tuple[str, str]:
    """Return the kind of a tokenizer and what stands behind the colon."""
    kind, _, argument = name.partition(":")
    if name != "bytes" and not (argument and kind in ("bpe", "folder", "hub", "ids")):
        raise ThinwireError(f"unknown tokenizer '{name}'; there are: bytes, bpe:SIZE, folder:PATH, hub:NAME, ids:SIZE")
    least = {"bpe": 257, "ids": 1}.get(kind, 0)
    if least and not (argument.isdecimal() and int(argument) >= least):
        raise ThinwireError(f"{name}: the size is a number of tokens, {least} or more")
    return kind, argument


def encode_behind(encode: Encode, left: str, text: str, both: list[int] | None = None) -> list[int]:
    """Return the tokens of ``text`` behind ``left`` (``both``: those of the two), or, where they merge, another lead.

    ``encode`` may put a space before whatever it is given, as SentencePiece does. In the middle of a text it is wrong.
    """
    for lead in (left, *LEADS):
        start, tokens = encode(lead), encode(lead + text) if both is None else both
        if (start or not lead) and tokens[: len(start)] == start:  # some drop a lead that is white
            return tokens[len(start) :]
        both = None
    return encode(text)


def adds_space(encode: Encode) -> bool:
    """Does ``encode`` begin each text with a space of its own?"""
    try:
        return encode_behind(encode, LEADS[0], "a") != encode("a")
    except Exception:  # tokenizers' own: a vocabulary of words, which lacks these letters
        return False


class Tokenizer:
    """A tokenizer by its name, with ``vocabulary`` tokens.

    Names: ``bytes``; ``bpe:SIZE``, trained on the training text; ``folder:PATH``, the tokenizer.json of a Hugging Face
    folder; ``hub:NAME``; ``ids:SIZE``, numbers without a text. The second and the third are kept in a run's folder.
    """

    def __init__(self, name: str, source: Iterable[str] | Path | HubTokenizer) -> None:
        """``source``: the training text in spans, of which a tokenizer is made; or the folder that keeps one; or what
        ``as_hub`` has returned."""
        self.name, self._tokenizer = name, None
        kind, argument = _read_name(name)
        if kind in ("bytes", "ids"):
            self.vocabulary = int(argument or 256)
            return
        if isinstance(source, HubTokenizer):
            self._tokenizer = source
        elif kind == "hub":
            self._tokenizer = _load(argument)
        elif isinstance(source, Path):
            path = tokenizer_file(name, source)
            assert path is not None
            self._tokenizer = _load(path)
        elif kind == "bpe":
            self._tokenizer = HubTokenizer.from_str(_train_bpe(argument, source).to_str())
        else:
            self._tokenizer = _load(Path(argument, "tokenizer.json"))
        self.vocabulary = max(self._tokenizer.get_vocab().values(), default=-1) + 1  # numbers may be left out

    def save(self, folder: Path) -> None:
        """Keep the tokenizer in ``folder``, if it needs a file."""
        if path := tokenizer_file(self.name, folder):
            write(path, self.text)

    @property
    def text(self) -> str:
        """The content of the file that keeps it; "": it needs none."""
        if self._tokenizer is None or tokenizer_file(self.name, Path()) is None:
            return ""
        return self._tokenizer.to_str(pretty=True)

    def as_hub(self) -> HubTokenizer:
        """Return a ``tokenizers.Tokenizer`` that gives the same tokens."""
        self._check_knows_text()
        if self._tokenizer is not None:
            return self._tokenizer
        # BPE without merges, over characters that stand for bytes: printable ones for themselves, those from U+0100 on
        # for the other bytes.
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        hidden = [byte for byte in range(256) if chr(byte) not in alphabet]
        numbers = {letter: ord(letter) if ord(letter) < 256 else hidden[ord(letter) - 256] for letter in alphabet}
        return _byte_level(models.BPE(vocab=numbers, merges=[]), use_regex=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        self._check_knows_text()
        if self._tokenizer is None:
            return bytes(tokens).decode("utf-8", errors="replace")
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def encode(self, text: str) -> Tensor:
        """Return the tokens of ``text``, (T,) of ``dtype``."""
        import torch

        return torch.from_numpy(np.concatenate([*self.encode_spans(spans([text])), np.empty(0, self.dtype)]))

    def _check_knows_text(self) -> None:
        if self.name.startswith("ids:"):
            raise ThinwireError(f"--tokenizer {self.name} has numbers without text: it cannot read or write any")

    @property
    def dtype(self) -> type[np.integer]:
        """NumPy dtype of the tokens: uint8 for up to 256 tokens, else int32."""
        return np.uint8 if self.vocabulary <= 256 else np.int32

    def encode_spans(self, text: Iterable[str], begins: bool = True) -> Iterator[np.ndarray]:
        """Yield the tokens of each span of a text, (T,). ``begins``: the first is where the text begins."""
        self._check_knows_text()
        if (tokenizer := self._tokenizer) is None:
            yield from (np.frombuffer(span.encode("utf-8"), np.uint8) for span in text)
            return

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        text, spaced = iter(text), adds_space(encode)
        while batch := list(itertools.islice(text, 1 if spaced and begins else BATCH)):
            lead, begins = LEADS[0] if spaced and not begins else "", False
            # With special tokens, some tokenizers would put one before every span.
            encodings = tokenizer.encode_batch_fast([lead + span for span in batch], add_special_tokens=False)
            for span, encoding in zip(batch, encodings, strict=True):
                yield np.array(encode_behind(encode, lead, span, encoding.ids), self.dtype)


def _byte_level(model: models.Model, use_regex: bool = True) -> HubTokenizer:
    tokenizer = HubTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train_bpe(size: str, train: Iterable[str]) -> HubTokenizer:
    tokenizer, alphabet = _byte_level(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=int(size), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(train, trainer)
    return tokenizer


def _load(source: Path | str) -> HubTokenizer:
    """Load a tokenizer from a file, or by its name on the hub."""
    try:
        if isinstance(source, Path):
            return HubTokenizer.from_file(str(source))
        _check_hub(source)
        return HubTokenizer.from_pretrained(source)
    except Exception as error:  # whatever the parser or the hub's client raises
        raise ThinwireError(f"cannot load the tokenizer {source}: {first_line(error)}") from None


def _check_hub(name: str) -> None:
    """Refuse what is not in the cache if the hub does not answer: its client would try again for a minute and more."""
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    if try_to_load_from_cache(name, "tokenizer.json") is None:
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
        except Exception as error:  # whatever its transport raises
            reason = f"{constants.ENDPOINT} does not answer ({first_line(error)})"
            raise ThinwireError(f"{reason}: name a folder that has its tokenizer.json, folder:PATH") from None
