"""The plugin that a config file of Axolotl names, loaded by Axolotl's own manager of plugins."""

from __future__ import annotations

import ranks
from frameworks import Sequences, gpt2, launched, needs


def _plugged(rank: int, world: int, folder: str) -> dict[str, object]:
    launched(rank, world)
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault
    from transformers import Trainer, TrainingArguments

    from thinwire.adapters.axolotl import ThinwireArgs

    manager = PluginManager.get_instance()
    manager.register("thinwire.adapters.axolotl.ThinwirePlugin")
    found: dict[str, object] = {"arguments": manager.get_input_args(), "default": ThinwireArgs().thinwire_method}
    for method in (None, "topk:density:0.05"):
        trainer = Trainer(gpt2(), TrainingArguments(folder, use_cpu=True, report_to=[]), train_dataset=Sequences())
        manager.post_trainer_create(DictDefault({"thinwire_method": method} if method else {}), trainer)
        found[str(method)] = trainer.callback_handler.callbacks[0].method
    return found


@needs("axolotl", "transformers", "accelerate")
def test_a_config_file_names_the_plugin_and_its_method(tmp_path):
    assert ranks.run(_plugged, 1, str(tmp_path), warm="warm_frameworks") == [{
        "arguments": ["thinwire.adapters.axolotl.ThinwireArgs"], "default": "int8", "None": "int8",
        "topk:density:0.05": "topk:density:0.05",
    }]  # fmt: skip
