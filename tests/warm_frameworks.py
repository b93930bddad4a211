"""As ``warm.py``, with the frameworks that are installed."""

from __future__ import annotations

import contextlib
import importlib

import warm  # noqa: F401

for name in ("accelerate", "lightning.pytorch", "peft", "transformers"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401  (looked up when first asked for)
