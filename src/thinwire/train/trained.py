"""A trained model, read back from a run's folder without ranks: for ``thinwire sample`` and ``thinwire export``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.train import checkpoint, sample
from thinwire.train.checkpoint import Checkpoint
from thinwire.train.config import from_yaml, parsed
from thinwire.train.data import Tokenizer
from thinwire.train.export import export
from thinwire.train.models import Decoder, ModelConfig


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds of the model. ``weights``: name -> whole tensor, on the CPU."""

    path: Path
    step: int
    shape: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer

    def model(self) -> Decoder:
        """The model with its weights."""
        with torch.device("meta"):
            model = Decoder(self.shape)
        missing, unknown = model.load_state_dict(self.weights, strict=False, assign=True)
        tied = {"head.weight"} if self.shape.family == "gpt" else set()
        if set(missing) - tied or unknown:
            raise ThinwireError(f"{self.path} does not hold this model: {[*missing, *unknown][0]}")
        if tied:
            model.head.weight = model.embedding.weight
        return model


def read(place: Path) -> Trained:
    """The model of a run's folder (its newest good checkpoint that is whole), or of a checkpoint's.

    Raises:
        ThinwireError: there is none, it is damaged, or the run's config.yaml or tokenizer is gone.
    """
    trained, damaged = checkpoint.of(place, _read)
    for line in damaged:
        print(f"thinwire: {line}: passed over", file=sys.stderr)
    return trained


def _read(found: Checkpoint) -> Trained:
    about = found.meta["about"]
    run = found.path.parent.parent
    config = from_yaml(run / "config.yaml")
    tokenizer = Tokenizer(config.tokenizer, (), run, trains=False)
    known = {field.name: about[field.name] for field in fields(ModelConfig)}
    shape = ModelConfig(**{**known, "context": config.sequence}).check()  # a llama's is no part of what a run is
    weights = {name.removeprefix("model/"): value for name, value in checkpoint.whole(found, ["model/"])}
    return Trained(found.path, found.step, shape, weights, tokenizer)


@dataclass(frozen=True)
class SampleOptions:
    """Print text that a trained model goes on with."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or of one of its checkpoints."""
    prompt: str = "\n"
    """What the text begins with."""
    tokens: int = 300
    """Tokens to add."""
    temperature: float = 0.8
    """Lower: likelier tokens; 0: always the likeliest."""
    top_k: int = 50
    """Draw among so many likeliest tokens; 0: among all."""
    seed: int = 0


@dataclass(frozen=True)
class ExportOptions:
    """Write a trained model as a Hugging Face folder, which transformers loads."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or of one of its checkpoints."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write."""


def sample_main(argv: list[str]) -> int:
    """``thinwire sample RUN``."""
    options: Any = parsed(SampleOptions, argv, "thinwire sample")
    if options.tokens < 0 or options.temperature < 0 or options.top_k < 0:
        raise ThinwireError("--tokens, --temperature and --top-k must not be negative")
    trained = read(options.run)
    prompt = trained.tokenizer.encode(options.prompt)
    if not len(prompt):
        raise ThinwireError("--prompt must not be empty: the model goes on from something")
    drawn = sample.tokens(
        trained.model(), prompt.long(), options.tokens, temperature=options.temperature, top_k=options.top_k,
        seed=options.seed,
    )  # fmt: skip
    print(trained.tokenizer.decode([*prompt.tolist(), *drawn]))
    return 0


def export_main(argv: list[str]) -> int:
    """``thinwire export RUN FOLDER``."""
    options: Any = parsed(ExportOptions, argv, "thinwire export")
    trained = read(options.run)
    export(trained.shape, trained.weights, trained.tokenizer.as_hub(), options.folder)
    print(f"{trained.path} (step {trained.step}) is in {options.folder}: "
          f"transformers.AutoModelForCausalLM.from_pretrained('{options.folder}')")  # fmt: skip
    return 0
