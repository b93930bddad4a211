"""Small models and batches for the engine tests: embeddings, norms, biases, odd shapes, a tied head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """``vocabulary`` 51 and ``width`` 18 divide by nothing in use; ``tied`` shares the head with the embedding."""

    def __init__(self, vocabulary: int = 51, width: int = 18, layers: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, rank: int, vocabulary: int = 51) -> tuple[Tensor, Tensor]:
    """(8, 16) tokens and the next ones: (3 t + 1) mod vocabulary, learnable."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, vocabulary, (8, 16), generator=generator, device="cpu")
    return tokens, (3 * tokens + 1) % vocabulary


def loss_of(model: nn.Module, step: int, rank: int, vocabulary: int = 51) -> Tensor:
    device = next(model.parameters()).device
    tokens, targets = (part.to(device) for part in batch(step, rank, vocabulary))
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def flat(model: nn.Module) -> Tensor:
    """All parameters in fp32, gathered where they are sharded, one after the other."""
    values = [parameter.detach() for parameter in model.parameters()]
    return torch.cat([(v.full_tensor() if hasattr(v, "full_tensor") else v).flatten().float() for v in values])
