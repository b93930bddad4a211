"""The trainer of an elastic run, on replicas that are threads: who comes, goes or lags never falls out of step."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire.wire
from breadth import spread
from lighthouse import Lighthouse, Replica
from thinwire.base.errors import ThinwireError, Unanswered
from thinwire.core.safety import Safety
from thinwire.engines.replicas import Replicas
from thinwire.methods import resolve
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, Threads
from thinwire.train.checkpoint.format import read_meta
from thinwire.train.checkpoint.store import Checkpoints
from thinwire.train.config import Config
from thinwire.train.job.collective import Collective
from thinwire.train.job.progress import Display
from thinwire.train.job.run_folder import RunFolder, read_owner
from thinwire.train.job.signals import Interrupted
from thinwire.train.loop import Trainer
from thinwire.train.replica import ReplicaTrainer
from thinwire.wire import Options, Wire, join

STEPS, SEEDS = 20, 9
METHODS = (
    "local-steps(every=4)", "local-steps(every=3, start=4)", "int8(smallest=0)",
    "local-steps(every=2, outer='int8(feedback=\"gradients\")')",
)  # fmt: skip


class Books:
    """What all replicas have counted, by vote and number of the membership: place in the run, weights, windows."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], set[Any]] = defaultdict(set)
        self.windows: dict[tuple[int, int], list[int]] = defaultdict(list)


class Counting(ReplicaTrainer):
    """A trainer whose steps learn nothing: it notes which windows of the text they would have learnt."""

    spoilt = False

    def __init__(self, replica: Replica, folder: Path, method: str, books: Books) -> None:
        self.replica, self.books, self._round, self.took = replica, books, list[int](), set[int]()
        self.manager: Any = replica
        replica._pg, replica._timeout = type("Group", (), {})(), None  # type: ignore[attr-defined]
        self.config = Config(out=folder, steps=STEPS, batch_size=2, elastic=True, method=method)
        self.log: Any = SimpleNamespace(write=lambda *given, **named: None)
        self.net = self.model = nn.Linear(6, 4)
        with torch.no_grad():
            self.net.weight.fill_(1.0), self.net.bias.fill_(0.5)
        self.optimizers = (torch.optim.SGD(self.net.parameters(), lr=0.1),)
        options = Options(
            resolve(method), self.optimizers, False, None, STEPS, 0, None, None, Safety(max_skipped=None)
        )
        self.wire: Wire = join(Replicas(self.net, replica, replica.comm), options, replica.comm.ledger)
        self.wire.attach()
        place = RunFolder(folder, (0,), SimpleNamespace(rank=0), read_owner(folder))
        self.checkpoints: Any = SimpleNamespace(run={}, latest="", folder=place)
        self.step = self.sequences = self.trained = self.streak = self.skipped = self.dropped = 0
        self.wall_s, self.first_loss, self.ranks = 0.0, 0.0, SimpleNamespace(per_node=1)
        self.step_seconds, self.losses, self.unshared = [], [], []
        self._begin_counts()
        self._evaluated = STEPS + 1  # there is nothing to evaluate
        self.display = Display(self.config, 1, 0)
        self._files: Any = SimpleNamespace(close=self._close, enter_context=lambda display: display.__enter__())
        replica.register_state_dict_fn("trainer", lambda news: setattr(self, "_news", news), self._give)

    def _close(self) -> None:
        self.display.__exit__(None, None, None)

    def _write_plan(self) -> None: ...

    def _mean(self, row: Tensor) -> Tensor:
        return row

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step

    def _row(self, *given: Any) -> dict[str, Any]:
        self.took.add(self.step)
        return super()._row(*given)

    def _take_step(self) -> tuple[Tensor, Tensor]:
        rank, size = self.place
        first = self.sequences + rank * self.config.batch_size
        self._round += range(first, first + self.config.batch_size)
        self.sequences += size * self.config.batch_size
        for weight in self.net.parameters():
            weight.grad = torch.full_like(weight, math.nan if self.spoilt else 0.01 * (first % 7) - 0.02)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        return torch.zeros(1), torch.zeros(())

    def run(self) -> None:
        while self.step < STEPS:
            votes, healed = self.replica.step, self.wire.turnover.healed
            self.attempt_step([])
            if self.wire.turnover.healed > healed:
                self._round, self.took = [], set()  # of steps that came to nothing
            elif self.replica.step > votes and self._round:
                key = self.replica.step, self.wire.engine.across.membership.number
                weights = torch.cat([weight.detach().reshape(-1) for weight in self.net.parameters()])
                equal = self.wire.method.rank_equal  # else the vote has begun the steps alone
                self.books.places[key].add((self.step, self.sequences, hash(tuple(weights.tolist())) * equal))
                self.books.windows[key] += self._round if equal else []
                self._round = self._round if not equal else []
            elif self.replica.step == votes and not self.wire.method.card.alone(self.wire._road.step):
                self._round = []  # an attempt that did not count
        self._close()


class Ending(Counting):
    """A trainer that runs to its end, evaluates and saves. At a ``moment`` of replica 1's step 8 all replicas are
    ``told`` to end (True), or the lighthouse ends without a word (False). ``spoils``: that step has a NaN, and is
    skipped."""

    def __init__(
        self, replica: Replica, folder: Path, method: str, moment: str, tells: bool, spoils: bool,
        told: list[bool], signals: list[int],
    ) -> None:  # fmt: skip
        super().__init__(replica, folder, method, Books())
        self.config = dataclasses.replace(self.config, eval_every=4, checkpoint_every=8 * (moment[:4] == "save"))
        self.collective = Collective(ThreadComm(Threads(1), 0, Ledger()))
        place = dataclasses.replace(self.checkpoints.folder, collective=self.collective)
        self.checkpoints = Checkpoints(place, {"mesh": "1", "method": method}, keep=2)
        self._restarted, self.moment, self.tells, self.spoils = True, moment, tells, spoils
        self.told, self.signals = told, signals
        replica.vote, self._vote = self._vote_at, replica.vote  # type: ignore[method-assign]
        replica.ask, self._first_ask = self._ask_at, replica.ask  # type: ignore[method-assign]

    def _reach(self, moment: str, step: int) -> None:
        if (moment, step, self.replica.name) == (self.moment, 8, "replica 1") and not any(self.told):
            self.told.append(self.tells)
            self.signals += [signal.SIGTERM] * self.tells

    def _vote_at(self, counts: bool) -> bool:
        self._reach("vote", self.step + 1)
        return self._vote(counts)

    def _ask_at(self) -> Any:
        told, answer = list(self.told), self._first_ask()
        if self.told == [False]:
            raise Unanswered("no lighthouse")
        if self.told != told:
            raise Interrupted
        return answer

    def _take_step(self) -> tuple[Tensor, Tensor]:
        self._reach("take", self.step + 1)
        self.spoilt = self.spoils and self.step + 1 == 8
        return super()._take_step()

    def _count_step(self, *given: Any) -> Any:
        self._reach("counted", self.step + 1)
        return super()._count_step(*given)

    def evaluate(self) -> float:
        self._reach("evaluate", self.step)
        return 0.0

    def _save(self, good: bool) -> None:
        self._reach("save", self.step)
        super()._save(good)
        self._reach("saved", self.step)


def play(seed: int, method: str, folder: Path) -> Counter[str]:
    books = Books()
    trainers: list[Counting] = []

    def begin(replica: Replica) -> Any:
        trainers.append(Counting(replica, folder, method, books))
        return trainers[-1].run

    lighthouse = Lighthouse(seed, begin)
    lighthouse.run()
    for trainer in trainers:  # torch's hooks are the process's
        trainer.wire.close()
    for (vote, number), places in books.places.items():
        assert len(places) == 1, f"seed {seed}: after vote {vote} of membership {number} replicas differ: {places}"
    latest = {vote: max(n for v, n in books.windows if v == vote) for vote, _ in books.windows}
    learnt = Counter(window for vote, number in latest.items() for window in books.windows[vote, number])
    assert max(learnt.values()) == 1, f"seed {seed}: {learnt.most_common(3)} windows were learnt several times"
    rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Nobody looks whether the replica that keeps the files still lives after the last step.
    took = set().union(*(trainer.took for trainer in trainers if trainer.step == STEPS)) - {STEPS}
    assert rows == sorted(set(rows)), f"seed {seed}: the rows of metrics.jsonl are of steps {rows}"
    assert took <= set(rows), f"seed {seed}: there are no rows of steps {took - set(rows)}"
    return lighthouse.seen


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinwire.wire, "compile_kernels", lambda *arguments: None)
    row = {"loss": 0.0, "wall_s": 0.0, "step_ms": 1.0}
    monkeypatch.setattr(Trainer, "_row", lambda self, *given: {"step": self.step, **row})


@pytest.mark.parametrize("method", spread(2, METHODS))
def test_replicas_stay_in_step(method: str, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(int(os.environ.get("THINWIRE_SEEDS", SEEDS)) // (1 + 2 * ("int8(s" in method))):
        folder = tmp_path / str(seed)
        folder.mkdir()
        seen += play(seed, method, folder)
    for what in ("killed", "joined", "behind", "lost", "stopped", "deaf"):
        assert seen[what] > 0, f"{what}: {seen[what]} times in all schedules, which show nothing about it"


@pytest.mark.parametrize("joins", [False, True], ids=["its own round", "the others' round"])
def test_who_is_told_to_end_as_a_round_ends_saves_nothing(
    joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the others then, and its counts and its weights are of two moments."""
    saved: list[int] = []
    monkeypatch.setattr(Trainer, "_save", lambda self, good: saved.append(self.step))

    def interrupted() -> None:
        raise Interrupted

    def begin(replica: Replica) -> Any:
        trainer = Counting(replica, tmp_path, "local-steps(every=4)", Books())
        trainer.checkpoints.path = tmp_path / "checkpoints"

        def run() -> None:
            while trainer.step < 7:
                trainer.attempt_step([])
            monkeypatch.setattr(replica, "ask", interrupted)
            with pytest.raises(Interrupted):
                trainer._join_round() if joins else trainer.attempt_step([])
            with pytest.raises(ThinwireError, match="as a round of local steps ended") as error:
                trainer._leave(signal.SIGTERM, False)
            assert error.value.status == 128 + signal.SIGTERM and saved == []
            trainer.wire.close()
            trainer._close()

        return run

    Lighthouse(0, begin, replicas=1, quorums=0).run()


@pytest.mark.parametrize(
    ("method", "tells", "spoils"),
    [
        ("int8(smallest=0)", True, False), ("int8(smallest=0)", True, True), ("int8(smallest=0)", False, False),
        ("local-steps(every=4)", True, False),
    ],
)  # who is in a round asks the lighthouse at its end only, when nothing can be saved
@pytest.mark.parametrize(
    ("moment", "replicas"), spread(2, ["take", "vote", "counted", "evaluate", "save", "saved"], [1, 2])
)
def test_a_run_that_ends_early_at_any_moment_is_saved_as_its_metrics_say(
    method: str, replicas: int, moment: str, tells: bool, spoils: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, signals, lines = list[bool](), list[int](), list[str]()
    monkeypatch.setattr("thinwire.train.replica.note_signals", lambda waits: nullcontext(signals))

    def begin(replica: Replica) -> Any:
        trainer = Ending(replica, tmp_path, method, moment, tells, spoils, told, signals)

        def run() -> None:
            try:
                lines.append(str(trainer.train()))
            except ThinwireError as error:
                lines.append(str(error))
            trainer.wire.close()

        return run

    Lighthouse(0, begin, replicas=replicas, quorums=0).run()
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert told and {7: moment in ("take", "vote"), 8: True}[last]
    assert (tmp_path / "checkpoints/latest").read_text() == f"step-{last:06d}\n", lines
    assert read_meta(tmp_path / f"checkpoints/step-{last:06d}").meta["good"]
    saved = f"ended by SIGTERM after step {last}: step-{last:06d} is saved, --resume auto goes on from it"
    assert (saved if tells else "no lighthouse") in lines, lines


@pytest.mark.parametrize("timeout", [30.0, 90.0])
def test_rounds_longer_than_the_timeout_are_refused_in_the_first_of_them(
    timeout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else replicas that come back begin the run anew without those in a round, for which nobody has waited."""
    clock = [0.0]
    monkeypatch.setattr("thinwire.train.replica.time", SimpleNamespace(perf_counter=lambda: clock[0], time=time.time))
    taken: list[int] = []

    def begin(replica: Replica) -> Any:
        trainer = Counting(replica, tmp_path, "local-steps(every=20)", Books())
        trainer.config = dataclasses.replace(trainer.config, timeout=timeout)
        take = trainer._take_step
        trainer._take_step = lambda: (clock.append(clock.pop() + 3), take())[1]

        def run() -> None:
            with pytest.raises(ThinwireError, match="a round of 20 steps") if timeout < 60 else nullcontext():
                while trainer.step < 12:
                    trainer.attempt_step([])
            taken.append(trainer.step)
            trainer.wire.close()
            trainer._close()

        return run

    Lighthouse(0, begin, replicas=1, quorums=0).run()
    assert taken == [5 if timeout < 60 else 12]


def test_a_replica_keeps_no_files_of_another_run(tmp_path: Path) -> None:
    """Its folder was moved, and another run has begun in its place."""
    folder = tmp_path / "run"
    folder.mkdir()

    def begin(replica: Replica) -> Any:
        trainer = Counting(replica, folder, "dense", Books())

        def run() -> None:
            while trainer.step < 3:
                trainer.attempt_step([])
            folder.rename(tmp_path / "moved")
            folder.mkdir()
            for name in (".lock", "metrics.jsonl"):
                (folder / name).write_text("another's")
            with pytest.raises(ThinwireError, match="was moved or removed"):
                trainer.attempt_step([])
            trainer.wire.close()
            trainer._close()

        return run

    Lighthouse(0, begin, replicas=1, quorums=0).run()
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        (".lock", "metrics.jsonl"), "another's"
    )
