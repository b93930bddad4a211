"""Where randomness comes from: (seed, parameter name, step), the same on every rank, never a global generator.

The numbers are a function of a counter (splitmix64, Steele et al. 2014), in integer arithmetic that CPU and CUDA do
alike: ranks with different devices draw the same signs and orders, and normal values equal to rounding.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor


def seed_of(seed: int, name: str, step: int = 0) -> int:
    """63 bits for one parameter (or any other ``name``) at one step: unrelated for any two different arguments."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Seeds:
    """Where the random bits of one encoding come from: of each parameter apart, wherever it lies in a row.

    ``parts``: (first column, last column, seed) of each parameter. In rows that are longer the parameters come again,
    with seeds of their own. The same seed rounds the same places the same way: take others for every step and rank.
    """

    parts: tuple[tuple[int, int, int], ...]

    def next(self) -> Seeds:
        """Those of the next encoding in the same exchange, which draws other bits."""
        return Seeds(tuple((first, last, _following(seed, 1)) for first, last, seed in self.parts))

    def over(self, n: int) -> list[tuple[int, int, int]] | None:
        """(first column, last column, seed) of all ``n`` columns of a row; None if the parameters do not fill it."""
        length = self.parts[-1][1] if self.parts else 0
        if not length or n % length:
            return None
        return [
            (first + start, last + start, _following(seed, start // length * 0x9E3779B97F4A7C15))
            for start in range(0, n, length)
            for first, last, seed in self.parts
        ]


def _following(seed: int, by: int) -> int:
    """Another seed, unrelated in the 32 bits that the kernels make of it."""
    return seed_of(seed, str(by)) if by else seed


def _signed(value: int) -> int:
    """64 bits as torch's int64 holds them."""
    return value - 2**64 if value >= 2**63 else value


def shifted(words: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's own copies the sign."""
    return (words >> bits) & (2 ** (64 - bits) - 1)


def hash_of(seed: int, counters: Tensor) -> Tensor:
    """64 random bits for every value of ``counters`` (int64): splitmix64's output at that place of its stream."""
    words = (counters + 1) * _signed(0x9E3779B97F4A7C15) + seed
    words = (words ^ shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ shifted(words, 31)


def random_bits(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """``count`` independent words of 64 random bits, int64."""
    return hash_of(seed, torch.arange(count, dtype=torch.int64, device=device))


def random_signs(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """``count`` values -1 or 1, float32."""
    return (random_bits(seed, count, device) & 1).mul_(2).sub_(1).float()


def random_order(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """A permutation of 0 .. ``count`` - 1, int64."""
    return random_bits(seed, count, device).argsort(stable=True)


def random_normal(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """``count`` standard normal values, float32 (Box and Muller 1958), equal on all devices to float32 rounding."""
    pairs = -(-count // 2)
    words = random_bits(seed, 2 * pairs, device).view(2, pairs)
    uniform = shifted(words, 11).double().add_(0.5).mul_(2.0**-53)  # in (0, 1)
    radius, angle = uniform[0].log_().mul_(-2).sqrt_(), uniform[1].mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].float()
