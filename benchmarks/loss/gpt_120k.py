"""The ladder's model of 120 thousand parameters, as ``thinwire simulate`` takes one.

    thinwire simulate --model benchmarks/loss/gpt_120k.py:model --cluster l40s-1g --link 50mbit --nodes 4 \\
        --tokens 256 --method "trickle(smallest=1024),trickle:muon(smallest=1024)" --json > docs/data/clock-50mbit.json
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.train.config import from_arguments
from thinwire.train.model.decoder import Decoder

WORDS = "--preset tiny --layers 2 --width 64 --heads 2 --seq-len 64"


def model() -> tuple[Decoder, tuple[Tensor]]:
    return Decoder(from_arguments(WORDS.split()).shape(256)), (torch.zeros(1, 64, dtype=torch.long),)
