"""``thinwire sample`` and ``thinwire export``: a trained model, read from a run's folder by one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.files import whole_or_empty
from thinwire.base.options import read_options
from thinwire.base.terminal import say
from thinwire.train.checkpoint.format import Checkpoint, read_newest
from thinwire.train.checkpoint.state import read_whole_tensors
from thinwire.train.config import LARGEST_SEED, Config, from_yaml, run_of
from thinwire.train.data.instruction_rows import opening_tokens
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.model import pretrained
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.hf_export import export
from thinwire.train.model.shapes import ModelConfig


@dataclass(frozen=True)
class TrainedModel:
    """The model that a checkpoint holds.

    Attributes:
        run: the run's folder, with config.yaml and the tokenizer.
        shape: None: ``config.init`` names a Hugging Face model, and ``init`` is the hash of its weights.
        weights: name -> whole tensor, on the CPU; persistent buffers, too.
    """

    path: Path
    step: int
    run: Path
    config: Config
    shape: ModelConfig | None
    init: str
    weights: dict[str, Tensor]
    tokenizer: Tokenizer

    def model(self) -> Any:
        if self.shape is None:
            init, adapters = self.config.init or "", self.config.adapters
            return pretrained.rebuild(init, adapters, self.run, self.init, self.weights)
        with torch.device("meta"):
            model = Decoder(self.shape)
        tied = {"head.weight": self.weights["embedding.weight"]} if self.shape.family == "gpt" else {}
        model.load_state_dict(self.weights | tied, assign=True)
        return model

    def export(self, folder: Path, *, adapter: bool = False) -> None:
        """Write the model as a Hugging Face folder. ``adapter``: write only the adapter of a run with --lora.

        Raises:
            ThinwireError: ``folder`` is not empty, or the model cannot be exported.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ThinwireError(f"{folder} holds files already: name another folder")
        with whole_or_empty(folder) as hidden:
            if self.shape is None:
                pretrained.export(self.model(), self.run, hidden, adapter=adapter)
            elif adapter:
                raise ThinwireError("--adapter is for runs with --lora")
            else:
                export(self.shape, self.weights, self.tokenizer.as_hub(), hidden)


def read(path: Path) -> TrainedModel:
    """Read the model of a run's folder (its newest good checkpoint that is whole), or of a checkpoint's.

    Raises:
        ThinwireError: there is none, it is damaged, or the run's config.yaml or tokenizer is gone.
    """
    return read_newest(path, _read)[0]


def _read(checkpoint: Checkpoint) -> TrainedModel:
    if not checkpoint.meta["good"]:
        say(f"thinwire: when {checkpoint.path} was saved, steps were skipped, or the loss was not finite", sys.stderr)
    description = checkpoint.meta["about"]
    run, init = run_of(checkpoint.path), description.get("init") or ""
    config = from_yaml(run / "config.yaml")
    shape = None
    if init:
        tokenizer = Tokenizer(f"folder:{config.init}", run / pretrained.HUB_FOLDER)
    else:
        tokenizer = Tokenizer(config.tokenizer, run)
        sizes = {field.name: description[field.name] for field in fields(ModelConfig)}
        # A run's description leaves out the context of a llama.
        shape = ModelConfig(**{**sizes, "context": config.sequence_length}).check()
        if (tokenizer.vocabulary, config.sequence_length) != (description["vocabulary"], description["sequence"]):
            raise ThinwireError(f"{run / 'config.yaml'} is not this run's any more: another tokenizer or seq_len")
    weights = {name.partition("/")[2]: saved for name, saved in read_whole_tensors(checkpoint, ["model/", "buffer/"])}
    return TrainedModel(checkpoint.path, checkpoint.step, run, config, shape, init, weights, tokenizer)


@dataclass(frozen=True)
class SampleOptions:
    """Let a trained model continue a text."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or of one of its checkpoints."""
    prompt: str = "\n"
    """Beginning of the text."""
    tokens: int = 300
    """Tokens to add."""
    temperature: float = 0.8
    """Lower: likelier tokens; 0: always the likeliest."""
    top_k: int = 50
    """Draw among this many of the likeliest tokens; 0: among all."""
    seed: int = 0
    """Another seed gives another text."""


@dataclass(frozen=True)
class ExportOptions:
    """Write a trained model as a Hugging Face folder, which transformers loads."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or of one of its checkpoints."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write."""
    adapter: bool = False
    """For a run with --lora: write only peft's adapter, not the model with the adapter merged into it."""


def generate(
    model: Any, prompt: Tensor, count: int, *, temperature: float = 1.0, top_k: int = 0, seed: int = 0,
    end: int | None = None,
) -> Iterator[int]:  # fmt: skip
    """Yield ``count`` tokens that follow ``prompt``, (T,) int64 with T >= 1; stop before the token ``end``.

    ``model`` (Decoder or Pretrained) sees as many earlier tokens as its context holds. Knobs as in ``SampleOptions``.

    Raises:
        ThinwireError: an output of the model is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    text = prompt.tolist()
    model.eval()
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([text[-model.context :]], device="cpu"))[0, -1].float()
        if not logits.max().isfinite():  # a model may rule tokens out by -inf
            raise ThinwireError("the model's output is not finite: nothing can be drawn from it")
        if top_k:
            threshold = logits.topk(min(top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        if token == end:
            return
        text.append(token)
        yield token


def sample_main(argv: list[str]) -> int:
    options: Any = read_options(SampleOptions, argv, "thinwire sample")
    if options.tokens < 0 or options.top_k < 0:
        raise ThinwireError("--tokens and --top-k must not be negative")
    if not (options.temperature == 0 or 1e-6 <= options.temperature <= 1e6):
        raise ThinwireError(f"--temperature is 0 or from 1e-6 to 1e6, got {options.temperature:g}")
    if abs(options.seed) > LARGEST_SEED:
        raise ThinwireError(f"--seed is a whole number up to {LARGEST_SEED:,} in size, got {options.seed}")
    if any("\ud800" <= letter <= "\udfff" for letter in options.prompt):  # so Python reads bytes that are no UTF-8
        raise ThinwireError("--prompt is not UTF-8 text")
    trained = read(options.run)
    tokenizer = trained.tokenizer
    prompt = tokenizer.encode(options.prompt)
    if not len(prompt):
        raise ThinwireError("--prompt must not be empty: the model needs a beginning to continue")
    # Our own models have no end-of-text token, and rows of --data alone begin with a begin-of-text token.
    hub = None if trained.shape else pretrained.load_tokenizer(trained.run / pretrained.HUB_FOLDER)
    end = None if hub is None else hub.eos_token_id
    opening = opening_tokens(hub) if hub is not None and trained.config.data else []
    context = prompt.long()
    if context[: len(opening)].tolist() != opening:
        context = torch.cat([torch.tensor(opening, dtype=torch.int64, device="cpu"), context])
    tokens = generate(
        trained.model(), context, options.tokens, temperature=options.temperature, top_k=options.top_k,
        seed=options.seed, end=end,
    )  # fmt: skip
    for text in _growing(tokenizer, prompt.tolist(), tokens):
        print(text, end="", flush=True)
    print()
    return 0


def _growing(tokenizer: Tokenizer, prompt: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text of ``prompt`` and then what ``tokens`` add to it, letter by letter as soon as one is complete."""
    shown = tokenizer.decode(prompt)
    yield shown
    for token in tokens:
        prompt.append(token)
        text = tokenizer.decode(prompt)
        if text.startswith(shown) and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(prompt)[len(shown) :]


def export_main(argv: list[str]) -> int:
    options: Any = read_options(ExportOptions, argv, "thinwire export")
    trained = read(options.run)
    trained.export(options.folder, adapter=options.adapter)
    loader = "peft.AutoPeftModelForCausalLM" if options.adapter else "transformers.AutoModelForCausalLM"
    say(f"{trained.path} (step {trained.step}) is in {options.folder}: {loader}.from_pretrained('{options.folder}')")
    return 0
