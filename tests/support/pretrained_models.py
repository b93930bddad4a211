"""Hugging Face folders for tests: tiny models with weights drawn here, and a tokenizer trained on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TEXT = [f"{i} times {i % 7} is {i * (i % 7)}.\n" for i in range(3000)]
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


TOKENIZERS = ["ByteLevel", "ByteLevel with a space", "Prepend", "Metaspace"]


def make_tokenizer(kind: str) -> Any:
    """Return a BPE of tokenizers, one of ``TOKENIZERS``: "ByteLevel", or one that begins a text with a space, by
    "Prepend" (Llama 2), "Metaspace" (Llama's in transformers 5) or "ByteLevel with a space"."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "Prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    elif kind == "Metaspace":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind != "ByteLevel")
        made.decoder = decoders.ByteLevel()
    letters = list("\n<|>abcdefghijklmnopqrstuvwxyz#") + pre_tokenizers.ByteLevel.alphabet() * kind.startswith("Byte")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator([line.strip() for line in TEXT], trainer)
    return made


def make(folder: Path, kind: str = "llama", seed: int = 0) -> Path:
    """A folder with a "llama" (grouped-query attention, its own head), a "gpt2" (tied head, dropout), a "deepseek"
    (experts, whose router has a bias that is a buffer) or a "bert" (which is not causal)."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    torch.manual_seed(seed)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=304, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, **ends,
        ))  # fmt: skip
    elif kind == "deepseek":
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
            vocab_size=304, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
            n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=16, max_position_embeddings=64, **ends,
        ))  # fmt: skip
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
    elif kind == "bert":
        model = transformers.BertLMHeadModel(transformers.BertConfig(
            vocab_size=304, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64,
        ))  # fmt: skip
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=304, n_positions=64, n_embd=32, n_layer=2, n_head=4, **ends)
        )
    model.save_pretrained(folder)
    return folder
