"""GPT-2-style and Llama-style decoders of any size, in plain torch.

Shapes of the presets: GPT 125M, 345M (Megatron's name), 355M (GPT-2 medium, the same shape) and 1.3B after GPT-2 and
GPT-3 (Brown et al. 2020, Table 2.1); GPT 2.0B after Radius (MLSys 2025, Table 1); Llama 500M and 1.8B in the shape of
H2O-Danube3-500M and H2O-Danube-1.8B, as SCAPE trains them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ThinwireError


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder.

    Attributes:
        family: "gpt" (learned positions, LayerNorm, GELU, biases, tied head) or "llama" (RoPE, RMSNorm, SwiGLU, no
            biases, a head of its own).
        layers, width, heads: blocks, values per token, attention heads (width is a multiple of heads).
        kv_heads: heads of keys and values, fewer than ``heads`` for grouped-query attention; 0: as many.
        hidden: width inside the MLP; 0: 4 * width.
        context: longest sequence, in tokens.
        vocabulary: number of tokens.
    """

    family: Literal["gpt", "llama"] = "gpt"
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 0
    hidden: int = 0
    context: int = 128
    vocabulary: int = 256

    def check(self) -> ModelConfig:
        """Fill in what is 0, and refuse what does not fit."""
        shape = replace(self, kv_heads=self.kv_heads or self.heads, hidden=self.hidden or 4 * self.width)
        if min(shape.layers, shape.width, shape.heads, shape.hidden, shape.context, shape.vocabulary) < 1:
            raise ThinwireError(f"every number of a model's shape must be 1 or more, got {shape}")
        if shape.width % shape.heads:
            raise ThinwireError(f"width {shape.width} is not a multiple of {shape.heads} heads")
        if shape.heads % shape.kv_heads:
            raise ThinwireError(f"{shape.heads} heads cannot share {shape.kv_heads} heads of keys and values evenly")
        if shape.family == "llama" and shape.width // shape.heads % 2:
            raise ThinwireError(f"RoPE needs an even head size, got {shape.width // shape.heads}")
        return shape


_GPT = ModelConfig(context=1024, vocabulary=50257)
_LLAMA = ModelConfig(family="llama", context=2048, vocabulary=32000)

PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(layers=2, width=128, heads=4, context=64),
    "small": ModelConfig(layers=4, width=128, heads=4, context=128),
    "laptop": ModelConfig(layers=6, width=192, heads=6, context=256),
    "net20m": ModelConfig(layers=6, width=512, heads=8, context=64),
    "llama-tiny": ModelConfig(family="llama", layers=2, width=128, heads=4, kv_heads=2, hidden=344, context=64),
    "llama-small": ModelConfig(family="llama", layers=4, width=128, heads=4, kv_heads=2, hidden=344, context=128),
    "gpt-125m": replace(_GPT, layers=12, width=768, heads=12),
    "gpt-345m": replace(_GPT, layers=24, width=1024, heads=16),
    "gpt-355m": replace(_GPT, layers=24, width=1024, heads=16),
    "gpt-1.3b": replace(_GPT, layers=24, width=2048, heads=16, context=2048),
    "gpt-2.0b": replace(_GPT, layers=24, width=2560, heads=32),
    "llama-500m": replace(_LLAMA, layers=16, width=1536, heads=16, kv_heads=8, hidden=4096),
    "llama-1.8b": replace(_LLAMA, layers=24, width=2560, heads=32, kv_heads=8, hidden=6912),
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), halves form: x (B, H, T, D), cos and sin (T, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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


class GeluMlp(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.gelu(self.up(x), approximate="tanh"))


class SwigluMlp(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        # "side" and not "gate": a gate is a router to those who read names.
        self.side = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.output = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.silu(self.side(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm: attention, then MLP, each added to what came in."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        gpt = shape.family == "gpt"
        norm = nn.LayerNorm if gpt else nn.RMSNorm
        self.attention_norm, self.attention = norm(shape.width, eps=1e-5), Attention(shape)
        self.mlp_norm, self.mlp = norm(shape.width, eps=1e-5), GeluMlp(shape) if gpt else SwigluMlp(shape)

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
                # Two additions per layer: keep the variance of the sum at the last layer what it is at the first.
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


def parameter_count(shape: ModelConfig) -> int:
    """Parameters of the model, tied ones once. Allocates nothing."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())
