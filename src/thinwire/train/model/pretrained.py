"""``thinwire train --init FOLDER``: a causal language model of Hugging Face's is what is trained, whole or by adapters.

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
from thinwire.train.config import Config

KEPT = "hf"
"""The folder in --out of what is no tensor."""
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
        found = [module for module in self.modules() if type(module).__name__ in classes]
        if not found:
            raise ThinwireError(f"{type(self.hub).__name__} does not say what its layers are: take --engine ddp")
        return found

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
        """What :mod:`thinwire.train.checkpoint.run_settings` calls the model's shape."""
        config = self.hub.config
        names = {
            "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads", "hidden": "intermediate_size",
        }  # fmt: skip
        found = {name: getattr(config, theirs, None) for name, theirs in names.items()}
        return found | {"family": config.model_type, "vocabulary": self.vocabulary, "context": 0}


def load(config: Config) -> Pretrained:
    """The model in ``config.init``, in fp32, with new adapters where ``config.lora`` asks for them.

    Raises:
        ThinwireError: there is none, it lacks weights, or has none of the modules that adapters are for.
    """
    assert config.init is not None
    folder = Path(config.init)
    if not (folder / "config.json").is_file():
        raise ThinwireError(f"--init {folder} is no Hugging Face folder: it has no config.json")
    with _quiet(f"cannot load the model in {folder}"):
        hub, about = extras.load("transformers").AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    if lacking := sorted(about["missing_keys"]):
        raise ThinwireError(f"--init {folder} has no weights for {lacking[0]} ({len(lacking)} are missing)")
    digest = _digest(hub)
    return Pretrained(_adapted(hub, config), digest)


def _adapted(hub: Any, config: Config) -> Any:
    if not config.lora:
        return hub
    peft = extras.load("peft")
    settings = peft.LoraConfig(
        r=config.lora, lora_alpha=config.alpha, target_modules=list(config.lora_targets) or "all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(config.seed)  # the same adapters on all ranks
    with _quiet("--lora"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # GPT-2's transposed matrices, which peft notices
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers, which no user can change
        return peft.get_peft_model(hub, settings)


def keep(config: Config, folder: Path) -> None:
    """Write what a run needs beside its checkpoints, ``folder``/hf."""
    transformers, kept = extras.load("transformers"), folder / KEPT
    with _quiet(f"cannot load the tokenizer in {config.init}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.init, local_files_only=True)
        kept.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(kept)
        transformers.AutoConfig.from_pretrained(config.init, local_files_only=True).save_pretrained(kept)
    assert config.init is not None
    if (source := Path(config.init, GENERATION)).exists():
        shutil.copyfile(source, kept / GENERATION)
    if not (kept / "tokenizer.json").exists():
        raise ThinwireError(f"the tokenizer in {config.init} has no tokenizer.json, nor can one be made")


def tokenizer_of(folder: Path) -> Any:
    """transformers' tokenizer of a run's ``folder``/hf, or of a Hugging Face folder."""
    with _quiet(f"cannot load the tokenizer in {folder}"):
        return extras.load("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)


def rebuilt(config: Config, run: Path, digest: str, weights: Mapping[str, Tensor]) -> Pretrained:
    """The model with a checkpoint's ``weights``; what they lack (all but the adapters) is the --init folder's.

    Raises:
        ThinwireError: that folder is gone, or holds another model than the run began with.
    """
    with _quiet(f"cannot read {run / KEPT}"):
        transformers = extras.load("transformers")
        about = transformers.AutoConfig.from_pretrained(run / KEPT, local_files_only=True)
        if not config.lora:
            model = Pretrained(transformers.AutoModelForCausalLM.from_config(about, dtype=torch.float32))
    if config.lora or any(name not in weights for name, _ in model.named_parameters()):
        model = load(config)
        if model.digest != digest:
            raise ThinwireError(f"{config.init} does not hold the weights that the run began with")
    named = dict(model.named_parameters())
    if unknown := sorted({*weights} - {*named}):
        raise ThinwireError(f"{run} holds {unknown[0]}, which the model has not")
    with torch.no_grad():
        for name, value in weights.items():
            named[name].copy_(value)
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
    try:
        with _quiet("cannot export"):
            whole = model.hub if adapter or not merges else model.hub.merge_and_unload()
            whole.save_pretrained(folder)
            tokenizer_of(run / KEPT).save_pretrained(folder)
            if not adapter and (run / KEPT / GENERATION).exists():
                shutil.copyfile(run / KEPT / GENERATION, folder / GENERATION)
    except OSError as error:
        raise ThinwireError(f"cannot write to {folder}: {error.strerror}") from None


def _digest(hub: nn.Module) -> str:
    """A hash of all weights, on the CPU."""
    found = hashlib.blake2b(digest_size=8)
    for name, weight in hub.named_parameters():
        found.update(f"{name} {tuple(weight.shape)}".encode())
        found.update(weight.detach().contiguous().numpy().data)
    return found.hexdigest()


@contextlib.contextmanager
def _quiet(what: str) -> Iterator[None]:
    """transformers draws no bars and tells no stories in here; its errors are one line that begins with ``what``."""
    told = extras.load("transformers").utils.logging
    level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    try:
        yield
    except (ThinwireError, ModuleNotFoundError):
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ThinwireError(f"{what}: {next(iter(str(error).strip().splitlines()), type(error).__name__)}") from None
    finally:
        told.set_verbosity(level)
        if bars:
            told.enable_progress_bar()
