"""The training run of one rank, in the order in which it happens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import resource
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.base.files import write
from thinwire.base.processes import Bytes, interface_bytes
from thinwire.base.terminal import counted, note, say
from thinwire.methods import resolve
from thinwire.network.comm import local
from thinwire.network.ledger import settled_rounds
from thinwire.predict.choice import Auto, Choice, Training, choose
from thinwire.predict.forecast import predictor
from thinwire.train.checkpoint.format import checkpoint_name
from thinwire.train.checkpoint.run_settings import describe_run
from thinwire.train.checkpoint.state import ResumedState
from thinwire.train.checkpoint.store import Checkpoints
from thinwire.train.config import Config
from thinwire.train.job import held_out
from thinwire.train.job.collective import Collective
from thinwire.train.job.patience import fit_timeout
from thinwire.train.job.progress import Display, Earlier
from thinwire.train.job.run_folder import RunFolder, open_run_folder
from thinwire.train.job.scheduler import starts_of
from thinwire.train.job.setup import Inputs, Ranks, join_ranks, make_optimizers, read_inputs, rebuild_buckets, wrap
from thinwire.train.job.signals import ended_by, note_signals
from thinwire.train.job.stepper import Stepper
from thinwire.wire import Wire

TIMES = ("encode_ms", "wire_ms", "decode_ms", "exposed_ms")
ALONE_S = 5.0
"""Longest time, by the steps before, that ranks which step alone go without telling each other their losses (higher:
fewer messages and waits; a signal takes as much longer to be obeyed)."""


def train(config: Config) -> dict[str, Any]:
    """Train as one rank of the job; return what summary.json holds, {} if nothing was left to do. Collective.

    Raises:
        ThinwireError: input cannot be used, or another rank is gone (LostRank, if a collective of ours has noticed).
    """
    config.check()
    with join_ranks(config) as ranks:
        if ranks.comm.rank == 0:
            note(f"{counted(ranks.comm.size, 'rank')} joined; reading {config.text_name}")
        return train_on(config, ranks)


def train_on(config: Config, ranks: Ranks) -> dict[str, Any]:
    """Train on ``ranks`` that have joined; return as ``train``. Collective."""
    with open_run_folder(config.out, Collective(ranks.comm.patient(config.file_timeout))) as folder:
        starts = starts_of(os.environ)
        if config.overwrite and folder.take_over(starts):  # which is not to be removed
            if not config.checkpoints and folder.has_results():
                if ranks.comm.rank == 0:
                    say(f"{config.out} holds this job's run, which has ended: nothing is left to do")
                return {}
            config = dataclasses.replace(config, overwrite=False, resume="auto")
        if not config.resume and not config.overwrite:
            folder.check_free()
        start = prepare(config, ranks, folder, read_inputs(config, folder.collective, config.goes_on_from))
        if start.ended:  # no error: a scheduler may start the run again and again until it has ended
            if ranks.comm.rank == 0:
                say(start.ended)
            return {}
        trainer = Trainer(start, ranks)
        # Nothing has been changed in the folder so far, because the run might have been refused.
        if start.resumed is None:
            folder.make_room()
            folder.mark(starts)
        else:
            start.checkpoints.go_on()
            folder.remove_results()
        folder.begin(lambda: start.inputs.save(config, folder.path))
        return trainer.run()


class Start(NamedTuple):
    """The beginning of a trainer. ended: why nothing is left to do, or ""."""

    config: Config
    inputs: Inputs
    checkpoints: Checkpoints
    resumed: ResumedState | None
    ended: str = ""


def prepare(config: Config, ranks: Ranks, folder: RunFolder, inputs: Inputs) -> Start:
    """Describe the run, and read the checkpoint to resume from. Collective."""
    init, tokens = inputs.hashes(folder.collective)
    shape = inputs.pretrained.shape if inputs.pretrained else config.shape(inputs.tokenizer.vocabulary)
    description = describe_run(
        config, shape, tokens=tokens, world_size=ranks.comm.size, per_node=ranks.per_node,
        device=ranks.device.type, dtype="bf16" if ranks.computes_in_bf16(config) else "fp32", init=init,
        order=inputs.train.order,
    )  # fmt: skip
    checkpoints = Checkpoints(
        folder, description, keep=config.keep, resume_anyway=config.resume_anyway,
        resize=None if config.resize == "refuse" else config.resize,
    )  # fmt: skip
    resumed = checkpoints.find(config.resume) if config.resume else None
    ended = ""
    if resumed is not None and (step := resumed.checkpoint.step) >= config.steps:
        was_killed = not folder.collective.share((config.out / "summary.json").exists())[0]  # in its last evaluation
        result = step == config.steps and resumed.checkpoint.meta.get("result")
        if not (was_killed and checkpoints.latest and result):
            ended = f"the checkpoint is at step {step}, the run ends at {config.steps}: nothing is left to do"
            if config.resume != "auto":
                raise ThinwireError(f"{ended}; raise --steps")
    elif resumed is not None:  # it has chosen, if its run had to
        about = resumed.checkpoint.meta["about"]
        checkpoints.description |= {"method": about["method"], "choice": about.get("choice")}
        config = config.with_choice(about["method"]) if config.chooses else config
    return Start(config, inputs, checkpoints, resumed, ended)


class StepOutcome(NamedTuple):
    """Outcome of a step, the same on all ranks: means over the ranks of the loss and of flags (0 or 1 on each)."""

    loss: float
    skipped: float
    stopped: float
    write_failed: float


class Trainer(Stepper):
    """The run of one rank: its model, what trains the model, and its progress.

    Attributes:
        unshared: of each step that ranks took alone and have not told each other of: this rank's loss and flags (5,),
            and the step's row of metrics.jsonl.
        steps_alone: how many steps ranks take alone, at most, before they tell each other of them.
        streak: steps in a row that were skipped, or had a loss that is not finite.
        diverged: the first and the last step of a streak that is too long; None: there is none.
        earlier: what a resumed run had done by its checkpoint.
        losses: mean loss of all ranks for each step since the process began that none skipped, after
            ``earlier.losses``. skipped: steps that a rank skipped, with those before the checkpoint.
        step_seconds: this rank's time for each step since the process began.
        wall_s: seconds of all steps, including those before the checkpoint.
        trained: sequences that all ranks together have trained on since the process began.
        wire: the exchange. kept: what saves its state, and takes it back; ``wire`` itself where ranks are fixed.
        first_loss: of the run's first evaluation of as many sequences.
        result: at the end of the steps, the summary and the report without the last evaluation; in the checkpoint, too.
    """

    diverged: tuple[int, int] | None = None
    first_loss = math.nan
    earlier = Earlier()
    result: dict[str, Any] | None = None

    def __init__(self, start: Start, ranks: Ranks) -> None:
        """Begin as ``start`` says, or where its checkpoint has ended. Collective."""
        super().__init__(start.config, ranks, start.inputs)
        config, self.checkpoints, self.collective = start.config, start.checkpoints, start.checkpoints.collective
        self.parameters = sum(parameter.numel() for parameter in self.net.parameters())
        self.patience = fit_timeout(ranks.comm, self.parameters, config.timeout)
        self.trained_parameters = sum(weight.numel() for weight in self.net.parameters() if weight.requires_grad)
        if config.engine != "ddp":
            self.net = wrap(self.net, config, ranks)
        self.optimizers = make_optimizers(self.net, config)
        self.streak, self.skipped, self.wall_s, self.trained = 0, 0, 0.0, 0
        self.unshared: list[tuple[Tensor, dict[str, Any]]] = []
        self.steps_alone = 1
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self._between = Bytes(0, 0)  # on the network between steps: of evaluations and checkpoints
        description = self.checkpoints.description
        if config.chooses:
            choice = self._choose()
            self.config = config.with_choice(choice.method)
            description |= {"method": str(resolve(choice.method)), "choice": dataclasses.asdict(choice)}
        self.start(self.config.method)
        if description.get("choice"):
            self.wire.note(Choice.from_plain(description["choice"]))
        if start.resumed is not None:
            self.restore(start.resumed)

    @property
    def tokens_per_step(self) -> int:
        return round(self.sequences_per_step * self.inputs.train.targets_per_window)

    @property
    def kept(self) -> Any:
        return self.wire

    def start(self, method: str) -> Wire:
        """Begin to exchange gradients with ``method``, on DDP in buckets that suit it. Collective."""
        config = dataclasses.replace(self.config, method=method)
        self.model, self.wire, self.runner = self.net, None, None  # an earlier wire and its buckets go first
        if config.engine == "ddp":
            self.model = wrap(self.net, config, self.ranks)
            rebuild_buckets(self.model, self.inputs.train, config, self.ranks, self.cast)
        check_every = config.check_every or None
        self.exchange_with(method, two_level=config.two_level, intra=config.intra, check_every=check_every)
        return self.wire

    def _choose(self) -> Choice:
        """Try methods on the first text, which the run then begins with. Collective."""
        config, knobs = self.config, (self.config.two_level, self.config.intra, self.config.bucket_mb)
        auto = Auto(lambda wire: self._take_step(), config.largest_loss, config.cluster, bool(config.init))
        training = Training(self.net, config.engine, self.optimizers, config.steps, *knobs)
        choice, self.sequences = choose(auto, training, self.start, predictor), 0
        return choice

    def restore(self, resumed: ResumedState) -> None:
        """Restore weights, moments, the method's state and the place in the text. Collective."""
        self.collective.do(lambda: resumed.restore(model=self.model, optimizers=self.optimizers, wire=self.kept))
        self.step, self.sequences = resumed.checkpoint.step, resumed.checkpoint.meta["sequences"]
        self.result = resumed.checkpoint.meta.get("result") if self.step == self.config.steps else None

    def run(self) -> dict[str, Any]:
        """Train to the last step; return the summary. Collective.

        Raises:
            ThinwireError: the run diverges, was stopped by a signal, or its files cannot be written.
        """
        config = self.config
        self.collective.do(self._write_plan if self.ranks.comm.rank == 0 else lambda: None)
        with contextlib.ExitStack() as stack:
            self.display = Display(config, self.ranks.comm.rank, self.step)
            signals = stack.enter_context(note_signals())  # before the display hides the cursor
            self.collective.do(lambda: stack.enter_context(self.display))
            stack.callback(self._log_unshared)
            if self.step:
                self.earlier = Earlier(*self.collective.broadcast(self.display.earlier))
                if self.earlier.steps < self.step and self.result is None and self.ranks.comm.rank == 0:
                    line = (
                        f"metrics.jsonl has {self.earlier.steps} of the {self.step} steps before the checkpoint: "
                        "losses, seconds and bytes in summary.json are of those and of the steps to come"
                    )
                    warnings.warn(line, ThinwireWarning, stacklevel=2)
            self.wall_s, self.losses = self.earlier.wall_s, list(self.earlier.losses)
            self.skipped = self.earlier.skipped
            self.display.say(self._headline() + (f"\n{choice.headline}" if (choice := self.wire.plan.choice) else ""))
            self.wire.ledger.close_step()
            self.wire.reset_stats()
            if self.step < config.steps:
                self.first_loss = self.earlier.first(self.evaluate())
            while self.step < config.steps:
                outcome = self.train_step(signals)
                if len(self.step_seconds) == 1:
                    self.checkpoints.folder.settle()
                if outcome is not None:
                    self._conclude_step(outcome, signals)
            summary = self._conclude()
        self.wire.close()
        return summary

    def _conclude_step(self, outcome: StepOutcome, signals: list[int]) -> None:
        """Check a step that was taken; evaluate, save and stop where that is due. Collective."""
        config = self.config
        self._check(outcome)
        if config.eval_every and self.step % config.eval_every == 0 and self.step < config.steps:
            self.evaluate()
        self._save_checkpoint(outcome)
        if outcome.stopped and self.step < config.steps:
            self._stop(max(self.collective.share(max(signals, default=0))))

    def evaluate(self) -> float:
        """Compute, show and log the mean loss over a fixed held-out text; NaN: not evaluated. Collective."""
        if not self.config.eval_sequences:
            return math.nan
        with self._between_steps():
            loss = held_out.mean_loss(self._window_losses(self.config.eval_sequences))
        whose = {} if self.wire.method.rank_equal else {"valid_loss_of": "each rank's own weights"}
        self.display.evaluation({"step": self.step, "valid_loss": loss, "wall_s": self.wall_s} | whose)
        return loss

    def _window_losses(self, number: int) -> list[held_out.WindowLoss]:
        """Compute the losses of ``number`` held-out windows. Collective."""
        comm, valid = self.ranks.comm, self.inputs.valid
        indices = held_out.shared_by(comm.size, comm.rank, valid, number)
        self.runner.eval()
        own_losses = held_out.window_losses(
            self.runner, valid, indices, self.config.batch_size, self.ranks.device, self.cast
        )
        self.runner.train()
        shared = self.collective.share(own_losses)
        return list({row[0]: held_out.WindowLoss(*row) for rows in shared for row in rows}.values())

    def train_step(self, signals: list[int]) -> StepOutcome | None:
        """Take one optimizer step, count it and log it, unless that waits (``_shares``): None. Collective."""
        began, skipped_before = time.perf_counter(), self.wire.skipped
        self._alone = self.wire.method.card.alone(self.wire.step - self.wire.skipped)
        loss, norm = self._take_step()
        return self._count_step(began, loss, norm, self.wire.skipped > skipped_before, signals)

    def _count_step(
        self, began: float, loss: Tensor, norm: Tensor, skipped: bool, signals: list[int]
    ) -> StepOutcome | None:  # fmt: skip
        """Count the step that ``began`` then; where that is due, agree on it and those before it. Collective."""
        self.step += 1
        self.trained += self.sequences_per_step
        # Each rank's flags travel to all together with its loss, and its bytes: others may send more or fewer.
        sent, write_failed = self.wire.ledger.last.bytes["inter"], bool(self.display.write_error)
        flags = [skipped, bool(signals), write_failed, sent, time.perf_counter() - began]
        report = torch.cat([loss, torch.tensor(flags, dtype=loss.dtype, device=loss.device)])
        reports, shares = [*(report for report, _ in self.unshared), report], self._shares
        means = self._mean(torch.cat(reports)).view(-1, len(report)).tolist() if shares else []
        # Timed after that exchange: messages that leave ahead of the next forward pass travel beside it.
        seconds = time.perf_counter() - began
        self.wall_s += seconds
        self.step_seconds.append(seconds)
        self.unshared.append((report, self._row(float(norm), seconds, skipped)))
        return self._note_losses(means) if shares else None

    @property
    def _shares(self) -> bool:
        """Do ranks tell each other their losses after this step? Not after each that they take alone."""
        config, step = self.config, self.step
        return (
            not self._alone
            or len(self.unshared) + 1 >= self.steps_alone
            or step == config.steps
            or any(every and step % every == 0 for every in (config.eval_every, config.checkpoint_every))
        )

    def _note_losses(self, means: list[list[float]]) -> StepOutcome:
        """Log steps whose ``means`` over the ranks are known; return the outcome of the last."""
        for (_, row), (loss, skipped, _, _, sent, _) in zip(self.unshared, means, strict=True):
            self.skipped += bool(skipped)
            if not skipped:
                self.losses.append(loss)
            self.streak = self.streak + 1 if skipped or not math.isfinite(loss) else 0
            row |= {"loss": loss, "node_bytes": sent * self.ranks.per_node, "skipped": bool(skipped)}
            self.display.step(row, self.tokens_per_step / row["step_ms"] * 1e3)
            if not self.diverged and 0 < self.config.max_skipped <= self.streak:
                self.diverged = (row["step"] - self.streak + 1, row["step"])
        self.unshared.clear()
        self.steps_alone = max(1, int(ALONE_S * len(means) / sum(seconds for *_, seconds in means)))
        return StepOutcome(*means[-1][:4])

    def _mean(self, row: Tensor) -> Tensor:
        """Average ``row`` over the ranks that took the step. Collective."""
        return self.ranks.comm.all_reduce(row, "mean")

    def _log_unshared(self) -> None:
        """Log steps of which ranks have not told each other, as an error ends the run: with this rank's own loss."""
        for report, row in self.unshared:
            self.display.step(row | {"loss": float(report[0]), "loss_of": "rank 0"}, 0.0)
        self.unshared.clear()

    def _check(self, outcome: StepOutcome) -> None:
        """End the run if a rank cannot write its files, or if it diverges. Collective."""
        if outcome.write_failed:
            self.collective.do(self.display.check)
        if self.diverged:
            (first, last), latest = self.diverged, self.checkpoints.latest
            raise ThinwireError(
                f"the run diverges: steps {first} to {last} were skipped, or had a loss that is not finite; "
                f"{_last_good(latest)}. A lower --lr may help; --max-skipped 0 lets such a run go on"
            )

    def _save_checkpoint(self, outcome: StepOutcome) -> None:
        """Save a checkpoint if one is due, at the end and before a stop. Collective."""
        config = self.config
        scheduled = config.checkpoint_every and self.step % config.checkpoint_every == 0
        final = bool(outcome.stopped) or self.step == config.steps
        if not config.checkpoints or not (scheduled or final):
            return
        good = self._is_good(bool(outcome.skipped), final)
        if self.step == config.steps:
            self.result = self._result()
        self._save(good)

    def _is_good(self, skipped: bool, final: bool) -> bool:
        """Is the state good to go on from? ``skipped``: was the last step? Collective."""
        # One skipped step leaves the state of the step before: good, if no better checkpoint will come (at the end).
        # Earlier, a run that diverges would replace an older checkpoint by it.
        if final and self.streak == 1 and skipped:
            return all(self.collective.gather(lambda: _is_finite(self.model)))
        return self.streak == 0

    def _save(self, good: bool) -> None:
        """Save a checkpoint. Collective."""
        self.checkpoints.folder.do_once(self.display.check)
        with self._between_steps():
            self.checkpoints.save(
                self.step, self.sequences, model=self.model, optimizers=self.optimizers, wire=self.kept, good=good,
                result=self.result,
            )  # fmt: skip

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Leave what the network carries inside out of the steps' rows."""
        before = interface_bytes()
        yield
        if before is not None and (after := interface_bytes()) is not None:
            self._between = Bytes(*map(sum, zip(self._between, after - before, strict=True)))

    def _stop(self, number: int) -> NoReturn:
        """Raise ThinwireError for signal ``number``, with a line that says what is saved."""
        latest, saved = self.checkpoints.latest, "nothing is saved"
        if self.config.checkpoints and latest == checkpoint_name(self.step):
            saved = f"{latest} is saved, --resume auto goes on from it"
        elif self.config.checkpoints:
            saved = "its loss, or a gradient, was not finite; " * bool(self.streak) + _last_good(latest)
        raise ended_by(number, f"after step {self.step}: {saved}")

    def _result(self) -> dict[str, Any]:
        taken = len(self.step_seconds)
        of_part = f"the {taken} of {self.step} steps that this process has taken:\n" if taken < self.step else ""
        return {"summary": self._summary(self.wire.stats()), "report": f"{of_part}{self.wire.report()}"}

    def _conclude(self) -> dict[str, Any]:
        """Evaluate, write the run's last files, and show the result; return the summary. Collective."""
        config, result = self.config, self.result or self._result()
        losses: list[held_out.WindowLoss] = []
        if config.eval_sequences:
            last_loss = self.evaluate()  # of the same text as the first
            losses = self._window_losses(held_out.count_at_end(self.inputs.valid, config.eval_sequences, self.tokens))
        summary = result["summary"] | {
            "valid_loss": held_out.mean_loss(losses) if losses else None,
            "valid_tokens": sum(row.targets for row in losses),
            "files": [
                "summary.json", "metrics.jsonl", *["metrics.csv"] * ("csv" in config.track), "config.yaml", "plan.txt",
                "report.txt", *[held_out.FILE] * bool(losses),
            ],
        }  # fmt: skip

        def write_summary() -> None:
            self.checkpoints.folder.check_owner()
            self.display.check()
            if self.ranks.comm.rank == 0:
                write(config.out / "summary.json", json.dumps(summary, indent=2) + "\n")
                write(config.out / "report.txt", f"{result['report']}\n")
                if losses:
                    write(config.out / held_out.FILE, held_out.to_csv(losses))

        self.collective.do(write_summary)
        first_loss = summary["first_valid_loss"]
        line = ""
        if losses and first_loss:
            more = len(losses) > min(config.eval_sequences, self.inputs.valid.count)
            of_all = f" (on more text {summary['valid_loss']:.4f})" if more else ""
            line = f"validation loss {first_loss:.4f} -> {last_loss:.4f}{of_all}, "
        self.display.say(
            f"{line}{summary['tokens_per_s']:,.0f} tokens/s, "
            f"{summary['step_ms']:.0f} ms per step of which {summary['exposed_ms']:.0f} ms waiting for the exchange"
        )
        saved = [f"checkpoints/{self.checkpoints.latest}"] if self.checkpoints.latest else []
        self.display.say(f"files: {config.out}/ {', '.join(summary['files'] + saved)}")
        return summary

    @property
    def tokens(self) -> int:
        """Tokens that the run has trained on."""
        return round(self.sequences * self.inputs.train.targets_per_window)

    def _write_plan(self) -> None:
        init = self.config.init and str(Path(self.config.init).resolve())
        # Who repeats the run by this file has not agreed to lose this one, or to go on from it.
        tokenizer = self.config.tokenizer if init else self.inputs.tokenizer.name
        config = dataclasses.replace(
            self.config, tokenizer=tokenizer, init=init, overwrite=False, resume=None, resume_anyway=False
        )
        write(config.out / "config.yaml", config.to_yaml())
        by_method = config.optimizer is None and config.optimizer_name != "adamw"
        optimizer = config.optimizer_name + f", for which {self.wire.method.name} is made" * by_method
        write(config.out / "plan.txt", f"{self.wire.plan.text()}\noptimizer: {optimizer}\n{self.patience}\n")

    def _headline(self) -> str:
        config, family = self.config, self.checkpoints.description["family"]
        some = f"{self.trained_parameters:,} of them trained, " if self.trained_parameters < self.parameters else ""
        return (
            f"{family} {config.model}: {self.parameters:,} parameters, {some}{config.method} on "
            f"{config.engine}, {config.optimizer_name}, {self._ranks_in_words()}, {self.ranks.device.type}, "
            f"{self.tokens_per_step:,} tokens per step, steps {self.step + 1} to {config.steps}"
        )

    def _ranks_in_words(self) -> str:
        ranks, nodes = self.ranks.comm.size, self.ranks.nodes
        return f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"

    def _row(self, norm: float, seconds: float, skipped: bool) -> dict[str, Any]:
        """Return the step's row of metrics.jsonl, whose loss is not known yet."""
        last = self.wire.last_step()
        row = {
            "step": self.step,
            "loss": math.nan,
            "lr": self.optimizers[-1].param_groups[0]["lr"],
            "grad_norm": norm,
            "step_ms": 1e3 * seconds,
            "wall_s": self.wall_s,
            "tokens": self.tokens,
            "wire_bytes": last["wire_bytes_per_step"],
            **{kind: last[kind] for kind in TIMES},
            "skipped": skipped,
            "facts": last["method"],
        }
        if (kernel := interface_bytes()) is None:
            return row
        of_steps = kernel - self._between
        return row | {"link_tx_bytes": of_steps.tx, "link_rx_bytes": of_steps.rx}

    def _summary(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Return what summary.json holds of the steps. Collective."""
        config, cuda, times = self.config, self.ranks.device.type == "cuda", self.step_seconds
        round_steps, earlier = self.wire.method.card.round_steps, self.earlier
        step_ms = 1e3 * statistics.median(settled_rounds(times, round_steps))
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_mb = (torch.cuda.max_memory_allocated() if cuda else 1024 * kib) / 1e6
        peak = torch.tensor([peak_mb], dtype=torch.float32, device=self.ranks.device)
        highest: Tensor = self.ranks.comm.all_reduce(peak, "max")
        return {
            "method": config.method,
            "engine": config.engine,
            "preset": None if config.init else config.preset,
            "init": config.init,
            "parameters": self.parameters,
            "world_size": self.place[1],
            "nodes": self.ranks.nodes,
            "steps": config.steps,
            "train_loss": statistics.fmean(self.losses[-10:] or [math.nan]),
            "first_valid_loss": self.first_loss if config.eval_sequences else None,
            "valid_loss": None,
            "valid_tokens": 0,
            "tokens_per_parameter": self.tokens / self.parameters,
            "tokens_per_s": self.trained * self.inputs.train.targets_per_window / sum(times),
            "step_ms": step_ms,
            "round_steps": round_steps,
            "wire_bytes_per_step": {
                link: (earlier.sent.get(link, 0) + mean * stats["steps"]) / (earlier.steps + stats["steps"])
                for link, mean in stats["wire_bytes_per_step"].items()
            },
            "dense_bytes_per_step": stats["dense_bytes_per_step"],
            "choice": self.checkpoints.description.get("choice"),
            "compressed_values": self.wire.plan.compressed,
            "note": self.wire.plan.note,
            **{kind: stats[kind] for kind in TIMES},
            "compute_ms": step_ms - stats["exposed_ms"],
            "peak_memory_mb": float(highest),
            **{kind: stats[kind] for kind in ("memory_bytes", "memory_planned_bytes")},
            "skipped_steps": max(self.skipped, self.wire.skipped),
            "facts": stats["method"],
            "wall_s": self.wall_s,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        }


def _is_finite(model: nn.Module) -> bool:
    return all(bool(local(parameter).detach().isfinite().all()) for parameter in model.parameters())


def _last_good(latest: str) -> str:
    return f"the last good checkpoint is {latest}" if latest else "there is no good checkpoint"
