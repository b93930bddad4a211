"""Windows of tokens, and batches of them. A step's batch depends on (seed, step, rank) alone."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinwire.base.errors import ThinwireError
from thinwire.train.data.token_files import TokenFiles

IGNORED = -100  # replaces a target that is not learnt: torch's cross entropy leaves it out
DRAWN = 1 << 20  # with up to so many windows, the order of an epoch is drawn at once and kept (8 bytes each)


@dataclass
class Windows:
    """Windows of ``length`` + 1 tokens, each starting at the last token of the one before. Each epoch shuffles them.

    Attributes:
        tokens: (T,) integers, on the CPU or in files. text: what they are of, for the error where they are too few.
        targets_per_window: on average.
    """

    tokens: Tensor | TokenFiles
    length: int
    seed: int = 0
    text: str = "the corpus"

    def __post_init__(self) -> None:
        self.count = (len(self.tokens) - 1) // self.length
        self.targets_per_window: float = self.length
        if self.count < 1:
            raise ThinwireError(
                f"{self.text} is too short: {len(self.tokens)} tokens, one sequence needs {self.length + 1}: name more "
                "text, or a shorter --seq-len"
            )

    @property
    def order(self) -> str | None:
        """Source of an epoch's order: "permuted" (the function), or None (drawn at once)."""
        return "permuted" if self.count > DRAWN else None

    def digest(self) -> str:
        """Return a hash of the tokens."""
        if not isinstance(self.tokens, Tensor):
            return self.tokens.digest()
        return hashlib.blake2b(self.tokens.numpy().data, digest_size=8).hexdigest()

    def window(self, index: int) -> Tensor:
        """Return window number ``index`` of the text, (length + 1,)."""
        start = index * self.length
        return self.tokens[start : start + self.length + 1]

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets), (count, length) int64 each, of ``indices(first, count)``."""
        return _inputs_and_targets([self.window(index) for index in self.indices(first, count)])

    def count_learnt(self, first: int, count: int) -> int:
        """Count the targets of ``batch(first, count)`` that are learnt."""
        return count * self.length

    def indices(self, first: int, count: int) -> Iterator[int]:
        """Yield the indices of ``count`` windows, from number ``first`` of the endless shuffled order on."""
        for number in range(first, first + count):
            epoch, position = divmod(number, self.count)
            seed = self.seed * 1_000_003 + epoch
            if self.order == "permuted":
                yield permuted(position, self.count, seed)
            else:
                yield int(_shuffled(self.count, seed)[position])

    def positions(self, number: int) -> list[int]:
        """Return the indices of ``number`` windows spread evenly over the text, always the same."""
        return [i * self.count // number for i in range(number)]

    def spread(self, number: int) -> list[Tensor]:
        """Return the windows of ``positions(number)`` (the benchmarks' held-out text)."""
        return [self.window(index) for index in self.positions(number)]


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")


def permuted(index: int, count: int, seed: int) -> int:
    """Compute where a permutation of ``range(count)`` puts ``index``, without storing the permutation.

    A Feistel network of four rounds permutes the numbers below a power of 4; those from ``count`` on go through it
    again (Black and Rogaway, 2002: "cycle walking").
    """
    half = (count.bit_length() + 1) // 2
    while True:
        high, low = divmod(index, 1 << half)
        for turn in range(4):
            drawn = hashlib.blake2b(f"{seed} {turn} {low}".encode(), digest_size=8).digest()
            high, low = low, high ^ int.from_bytes(drawn) % (1 << half)
        index = (high << half) + low
        if index < count:
            return index


def _inputs_and_targets(windows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad windows at their end, and shift them; ``~token``, which is not learnt, becomes an input but no target."""
    block = pad_sequence([window.long() for window in windows], batch_first=True, padding_value=~0)
    inputs, targets = block[:, :-1], block[:, 1:]
    return torch.where(inputs < 0, ~inputs, inputs).contiguous(), targets.masked_fill(targets < 0, IGNORED)


def batches(windows: Sequence[Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    """Split windows into batches of up to ``size``, as (inputs, targets)."""
    return [_inputs_and_targets(windows[i : i + size]) for i in range(0, len(windows), size)]
