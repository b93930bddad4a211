"""Memory of `thinwire tokenize` and `thinwire train` on a large text: resident MB of the process that has most.

    python benchmarks/speed/corpus.py                     # 1 GB, as bytes
    python benchmarks/speed/corpus.py --mb 100 --tokenizer bpe:4096

The text is the source of Python's standard library, over and over, with a number in front of each copy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from thinwire.train.data.corpus import read_pieces


def run(*words: str) -> tuple[float, float]:
    """Peak resident MB of the largest process of ``thinwire`` with these words, and its seconds."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "thinwire", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"thinwire {words[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024 / 1e6, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--steps", type=int, default=200)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thinwire-corpus-") as folder:
        box = Path(folder)
        copy = "".join(read_pieces(["stdlib"])).encode()
        with (box / "text.txt").open("wb") as file:
            number = 0
            while file.tell() < chosen.mb * 1_000_000:
                file.write(b"%d\n" % number + copy)
                number += 1
        size = (box / "text.txt").stat().st_size / 1e6
        out, tokens = str(box / "run"), str(box / "tokens")
        peak, seconds = run("tokenize", str(box / "text.txt"), "--tokenizer", chosen.tokenizer, "--out", tokens)
        print(f"tokenize: {size:,.0f} MB of text, {chosen.tokenizer}: {peak:.0f} MB, {seconds:.0f} s", flush=True)
        words = ("--corpus", tokens, "--preset", "small", "--steps", str(chosen.steps), "--ranks", "2", "--out", out)
        _, seconds = run("train", *words)
        peak = json.loads((box / "run" / "summary.json").read_text())["peak_memory_mb"]
        print(f"train: {chosen.steps} steps of small on 2 ranks: {peak:.0f} MB in the larger rank, {seconds:.0f} s")


if __name__ == "__main__":
    main()
