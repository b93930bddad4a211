"""As ``warm.py``, with the frameworks that are installed."""

from __future__ import annotations

import contextlib
import gc
import importlib

import warm  # noqa: F401

LIBRARIES = (
    "accelerate", "lightning.pytorch", "peft",
    "transformers.trainer", "transformers.models.gpt2.modeling_gpt2",  # which transformers imports when first asked
    "transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto",
)  # fmt: skip

for name in LIBRARIES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

gc.freeze()  # frameworks collect often, and what is here they would look through each time
