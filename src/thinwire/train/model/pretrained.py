"""Fine-tuning (``thinwire train --init FOLDER``) of a Hugging Face causal language model, whole or by adapters.

    OUT/hf/   config.json, the tokenizer and its chat template: with a checkpoint's weights, the whole model

A checkpoint holds what is trained: all weights, or with ``--lora`` only the adapters. The model of adapters needs
FOLDER, too, which the checkpoint identifies by a hash of its weights.
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
from tokenizers import Tokenizer as HubTokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, first_line
from thinwire.core.names import persistent_buffers
from thinwire.train.model.shapes import hub_folder

HUB_FOLDER = "hf"  # folder in --out of the model's files that hold no tensors
GENERATION = "generation_config.json"


class Pretrained(nn.Module):
    """Tokens (B, T) -> logits (B, T, vocabulary), or the mean cross entropy over ``targets`` (B, T) other than -100.

    Padding after the text needs no mask: no token sees later ones.

    Attributes:
        hub: a model of transformers, or one of peft around it.
        digest: a hash of the weights that it was loaded with; "" if they are a checkpoint's.
    """

    def __init__(self, hub: Any, digest: str = "") -> None:
        super().__init__()
        self.hub, self.digest = hub, digest

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        # Without a cache, models read the positions of their tokens, whose values a profile's do not have.
        logits = self.hub(input_ids=tokens, use_cache=tokens.is_meta).logits
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder's layers: modules of the class that transformers says must not be split."""
        classes = {name for module in self.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        blocks = [module for module in self.modules() if type(module).__name__ in classes]
        if not blocks:
            raise ThinwireError(f"{type(self.hub).__name__} does not name its layers: use --engine ddp")
        return blocks

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: at least as many as the tokenizer has tokens."""
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
    """Load the model in the folder ``init`` in fp32; add adapters (arguments of ``LoraConfig``), drawn by ``seed``.

    Raises:
        ThinwireError: there is no model, it lacks weights, it is not causal, or it has none of the modules that
            adapters are for.
    """
    folder = hub_folder(init)
    with _quiet(f"cannot load the model in {folder}"):
        hub, report = extras.load("transformers").AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    if lacking := sorted(report["missing_keys"]):
        raise ThinwireError(f"--init {folder} has no weights for {lacking[0]} ({len(lacking)} are missing)")
    model = Pretrained(hub, _digest(hub))
    with _quiet(f"cannot try the model in {folder}"):
        if _sees_later(model):
            raise ThinwireError(
                f"--init {folder} is not causal ({type(hub).__name__}): its tokens see later ones, and would learn to "
                "copy them; take a model for text generation"
            )
    return model if adapters is None else Pretrained(_add_adapters(hub, adapters, seed), model.digest)


@torch.no_grad()
def _sees_later(model: Pretrained) -> bool:
    """Do the logits of two texts that differ in their last token alone differ before it, beyond rounding?"""
    tokens = torch.full((2, 8), model.vocabulary // 2, device="cpu")
    tokens[1, -1] //= 2
    one, other = model(tokens)[:, :-1].double()
    return bool((one - other).norm() > 1e-4 * one.norm())


def _add_adapters(hub: Any, adapters: dict[str, Any], seed: int) -> Any:
    peft = extras.load("peft")
    torch.manual_seed(seed)  # the same adapters on all ranks
    with _quiet("--lora"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft handles GPT-2's transposed matrices itself
        warnings.simplefilter("ignore", FutureWarning)  # about peft's use of transformers, which no user can change
        return peft.get_peft_model(hub, peft.LoraConfig(**adapters, task_type="CAUSAL_LM"))


def save_hub_files(init: str, run: Path) -> None:
    """Write to ``run``/hf what a run needs of the folder ``init`` besides its weights."""
    tokenizer, folder = load_tokenizer(Path(init)), run / HUB_FOLDER
    with _quiet(f"cannot copy the settings in {init}"):
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        extras.load("transformers").AutoConfig.from_pretrained(init, local_files_only=True).save_pretrained(folder)
    if (source := Path(init, GENERATION)).exists():
        shutil.copyfile(source, folder / GENERATION)


def load_tokenizer(folder: Path) -> Any:
    """Load transformers' tokenizer from a Hugging Face folder, or from the folder hf of a run."""
    with _quiet(f"cannot load the tokenizer in {folder}"):
        return extras.load("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)


def fast_tokenizer(hub: Any, init: str) -> HubTokenizer:
    """Return a copy of the tokenizer inside ``hub``, transformers' own of the folder ``init``: its tokenizer.json."""
    backend = getattr(hub, "backend_tokenizer", None)
    if backend is None:
        raise ThinwireError(f"the tokenizer in {init} has no tokenizer.json, and none can be made from it")
    return HubTokenizer.from_str(backend.to_str())


def rebuild(
    init: str, adapters: dict[str, Any] | None, run: Path, digest: str, weights: Mapping[str, Tensor]
) -> Pretrained:
    """Build the model with a checkpoint's ``weights`` and buffers; those that it lacks (all but adapters) come from
    ``init``.

    Raises:
        ThinwireError: the folder ``init`` is gone, or holds another model than the run began with; or the checkpoint
            lacks something that is trained, or a buffer.
    """
    with _quiet(f"cannot read {run / HUB_FOLDER}"):
        transformers = extras.load("transformers")
        config = transformers.AutoConfig.from_pretrained(run / HUB_FOLDER, local_files_only=True)
        if adapters is None:
            model = Pretrained(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    if adapters is not None or any(name not in weights for name, _ in model.named_parameters()):
        if not Path(init).is_dir():
            raise ThinwireError(f"the model that the run began with is gone: {init} (config.yaml names it)")
        model = load(init, adapters)
        if model.digest != digest:
            buffer = next((name for name in persistent_buffers(model) if name not in weights), "")
            earlier = f"; or {run} is of an earlier version of Thinwire, which did not save {buffer}" if buffer else ""
            raise ThinwireError(
                f"{init} does not hold the weights that the run began with: put them back there{earlier}"
            )
    _, unknown = model.load_state_dict(weights, strict=False)
    if unknown:
        raise ThinwireError(f"{run} holds {unknown[0]}, which the model does not have")
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    if lacking := [name for name in (*trained, *persistent_buffers(model)) if name not in weights]:
        raise ThinwireError(f"{run} holds no {lacking[0]}, which the model has")
    return model.eval()


def export(model: Pretrained, run: Path, folder: Path, *, adapter: bool) -> None:
    """Write ``model``, with adapters merged into its weights, or only the ``adapter``; and its tokenizer.

    Raises:
        ThinwireError: there is no adapter.
    """
    merges = hasattr(model.hub, "merge_and_unload")
    if adapter and not merges:
        raise ThinwireError("--adapter is for runs with --lora: this run trained all weights")
    with _quiet(f"cannot write to {folder}"):
        whole = model.hub if adapter or not merges else model.hub.merge_and_unload()
        whole.save_pretrained(folder)
        load_tokenizer(run / HUB_FOLDER).save_pretrained(folder)
        if not adapter and (source := run / HUB_FOLDER / GENERATION).exists():
            shutil.copyfile(source, folder / GENERATION)


def _digest(hub: nn.Module) -> str:
    """Hash all weights and persistent buffers, which are on the CPU."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in (*hub.named_parameters(), *persistent_buffers(hub).items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def _quiet(trouble: str) -> Iterator[None]:
    """Silence transformers from here on; turn its errors in the block into one line that begins with ``trouble``."""
    logging = extras.load("transformers").utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except (ThinwireError, ModuleNotFoundError):
        raise
    except Exception as error:  # the libraries below raise bare ones, for a full disk, say
        raise ThinwireError(f"{trouble}: {first_line(error)}") from None
