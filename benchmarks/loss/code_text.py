"""Write the text ``code``: Python sources of an installed torch 2.13.0, for those who have no corpus of it.

    python benchmarks/loss/code_text.py DIR

DIR/code-valid.txt.xz gets the first 2.1 MB of whole files and DIR/code-train.txt.xz the next 18 MB, in the order of the
SHA-256 of their paths, so that neighbours do not share a topic. Files above 100 kB are left out: they are mostly
generated. The program prints the SHA-256 of both texts, and ends with status 1 if they are not those that the rows of
docs/data/ladder.jsonl were run on.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import sys
from importlib.metadata import distribution
from pathlib import Path

LARGEST = 100_000
SIZES = {"code-valid.txt.xz": 2_100_000, "code-train.txt.xz": 18_000_000}
"""Bytes of a text; the file that passes it is the last."""
DIGESTS = {
    "code-valid.txt.xz": "b465df5a4c7741c89630c2611095ceb7b97edc7246a5bf761176ef8eaf80fb87",
    "code-train.txt.xz": "8bd77ede857ce1103a8e37ce4deb69e66fe603550b6ba9c277b5b6cea29c75a8",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    torch = distribution("torch")
    sources = sorted(
        (file for file in torch.files or [] if file.suffix == ".py" and file.parts[0] in ("torch", "functorch")),
        key=lambda file: hashlib.sha256(file.as_posix().encode()).digest(),
    )
    texts = (Path(str(file.locate())).read_bytes() for file in sources if (file.size or 0) <= LARGEST)
    alike = True
    for name, size in SIZES.items():
        text = bytearray()
        while len(text) < size:
            text += next(texts)
        digest = hashlib.sha256(text).hexdigest()
        (directory / name).write_bytes(lzma.compress(text))
        print(f"{name}: {len(text)} bytes, {digest}")
        alike = alike and digest == DIGESTS[name]
    if not alike:
        print(f"these are not the texts of docs/data/ladder.jsonl: torch is {torch.version} here", file=sys.stderr)
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
