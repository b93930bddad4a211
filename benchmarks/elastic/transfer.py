"""What would a replica that joins receive in other forms? Bytes, seconds of encoding, and seconds on a slow link.

    python benchmarks/elastic/transfer.py runs/x/checkpoints/step-000400 runs/x/checkpoints/step-000500 --link 50

The two are checkpoints of ``thinwire train``: the one that the joiner has, and what it is to get. ``exact`` forms give
the joiner the same bits: the bytes of the values, or of their differences as integers (XOR) to those that it has, plane
by plane (all first bytes, all second bytes, ...), in zlib at level 1. The others do not: replicas would then have to
round their own weights in the same way, or would no longer be equal.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Values = np.ndarray


def read(path: Path, part: str) -> dict[str, Values]:
    """Read the float32 tensors of a checkpoint: its weights, or what its ranks keep of their second moments."""
    files = [path / "model.safetensors"] if part == "weights" else sorted(path.glob("rank-*.safetensors"))[:1]
    found = {key: value for file in files for key, value in load_file(file).items() if value.dtype == np.float32}
    return {key: value for key, value in found.items() if part == "weights" or "second" in key or "exp_avg_sq" in key}


def flat(tensors: dict[str, Values]) -> Values:
    return np.concatenate([tensors[key].reshape(-1) for key in sorted(tensors)])


def planes(values: Values) -> bytes:
    """Put all first bytes of (n,) 4-byte values in front, then all second ones, and so on; compress."""
    return zlib.compress(np.ascontiguousarray(values.view(np.uint8).reshape(-1, 4).T).tobytes(), 1)


def in_8_bits(values: Values, group: int = 64) -> bytes:
    rows = np.pad(values, (0, -len(values) % group)).reshape(-1, group)
    scales = np.abs(rows).max(1, keepdims=True) / 127
    codes = np.rint(rows / np.where(scales == 0, 1, scales)).astype(np.int8)
    return codes.tobytes() + scales.astype(np.float32).tobytes()


def forms(old: Values, new: Values) -> dict[str, Callable[[], bytes]]:
    return {
        "whole (exact, as it is)": lambda: new.tobytes(),
        "whole, zlib of planes (exact)": lambda: planes(new),
        "XOR with the old, zlib of planes (exact)": lambda: planes(old.view(np.uint32) ^ new.view(np.uint32)),
        "integer difference, zlib of planes (exact)": lambda: planes(zigzag(old, new)),
        "whole in bfloat16": lambda: (new.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "differences in 8 bits": lambda: in_8_bits(new - old),
    }


def zigzag(old: Values, new: Values) -> Values:
    """Return the differences of two float32 as integers, small ones of both signs as small numbers."""
    signed = new.view(np.int32).astype(np.int64) - old.view(np.int32)
    wrapped = signed.astype(np.int32)
    return ((wrapped << 1) ^ (wrapped >> 31)).view(np.uint32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path, help="checkpoint that the joiner has")
    parser.add_argument("new", type=Path, help="checkpoint that it is to get")
    parser.add_argument("--link", type=float, default=50, help="Mbit/s")
    parser.add_argument("--values", type=float, default=20e6, help="of the model for which seconds are given")
    options = parser.parse_args()
    told = f"{options.values:,.0f} values, {options.link:g} Mbit/s"
    print(f"{options.old.name} -> {options.new.name}; seconds for {told}")
    print(f"{'':58} {'bytes/value':>11} {'encode':>8} {'link':>8}")
    for part in ("weights", "second moments"):
        old, new = (read(path, part) for path in (options.old, options.new))
        if not new:
            print(f"{part}: there are none in these checkpoints")
            continue
        before, after = flat(old), flat(new)
        for name, encode in forms(before, after).items():
            began = time.perf_counter()
            size = len(encode()) / len(after)
            encode_s = (time.perf_counter() - began) * options.values / len(after)
            link_s = 8e-6 * size * options.values / options.link
            print(f"{part + ', ' + name:58} {size:11.2f} {encode_s:6.1f} s {link_s:6.1f} s")


if __name__ == "__main__":
    main()
