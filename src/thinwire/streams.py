"""Where randomness comes from: (seed, parameter name, step), the same on every rank, never a global generator."""

from __future__ import annotations

import hashlib


def seed_of(seed: int, name: str, step: int = 0) -> int:
    """63 bits for one parameter (or any other ``name``) at one step: unrelated for any two different arguments."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
