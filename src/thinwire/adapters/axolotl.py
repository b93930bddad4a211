"""Axolotl, by its config file alone.

plugins:
  - thinwire.adapters.axolotl.ThinwirePlugin
thinwire_method: int8
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from thinwire.adapters.transformers import attach


class ThinwireArgs(BaseModel):
    """The settings that the plugin adds to Axolotl's configuration."""

    thinwire_method: str = "int8"


class ThinwirePlugin(BasePlugin):
    """Compresses the gradients of Axolotl's Trainer by ``thinwire_method``, as ``attach`` does."""

    def get_input_args(self) -> str:
        return f"{ThinwireArgs.__module__}.{ThinwireArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        attach(trainer, cfg.thinwire_method or "int8")
