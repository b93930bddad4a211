"""Export of a decoder as a Hugging Face folder, which transformers loads with the same logits.

    FOLDER/config.json   model.safetensors   tokenizer.json   tokenizer_config.json

The family "gpt" is GPT-2's architecture (``GPT2LMHeadModel``), "llama" Llama's (``LlamaForCausalLM``). Written with
safetensors and tokenizers alone: transformers is not needed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.extras import save_file
from thinwire.train.model.shapes import ModelConfig

EPSILON, ROPE_THETA = 1e-5, 10000.0


def export(shape: ModelConfig, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
    """Write the model to ``folder``.

    Args:
        weights: as ``Decoder.named_parameters()`` names them.
        tokenizer: a ``tokenizers.Tokenizer`` that gives the tokens the model was trained on.

    Raises:
        ThinwireError: ``folder`` holds a model already, or the architecture has no counterpart there.
    """
    shape = shape.check()
    if (folder / "config.json").exists():
        raise ThinwireError(f"{folder} holds a model already: name another folder")
    config = _gpt_config(shape) if shape.family == "gpt" else _llama_config(shape)
    renamed = _gpt_weights(shape, weights) if shape.family == "gpt" else _llama_weights(shape, weights)
    common = {"vocab_size": shape.vocabulary, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: weight.contiguous() for name, weight in renamed.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(folder / "tokenizer.json"))
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.context}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
        (folder / "config.json").write_text(json.dumps(config | common, indent=2) + "\n")
    except OSError as error:
        raise ThinwireError(f"cannot write to {folder}: {error.strerror}") from None


def _gpt_config(shape: ModelConfig) -> dict[str, Any]:
    if shape.kv_heads != shape.heads:
        raise ThinwireError("GPT-2 has no grouped-query attention: only the family llama is exported with it")
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": shape.layers, "n_embd": shape.width,
        "n_head": shape.heads, "n_inner": shape.hidden, "n_positions": shape.context, "layer_norm_epsilon": EPSILON,
        "activation_function": "gelu_new", "tie_word_embeddings": True, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }  # fmt: skip


def _llama_config(shape: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": shape.layers,
        "hidden_size": shape.width, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.hidden, "max_position_embeddings": shape.context, "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    }  # fmt: skip


def _gpt_weights(shape: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights: GPT-2 keeps its matrices transposed, and queries, keys and values in one."""
    renamed = {
        "transformer.wte.weight": weights["embedding.weight"],
        "transformer.wpe.weight": weights["positions.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "transformer.ln_f.bias": weights["norm.bias"],
    }
    for layer in range(shape.layers):
        block = f"blocks.{layer}"
        for kind in ("weight", "bias"):
            joined = torch.cat([weights[f"{block}.attention.{role}.{kind}"] for role in ("query", "key", "value")])
            tensors = {
                "ln_1": weights[f"{block}.attention_norm.{kind}"],
                "ln_2": weights[f"{block}.mlp_norm.{kind}"],
                "attn.c_attn": joined.t(),
                "attn.c_proj": weights[f"{block}.attention.output.{kind}"].t(),
                "mlp.c_fc": weights[f"{block}.mlp.up.{kind}"].t(),
                "mlp.c_proj": weights[f"{block}.mlp.output.{kind}"].t(),
            }  # a vector is its own transpose
            renamed |= {f"transformer.h.{layer}.{name}.{kind}": tensor for name, tensor in tensors.items()}
    return renamed


_LLAMA_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.side": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.output": "mlp.down_proj",
}


def _llama_weights(shape: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["norm.weight"],
        "lm_head.weight": weights["head.weight"],
    }
    for layer in range(shape.layers):
        for name, llama_name in _LLAMA_NAMES.items():
            renamed[f"model.layers.{layer}.{llama_name}.weight"] = weights[f"blocks.{layer}.{name}.weight"]
    return renamed
