"""GPT-2-style and Llama-style decoders of any size, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.train.model.shapes import ModelConfig


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021), halves form: x (B, H, T, D), cos and sin (T, D / 2)."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention; keys and values may have fewer heads than queries."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.width // shape.heads
        bias = shape.family == "gpt"
        self.query = nn.Linear(shape.width, shape.width, bias=bias)
        self.key = nn.Linear(shape.width, shape.kv_heads * self.size, bias=bias)
        self.value = nn.Linear(shape.width, shape.kv_heads * self.size, bias=bias)
        self.output = nn.Linear(shape.width, shape.width, bias=bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, length, width = x.shape  # (B, T, width)
        query = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        key = self.key(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        value = self.value(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        if rope is not None:
            query, key = rotate(query, *rope).to(value.dtype), rotate(key, *rope).to(value.dtype)
        grouped = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """GELU (gpt), or SwiGLU (llama)."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        gpt = shape.family == "gpt"
        # Not named "gate": code that goes by names takes a gate for a router.
        self.side = None if gpt else nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=gpt)
        self.output = nn.Linear(shape.hidden, shape.width, bias=gpt)

    def forward(self, x: Tensor) -> Tensor:
        if self.side is None:
            return self.output(F.gelu(self.up(x), approximate="tanh"))
        return self.output(F.silu(self.side(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm block: attention, then MLP, each added to its input."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        norm = nn.LayerNorm if shape.family == "gpt" else nn.RMSNorm
        self.attention_norm, self.attention = norm(shape.width, eps=1e-5), Attention(shape)
        self.mlp_norm, self.mlp = norm(shape.width, eps=1e-5), Mlp(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens (B, T) -> logits (B, T, vocabulary), or the mean cross entropy when ``targets`` (B, T) are given."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.shape = shape = shape.check()
        gpt = shape.family == "gpt"
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if gpt else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.LayerNorm if gpt else nn.RMSNorm)(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if gpt:
            self.head.weight = self.embedding.weight
        self.apply(self._initialize)
        for name, parameter in self.named_parameters():
            if name.endswith("output.weight"):
                # Each layer adds twice: this keeps the variance of the sum the same from the first layer to the last.
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers))

    @property
    def context(self) -> int:
        """Longest sequence, in tokens."""
        return self.shape.context

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def _rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size = self.shape.width // self.shape.heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
        return angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        x, rope = self.embedding(tokens), None
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        else:
            rope = self._rope(length, tokens.device)
        for block in self.blocks:
            x = block(x, rope)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
