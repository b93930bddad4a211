"""Training of N virtual ranks with sharded weights in one process: both hops of gradients, and the weights' messages.

``virtual.py`` plays DDP. This is FSDP2 with the whole model as one module: every rank owns a chunk of each parameter,
and the model computes with the weights that the ranks have gathered by the method's messages: the same bits on all.
``python benchmarks/papers/sharded.py`` holds it against ``thinwire train --engine fsdp2`` on processes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import measures
from frame import Settings
from measures import Run, corpora, regimes, tasks, virtual
from thinwire.core.bucket import Piece, Shard
from thinwire.core.weights import Replica
from thinwire.methods import resolve
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, ThreadEngine, Threads, VirtualRank
from thinwire.train.config import Config
from thinwire.train.data.windows import Windows, batches
from thinwire.train.model.decoder import Decoder

RANKS, PER_NODE = 4, 2
"""Virtual ranks, and how many of them share a node: two nodes, so that both hops have a peer."""
LOOKS = 8


class Chunks:
    """Where each rank's chunk of every parameter lies: parameters (P,) as the model has them <-> shards (N, width)."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> None:
        self.shapes, self._ranks = shapes, ranks
        self.pieces: list[Piece] = []
        self.width = 0
        for name, shape in shapes.items():
            local = -(-shape[0] // ranks) * math.prod(shape[1:])
            self.pieces.append(Piece(name, self.width, local))
            self.width += local

    def shards(self, values: Mapping[str, Tensor]) -> Tensor:
        """Cut ``values`` by name along their first dimension; what is left over in the last chunks is 0."""
        shards = torch.zeros(self._ranks, self.width)
        for piece in self.pieces:
            whole = values[piece.name].reshape(-1)
            padded = torch.zeros(self._ranks * piece.numel)
            padded[: len(whole)] = whole
            shards[:, piece.columns] = padded.view(self._ranks, -1)
        return shards

    def join(self, shards: Tensor, into: Mapping[str, Tensor]) -> None:
        """Copy ``shards`` (N, width) to the tensors ``into``, by name."""
        for piece in self.pieces:
            there = into[piece.name]
            there.copy_(shards[:, piece.columns].reshape(-1)[: there.numel()].view_as(there))


class Owner:
    """One rank: its chunk of the weights with its optimizer, and the weights of all as it holds them."""

    def __init__(self, world: Threads, number: int, config: Config, chunks: Chunks, shards: Tensor) -> None:
        method, ledger = resolve(config.method), Ledger()
        shapes = chunks.shapes
        engine = ThreadEngine("two_level_owner", world, number, ledger, dict(shapes), PER_NODE)

        def optimizer(weights: list[Tensor]) -> torch.optim.Optimizer:
            decayed = [weight for weight, shape in zip(weights, shapes.values(), strict=True) if len(shape) >= 2]
            others = [weight for weight, shape in zip(weights, shapes.values(), strict=True) if len(shape) < 2]
            groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=config.top_lr, betas=config.betas)

        self.rank = VirtualRank(method, engine, config.steps, seed=config.seed, optimizer=optimizer)
        self._world, self._clip, self._ledger, self.sent = world, config.clip or math.inf, ledger, 0.0
        for weight, piece in zip(self.rank.weights.values(), chunks.pieces, strict=True):
            weight.data.copy_(shards[number, piece.columns])
        self._whole, self._replica = ThreadComm(world, number, ledger, per_node=PER_NODE), None
        if method.card.encodes_weights:
            shard = Shard(tuple(chunks.pieces), (), chunks.width, torch.float32)
            message = method.weight_message(shard, number)
            self._replica = Replica(message, method.state, shard, self._whole, torch.device("cpu"))

    def gather(self, step: int) -> Tensor:
        """Return all ranks' weights (N, width) as this rank holds them, after ``step`` steps. Collective."""
        own = torch.cat([weight.detach().view(-1) for weight in self.rank.weights.values()])
        if self._replica is None:
            out = torch.empty(self._whole.size * len(own))
            self._whole.all_gather(out, own)
        else:
            out = self._replica.allocate()
            out.view(self._whole.size, -1)[self._whole.rank].copy_(own)
            self._replica.gather(out, step)
        return out.view(self._whole.size, -1)

    @property
    def resident(self) -> Tensor:
        """This rank's weights (width,) as all ranks held them at the last gather."""
        assert self._replica is not None and self._replica.resident is not None
        return self._replica.resident.view(self._whole.size, -1)[self._whole.rank]

    def step(self, number: int, gradients: Tensor, rate: float) -> None:
        """Exchange this rank's ``gradients`` (N, width) and take an optimizer step. Collective."""
        for group in self.rank.optimizer.param_groups:
            group["lr"] = rate
        self.rank.exchange(number, gradients.view(-1))
        squares = self._world.swap(self.rank.engine.rank, self.rank.out.double().square().sum())
        norm = torch.stack(squares).sum().sqrt()
        self.rank.finish(number, (self._clip / (norm + 1e-6)).clamp(max=1.0).float())
        self.sent += sum(self._ledger.current.bytes.values())
        self._ledger.close_step()
        self._ledger.reset()


def train(
    config: Config,
    windows: Windows,
    held_out: Windows | None = None,
    look: Callable[[Owner, int], None] | None = None,
    start: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Train ``RANKS`` virtual ranks. ``look``, ``start``: as for :func:`trained_once`.

    Returns: "losses" by step, "curve" of (step, validation loss), "model", "sent" (bytes of rank 0), "facts".
    """
    torch.manual_seed(config.seed)
    model = Decoder(config.shape(256))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    for name, weight in weights.items() if start else ():
        weight.copy_(start[f"model/{name}"])
    chunks = Chunks({name: tuple(weight.shape) for name, weight in weights.items()}, RANKS)
    shards = chunks.shards(weights)
    gradients = virtual.Gradients(RANKS, model, [list(weights)])
    together = virtual.Together(model, gradients)
    world = Threads(RANKS)
    owners = [Owner(world, number, config, chunks, shards) for number in range(RANKS)]
    chosen = [] if held_out is None else batches(held_out.spread(64), 16)
    found: dict[str, Any] = {"losses": [], "curve": [], "model": model}
    batch, every = RANKS * config.batch_size, max(config.steps // LOOKS, 1)

    def body(number: int) -> None:
        owner = owners[number]
        for turn in range(config.steps + 1):
            everything = owner.gather(turn)
            if number == 0:  # the others hold the same bits
                chunks.join(everything, weights)
                if chosen and turn and (turn % every == 0 or turn == config.steps):
                    found["curve"].append((turn, virtual.evaluate(model, chosen)))
                if turn < config.steps:
                    found["losses"].append(together.take(*windows.batch(turn * batch, batch)))
            world.swap(number, None)  # now there are gradients
            if turn == config.steps or not math.isfinite(found["losses"][-1]):
                break
            mine = {name: values[number] for name, values in gradients.of.items()}
            owner.step(turn, chunks.shards(mine), config.learning_rate(turn))
            if look is not None and number == 0:
                look(owner, turn)
        owner.rank.method.finish()

    world.run(body)
    return found | {"sent": owners[0].sent, "facts": owners[0].rank.method.facts()}


def trained(
    settings: Settings, methods: Mapping[str, str], steps: int, *, model: str, text: str = "wikitext", lr: float = 4e-3
) -> dict[str, list[Run]]:
    """Train with each of ``methods`` as ``measures.trained`` does, with sharded weights.

    A run: "valid", "curve", "train", "tasks", "sent" (bytes of a rank in all), "facts". Runs that are in
    ``settings.out`` already are not repeated.
    """
    return measures.trained(
        settings, methods, steps, model=model, text=text, lr=lr, ranks=RANKS, make=trained_once, file="sharded.jsonl"
    )


def trained_once(
    job: regimes.Job, folder: Path, look: Callable[[Owner, int], None] | None = None,
    start: dict[str, Tensor] | None = None,
) -> Run:  # fmt: skip
    """Train on virtual ranks, from the weights ``start``; ``look`` is called behind every step of rank 0."""
    torch.set_num_threads(1)
    config, evaluated = job.config(), min(regimes.EVALUATED, 8 * job.steps)
    texts = (job.text, *(name for name in regimes.TEXTS if name != job.text))
    windows, *held_out = (
        regimes.windows_of(folder, name, config.sequence_length, config.seed)
        for name in (regimes.TEXTS[job.text][0], *(regimes.TEXTS[text][1] for text in texts))
    )
    end = train(config, windows, held_out[0], look, start)
    losses = end["losses"][-max(len(end["losses"]) // 10, 1) :]
    return {
        "valid": regimes._number(virtual.evaluate(end["model"], batches(held_out[0].spread(evaluated), 16))),
        "curve": [[step, regimes._number(value)] for step, value in end["curve"]],
        "train": regimes._number(fmean(losses)),
        "tasks": tasks(end["model"], held_out, evaluated // 4),
        "sent": end["sent"],
        "parameters": sum(weight.numel() for weight in end["model"].parameters()),
        "facts": {name: regimes._number(value) for name, value in end["facts"].items()},
    }


def main() -> None:
    """Print the losses of a few steps here and on processes, method by method."""
    settings, steps = Settings(), 8
    folder = corpora(settings)
    for method in sys.argv[1:] or ("dense", "sdp4bit:paper"):
        job = regimes.Job("check", "wikitext", "tiny", RANKS, method, 4e-3, 0, steps)
        config = job.config()
        text = folder / regimes.TEXTS["wikitext"][0]
        windows = regimes.windows_of(folder, text.name, config.sequence_length, config.seed)
        ours = train(config, windows)["losses"]
        with tempfile.TemporaryDirectory() as out:
            words = regimes.arguments(config, str(text), Path(out) / "run")
            words[words.index("--ranks-per-node") + 1] = str(PER_NODE)
            command = [sys.executable, "-m", "thinwire", "train", *words, "--engine", "fsdp2"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            lines = [json.loads(line) for line in (Path(out) / "run" / "metrics.jsonl").read_text().splitlines()]
        theirs = [row["loss"] for row in lines if "loss" in row]
        furthest = max(abs(mine - other) for mine, other in zip(ours, theirs, strict=True))
        print(f"{method}: the losses of {steps} steps differ by at most {furthest:.1e}", flush=True)


if __name__ == "__main__":
    main()
