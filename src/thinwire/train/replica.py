"""A replica of ``thinwire train --elastic``: a run of one rank, whose gradients travel between replicas.

    ask who takes part -> this replica's share of the step's text -> exchange, vote -> count it, or take its text again

The text of a step is dealt out once it is known who takes part, and moves on only when the step counts: each window is
learnt once per epoch, whoever comes or goes. An attempt that does not count costs the computing of its batch.

The replica that is the first of those that take part keeps the run's files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import FailedExchange, ThinwireError, Unanswered
from thinwire.base.terminal import say
from thinwire.core.safety import Safety
from thinwire.network.comm import ManagedComm
from thinwire.network.ledger import Ledger
from thinwire.saved.turnover import Turnover
from thinwire.train.checkpoint.format import checkpoint_name, step_of
from thinwire.train.checkpoint.run_settings import DATA, TABLE
from thinwire.train.config import LIGHTHOUSE, Config
from thinwire.train.data.tokenizer import is_kept
from thinwire.train.job.collective import Collective
from thinwire.train.job.progress import Display
from thinwire.train.job.replica_log import REPLICAS, STARTS, ReplicaLog, summary_time, turn
from thinwire.train.job.run_folder import RunFolder, has_begun, read_owner
from thinwire.train.job.setup import Ranks, join_ranks, read_inputs
from thinwire.train.job.signals import Interrupted, ended_by, note_signals
from thinwire.train.job.status import goes_on
from thinwire.train.loop import Start, StepOutcome, Trainer, prepare
from thinwire.wire import Wire

TIMED = 6
"""Steps of a first round of local steps after which the length of a round is judged."""
COMMON = ("step", "sequences", "streak", "skipped", "wall_s", "first_loss")
"""The attributes of a trainer that a replica that joins takes over."""


class _Folder(RunFolder):
    """A run's folder that the launcher of the replicas has locked, and checked."""

    def check_free(self) -> None:
        """Do nothing: another replica may have begun the run."""


def train_replica(config: Config, name: str, connect: Callable[..., Any], compress: Callable[..., Wire]) -> int:
    """Train as the replica ``name``. Return the exit status.

    Args:
        connect: opens the manager (``adapters.torchft.open_manager``). compress: ``adapters.torchft.compress``.

    Raises:
        ThinwireError: input cannot be used, the run diverges, or the lighthouse does not answer.
    """
    logging.getLogger("torchft").setLevel(logging.CRITICAL)  # each lost replica is several traces there
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch's reader of what torchft sends
    restarted = os.environ[STARTS] != "0"
    resume = "auto" if restarted and config.checkpoints else config.resume
    config = dataclasses.replace(config, device="cpu", overwrite=False, resume=resume)
    log = ReplicaLog(config.out / REPLICAS / f"{name}.jsonl")
    log.write("started", pid=os.getpid(), host=socket.gethostname())
    with join_ranks(config) as ranks:
        # Replicas that start together wait for each other. One that comes later must not let the others wait: it first
        # fetches their state, and then opens its manager.
        open_manager = functools.partial(
            connect, name, os.environ["MASTER_ADDR"], min_replicas=config.min_replicas, timeout_s=config.timeout,
            longest_s=max(config.timeout, config.file_timeout),
        )  # fmt: skip
        comes_later = not restarted and goes_on(os.environ[LIGHTHOUSE])
        manager = open_manager if restarted or comes_later else open_manager()
        collective = Collective(ranks.comm.patient(config.file_timeout))
        folder = _Folder(config.out, (0,), collective, read_owner(config.out))
        logs = config.out / REPLICAS
        with turn(logs):  # the first makes the tokenizer, if one is to be made, for all
            kept = is_kept(config.tokenizer, logs)
            inputs = read_inputs(config, folder.collective, logs if kept else config.goes_on_from)
            if not kept:
                inputs.tokenizer.save(logs)
        with _patient_turn(config, config.timeout):
            start = prepare(config, ranks, folder, inputs)
            if not start.ended:
                inputs.save(config, config.out)
                if comes_later:  # the others go on from where they are, whatever it resumes from
                    start.checkpoints.latest = start.checkpoints.newest()
                else:
                    start.checkpoints.go_on()
        if start.ended:
            say(f"thinwire: {start.ended}", sys.stderr)
            return 0
        trainer = ReplicaTrainer(start, ranks, manager, compress, log, restarted)
        try:
            return trainer.train()
        finally:
            trainer.manager.shutdown(wait=False)


@contextlib.contextmanager
def _patient_turn(config: Config, limit_s: float) -> Iterator[bool]:
    """Wait until no other replica is busy with checkpoints, for up to ``limit_s``, and go on; yield whether none is.

    One that was stopped in its save drops it when it wakes, if there is a newer one."""
    with turn(config.out, limit_s) as is_free:
        if not is_free and limit_s:
            line = f"another replica, which may be stopped, has been in its save for {limit_s:g} s: going on beside it"
            say(f"thinwire: {line}", sys.stderr)
        yield is_free


class ReplicaTrainer(Trainer):
    """The run of one replica.

    Attributes:
        dropped: attempts at a step of this process that did not count.
    """

    def __init__(
        self, start: Start, ranks: Ranks, manager: Any, compress: Callable[..., Wire], log: ReplicaLog, restarted: bool
    ) -> None:  # fmt: skip
        self.manager, self.log, self._compress, self._restarted = manager, log, compress, restarted
        self.dropped = 0
        self._begin_counts()
        super().__init__(start, ranks)

    def _begin_counts(self) -> None:
        self._keeps = self._reopen = False  # the run's files
        self._news: Mapping[str, Any] | None = None  # from a replica that is ahead
        self._healed = 0  # how often it was taken over
        self._stepping = self._joining = False  # is a step under way, or the end of a round of others?
        self._rows: list[dict[str, Any]] = []  # of steps since the last vote but one, which may be in no file yet
        self._votes = self._voted = 0  # votes that counted, and the step at the last one
        self._newcomers: set[str] = set()  # who have no rows of the round under way
        self._evaluated = -1
        self._is_blocked = False  # by another replica's save
        self._round_seconds: list[float] = []  # of the first steps that this replica takes alone
        self._number = -1  # of the membership
        self._since = time.time()

    @property
    def place(self) -> tuple[int, int]:
        across = self.wire.engine.across
        return across.rank, across.size

    def start(self, method: str) -> Wire:
        config = self.config
        self.model = self.runner = self.net
        self.wire = self._compress(
            self.net, self.optimizers, method, manager=self.manager, steps=config.steps, seed=config.seed,
            # The trainer counts skipped steps itself, together with losses that are not finite.
            safety=Safety(guard=config.guard, max_skipped=None),
        )  # fmt: skip
        self.manager = self.wire.manager
        described = self.checkpoints.description
        data = {name: described.get(name) for name, (consequence, _) in TABLE.items() if consequence == DATA}
        self.turnover.run_settings = str({**data, "steps": config.steps})
        self.manager.register_state_dict_fn("trainer", functools.partial(setattr, self, "_news"), self._give)
        return self.wire

    @property
    def turnover(self) -> Turnover:
        assert self.wire.turnover is not None
        return self.wire.turnover

    def _give(self) -> dict[str, Any]:
        """Return what a replica that joins needs. One that joins in a step, as a round ends, joins after that step."""
        if self._news is not None and self.turnover.healed > self._healed:  # in the step under way, by another
            return dict(self._news)
        common = {name: getattr(self, name) for name in COMMON}
        return {"run": self.checkpoints.run, **common, "step": self.step + self._stepping}

    @property
    def kept(self) -> SavedReplica:
        return SavedReplica(self.wire, self.manager)

    def train(self) -> int:
        """Train to the last step. Return the exit status: 0, or 128 + the signal on which this replica leaves."""
        config = self.config
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(note_signals(lambda: self.manager.asking))
            self._files = stack.enter_context(contextlib.ExitStack())
            self.display = self._files.enter_context(Display(config, 1, self.step))
            if self.step == config.steps:  # resumed in the last evaluation, which the first to come makes for all
                with turn(config.out, config.file_timeout):
                    if not summary_time(config.out):
                        self.display = self._files.enter_context(Display(config, 0, self.step))
                        self._conclude()
            elif not self._restarted:
                self.first_loss, self._evaluated = self.evaluate(), self.step
            self.wire.reset_stats()
            counted = True
            try:
                while self.step < config.steps and not signals:
                    outcome = self.attempt_step(signals)
                    counted = outcome is not None
                    if outcome is not None:
                        self._conclude_step(outcome, signals)
            except Interrupted:
                counted = False
            except Unanswered:  # if it is the lighthouse that is gone, nobody goes on
                if self.step and not (self._stepping or self._joining):
                    self._save_alone()
                raise
            except _Over:
                self.log.write("ended", step=self.step, why="done")
                return 0
            if self.step < config.steps:
                return self._leave(signals[0], counted)
            if self._number >= 0:
                self._end_together()
            self.log.write("ended", step=self.step, why="done")
        self.wire.close()
        return 0

    def _end_together(self) -> None:
        """Write the run's last files if this replica keeps them, else wait for them: should the keeper be lost, the
        first to notice it writes them."""
        if self._keeps:
            with turn(self.config.out, 0 if self._is_blocked else self.config.file_timeout):
                self._conclude()
        try:
            self._beside.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), "mean")
        except FailedExchange:
            with turn(self.config.out, self.config.file_timeout):
                if self._keeps or summary_time(self.config.out) > self._since:
                    return
                self._open_files(keeps=True)
                self.result = self._result()
                name = checkpoint_name(self.step)
                if self.config.checkpoints and not (self.checkpoints.path / name).exists():
                    super()._save(self.checkpoints.latest == name)
                self._conclude()

    def attempt_step(self, signals: list[int]) -> StepOutcome | None:
        """Attempt one optimizer step; count it and log it, or return None if it does not count."""
        began = time.perf_counter()
        asked = self.wire.engine.ask()  # who takes part
        self._take_news()
        if not asked:
            self._drop(began)
            return None
        self._note_members(new=self.wire.engine.joins_round)
        if self.wire.engine.joins_round:
            self._join_round()
            return None
        first, skipped_before = self.sequences, self.wire.skipped
        self._alone = self.wire.method.card.alone(self.wire.step - self.wire.skipped)
        self._stepping = True
        loss, norm = self._take_step()
        self._stepping = False
        self._time_round(time.perf_counter() - began)
        came_late = self._alone and self._take_news()
        if came_late:  # as a round ended, in a step that the others count, too
            self.step, self._rows = self.step - 1, []
        if self._alone:
            self._note_members(new=came_late)
        skipped = self.wire.skipped > skipped_before and not came_late
        if skipped and self.wire.engine.uncounted:
            self.sequences = first
            self._drop(began)
            return None
        # A replica that is told to end leaves alone, and saves then.
        outcome = self._count_step(began, loss, norm, skipped, signals)
        return outcome and outcome._replace(stopped=0.0)

    def _time_round(self, seconds: float) -> None:
        """Raise ThinwireError, after a few ``seconds`` of steps taken alone, if a round is longer than the timeout: the
        lighthouse would not wait for those who are in it, and let others begin the run without them."""
        every = self.wire.method.card.round_steps
        if not self._alone or len(self._round_seconds) == min(every, TIMED):
            return
        self._round_seconds.append(seconds)
        round_s, timeout = every * statistics.median(self._round_seconds), self.config.timeout
        if len(self._round_seconds) == min(every, TIMED) and round_s > timeout:
            raise ThinwireError(
                f"a round of {every} steps takes about {round_s:.0f} s, longer than --timeout {timeout:g}: "
                "replicas that come back could begin the run anew without those in a round. Take fewer steps in a "
                f"round, or --timeout {2 * round_s:.0f} (a lighthouse of your own: also --join_timeout_ms)"
            )

    def _join_round(self) -> None:
        """Meet the others at the end of their round, without a step of one's own."""
        self._joining = True
        for weight in self.net.parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._votes, self._joining = self.manager.current_step(), False

    def _take_news(self) -> bool:
        """Take over the counts of a replica that turned out to be ahead, if the wire has taken over its state."""
        news, healed = self._news, self.turnover.healed
        took_over, self._news, self._healed = healed > self._healed, None, healed
        if not took_over or news is None:
            return False
        for name in COMMON:
            setattr(self, name, news[name])
        self.checkpoints.run, self._reopen = news["run"], True
        return True

    def _note_members(self, *, new: bool) -> None:
        """Note who takes part, if that has changed, and begin or cease to keep the run's files.

        ``new``: this replica had no part in the round of local steps that ends."""
        membership = self.wire.engine.across.membership
        changed, votes = membership.number != self._number, self.manager.current_step()
        if changed:
            if summary_time(self.config.out) > self._since:
                raise _Over
            self._beside = ManagedComm(self.manager._pg, Ledger(), self.manager._timeout)  # its bytes are nobody's
            self._beside.take(membership)
            alone = self.wire.method.card.alone(self.wire.step - self.wire.skipped)
            counts_late = alone and (new or self._number >= 0)  # not as the run begins
            self._newcomers = {membership.names[rank] for rank in membership.late if counts_late}
            self._number = membership.number
            losses = [(_short(loss.name), loss.step, loss.norm) for loss in self.turnover.losses.values()]
            names = [_short(member) for member in membership.names]
            self.log.write("members", step=self.step + 1, names=names, losses=losses)
        elif votes != self._votes:
            self._newcomers = set()
        if not self.step and self._evaluated < 0:  # all were lost: else it would have another's state now
            self.first_loss, self._evaluated = self.evaluate(), self.step
        self._keep_files()
        if votes != self._votes:
            self._rows = [row for row in self._rows if row["step"] > self._voted]
            self._votes, self._voted = votes, self.step
        if changed:
            self.display.say(f"step {self.step + 1:>6}  replicas: {', '.join(names)}")

    def _keep_files(self) -> None:
        """Begin to keep the run's files if this replica is the first of those that take part, or leave them alone.

        A newcomer to a round of local steps begins with the next one, of which it has the rows of all steps."""
        names = self.wire.engine.across.membership.names
        first = next((rank for rank, name in enumerate(names) if name not in self._newcomers), 0)
        keeps = first == self.place[0]
        if keeps != self._keeps or (keeps and (self._reopen or self.display.replaced)):
            self._open_files(keeps=keeps)

    def _open_files(self, *, keeps: bool) -> None:
        """Open the run's files to continue them, if this replica ``keeps`` them from now on, or close them."""
        self.checkpoints.folder.check_owner()
        if keeps and not self.step and has_begun(self.config.out):
            line = "all replicas were lost before the first checkpoint (--checkpoint-every): the run begins anew"
            say(f"thinwire: {line}", sys.stderr)
        self._files.close()
        self.display = self._files.enter_context(Display(self.config, 0 if keeps else 1, self.step))
        self._keeps, self._reopen = keeps, False
        if not keeps:
            return
        self.wall_s = max(self.wall_s, self.display.earlier.wall_s)
        for row in self._rows:
            if row["step"] > self.display.last_step:
                self.display.step(row, self.tokens_per_step / (1e-3 * row["step_ms"]))
        self._write_plan()
        if self._evaluated == self.step:
            self.display.say(self._headline())
            if self.config.eval_sequences:
                row = {"step": self.step, "valid_loss": self.first_loss, "wall_s": self.wall_s}
                self.display.evaluation(row)
        earlier = self.display.earlier
        self.first_loss, self.losses = earlier.first(self.first_loss), self.losses or list(earlier.losses)

    def _drop(self, began: float) -> None:
        """Note an attempt that does not count."""
        self.wall_s += time.perf_counter() - began
        self.dropped += 1
        self.log.write("dropped", step=self.step + 1)

    @property
    def _shares(self) -> bool:
        return True  # who takes part may differ in the next step

    def _mean(self, row: Tensor) -> Tensor:
        if self._alone:
            return row
        unshared = row.clone()
        try:
            self._beside.all_reduce(row, "mean")
        except FailedExchange:  # which the next attempt will find, too
            return unshared
        return row

    def _save(self, good: bool) -> None:
        if not self._keeps:
            if good:  # by the replica that keeps the files
                self.checkpoints.latest = checkpoint_name(self.step)
            return
        with self._turn_to_save():
            super()._save(good)

    @contextlib.contextmanager
    def _turn_to_save(self) -> Iterator[None]:
        """Wait until no other replica saves. One that may have been stopped in its save is waited for once."""
        with _patient_turn(self.config, 0 if self._is_blocked else self.config.timeout) as is_free:
            self._is_blocked = not is_free
            yield

    def _leave(self, number: int, counted: bool) -> int:
        """Leave on a signal, whatever the others do. Return the exit status.

        ``counted``: the last attempt did. If not, nobody may be left: this replica saves the run, unless it is saved.

        Raises:
            ThinwireError: a line that says what is saved, if this replica keeps the run's files.
        """
        self.log.write("ended", step=self.step, why=signal.Signals(number).name)
        if not self.step:
            raise ended_by(number, "before the first step: nothing is saved")
        if counted and not self._keeps:
            return 128 + number
        if self._stepping or self._joining:  # counts and weights are of two moments
            raise ended_by(number, "as a round of local steps ended: --resume auto goes on from the last checkpoint")
        self._save_alone()
        self._stop(number)

    def _save_alone(self) -> None:
        """Save the run, whatever the others do, unless it is saved, or this replica is behind the last checkpoint."""
        if not self.config.checkpoints or not self._is_good(bool(self._rows) and self._rows[-1]["skipped"], final=True):
            return
        with self._turn_to_save():
            newest = self.checkpoints.newest()
            if newest and step_of(newest) >= self.step:
                self.checkpoints.latest = newest
            else:
                super()._save(True)

    def _ranks_in_words(self) -> str:
        return f"{self.place[1]} replicas"

    def _row(self, norm: float, seconds: float, skipped: bool) -> dict[str, Any]:
        row = super()._row(norm, seconds, skipped)
        row |= {"time": round(time.time(), 3), "replicas": self.place[1], "dropped": self.dropped}
        self._rows.append(row)
        return row

    def _summary(self, stats: dict[str, Any]) -> dict[str, Any]:
        summary = super()._summary(stats)
        return summary | {"skipped_steps": self.skipped, "dropped_attempts": self.dropped, "lost": stats["lost"]}


class _Over(Exception):
    """The others have come to the end of the run, and this replica has missed their last step."""


class SavedReplica:
    """A replica's exchange as a checkpoint holds it: what a replica that joins gets, and the manager's count of steps.

    What waits on the replicas is in no checkpoint: only one of them writes it.
    """

    def __init__(self, wire: Wire, manager: Any) -> None:
        assert wire.turnover is not None
        self.engine, self.method = wire.engine, wire.method
        self._turnover, self._manager = wire.turnover, manager

    def hand_over(self) -> None:
        """Do nothing: moments of what the method steps are in its own state, which the run goes on with."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state, a flat dict of tensors."""
        return {**self._turnover.saved(), "votes": torch.tensor(self._manager.current_step(), device="cpu")}

    def load_state_dict(self, state: Mapping[str, Tensor], resize: None = None) -> None:
        """Go on from ``state_dict()``, when this replica first asks who takes part."""
        state = dict(state)
        self._manager.load_state_dict({"step": int(state.pop("votes")), "batches_committed": 0})
        self._turnover.resume(state)


def _short(name: str) -> str:
    """Return a replica's own name, without that of its process."""
    return name.partition(":")[0]
