"""Tokenizers: bytes, byte-pair encodings that are trained here, and those of Hugging Face."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.files import write
from thinwire.train.data.corpus import spans

BATCH = 16
"""Spans that are tokenized at a time: tokenizers keeps about 100 bytes for each byte of them."""


def tokenizer_file(name: str, folder: Path) -> Path | None:
    """Name the file in which the tokenizer ``name`` keeps what it is made of; None: it keeps nothing."""
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
        kind, _, argument = name.partition(":")
        self._adds_special_tokens = kind != "folder"
        if name == "bytes" or (kind == "ids" and argument.isdigit() and int(argument) > 0):
            self.vocabulary = 256 if name == "bytes" else int(argument)
            return
        if kind == "bpe":
            self._tokenizer = self._bpe(argument, train, folder, trains, anew)
        elif kind == "folder" and argument:
            self._tokenizer = self._from_folder(Path(argument), folder, trains, anew)
        elif kind == "hub" and argument:
            self._tokenizer = self._from_hub(argument)
        else:
            kinds = "bytes, bpe:SIZE, folder:PATH, hub:NAME, ids:SIZE"
            raise ThinwireError(f"unknown tokenizer '{name}'; there are: {kinds}")
        self.vocabulary = self._tokenizer.get_vocab_size()

    @staticmethod
    def _bpe(size: str, train: Iterable[str], folder: Path, trains: bool, anew: bool):
        from tokenizers import models, pre_tokenizers, trainers

        def make():
            tokenizer = _byte_level(models.BPE())
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            trainer = trainers.BpeTrainer(vocab_size=int(size), initial_alphabet=alphabet, show_progress=False)
            tokenizer.train_from_iterator(train, trainer)
            return tokenizer

        if not size.isdigit() or int(size) < 257:
            raise ThinwireError(f"bpe:{size}: the size must be a number of 257 tokens or more")
        path = folder / f"tokenizer-bpe-{size}.json"
        _write_once(path, make, trains, anew)
        try:
            return _load(path)
        except Exception as error:  # whatever its parser raises
            raise ThinwireError(f"{path} is damaged: remove it, and it is trained anew ({error})") from None

    @staticmethod
    def _from_folder(folder: Path, run_folder: Path, trains: bool, anew: bool):
        source, path = folder / "tokenizer.json", run_folder / "tokenizer.json"
        try:
            _write_once(path, lambda: _load(source), trains, anew)
            return _load(path)
        except OSError as error:
            raise ThinwireError(f"cannot read {source}: {error.strerror}") from None
        except Exception as error:  # whatever its parser raises
            raise ThinwireError(f"{source} is no tokenizer: {str(error).splitlines()[0]}") from None

    @staticmethod
    def _from_hub(name: str):
        from tokenizers import Tokenizer as HubTokenizer

        try:
            return HubTokenizer.from_pretrained(name)
        except Exception as error:  # the hub's client raises whatever its transport raises
            raise ThinwireError(f"cannot load the tokenizer '{name}': {str(error).splitlines()[0]}") from None

    def as_hub(self) -> Any:
        """Make a ``tokenizers.Tokenizer`` that gives the same tokens."""
        self._check_knows_text()
        if self._tokenizer is not None:
            return self._tokenizer
        from tokenizers import models, pre_tokenizers

        # BPE without merges, over the characters by which it writes bytes: those that are shown stand for themselves,
        # and those from U+0100 on for the other bytes.
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        hidden = [byte for byte in range(256) if chr(byte) not in alphabet]
        numbers = {letter: ord(letter) if ord(letter) < 256 else hidden[ord(letter) - 256] for letter in alphabet}
        return _byte_level(models.BPE(vocab=numbers, merges=[]), use_regex=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Give the text of ``tokens``; bytes that are no UTF-8 become U+FFFD."""
        self._check_knows_text()
        if self._tokenizer is None:
            return bytes(tokens).decode("utf-8", errors="replace")
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def encode(self, text: str) -> Tensor:
        """Give the tokens of ``text``, (T,), in the smallest integer dtype of torch's that holds them."""
        return torch.from_numpy(np.concatenate([*self.encode_spans(spans([text])), np.empty(0, self.dtype)]))

    def _check_knows_text(self) -> None:
        if self.name.startswith("ids:"):
            raise ThinwireError(f"--tokenizer {self.name} knows numbers only: no text can be made of them, or read")

    @property
    def dtype(self) -> type[np.integer]:
        """NumPy dtype of the tokens: uint8, or int32."""
        return np.uint8 if self.vocabulary <= 256 else np.int32

    def encode_spans(self, text: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the tokens of each span of a text, (T,)."""
        self._check_knows_text()
        if self._tokenizer is None:
            yield from (np.frombuffer(span.encode("utf-8"), np.uint8) for span in text)
            return
        text = iter(text)
        while batch := list(itertools.islice(text, BATCH)):
            # A folder's tokenizer would put its begin-of-text token before every span.
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=self._adds_special_tokens)
            yield from (np.array(encoding.ids, self.dtype) for encoding in encodings)


def _byte_level(model: Any, use_regex: bool = True):
    from tokenizers import Tokenizer as HubTokenizer
    from tokenizers import decoders, pre_tokenizers

    tokenizer = HubTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _load(path: Path):
    from tokenizers import Tokenizer as HubTokenizer

    return HubTokenizer.from_str(path.read_text(encoding="utf-8"))


def _write_once(path: Path, make: Callable[[], Any], trains: bool, anew: bool) -> None:
    """Write the tokenizer that ``make`` makes, where this rank is to and none is there or it is made anew."""
    if trains and (anew or not path.exists()):
        tokenizer = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, tokenizer.to_str(pretty=True))
