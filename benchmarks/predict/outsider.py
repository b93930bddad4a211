"""``thinwire`` with one more method, ``twice``, that nothing in the package knows: is it predicted like the others?

    python benchmarks/predict/outsider.py train --method twice     # any command of thinwire
    python benchmarks/predict/draws.py --rates 125 --methods twice # held against the lab
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from thinwire import methods
from thinwire.cli.program import main
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.methods import Bf16


@dataclass
class Twice(Bf16):
    """The mean of two means in bfloat16: two messages for each buffer, and kernels of its own between them."""

    name: ClassVar[str] = "twice"

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        super().reduce(bucket, exchange)
        first = bucket.mean.clone()
        super().reduce(bucket, exchange)
        bucket.mean.add_(first).mul_(0.5)


def register() -> None:
    """Put ``twice`` among the methods of this process."""
    methods.TABLE = (*methods.TABLE, Twice)


if __name__ == "__main__":
    register()
    sys.exit(main(sys.argv[1:]))
