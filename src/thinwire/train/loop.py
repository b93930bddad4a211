"""The training run of one rank: everything in the order in which it happens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import resource
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base.errors import ThinwireError
from thinwire.base.processes import interface_bytes
from thinwire.network.comm import is_of_the_network, local, network_words
from thinwire.train import differences, pretrained
from thinwire.train.checkpoint import Checkpoints
from thinwire.train.config import Config
from thinwire.train.data import IGNORED, Windows, batches
from thinwire.train.differences import hash_of
from thinwire.train.display import Display
from thinwire.train.folder import Folder, opened, write
from thinwire.train.models import Decoder
from thinwire.train.setup import Ranks, joined, make_optimizer, text_windows, wrap
from thinwire.train.signals import Signals, Stopped
from thinwire.train.together import Together
from thinwire.wire import Wire, compress


def evaluate(model: Any, windows: Windows, config: Config, ranks: Ranks, cast) -> float:
    """Mean loss over what is learnt of held-out sequences, always the same ones, shared out between the ranks."""
    comm = ranks.comm
    chosen = windows.spread(max(1, config.eval_sequences // comm.size) * comm.size)
    total = torch.zeros(1, device=ranks.device)
    model.eval()
    with torch.no_grad():
        for inputs, targets in batches(chosen[comm.rank :: comm.size], config.batch_size):
            with cast():
                loss = model(inputs.to(ranks.device), targets.to(ranks.device)).float()
            total += loss * (_learnt(targets) / config.sequence)
    model.train()
    comm.all_reduce(total)
    return float(total) / (sum(int((window[1:] >= 0).sum()) for window in chosen) / config.sequence)


def _learnt(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())


def settle_buckets(model: nn.Module, windows: Windows, config: Config, ranks: Ranks, cast) -> None:
    """A throw-away backward pass, so that DDP has rebuilt its buckets before the first step.

    The order of a ring's sum depends on the buckets: without this, a resumed dense run on more than two ranks would
    differ from an uninterrupted one in the last bits of its first step.
    """
    inputs, targets = windows.take(0, config.batch_size)
    with cast():
        loss = model(inputs.to(ranks.device), targets.to(ranks.device))
    loss.backward()
    model.zero_grad(set_to_none=True)


def train(config: Config) -> dict[str, Any]:
    """Train as one rank of the job; returns what summary.json holds, {} where nothing was left to do. Collective.

    Raises:
        ThinwireError: for input that cannot be used, or (LostRank, where one of ours has noticed) when another rank is
            gone.
    """
    config.check()
    try:
        with joined(config) as ranks:
            return _train(config, ranks)
    except RuntimeError as error:  # of a collective that is torch's own
        if is_of_the_network(error):
            raise ThinwireError(f"rank {os.environ['RANK']} lost another rank: {network_words(error)}") from None
        raise


def _train(config: Config, ranks: Ranks) -> dict[str, Any]:
    together = Together(ranks.comm.patient(config.file_timeout))
    with opened(config.out, together) as folder:
        return _run(config, ranks, folder)


def _run(config: Config, ranks: Ranks, folder: Folder) -> dict[str, Any]:
    comm, device, together = ranks.comm, ranks.device, folder.together
    if not config.resume and not config.overwrite:
        folder.check_free()
    base = together.do(lambda: pretrained.load(config)) if config.init else None
    tokenizer, train_windows, valid_windows = text_windows(config, folder, base.vocabulary if base else None)
    shape = base.shape if base else config.shape(tokenizer.vocabulary)
    bf16 = config.dtype == "bf16" or (config.dtype == "auto" and device.type == "cuda")
    by_autocast = bf16 and config.engine == "ddp"  # FSDP2 has its own mixed precision
    about = differences.about(
        config, shape, tokens=_same_text(together, train_windows, valid_windows), world_size=comm.size,
        per_node=ranks.per_node, device=device.type, dtype="bf16" if bf16 else "fp32",
        init=_same_model(together, base) if base else None, order=train_windows.order,
    )  # fmt: skip
    checkpoints = Checkpoints(
        folder, about, keep=config.keep, anyway=config.resume_anyway,
        resize=None if config.resize == "refuse" else config.resize,
    )  # fmt: skip
    resumed = checkpoints.find(config.resume) if config.resume else None
    start, sequences = (resumed.checkpoint.step, resumed.checkpoint.meta["sequences"]) if resumed else (0, 0)
    if start >= config.steps:
        line = f"the checkpoint is at step {start}, the run ends at {config.steps}: nothing is left to do"
        if config.resume != "auto":
            raise ThinwireError(f"{line}; raise --steps")
        if comm.rank == 0:  # a scheduler that starts the run until it has ended need not be told to stop
            print(line, flush=True)
        return {}

    def cast():
        return torch.autocast(device.type, torch.bfloat16, enabled=by_autocast)

    torch.manual_seed(config.seed)
    net = (base or Decoder(config.shape(tokenizer.vocabulary))).to(device)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    trained = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    model = wrap(net, config, ranks, bf16)
    optimizer = make_optimizer(model, config)
    if config.engine == "ddp":
        settle_buckets(model, train_windows, config, ranks, cast)
    wire = compress(
        model,
        optimizer,
        config.method,
        guard=config.guard,
        two_level=config.two_level,
        intra=config.intra,
        steps=config.steps,
        seed=config.seed,
        max_skipped=None,  # they are counted here, together with losses that are not finite
        check_every=config.check_every or None,
    )
    runner: Any = torch.compile(model) if config.compile else model
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "wire": wire}
    if resumed:
        together.do(functools.partial(resumed.put_back, **state))
        resumed = None  # its tensors are as large as the model's
    else:
        folder.clear()

    per_step = comm.size * config.batch_size * config.accumulate
    tokens_per_step = round(per_step * train_windows.each)
    losses: list[float] = []
    times: list[float] = []
    first_valid, valid = math.nan, math.nan
    streak = 0  # steps in a row that were skipped, or had a loss that is not finite

    chosen = config.optimizer is None and config.stepper != "adamw"
    by = config.stepper + f", for which {wire.method.name} is made" * chosen

    def describe() -> None:
        known = dataclasses.replace(config, tokenizer=tokenizer.name)
        if config.init:
            known = dataclasses.replace(config, init=str(Path(config.init).resolve()))
        write(config.out / "config.yaml", known.to_yaml())
        write(config.out / "plan.txt", f"{wire.plan}\noptimizer: {by}\n")

    together.do(describe if comm.rank == 0 else lambda: None)
    with contextlib.ExitStack() as stack:
        display = Display(config, comm.rank, start)
        together.do(lambda: stack.enter_context(display))
        signals = stack.enter_context(Signals())
        wall = display.wall
        display.say(
            f"{about['family']} {config.init or config.preset}: {parameters:,} parameters, "
            + (f"{trained:,} of them trained, " if trained < parameters else "")
            + f"{config.method} on {config.engine}, "
            f"{config.stepper}, {comm.size} ranks on {ranks.nodes} node{'s' * (ranks.nodes > 1)}, {device.type}, "
            f"{tokens_per_step:,} tokens per step, steps {start + 1} to {config.steps}"
        )

        def look(step: int) -> float:
            if not config.eval_sequences:
                return math.nan
            loss = evaluate(runner, valid_windows, config, ranks, cast)
            display.evaluation({"step": step, "valid_loss": loss, "wall_s": wall})
            return loss

        first_valid = valid = look(start)
        # Evaluation may have gathered sharded weights: those bytes belong to no step.
        wire.ledger.close_step()
        wire.reset_stats()
        for step in range(start, config.steps):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate(step)
            loss = torch.zeros(1, device=device)
            learnt = train_windows.learnt(sequences, per_step)
            for micro in range(config.accumulate):
                inputs, targets = train_windows.take(sequences + comm.rank * config.batch_size, config.batch_size)
                if base:  # a pretrained model may have dropout: what it draws depends on the place alone
                    torch.manual_seed(config.seed * 1_000_003 + sequences + comm.rank * config.batch_size)
                sequences += comm.size * config.batch_size
                share = _learnt(targets) * per_step / (learnt * config.batch_size)  # 1 where every token is learnt
                with wire.accumulate(last=micro == config.accumulate - 1):
                    with cast():
                        part = runner(inputs.to(device), targets.to(device)) * share / config.accumulate
                    part.backward()
                loss += part.detach()
            norm = wire.clip_grad_norm_(config.clip or math.inf)
            skipped = wire.skipped
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # What any rank has to say to all rides on the loss.
            flags = [wire.skipped > skipped, signals.number > 0, bool(display.trouble)]
            told = torch.cat([loss, torch.tensor(flags, dtype=loss.dtype, device=device)])
            mean, any_skipped, stopped, trouble = comm.all_reduce(told, "mean").tolist()
            # Behind it: what leaves ahead of the next forward pass travels beside.
            seconds = time.perf_counter() - began
            wall += seconds
            times.append(seconds)
            losses.append(mean)
            streak = streak + 1 if any_skipped or not math.isfinite(mean) else 0
            seen = round(sequences * train_windows.each)
            display.step(
                _row(wire, step + 1, mean, float(norm), optimizer, seconds, wall, seen, skipped),
                tokens_per_step / seconds,
            )
            if trouble:
                together.do(display.check)
            if config.max_skipped and streak >= config.max_skipped:
                raise Diverged(step + 1, streak, checkpoints.latest)
            if config.eval_every and (step + 1) % config.eval_every == 0 and step + 1 < config.steps:
                valid = look(step + 1)
                wire.ledger.current = type(wire.ledger.current)()
            due = config.checkpoint_every and (step + 1) % config.checkpoint_every == 0
            last = stopped or step + 1 == config.steps
            if config.checkpoints and (due or last):
                # One skipped step has left all as the step before did. At the end there is no better one to come;
                # before, a run that diverges would put it in the place of an earlier one.
                as_before = last and streak == 1 and any_skipped == 1 and all(together.gather(lambda: _finite(model)))
                checkpoints.save(step + 1, sequences, **state, good=streak == 0 or as_before)
            if stopped and step + 1 < config.steps:
                raise _stopped(step + 1, max(together.tell(signals.number)), config, checkpoints.latest)
        stats = wire.stats()
        valid = look(config.steps)
        summary = _summary(config, ranks, parameters, losses, times, wall, tokens_per_step, stats, wire)
        if config.eval_sequences:
            summary |= {"first_valid_loss": first_valid, "valid_loss": valid}

        def conclude() -> None:
            display.check()
            if comm.rank == 0:
                write(config.out / "summary.json", json.dumps(summary, indent=2) + "\n")
                write(config.out / "report.txt", f"{wire.report()}\n")

        together.do(conclude)
        losses_said = f"validation loss {first_valid:.4f} -> {valid:.4f}, " if config.eval_sequences else ""
        display.say(
            f"{losses_said}{summary['tokens_per_s']:,.0f} tokens/s, "
            f"{summary['step_ms']:.0f} ms per step of which {summary['exposed_ms']:.0f} ms waiting for the network"
        )
        kept = [f"checkpoints/{checkpoints.latest}"] if checkpoints.latest else []
        display.say(f"files: {config.out}/ {', '.join(summary['files'] + kept)}")
    wire.close()
    return summary


class Diverged(ThinwireError):
    """No step has counted for a while."""

    def __init__(self, step: int, streak: int, latest: str) -> None:
        super().__init__(
            f"the run diverges: steps {step - streak + 1} to {step} were skipped, or had a loss that is not finite; "
            f"{_last_good(latest)}. A lower --lr may help; --max-skipped 0 goes on"
        )


def _last_good(latest: str) -> str:
    return f"the last good checkpoint is {latest}" if latest else "there is no good checkpoint"


def _finite(model: nn.Module) -> bool:
    return all(bool(local(parameter).detach().isfinite().all()) for parameter in model.parameters())


def _stopped(step: int, number: int, config: Config, latest: str) -> Stopped:
    kept = "nothing is saved"
    if config.checkpoints and latest == f"step-{step:06d}":
        kept = f"{latest} is saved, --resume auto goes on from it"
    elif config.checkpoints:
        kept = f"its loss, or a gradient, was not finite; {_last_good(latest)}"
    return Stopped(number, f"ended by {signal.Signals(number).name} after step {step}: {kept}")


def _same_model(together: Together, base: pretrained.Pretrained) -> str:
    """A hash of the weights, which have to be every rank's."""
    told = together.tell(base.digest)
    for rank, digest in enumerate(told):
        if digest != told[0]:
            raise ThinwireError(f"rank {rank} has another model than rank 0: --init must be the same")
    return told[0]


def _same_text(together: Together, train: Windows, valid: Windows) -> tuple[str, str]:
    """Hashes of the tokens, which have to be every rank's."""
    told = together.gather(lambda: [hash_of(windows.tokens) for windows in (train, valid)])
    for rank, hashes in enumerate(told):
        if hashes != told[0]:
            raise ThinwireError(f"rank {rank} reads another text than rank 0: --corpus and --valid must be the same")
    return told[0][0], told[0][1]


def _row(wire: Wire, step, loss, norm, optimizer, seconds, wall, tokens, skipped) -> dict[str, Any]:
    last = wire.last_step()
    row = {
        "step": step,
        "loss": loss,
        "lr": optimizer.param_groups[0]["lr"],
        "grad_norm": norm,
        "step_ms": 1e3 * seconds,
        "wall_s": wall,
        "tokens": tokens,
        "wire_bytes": last["wire_bytes_per_step"],
        **{kind: last[kind] for kind in ("encode_ms", "wire_ms", "decode_ms", "exposed_ms")},
        "skipped": wire.skipped > skipped,
        "facts": last["method"],
    }
    kernel = interface_bytes()
    if kernel is not None:
        row |= {"link_tx_bytes": kernel.tx, "link_rx_bytes": kernel.rx}
    return row


def _summary(config, ranks, parameters, losses, times, wall, tokens_per_step, stats, wire) -> dict[str, Any]:
    settled = times[2:] if len(times) > 4 else times
    step_ms = 1e3 * statistics.median(settled)
    if ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 1e6
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    highest: Tensor = ranks.comm.all_reduce(torch.tensor([peak], device=ranks.device), "max")
    kinds = ("encode_ms", "wire_ms", "decode_ms", "exposed_ms")
    return {
        "method": config.method,
        "engine": config.engine,
        "preset": config.preset,
        "parameters": parameters,
        "world_size": ranks.comm.size,
        "nodes": ranks.nodes,
        "steps": config.steps,
        "train_loss": statistics.fmean(losses[-10:]),
        "first_valid_loss": None,
        "valid_loss": None,
        "tokens_per_s": tokens_per_step * len(times) / sum(times),
        "step_ms": step_ms,
        "wire_bytes_per_step": stats["wire_bytes_per_step"],
        "dense_bytes_per_step": stats["dense_bytes_per_step"],
        "compressed_values": wire.plan.compressed,
        "note": wire.plan.note,
        **{kind: stats[kind] for kind in kinds},
        "compute_ms": step_ms - stats["exposed_ms"],
        "peak_memory_mb": float(highest),
        **{kind: stats[kind] for kind in ("memory_bytes", "memory_planned_bytes")},
        "skipped_steps": wire.skipped,
        "facts": stats["method"],
        "wall_s": wall,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        "files": [
            "summary.json", "metrics.jsonl", *["metrics.csv"] * ("csv" in config.track), "config.yaml", "plan.txt",
            "report.txt",
        ],
    }
