"""Generation of text by a trained model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.train.model.decoder import Decoder
from thinwire.train.model.pretrained import Pretrained


def generate(
    model: Decoder | Pretrained, prompt: Tensor, count: int, *, temperature: float = 1.0, top_k: int = 0, seed: int = 0,
    end: int | None = None,
) -> Iterator[int]:  # fmt: skip
    """Yield ``count`` tokens that follow ``prompt``, (T,) int64 with T >= 1; fewer if ``end`` is one of them.

    Each is drawn given as many tokens before it as the model's context holds.

    Args:
        temperature: lower => likelier tokens; 0: always the likeliest.
        top_k: draw among so many likeliest tokens; 0: among all.
    """
    generator = torch.Generator().manual_seed(seed)
    text = prompt.tolist()
    model.eval()
    for _ in range(count):
        with torch.no_grad():
            window = torch.tensor([text[-model.context :]])
            logits = model(window)[0, -1].float()
        text.append(_draw(logits, temperature, top_k, generator))
        if text[-1] == end:
            return
        yield text[-1]


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        threshold = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
