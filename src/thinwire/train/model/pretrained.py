"""Fine-tuning (``thinwire train --init FOLDER``) of a causal language model of Hugging Face's, whole or by adapters.

    OUT/hf/   config.json, the tokenizer and its chat template: with a checkpoint's weights, all of the model

A checkpoint holds what is trained: all weights, or with ``--lora`` the adapters alone. Then FOLDER is needed to make a
model of it again, and the checkpoint knows it by a hash of its weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.base import extras
from thinwire.base.errors import ThinwireError

HUB_FOLDER = "hf"
"""Folder in --out of what is no tensor."""
GENERATION = "generation_config.json"


class Pretrained(nn.Module):
    """Tokens (B, T) -> logits (B, T, vocabulary), or the mean cross entropy over those of ``targets`` (B, T) that are
    not -100.

    Padding needs no mask where it comes after the text: no token sees those that follow.

    Attributes:
        hub: a model of transformers', or peft's around one.
        digest: a hash of the weights that it was loaded with; "" where they are a checkpoint's.
    """

    def __init__(self, hub: Any, digest: str = "") -> None:
        super().__init__()
        self.hub, self.digest = hub, digest

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.hub(input_ids=tokens, use_cache=False).logits
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder's layers, by the class that transformers says must not be split."""
        classes = {name for module in self.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        blocks = [module for module in self.modules() if type(module).__name__ in classes]
        if not blocks:
            raise ThinwireError(f"{type(self.hub).__name__} does not say what its layers are: take --engine ddp")
        return blocks

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: never fewer than the tokenizer has tokens."""
        return self.hub.get_input_embeddings().weight.shape[0]

    @property
    def context(self) -> int:
        """Longest sequence, in tokens."""
        return getattr(self.hub.config, "max_position_embeddings", None) or 1 << 20

    @property
    def shape(self) -> dict[str, Any]:
        """The model's shape, by the names of :mod:`thinwire.train.checkpoint.run_settings`."""
        config = self.hub.config
        names = {
            "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads", "hidden": "intermediate_size",
        }  # fmt: skip
        sizes = {name: getattr(config, hub_name, None) for name, hub_name in names.items()}
        return sizes | {"family": config.model_type, "vocabulary": self.vocabulary, "context": 0}


def load(init: str, adapters: dict[str, Any] | None, seed: int = 0) -> Pretrained:
    """Load the model in the folder ``init``, in fp32, with new ``adapters`` where there are to be any.

    Args:
        adapters: arguments of peft's ``LoraConfig``.
        seed: of the adapters' first values.

    Raises:
        ThinwireError: there is none, it lacks weights, or has none of the modules that adapters are for.
    """
    folder = Path(init)
    if not (folder / "config.json").is_file():
        raise ThinwireError(f"--init {folder} is no Hugging Face folder: it has no config.json")
    with _quiet(f"cannot load the model in {folder}"):
        hub, report = extras.load("transformers").AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    if lacking := sorted(report["missing_keys"]):
        raise ThinwireError(f"--init {folder} has no weights for {lacking[0]} ({len(lacking)} are missing)")
    digest = _digest(hub)
    return Pretrained(hub if adapters is None else _add_adapters(hub, adapters, seed), digest)


def _add_adapters(hub: Any, adapters: dict[str, Any], seed: int) -> Any:
    peft = extras.load("peft")
    torch.manual_seed(seed)  # the same adapters on all ranks
    with _quiet("--lora"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # GPT-2's transposed matrices, which peft notices
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers, which no user can change
        return peft.get_peft_model(hub, peft.LoraConfig(**adapters, task_type="CAUSAL_LM"))


def save_hub_files(init: str, run: Path) -> None:
    """Write what a run needs of the folder ``init`` beside its checkpoints to ``run``/hf."""
    tokenizer, folder = load_tokenizer(Path(init)), run / HUB_FOLDER
    with _quiet(f"cannot copy the settings in {init}"):
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        extras.load("transformers").AutoConfig.from_pretrained(init, local_files_only=True).save_pretrained(folder)
    if (source := Path(init, GENERATION)).exists():
        shutil.copyfile(source, folder / GENERATION)
    if not (folder / "tokenizer.json").exists():
        raise ThinwireError(f"the tokenizer in {init} has no tokenizer.json, nor can one be made")


def load_tokenizer(folder: Path) -> Any:
    """Load transformers' tokenizer of a run's ``folder``/hf, or of a Hugging Face folder."""
    with _quiet(f"cannot load the tokenizer in {folder}"):
        return extras.load("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)


def rebuild(
    init: str, adapters: dict[str, Any] | None, run: Path, digest: str, weights: Mapping[str, Tensor]
) -> Pretrained:
    """Build the model with a checkpoint's ``weights``; what they lack (all but the adapters) is the --init folder's.

    Raises:
        ThinwireError: that folder is gone, or holds another model than the run began with.
    """
    with _quiet(f"cannot read {run / HUB_FOLDER}"):
        transformers = extras.load("transformers")
        config = transformers.AutoConfig.from_pretrained(run / HUB_FOLDER, local_files_only=True)
        if adapters is None:
            model = Pretrained(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    if adapters is not None or any(name not in weights for name, _ in model.named_parameters()):
        model = load(init, adapters)
        if model.digest != digest:
            raise ThinwireError(f"{init} does not hold the weights that the run began with")
    _, unknown = model.load_state_dict(weights, strict=False)
    if unknown:
        raise ThinwireError(f"{run} holds {unknown[0]}, which the model has not")
    return model.eval()


def export(model: Pretrained, run: Path, folder: Path, *, adapter: bool) -> None:
    """Write ``model`` to ``folder``, with its tokenizer: adapters merged into the weights, or the ``adapter`` alone.

    Raises:
        ThinwireError: ``folder`` holds a model already, or there is no adapter.
    """
    merges = hasattr(model.hub, "merge_and_unload")
    if adapter and not merges:
        raise ThinwireError("--adapter: the run trained all weights (no --lora), there is no adapter")
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).exists():
            raise ThinwireError(f"{folder} holds a model already: name another folder")
    with _quiet(f"cannot write to {folder}"):
        whole = model.hub if adapter or not merges else model.hub.merge_and_unload()
        whole.save_pretrained(folder)
        load_tokenizer(run / HUB_FOLDER).save_pretrained(folder)
        if not adapter and (source := run / HUB_FOLDER / GENERATION).exists():
            shutil.copyfile(source, folder / GENERATION)


def _digest(hub: nn.Module) -> str:
    """Hash all weights, which are on the CPU."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in hub.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().contiguous().numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def _quiet(trouble: str) -> Iterator[None]:
    """Let transformers draw no bars and log nothing from here on; its errors become one line that begins with
    ``trouble``."""
    logging = extras.load("transformers").utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except (ThinwireError, ModuleNotFoundError):
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ThinwireError(f"{trouble}: {next(iter(str(error).strip().splitlines()), type(error).__name__)}") from None
