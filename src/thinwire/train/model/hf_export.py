"""Export of a decoder as a Hugging Face folder, which transformers loads with the same logits.

    FOLDER/config.json   model.safetensors   tokenizer.json   tokenizer_config.json

The family "gpt" becomes a ``GPT2LMHeadModel``, "llama" a ``LlamaForCausalLM``. Writing needs no transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.extras import save_file
from thinwire.base.files import write
from thinwire.train.model.shapes import ModelConfig

EPSILON, ROPE_THETA = 1e-5, 10000.0


def export(shape: ModelConfig, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
    """Write the model to ``folder``, from ``Decoder.named_parameters()`` and its ``tokenizers.Tokenizer``.

    Raises:
        ThinwireError: transformers has no such architecture.
    """
    shape = shape.check()
    if shape.family == "gpt" and shape.kv_heads != shape.heads:
        raise ThinwireError("GPT-2 has no grouped-query attention: only the family llama is exported with it")
    contiguous = {name: weight.contiguous() for name, weight in _rename(weights, shape.family).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.context}
    write(folder / "tokenizer_config.json", json.dumps(tokenizer_config, indent=2) + "\n")
    write(folder / "config.json", json.dumps(_config(shape), indent=2) + "\n")


def _config(shape: ModelConfig) -> dict[str, Any]:
    if shape.family == "gpt":
        settings = {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": shape.layers, "n_embd": shape.width,
            "n_head": shape.heads, "n_inner": shape.hidden, "n_positions": shape.context, "layer_norm_epsilon": EPSILON,
            "activation_function": "gelu_new", "tie_word_embeddings": True, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }  # fmt: skip
    else:
        settings = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": shape.layers,
            "hidden_size": shape.width, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.hidden, "max_position_embeddings": shape.context, "rms_norm_eps": EPSILON,
            "rope_theta": ROPE_THETA, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
        }  # fmt: skip
    common = {"vocab_size": shape.vocabulary, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None}
    return settings | common


_NAMES = {
    "embedding": ("transformer.wte", "model.embed_tokens"),
    "positions": ("transformer.wpe", ""),
    "norm": ("transformer.ln_f", "model.norm"),
    "head": ("", "lm_head"),
    "blocks": ("transformer.h", "model.layers"),
    "attention_norm": ("ln_1", "input_layernorm"),
    "attention.query": ("attn.c_attn", "self_attn.q_proj"),
    "attention.key": ("", "self_attn.k_proj"),
    "attention.value": ("", "self_attn.v_proj"),
    "attention.output": ("attn.c_proj", "self_attn.o_proj"),
    "mlp_norm": ("ln_2", "post_attention_layernorm"),
    "mlp.side": ("", "mlp.gate_proj"),
    "mlp.up": ("mlp.c_fc", "mlp.up_proj"),
    "mlp.output": ("mlp.c_proj", "mlp.down_proj"),
}
"""{our name of a module: (GPT-2's, Llama's)}; "": the architecture has no such module."""


def _rename(weights: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Rename weights for the architecture; transpose GPT-2's matrices, and join its queries, keys and values."""
    gpt, renamed = family == "gpt", {}
    names = {module_name: hub_names[0 if gpt else 1] for module_name, hub_names in _NAMES.items()}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        if not module.startswith("blocks."):
            renamed[f"{names[module]}.{kind}"] = weight
            continue
        _, layer, role = module.split(".", 2)
        if gpt:
            if role == "attention.query":
                weight = torch.cat([weights[name.replace("query", role_)] for role_ in ("query", "key", "value")])
            weight = weight.t()  # a vector is its own transpose
        if names[role]:
            renamed[f"{names['blocks']}.{layer}.{names[role]}.{kind}"] = weight
    return renamed
