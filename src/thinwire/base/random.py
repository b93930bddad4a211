"""Random numbers from (seed, parameter name, step), the same on every rank, never from a global generator.

They are a function of a counter (splitmix64, Steele et al. 2014) in integer arithmetic, equal on CPU and CUDA: ranks
with different devices draw the same signs and orders, and normal values equal to rounding.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.base import device as devices


def seed_of(seed: int, name: str, step: int = 0) -> int:
    """Return 63 bits for one parameter (or other ``name``) at one step, unrelated for different arguments."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def key_of(seed: int) -> int:
    """Fold ``seed`` to a signed integer of 32 bits, the key that kernels use."""
    return _signed((seed ^ seed >> 32) & 0xFFFFFFFF, 32)


class Pool:
    """All seeds of one step, which a GPU gets at once instead of for each encoding.

    Attributes:
        seeds: in the order given. indices: seed -> index into ``seeds``.
    """

    def __init__(self, seeds: Iterable[int]) -> None:
        self.seeds = tuple(seeds)
        self.indices = {seed: index for index, seed in enumerate(self.seeds)}
        self._keys: dict[object, Tensor] = {}

    @functools.cached_property
    def next(self) -> Pool:
        """The pool for the next encodings in the same exchanges, which draw other bits."""
        return Pool(_following(seed, 1) for seed in self.seeds)

    def keys(self, device: torch.device) -> Tensor:
        """Return the keys (m,) int32 on ``device``, in the order of ``seeds``."""
        backend = devices.streams(device)  # another stream cannot rely on this one's copy
        stream = device if backend is None else backend.current_stream(device)
        if stream not in self._keys:
            self._keys[stream] = devices.upload([key_of(seed) for seed in self.seeds], device)
        return self._keys[stream]


@dataclass(frozen=True)
class Seeds:
    """The seeds of one encoding's random bits, one for each parameter, wherever it lies in a row.

    The same seed rounds the same columns the same way: take other seeds for every step and rank.

    Attributes:
        ranges: (first column, end, seed) of each parameter. They adjoin, from column 0 on, and begin and end at
            multiples of the group. pool: holds the seeds on a GPU, if there is one.
    """

    ranges: tuple[tuple[int, int, int], ...]
    pool: Pool | None = None

    def next(self) -> Seeds:
        """Return seeds for the next encoding in the same exchange, which draws other bits."""
        pool = self.pool
        if pool is None:
            return Seeds(tuple((first, last, _following(seed, 1)) for first, last, seed in self.ranges))
        seeds, indices = pool.next.seeds, pool.indices
        return Seeds(tuple((first, last, seeds[indices[seed]]) for first, last, seed in self.ranges), pool.next)

    def over(self, n: int) -> Seeds | None:
        """Return the seeds for a row of ``n`` columns, in which the parameters may repeat, each time with other seeds;
        None if they do not fill it."""
        length = self.ranges[-1][1] if self.ranges else 0
        if not length or n % length:
            return None
        return self if n == length else Seeds(tuple(
            (first + start, last + start, _following(seed, start // length * 0x9E3779B97F4A7C15))
            for start in range(0, n, length)
            for first, last, seed in self.ranges
        ))  # fmt: skip

    def keys(self, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
        """Return keys (m,) int32 on ``device``, and for each range the index of its key."""
        seeds = [seed for _, _, seed in self.ranges]
        if self.pool is not None:
            return self.pool.keys(device), tuple(self.pool.indices[seed] for seed in seeds)
        return devices.upload([key_of(seed) for seed in seeds], device), tuple(range(len(seeds)))


def _following(seed: int, number: int) -> int:
    """Derive another seed, unrelated in the 32 bits that the kernels make of it."""
    return seed_of(seed, str(number)) if number else seed


def _signed(value: int, bits: int) -> int:
    """Return the unsigned ``value`` of ``bits`` bits as the signed integer with the same bits."""
    return value - 2**bits if value >> (bits - 1) else value


def shifted(words: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's own shift copies the sign."""
    return (words >> bits) & (2 ** (64 - bits) - 1)


def hash_of(seed: int, counters: Tensor) -> Tensor:
    """Return 64 random bits for every value of ``counters`` (int64): splitmix64's output at that position."""
    words = (counters + 1) * _signed(0x9E3779B97F4A7C15, 64) + seed
    words = (words ^ shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    words = (words ^ shifted(words, 27)) * _signed(0x94D049BB133111EB, 64)
    return words ^ shifted(words, 31)


def random_bits(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw ``count`` independent words of 64 random bits, int64."""
    return hash_of(seed, torch.arange(count, dtype=torch.int64, device=device))


def random_signs(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw ``count`` values -1 or 1, float32."""
    return (random_bits(seed, count, device) & 1).mul_(2).sub_(1).float()


def random_order(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw a permutation of 0 .. ``count`` - 1, int64."""
    return random_bits(seed, count, device).argsort(stable=True)


def random_normal(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw ``count`` standard normal float32 values (Box and Muller 1958), equal on all devices to float32 rounding."""
    pairs = -(-count // 2)
    words = random_bits(seed, 2 * pairs, device).view(2, pairs)
    uniform = shifted(words, 11).double().add_(0.5).mul_(2.0**-53)  # in (0, 1)
    radius, angle = uniform[0].log_().mul_(-2).sqrt_(), uniform[1].mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].float()
