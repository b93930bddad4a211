"""The settings of a run, which a YAML file, the command line or a Python object gives."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, refuse_any
from thinwire.base.help import Option
from thinwire.base.knobs import Within, check_types
from thinwire.base.options import read_options
from thinwire.lab.link import share
from thinwire.predict.cluster import read_cluster
from thinwire.train.model.shapes import PRESETS, ModelConfig, hub_folder

SHAPE = ("family", "layers", "width", "heads", "kv_heads", "hidden")  # settings that override the preset's shape
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # the variable with the address of torchft's lighthouse
LARGEST_SEED = 2**43  # the seed of an epoch's shuffle is about a million times as large, and torch takes 64 bits
LARGEST_RATE = 1e15  # optimizers multiply rates, or divide by 1 - beta, and the result has to be a float32

_NOT_NEGATIVE = Within(lambda value: value >= 0, "must not be negative")
Count = Annotated[int, Within(lambda count: count >= 1, "must be 1 or more")]
CountOrZero = Annotated[int, _NOT_NEGATIVE]
Norm = Annotated[float, _NOT_NEGATIVE]
Rate = Annotated[float, _NOT_NEGATIVE, Within(lambda rate: rate <= LARGEST_RATE, f"is up to {LARGEST_RATE:g}")]
ShareOrZero = Annotated[float, Within(lambda share: 0 <= share <= 1, "is a share from 0 to 1")]
_BELOW_1 = Within(lambda betas: 0 <= min(betas) <= max(betas) < 1, "are two numbers from 0 to below 1")
Betas = Annotated[tuple[float, float], _BELOW_1]
Seed = Annotated[int, Within(lambda s: abs(s) <= LARGEST_SEED, f"is a whole number up to {LARGEST_SEED:,} in size")]
Alpha = Annotated[float, Within(lambda alpha: alpha > 0, "must be above 0")]
Megabytes = Annotated[float, Within(lambda mb: 0 < mb <= 1e6, "is above 0 and up to 1,000,000")]
Seconds = Annotated[float, Within(lambda s: 0 < s <= 1e9, "is in seconds, above 0 and up to 1,000,000,000")]


@dataclass(frozen=True)
class Config:
    """Train a language model: from scratch in the shape of a preset, or from a Hugging Face model (--init).

    Run by itself it starts its ranks on this machine; under torchrun, srun or mpirun it is one rank of the job. The
    files of the run are in --out. Ctrl-C ends the step under way, saves and stops; --resume auto goes on from there.

    $ thinwire train --preset tiny --steps 300 --method int8 --out runs/first
    $ thinwire train --config runs/first/config.yaml --method trickle --out runs/second
    $ torchrun --nnodes 2 --nproc-per-node 8 -m thinwire train --preset gpt-125m
    """

    GROUPS: ClassVar[Mapping[str, str]] = {
        "preset": "Model", "init": "Fine-tuning", "method": "Exchange of gradients", "engine": "Engine",
        "corpus": "Text", "steps": "Steps and optimizer", "ranks": "Ranks and devices",
        "elastic": "Replicas that come and go", "out": "Files",
        "eval_every": "Evaluation", "checkpoints": "Checkpoints", "guard": "Safety",
    }  # fmt: skip
    """The first setting of each group of the help -> the group's title."""

    preset: str = "small"
    """Shape of the model: tiny, small, laptop, net20m, llama-tiny, llama-small, gpt-125m, gpt-345m, gpt-355m, gpt-1.3b,
    gpt-2.0b, gpt-2.7b, gpt-6.7b, gpt-13b, llama-500m, llama-1.8b, llama-7b, llama-13b. The next seven options override
    it."""
    family: Literal["gpt", "llama"] | None = None
    """Architecture. Default: the preset's."""
    layers: Count | None = None
    """Transformer blocks. Default: the preset's."""
    width: Count | None = None
    """Values per token between blocks. Default: the preset's."""
    heads: Count | None = None
    """Attention heads. Default: the preset's."""
    kv_heads: Count | None = None
    """Heads of keys and values (fewer than heads: grouped-query attention). Default: the preset's."""
    hidden: Count | None = None
    """Width inside the MLP. Default: the preset's."""
    seq_len: Count | None = None
    """Tokens per sequence. Default: the preset's; with --init 512, or the model's positions if these are fewer."""

    init: str | None = None
    """Start from the Hugging Face model in this folder, in place of a preset: a causal language model."""
    data: tuple[str, ...] = ()
    """With --init: instructions, in place of --corpus: JSONL files or globs with "prompt" and "completion", or with
    "messages". Only the answers are learnt."""
    lora: Count | None = None
    """With --init: train only LoRA adapters (peft) of this rank (lower: fewer parameters). Default: train the whole
    model.
    """
    lora_alpha: Alpha | None = None
    """LoRA's alpha: adapters are scaled by alpha / rank. Default: twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the modules that get adapters. Default: all linear modules except the head."""

    method: str = "dense"
    """The method that exchanges gradients, by its name, or with knobs in parentheses: "int8(group=64)". `thinwire
    methods` lists them. "auto": tries a few steps of several, and trains with the fastest."""
    max_loss: str = "1%"
    """With --method auto: how far a method's loss may have been above dense's, its ± included, in measured runs of
    similar length: 1% or 0.01 (lower: fewer candidates), or "any".
    """
    cluster: str | None = None
    """Name or TOML file of the cluster from which --method auto predicts. Default: it measures the links."""
    two_level: bool | None = None
    """Average gradients inside each node first, then between nodes. Default: the method decides (sdp4bit, zeropp: True
    if nodes have several ranks)."""
    intra: str | None = None
    """Method inside a node, with HSDP or --two-level True: dense, bf16, int8, ... Default: the method's own, mostly
    dense."""

    engine: Literal["ddp", "fsdp2", "hsdp"] = "ddp"
    """torch's engine for data parallelism: weights on every rank (ddp), sharded over all ranks (fsdp2), or sharded
    inside each node (hsdp)."""
    bucket_mb: Megabytes | None = None
    """DDP: MB of gradients per exchange. Lower: exchanges start earlier and less is left when the backward pass ends,
    but there are more messages. Default: chosen for the method; with dense, torch's own."""
    reshard: bool = True
    """FSDP2 and HSDP: free the gathered weights after the forward pass (less memory, one more gather per step)."""
    shard_size: Count | None = None
    """HSDP: ranks that share one copy of the weights. Default: the ranks of a node."""

    corpus: tuple[str, ...] = ("stdlib",)
    """Text to train on: files or globs (.xz and .gz too), "stdlib" (the source of Python's standard library), or
    "hub:NAME"; or tokens: a folder that `thinwire tokenize` wrote, or files (.bin as nanoGPT writes them, .npy)."""
    valid: tuple[str, ...] = ()
    """Text for validation, written like --corpus (of hub:NAME the split validation, else test). Default: every 20th
    part of the corpus is held out."""
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE (trained on the corpus), folder:PATH (tokenizer.json of a Hugging Face folder), hub:NAME, or
    ids:SIZE for token files with SIZE different tokens."""

    steps: Count = 400
    """Optimizer steps of the whole run."""
    batch_size: Count = 8
    """Sequences per rank in each forward pass."""
    accumulate: Count = 1
    """Forward and backward passes per optimizer step."""
    optimizer: Literal["adamw", "adams", "sgd", "muon"] | None = None
    """adams: thinwire.AdamS, which keeps no second moment. sgd: without momentum, for a method that has its own (dgc).
    muon: torch.optim.Muon for the hidden matrices, with steps as large as AdamW's, and adamw for the rest. Default:
    scape takes adams, dgc sgd, all others adamw."""
    lr: Rate | None = None
    """Highest learning rate. Default: 2e-3; less for models wider than 256 (512: 5e-4); 2e-5 with --init, 2e-4 with
    --lora."""
    muon_lr: Rate | None = None
    """With --optimizer muon, the highest learning rate of the hidden matrices. Default: --lr."""
    lr_end: ShareOrZero = 0.1
    """Learning rate at the end, as a share of the highest."""
    warmup: ShareOrZero = 0.05
    """Share of the steps in which the learning rate rises."""
    weight_decay: Rate = 0.1
    """Decoupled weight decay, on tensors of two or more dimensions."""
    betas: Betas = (0.9, 0.95)
    """beta1 and beta2 of adamw and adams."""
    clip: Norm = 1.0
    """Clip the gradient to this norm (lower: clipped more); 0: do not clip."""
    seed: Seed = 0
    """Seed of the initial weights and of the order of the text."""

    ranks: Count | None = None
    """Ranks to start on this machine. Default: one per GPU, or 2 on CPU. Under torchrun, srun or mpirun: theirs."""
    ranks_per_node: Count | None = None
    """Treat every so many of the ranks started here as a node (to try --two-level). Default: all are one node."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU for each rank if torch sees any."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the computation; weights and moments are fp32. auto: bf16 on CUDA, fp32 on CPU."""
    compile: bool = False
    """torch.compile the model."""
    threads: Count = 1
    """CPU threads per rank."""

    elastic: bool = False
    """Train on replicas of one rank each, on CPUs (torchft): if one is lost, the others go on; it is started again
    and joins them.
    """
    replicas: Count | None = None
    """Replicas to start on this machine. Default: 2."""
    min_replicas: Count = 1
    """With fewer replicas than this the run waits."""

    out: Path = Path("runs/train")
    """Folder for the run's files: settings, plan, metrics, report, checkpoints."""
    overwrite: bool = False
    """If --out holds a run, remove it and start a new one."""
    track: tuple[Literal["csv", "wandb", "trackio", "mlflow"], ...] = ()
    """Send the numbers of metrics.jsonl to trackers, too: csv (metrics.csv in --out), wandb (Weights & Biases),
    trackio, mlflow."""
    track_project: str = "thinwire"
    """Name of the project at the tracker (mlflow: of the experiment)."""

    eval_every: CountOrZero = 100
    """Steps between evaluations, besides those at the start and at the end; 0: only those two."""
    eval_sequences: CountOrZero = 64
    """Validation sequences per evaluation, over all ranks; 0: no evaluation. The evaluation at the end takes all, but
    at most 2 million tokens and at most half as many as were trained on; valid_losses.csv has the loss of each."""

    checkpoints: bool = True
    """Save at the end of the run, and on SIGTERM or Ctrl-C."""
    checkpoint_every: CountOrZero = 0
    """Steps between further checkpoints; 0: none."""
    keep: Count = 2
    """Keep so many of the newest checkpoints. Those saved while the run diverged do not count."""
    resume: str | None = None
    """Continue from a checkpoint: "latest" (the newest in --out), "auto" (the same; without one, start a new run), or
    a checkpoint's folder."""
    resume_anyway: bool = False
    """Continue even if the text, its order or the batch differs from the checkpoint's."""
    resize: Literal["flush", "redistribute", "reset", "refuse"] = "redistribute"
    """If a run resumes on other ranks or another engine: hand what the old ranks had not sent yet to the new ranks
    (redistribute), drop it (reset), send it all in the next step (flush: in the middle of a run far too large a step),
    or do not resume (refuse).
    """

    guard: bool = True
    """If a gradient on any rank is not finite, skip the step on all ranks."""
    max_skipped: CountOrZero = 20
    """End the run after this many steps in a row that were skipped, or whose loss was not finite; 0: never."""
    check_every: CountOrZero = 0
    """Steps between comparisons of the weights of all ranks, by hashes; 0: once, after the first step."""
    timeout: Seconds = 120.0
    """Seconds to wait for the other ranks. On a slow link, which is measured at the start, a rank waits longer."""
    file_timeout: Seconds = 3600.0
    """Seconds to wait for a rank that reads text, trains a tokenizer, or reads or writes a checkpoint."""

    def shape(self, vocabulary: int) -> ModelConfig:
        """Return the preset's shape with the settings that override it."""
        changed = {name: getattr(self, name) for name in SHAPE if getattr(self, name) is not None}
        base = PRESETS[self.preset]
        return dataclasses.replace(base, **changed, context=self.sequence_length, vocabulary=vocabulary).check()

    @property
    def model(self) -> str:
        """The model's name in reports: the folder, or the preset with what overrides its shape."""
        own = [f"{name} {getattr(self, name)}" for name in SHAPE if getattr(self, name) is not None]
        return self.init or self.preset + (f" ({', '.join(own)})" if own else "")

    @property
    def sequence_length(self) -> int:
        return self.seq_len or (512 if self.init else PRESETS[self.preset].context)

    @property
    def goes_on_from(self) -> Path | None:
        """Folder of the run of --resume, which has the tokenizer, too; None: the run begins afresh."""
        if self.resume not in ("auto", "latest"):
            return run_of(Path(self.resume)) if self.resume else None
        return self.out if any((self.out / "checkpoints").glob("step-*")) else None

    @property
    def text_name(self) -> str:
        """Name of the text to train on, as typed."""
        return " ".join(self.data or self.corpus)

    @property
    def chooses(self) -> bool:
        """Is the method to be chosen?"""
        return self.method == "auto"

    def with_choice(self, method: str) -> Config:
        """Return these settings with the ``method`` that was chosen, without what it was chosen by."""
        return dataclasses.replace(self, method=method, cluster=None, max_loss=Config.max_loss)

    @property
    def largest_loss(self) -> float:
        """The share above dense's loss that --max-loss allows."""
        return math.inf if self.max_loss == "any" else share(self.max_loss, "--max-loss, of dense's loss,")

    @property
    def optimizer_name(self) -> str:
        """Name of the optimizer that steps: as set, or the method's own."""
        from thinwire.methods import resolve

        return self.optimizer or ("adamw" if self.chooses else resolve(self.method).OPTIMIZER.__name__.lower())

    @property
    def top_lr(self) -> float:
        if self.lr is not None:
            return self.lr
        if self.init:
            return 2e-4 if self.lora else 2e-5
        width = self.width or PRESETS[self.preset].width
        return 2e-3 if width <= 256 else 0.256 / width

    @property
    def adapters(self) -> dict[str, Any] | None:
        """Arguments of peft's ``LoraConfig``; None: the model's own weights are trained."""
        if not self.lora:
            return None
        targets = list(self.lora_targets) or "all-linear"
        return {"r": self.lora, "lora_alpha": self.lora_alpha or 2.0 * self.lora, "target_modules": targets}

    def learning_rate(self, step: int) -> float:
        """Return the rate of ``step`` (from 0): a linear warm-up, then half a cosine down to ``lr_end`` * ``lr``."""
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return self.top_lr * (step + 1) / warmup
        progress = min((step - warmup) / max(1, self.steps - warmup), 1.0)
        return self.top_lr * (self.lr_end + (1 - self.lr_end) * 0.5 * (1 + math.cos(math.pi * progress)))

    def check(self) -> Config:
        """Return these settings; raise ThinwireError, in one line, if they cannot be used."""
        self.check_options()
        self.check_methods()
        return self

    def check_options(self) -> None:
        """Check all settings but the methods, without torch."""
        check_types(self, _flag)
        if self.preset not in PRESETS:
            raise ThinwireError(f"unknown preset '{self.preset}'; there are: {', '.join(PRESETS)}")
        self._check_combinations()
        if not self.init:
            self.shape(vocabulary=256)
        if os.environ.get("RANK", "0") == "0":
            for name in self.track:
                if name != "csv":
                    extras.package_folder(name)

    def check_shards(self, ranks: int, per_node: int) -> int:
        """Return over how many ranks HSDP shards. Raise ThinwireError if there is no whole number of such groups."""
        size = self.shard_size or per_node
        if self.engine == "hsdp" and ranks % size:
            raise ThinwireError(f"--shard-size {size} does not divide {ranks} ranks")
        return size

    def check_files(self) -> None:
        """Raise what the ranks would raise of text, a tokenizer, a model or a cluster that is not there.

        For who starts them: nothing is read that takes long, and torch is not imported.
        """
        from thinwire.train.data import corpus, token_files, tokenizer

        with suppress(OSError):  # a name that is too long, a folder that may not be read: the ranks say it
            if self.chooses and self.cluster and not self.resume:  # a run that goes on has chosen
                read_cluster(self.cluster)
            if self.init:
                hub_folder(self.init)
                tokens = not self.data and Path(self.corpus[0]).is_dir()
            else:
                tokens = token_files.find_token_files(self.corpus, self.valid, self.tokenizer) is not None
            if not tokens:
                corpus.check_there((*(self.data or self.corpus), *self.valid))
                tokenizer.check_tokenizer(self.tokenizer, self.goes_on_from)
            corpus.check_apart(self.data or self.corpus, self.valid)

    def check_methods(self) -> None:
        """Check what only the methods, and so torch, can say."""
        from thinwire.core.method import check_engine
        from thinwire.methods import resolve
        from thinwire.optim import AdamS

        method = None if self.chooses and self.largest_loss >= 0 else resolve(self.method)
        if method is not None:
            check_engine(method, self.engine)
        if method is not None and method.OPTIMIZER is AdamS and self.optimizer_name != "adams":
            raise ThinwireError(
                f"--method {method.name} is built on AdamS: leave --optimizer {self.optimizer} out, or name adams"
            )
        if self.elastic and (getattr(method, "fragments", 1) > 1 or getattr(method, "delay", 0)):
            raise ThinwireError(
                "--method local-steps with fragments or a delay does not go with --elastic, whose replicas come and "
                "go: leave them out"
            )
        if self.intra is not None:
            resolve(self.intra)

    def _check_combinations(self) -> None:
        no_corpus, own_shape = not (self.corpus and all(self.corpus)), "--init, whose model has its own shape"
        refuse_any({
            f"--corpus needs a file or more, 'stdlib' or hub:NAME, got {self.corpus}": no_corpus,
            "--checkpoint-every does not go with --no-checkpoints": self.checkpoint_every and not self.checkpoints,
            "--resume does not go with --overwrite, which starts afresh": self.overwrite and self.resume,
            "--lr 0 does not go with --muon-lr, which follows it": self.muon_lr is not None and self.lr == 0,
            **{f"{_flag(name)} is for {what}": getattr(self, name) != getattr(Config, name) and not serves(self)
               for name, (what, serves) in SERVING.items()},
            **{f"{_flag(name)} is for fine-tuning: name a model with --init FOLDER": getattr(self, name)
               for name in ("data", "lora", "lora_alpha", "lora_targets") if not self.init},
            **{f"{_flag(name)} does not go with {own_shape}": getattr(self, name) is not None
               for name in SHAPE if self.init},
            f"--preset {self.preset} does not go with {own_shape}": self.init and self.preset != Config.preset,
            f"--tokenizer {self.tokenizer} does not go with --init, whose folder has one":
                self.init and self.tokenizer != "bytes",
            "--data takes the place of --corpus: leave one of them out": self.data and self.corpus != Config.corpus,
            "--lora-alpha and --lora-targets need --lora RANK":
                not self.lora and (self.lora_alpha is not None or self.lora_targets),
        })  # fmt: skip
        self._check_elastic()

    def _check_elastic(self) -> None:
        if not self.elastic:
            if self.replicas is not None or self.min_replicas != Config.min_replicas:
                raise ThinwireError("--replicas and --min-replicas are for --elastic")
            return
        refused = {
            "--ranks": self.ranks is not None, "--ranks-per-node": self.ranks_per_node is not None,
            f"--engine {self.engine}": self.engine != "ddp", "--bucket-mb": self.bucket_mb is not None,
            "--two-level": bool(self.two_level), "--intra": self.intra is not None, "--method auto": self.chooses,
            "--check-every": bool(self.check_every), "--device cuda": self.device == "cuda",
            "--compile": self.compile,
        }  # fmt: skip
        line = "does not go with --elastic, whose replicas are one rank each, on a CPU"
        refuse_any({f"{option} {line}": is_set for option, is_set in refused.items()})
        own_lighthouse = LIGHTHOUSE not in os.environ
        if own_lighthouse and self.min_replicas > self.local_replicas:
            raise ThinwireError(
                f"--min-replicas {self.min_replicas} is more than the {self.local_replicas} replicas that are started; "
                f"others can join only if {LIGHTHOUSE} names a lighthouse"
            )

    @property
    def local_replicas(self) -> int:
        """The replicas that this machine starts."""
        return self.replicas or 2

    def to_yaml(self) -> str:
        """Return all settings as YAML that ``--config`` reads."""
        return yaml.safe_dump(self.plain(), sort_keys=False)

    def plain(self) -> dict[str, Any]:
        """Return all settings in types that YAML and JSON have."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


SERVING: dict[str, tuple[str, Callable[[Config], bool]]] = {
    "muon_lr": ("--optimizer muon", lambda config: config.optimizer == "muon"),
    "bucket_mb": ("--engine ddp", lambda config: config.engine == "ddp"),
    "shard_size": ("--engine hsdp", lambda config: config.engine == "hsdp"),
    "cluster": ("--method auto", lambda config: config.chooses),
    "max_loss": ("--method auto", lambda config: config.chooses),
}
"""Settings that do nothing beside others than these: refused; void if typed words override those of their file."""


class _Settings(yaml.SafeLoader):
    """A loader that refuses a name that is there twice; PyYAML takes the last of its values."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"'{name}' is there twice")
        return super().construct_mapping(node, deep)


def run_of(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's run. The checkpoint, or "checkpoints" on another disk, may be a link."""
    runs = [path.parent.parent for path in (checkpoint.absolute(), checkpoint.resolve())]
    return next((run for run in runs if (run / "config.yaml").exists()), runs[0])


def from_yaml(path: Path) -> Config:
    """Read a YAML file, which maps names of fields of ``Config`` to values.

    Raises:
        ThinwireError: there is no such file, it is no mapping, or a field does not exist or has another type.
    """
    try:
        read = yaml.load(path.read_text(), _Settings)
    except OSError as error:
        raise ThinwireError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no text, dates that are none
        raise ThinwireError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict | None):
        raise ThinwireError(f"{path} must hold 'name: value' lines, got {type(read).__name__}")
    words: list[str] = []
    for name, value in (read or {}).items():
        if name not in Config.__dataclass_fields__:
            raise ThinwireError(f"{path}: there is no setting '{name}'; see thinwire train --help")
        if value is None:
            if getattr(Config, name) is not None:
                raise ThinwireError(f"{path}: {name} needs a value")
            continue
        words += _words(name, value)
    return from_arguments(words, source=str(path))


def _words(name: str, value: Any) -> list[str]:
    """Write a YAML value as command-line words: one parser reads both, so both accept the same."""
    if isinstance(value, bool) and getattr(Config, name) is not None:  # a boolean whose default is not None is a flag
        return [_flag(name) if value else _flag("no_" + name)]
    return [_flag(name), *map(str, value if isinstance(value, list) else [value])]


CONFIG = Option(
    "--config FILE",
    "Read settings from a YAML file of 'name: value' lines; options typed beside it win. Every run leaves such a file, "
    "config.yaml in --out, to repeat the run or to change one setting of it.",
)


def from_arguments(arguments: list[str], source: str = "") -> Config:
    """Read a command line; its words override the file of its ``--config FILE``."""
    arguments = list(arguments)
    default = Config()
    positions = [position for position, word in enumerate(arguments) if word.partition("=")[0] == "--config"]
    if len(positions) > 1:
        raise ThinwireError("--config is there twice: name one file; options typed beside it win")
    for position in positions:
        _, equals, name = arguments[position].partition("=")
        name = name or "".join(arguments[position + 1 : position + 2])
        if not name:
            raise ThinwireError("--config needs the name of a YAML file")
        default = from_yaml(Path(name))
        del arguments[position : position + (1 if equals else 2)]
    config = read_options(Config, arguments, "thinwire train", default=default, source=source, extra=[CONFIG])
    typed = {word.partition("=")[0] for word in arguments}
    void = {name: getattr(Config, name) for name, (_, serves) in SERVING.items()
            if serves(default) and not serves(config) and _flag(name) not in typed}  # fmt: skip
    return dataclasses.replace(config, **void)
