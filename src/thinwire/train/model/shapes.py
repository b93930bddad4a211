"""Shapes of models, and the presets. This module needs no torch: a command line is read before torch is imported.

GPT 125M, 345M (Megatron's name), 355M (GPT-2 medium, the same shape) and 1.3B after GPT-2 and GPT-3 (Brown et al. 2020,
Table 2.1), as are 2.7B, 6.7B and 13B; GPT 2.0B after Radius (MLSys 2025, Table 1); Llama 500M and 1.8B in the shape of
H2O-Danube3-500M and H2O-Danube-1.8B, as SCAPE trains them; Llama 7B and 13B after Touvron et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from thinwire.base.errors import ThinwireError


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
        """Return the shape with its zeros filled in; raise ThinwireError if its numbers do not fit each other."""
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
    "gpt-2.7b": replace(_GPT, layers=32, width=2560, heads=32, context=2048),
    "gpt-6.7b": replace(_GPT, layers=32, width=4096, heads=32, context=2048),
    "gpt-13b": replace(_GPT, layers=40, width=5120, heads=40, context=2048),
    "llama-500m": replace(_LLAMA, layers=16, width=1536, heads=16, kv_heads=8, hidden=4096),
    "llama-1.8b": replace(_LLAMA, layers=24, width=2560, heads=32, kv_heads=8, hidden=6912),
    "llama-7b": replace(_LLAMA, layers=32, width=4096, heads=32, hidden=11008),
    "llama-13b": replace(_LLAMA, layers=40, width=5120, heads=40, hidden=13824),
}


def hub_folder(init: str) -> Path:
    """Return the Hugging Face folder of --init.

    Raises:
        ThinwireError: it has no config.json, in which the shape of a model stands.
    """
    folder = Path(init)
    if not (folder / "config.json").is_file():
        raise ThinwireError(f"--init {folder} is no Hugging Face folder: it has no config.json")
    return folder
