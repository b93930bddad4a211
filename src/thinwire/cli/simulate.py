"""``thinwire simulate``: will it help me? A prediction for a model, methods and a cluster."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, first_line, refuse_any
from thinwire.base.files import refuse_unwritable, write
from thinwire.base.options import read_options
from thinwire.base.terminal import note, say
from thinwire.lab.entries import method_names
from thinwire.lab.link import bit_rate
from thinwire.predict.cluster import read_cluster
from thinwire.predict.profile import profile_of
from thinwire.predict.simulate import Job, Simulation, at_scale, simulate
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.pretrained import Pretrained
from thinwire.train.model.shapes import PRESETS

SEQUENCES = 8
"""Sequences per rank and micro-batch, as ``thinwire train`` has them."""
MOST_RANKS = 1_000_000


@dataclass
class SimulateOptions:
    """Predict the step time, bytes and memory of methods on a cluster, without running anything there.

    Prints which method is the fastest, by how much, and what limits it; then tables, and the assumptions. `thinwire
    doctor` measures a cluster and writes its file.

    $ thinwire simulate --model gpt-1.3b --cluster l40s-10g --nodes 8
    $ thinwire simulate --model config.json --engine fsdp2 --cluster mine.toml --links
    """

    GROUPS: ClassVar[Mapping[str, str]] = {
        "cluster": "What is predicted", "nodes": "Size", "two_level": "Network", "links": "Pictures and output",
    }  # fmt: skip

    cluster: str
    """A TOML file as `thinwire doctor` writes it, or the name of a known cluster; a wrong name lists them."""
    model: str = "gpt-125m"
    """A preset, a Hugging Face config.json, or file.py:function. Your function is called under torch.device("meta") and
    returns a module and a tuple of example inputs. If these are no token ids, an example counts as one token."""
    method: str = "bf16,int8,sdp4bit,trickle,trickle:merged"
    """Methods, separated by commas, with or without knobs. dense is always added."""
    engine: str = "ddp"
    """torch's engine for data parallelism: ddp, fsdp2 or hsdp."""
    nodes: int | None = None
    """Number of nodes. The cluster's file says how many ranks each has. Default: 2."""
    ranks: int | None = None
    """Number of ranks in all, in place of --nodes."""
    sequence: int | None = None
    """Tokens per sequence. Default: the preset's context; a function's own inputs; for a config.json 2048, or fewer if
    its model takes no more."""
    tokens: int | None = None
    """Tokens per rank and step. Default: 8 sequences in each micro-batch."""
    micro_batches: int = 1
    """Forward and backward passes per step."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the computation; weights and moments are fp32. auto: bf16 on GPUs, fp32 on CPUs."""
    two_level: bool | None = None
    """Average gradients inside each node first. Default: the method decides."""
    intra: str | None = None
    """Method inside a node, with hsdp or --two-level True. Default: the method's own, mostly dense."""
    link: str | None = None
    """Rate of each node's link, in place of the one in the cluster's file: 200mbit, 1gbit."""
    links: bool = False
    """Draw the time of a step for links from 10 Mbit/s to 400 Gbit/s, and where each method begins to pay."""
    scale: str | None = None
    """Draw the time of a step and the efficiency for more and more ranks: 8..16384, doubling."""
    strong: bool = False
    """With --scale: all ranks share the tokens of --nodes. Default: --weak."""
    weak: bool = False
    """With --scale: each rank keeps its tokens."""
    out: Path = Path("runs/simulate")
    """Folder for the pictures."""
    explain: Path | None = None
    """Write a Chrome trace of a step to this file, for chrome://tracing or Perfetto."""
    json: bool = False
    """Print JSON."""


def simulate_main(argv: list[str]) -> int:
    """Run ``thinwire simulate``. Return the exit status."""
    options = read_options(SimulateOptions, argv, "thinwire simulate")
    ranks_to_draw = _check(options)
    if options.explain is not None:
        refuse_unwritable(options.explain, "--explain")
    if options.links or ranks_to_draw:
        refuse_unwritable(options.out / "links.svg", "--out")
        extras.load("matplotlib")
    note(f"predicting {options.model} on {options.cluster}: some seconds")
    job, methods = make_job(options), method_names(options.method)
    simulation = simulate(job, methods)
    written: list[str] = []
    try:
        for path in _write(options, simulation, methods, ranks_to_draw):
            written.append(str(path))
    finally:  # what is predicted is said also if a disk is full
        if options.json:
            print(json.dumps(simulation.to_json() | {"written": written}, indent=2))
        else:
            say("\n".join([str(simulation), *(f"written: {path}" for path in written)]))
    return 0


def _write(
    options: SimulateOptions, simulation: Simulation, methods: Sequence[str], ranks_to_draw: Sequence[int]
) -> Iterator[Path]:
    """Write the files that ``options`` ask for; yield each once it is there."""
    if options.explain is not None:
        options.explain.parent.mkdir(parents=True, exist_ok=True)
        write(options.explain, json.dumps(simulation.to_trace()))
        yield options.explain
    if options.links or ranks_to_draw:
        from thinwire.cli import simulate_pictures as pictures  # it takes a second to import

        options.out.mkdir(parents=True, exist_ok=True)
        if options.links:
            yield pictures.links(simulation, options.out / "links.svg")
        if ranks_to_draw:
            curves = at_scale(simulation.job, methods, ranks_to_draw, strong=options.strong)
            yield pictures.scale(simulation.job, curves, options.out / "scale.svg", strong=options.strong)


def _check(options: SimulateOptions) -> list[int]:
    """Refuse what cannot be meant. Return the ranks of ``--scale``."""
    for name in ("nodes", "ranks", "sequence", "tokens", "micro_batches"):
        if (count := getattr(options, name)) is not None and count < 1:
            raise ThinwireError(f"--{name.replace('_', '-')} must be 1 or more, got {count}")
        if name in ("nodes", "ranks") and (count or 0) > MOST_RANKS:
            raise ThinwireError(f"--{name} {count}: clusters of up to {MOST_RANKS:,} are simulated")
    averages_inside = options.engine == "hsdp" or options.two_level
    refuse_any({
        "--nodes and --ranks exclude each other: choose one": options.nodes is not None and options.ranks is not None,
        "--intra averages inside a node: it needs --engine hsdp or --two-level True":
            options.intra is not None and not averages_inside,
        "--strong and --weak exclude each other: choose one": options.strong and options.weak,
        "--strong and --weak are for --scale 8..16384": options.scale is None and (options.strong or options.weak),
    })  # fmt: skip
    if options.scale is None:
        return []
    first, separator, last = options.scale.partition("..")
    if not (separator and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= MOST_RANKS):
        raise ThinwireError(
            f"cannot read --scale '{options.scale}': write the fewest and the most ranks, as 8..16384, "
            f"up to {MOST_RANKS:,}"
        )
    ranks = [int(first)]
    while ranks[-1] * 2 <= int(last):
        ranks.append(ranks[-1] * 2)
    return ranks


def make_job(options: SimulateOptions) -> Job:
    """Read the cluster, make and profile the model."""
    cluster = read_cluster(options.cluster)
    if options.link is not None:
        cluster = cluster.with_link(bit_rate(options.link, "200mbit or 10gbit")[1] / 8)
    ranks = options.ranks or (options.nodes or 2) * cluster.per_node
    if options.two_level and not 1 < cluster.per_node < ranks:
        raise ThinwireError(
            f"--two-level True is for several nodes of several ranks, and here {ranks} are in nodes of "
            f"{cluster.per_node} ({cluster.name}): leave it out"
        )
    bf16 = options.dtype == "bf16" or (options.dtype == "auto" and not cluster.codec_on_core)
    dtype = torch.bfloat16 if bf16 else torch.float32
    model, inputs, length = load_model(options.model, options.sequence)
    tokens = options.tokens or SEQUENCES * options.micro_batches * length
    if tokens < (least := options.micro_batches * length):
        raise ThinwireError(
            f"--tokens {tokens}: a rank takes {least} or more in a step, one sequence of {length} per micro-batch; a "
            "shorter --sequence needs fewer"
        )
    return Job(
        options.model, model, profile_of(model, inputs, None if dtype == torch.float32 else dtype), cluster,
        options.engine, ranks, tokens / (options.micro_batches * length), options.micro_batches, dtype,
        options.two_level, options.intra,
    )  # fmt: skip


def load_model(text: str, sequence: int | None) -> tuple[nn.Module, Sequence[Tensor], int]:
    """Make a model on the meta device; return it with inputs of one sequence or more, and the sequence's length.

    Raises:
        ThinwireError: there is no such model, or it is not what its file should bring.
    """
    path, _, function = text.partition(":")
    if path.endswith(".py"):
        return _own_model(Path(path), function, sequence)
    if text in PRESETS:
        length = sequence or PRESETS[text].context
        with torch.device("meta"), _Uninitialized():
            model: Decoder | Pretrained = Decoder(replace(PRESETS[text], context=max(length, PRESETS[text].context)))
    elif text.endswith(".json") or Path(text).is_dir():
        model = _hub_model(Path(text))
        length = sequence or min(2048, model.context)
        if length > model.context:
            raise ThinwireError(
                f"--sequence {length} is longer than the {model.context} tokens that {text} is made for"
            )
    else:
        raise ThinwireError(
            f"there is no model '{text}': write a Hugging Face config.json, your file.py:function, or one of "
            f"{', '.join(PRESETS)}"
        )
    tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
    return model, (tokens, tokens), length


def _hub_model(path: Path) -> Pretrained:
    transformers = extras.load("transformers")
    if not path.exists():  # transformers would take its name for one of the hub's
        raise ThinwireError(f"there is no file {path}")
    transformers.utils.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"), _Uninitialized():
            return Pretrained(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ThinwireError(f"cannot make a causal language model of {path}: {first_line(error)}") from None


def _own_model(path: Path, function: str, sequence: int | None) -> tuple[nn.Module, Sequence[Tensor], int]:
    if not function:
        raise ThinwireError(f"write {path}:FUNCTION, which returns a module and a tuple of example inputs")
    if sequence is not None:
        raise ThinwireError(
            f"--sequence is for presets and a config.json; here the example inputs of {path}:{function} set it"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ThinwireError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        with torch.device("meta"):
            result = getattr(module, function)()
    except Exception as error:  # anything may go wrong in it
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ThinwireError(f"{path}:{function} failed with {type(error).__name__}: {reason}") from None
    match result:
        case (nn.Module() as model, (Tensor(), *_) as inputs):
            tokens = inputs[0].ndim > 1 and not inputs[0].is_floating_point()
            return model, tuple(inputs), inputs[0].shape[1] if tokens else 1
    raise ThinwireError(f"{path}:{function} must return a module and a tuple of example inputs, the first a tensor")


class _Uninitialized(TorchFunctionMode):
    """Leaves parameters as they are: on the meta device their first values do not matter, but take seconds."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", *args[:1])
        return function(*args, **(kwargs or {}))
