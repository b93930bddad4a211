"""Tokenizers: bytes, byte-pair encodings that are trained here, and those of Hugging Face."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
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

_PRINTED = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = [chr(byte if byte in _PRINTED else 256 + _HIDDEN.index(byte)) for byte in range(256)]
"""The character that stands for each byte in byte-level BPE: itself, or from U+0100 on where it is not shown."""


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
