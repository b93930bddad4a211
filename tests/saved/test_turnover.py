"""Replicas that die, join and lose messages: nothing is lost but what is counted, and all hold equal weights."""

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import lighthouse
import thinwire.wire
from breadth import ALL, dealt, spread
from thinwire.adapters import transport
from thinwire.base.errors import LostRank, ThinwireError
from thinwire.base.knobs import knobs_of
from thinwire.core.method import Method
from thinwire.core.safety import Safety
from thinwire.core.state import dump_state
from thinwire.engines.replicas import Replicas
from thinwire.methods import TABLE, resolve
from thinwire.network.comm import Membership
from thinwire.proof.ranks import Threads
from thinwire.saved import tape, turnover
from thinwire.saved.format import Header
from thinwire.saved.resize import regroup
from thinwire.wire import Options, join
from turnover import DROPS, FURTHER, TOUCHES, FaultyComm, MemoryFollower, Model, Replica, Run, ScriptedMembers

SGD = partial(torch.optim.SGD, lr=1.0)
ADAM = partial(torch.optim.AdamW, lr=1e-2)
CONSERVING = (
    "fp32", "int8(feedback='gradients', smallest=0)", "topk(density=0.2, smallest=0, feedback='gradients')",
    "sign(smallest=0, feedback='gradients')", "powersgd:paper(rank=1)", "loco(smallest=0)",
    "trickle(mask='merged', density=0.2, smallest=0, feedback='gradients')",
    "trickle(density=0.2, smallest=0, feedback='gradients')",
)  # fmt: skip
STEPPING = (
    "trickle(density=0.2, smallest=0)", "trickle:merged(smallest=0)", "powersgd(rank=1, smallest=0)", "dense",
)  # fmt: skip
SEEDS = 200 if ALL else 120
FORMS = [
    text + ("(smallest=0)" if any(knob.name == "smallest" for knob in knobs_of(resolve(text))) else "")
    for cls in TABLE
    for text in (cls.name, *(f"{cls.name}:{preset}" for preset in cls.PRESETS))
    if "ddp" in cls.engines and resolve(text).rank_equal and cls.name != "local-steps"
]
"""All methods that give all ranks the same weights, and all of their presets; local steps are played below."""


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinwire.wire, "compile_kernels", lambda *arguments: None)
    monkeypatch.setattr(transport, "LARGE", 9)  # what has more than a count
    monkeypatch.setattr(turnover, "SHARE", 0)  # of these small models the messages are as large


def maker(text: str) -> Callable[[], Method]:
    return lambda: resolve(text)


def play(seed: int, attempts: int = 5) -> Counter[str]:
    conserves = seed % 3 < 2
    texts = CONSERVING if conserves else STEPPING
    text = texts[seed // 3 % len(texts)]
    optimizer, fetches = SGD if conserves else ADAM, seed % 2 == 1
    run = Run(maker(text), seed, optimizer, conserves=conserves, fetches=fetches)
    try:
        run.play(attempts + 2 * fetches)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {text}: {error}") from error
    return run.seen


def test_schedules() -> None:
    seen = sum((play(seed) for seed in range(SEEDS)), Counter())
    joins = ("fetched first", "took all steps again", "died as it fetched", "its source died")
    assert all(seen[what] > 10 for what in (*joins, "steps taken again")) and seen["fetched more"], seen
    for what in ("died", "joined", "behind", "counted", "failed", "counted by some alone"):
        assert seen[what] > 20, f"{what}: {seen[what]} times in all schedules, which show nothing about it"


@pytest.mark.filterwarnings("ignore:.*exchanged a second time")
def test_batches_that_are_dropped_and_further_passes() -> None:
    """Between the exchange and the step, of all methods: what is stepped with is the mean of what was not dropped."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS if ALL else 60):
        conserves = seed % 3 < 2
        texts = CONSERVING if conserves else STEPPING
        text = texts[seed // 3 % len(texts)]
        optimizer = SGD if conserves else ADAM
        run = Run(maker(text), seed, optimizer, conserves=conserves, fetches=seed % 2 == 1, turns=True)
        try:
            run.play(6)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {text}: {error}") from error
        seen += run.seen
    for what in ("died", "joined", "failed", *DROPS, *FURTHER, *TOUCHES):
        assert seen[what] > 5, f"{what}: {seen[what]} times in all schedules, which show nothing about it"


@pytest.mark.parametrize("text", [*CONSERVING, *STEPPING])
def test_a_dropped_batch_is_a_skipped_step_and_leaves_no_trace(text: str) -> None:
    """To zeros, to None, or in a pass that is added to: the state is that of a run without it, bit for bit."""

    def played(*turns: str, later: bool = False) -> tuple[Any, ...]:
        run = Run(maker(text), 0, ADAM, conserves=False, calm=True, turns=True)
        remaining = iter(turns)
        run._turn = lambda attempt: next(remaining)  # type: ignore[method-assign]
        if later:  # the batches that come after those that are dropped
            draw, run.draw = run.draw, lambda name, attempt: draw(name, attempt if attempt == 0 else ~attempt)
        run.play(len(turns))
        wires = [replica.wire for replica in run.replicas]
        states = [dump_state(wire.method.state) for wire in wires]
        return run.replicas[0].weights, states, {wire.skipped for wire in wires}

    plain, *_ = played("", "", "", "", "")
    weights, states, skipped = played(*[""] * 5, later=True)
    assert skipped == {0}
    found, kept, skipped = played("", *DROPS, DROPS[0])
    assert skipped == {4} and torch.equal(weights, found)
    touched, _, skipped = played("", *TOUCHES, *TOUCHES)
    assert skipped == {0} and torch.equal(touched, plain)
    for ours, theirs in zip(kept, states, strict=True):
        assert ours.keys() == theirs.keys()
        assert [key for key, value in ours.items() if not torch.equal(value, theirs[key])] == []


def test_a_parameter_that_is_frozen_after_compress_is_refused_before_anything_is_sent() -> None:
    """Its momentum, its weight decay and the mean of the others would go on to move it."""
    replica = Replica("replica 1", maker("dense"), ADAM, 10)
    a, b = replica.model.parameters()
    b.requires_grad_(False)
    a.grad = torch.ones_like(a)
    for take in (replica.optimizer.step, lambda: replica.wire.clip_grad_norm_(1.0)):
        with pytest.raises(ThinwireError, match="b was frozen after compress"):
            take()
    assert not replica.weights.any() and replica.comm.verbs == 0
    replica.wire.close()


def test_spares() -> None:
    """Spares hear what one that takes part hears: they hold the same weights, and can take its place at once."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS // 4):
        conserves = seed % 3 < 2
        texts = CONSERVING if conserves else STEPPING
        text = texts[seed // 3 % len(texts)]
        run = Run(maker(text), seed, SGD if conserves else ADAM, conserves=conserves, active=2)
        try:
            run.play(5)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {text}: {error}") from error
        seen += run.seen
    for what in ("died", "joined", "behind", "counted", "failed", "became a spare"):
        assert seen[what] > 5, f"{what}: {seen[what]} times in all schedules, which show nothing about it"


@pytest.mark.parametrize("text", FORMS if ALL else dealt(FORMS, 0, range(4)))
def test_weights_stay_equal(text: str) -> None:
    """``THINWIRE_TESTS=all pytest tests/saved/test_turnover.py -k stay_equal``: every method, 200 schedules each."""
    for seed in range(SEEDS if ALL else 2):
        optimizer = partial(resolve(text).OPTIMIZER, lr=1e-2)
        run = Run(maker(text), seed, optimizer, conserves=False, total=20)
        try:
            run.play(6)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


LOCAL = (
    "local-steps(every=3)", "local-steps(every=2, start=3)", "local-steps:recommended(start=4)",
    "local-steps(every=2, outer='topk(density=0.2, smallest=0, feedback=\"gradients\")')",
)  # fmt: skip
VOTES = 9


class Rounds:
    """The program of a replica that takes local steps in a loop of its own, and drops a share of its batches."""

    def __init__(
        self, replica: lighthouse.Replica, text: str, weights: dict[tuple[int, int], set[int]], drops: float = 0.0,
        flushes: bool = False,
    ) -> None:
        """``flushes``: each round delivers all that waits, as all ask for in its second step."""
        self.replica, self.text, self.weights, self.drops, self.flushes = replica, text, weights, drops, flushes
        self.rounds: list[tuple[int, int]] = []  # that counted: their votes, and how often it was healed until then
        model = Model()
        self.optimizer = resolve(text).OPTIMIZER(model.parameters(), lr=1e-2)
        options = Options(resolve(text), (self.optimizer,), None, None, 1000, 0, None, None, Safety(max_skipped=None))
        self.model, self.wire = model, join(Replicas(model, replica, replica.comm), options, replica.comm.ledger)
        self.wire.attach()

    def run(self) -> None:
        draw = torch.Generator().manual_seed(int(self.replica.name.split()[1]))
        since, last = 0, 0
        while (votes := self.replica.step) < VOTES:
            since, last = (since + 1 if votes == last else 0), votes
            if self.flushes and since == 1:
                self.wire.flush(with_next=True)
            batch = [(weight * torch.randn(weight.shape, generator=draw)).sum() for weight in self.model.parameters()]
            torch.stack(batch).sum().backward()
            dropped, to_none = torch.rand(2, generator=draw) < torch.tensor([self.drops, 0.5])
            if dropped:  # after its exchange: else nobody knows of it
                self.wire.clip_grad_norm_(1e9)
            else:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=bool(to_none))
            if self.replica.step > votes:
                self.rounds.append((self.replica.step, self.wire.turnover.healed))
            if self.replica.step > votes and self.wire.method.rank_equal:
                values = torch.cat([weight.detach().reshape(-1) for weight in self.model.parameters()])
                vote = self.replica.step, self.wire.engine.across.membership.number
                self.weights[vote].add(hash(tuple(values.tolist())))


def play_rounds(seed: int, text: str, drops: float = 0.0, flushes: bool = False) -> tuple[list[Rounds], Counter[str]]:
    """Play a schedule to its end, after which all have held W after each round that counts: programs, and events."""
    weights: dict[tuple[int, int], set[int]] = defaultdict(set)
    programs: list[Rounds] = []

    def begin(replica: lighthouse.Replica) -> Any:
        programs.append(Rounds(replica, text, weights, drops, flushes))
        replica.follow(programs[-1].wire.turnover)
        return programs[-1].run

    played = lighthouse.Lighthouse(seed, begin)
    played.run()
    for program in programs:
        program.wire.close()
    assert weights and all(len(bits) == 1 for bits in weights.values()), f"seed {seed}: {weights}"
    return programs, played.seen


def test_who_follows_hears_of_a_flush_inside_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it takes the round as one that delivers nothing, and has to fetch the whole state."""
    ways: Counter[str] = Counter()
    take_again = turnover.Turnover._take_again

    def take(follower: turnover.Turnover, entry: Any) -> None:
        ways["begun"] += 1
        take_again(follower, entry)
        ways["taken"] += 1

    monkeypatch.setattr(turnover.Turnover, "_take_again", take)
    text = """local-steps(every=3, outer='topk(density=0.2, smallest=0, feedback="gradients")')"""
    for seed in range(SEEDS if ALL else 8):
        play_rounds(seed, text, flushes=True)
    assert ways["taken"] == ways["begun"] > 5, ways


@pytest.mark.parametrize("text", ["dense", "int8(smallest=0)", "onebit-adam(smallest=0)"])
def test_an_optimizer_that_comes_after_the_next_pass_misses_the_step(text: str) -> None:
    """Two optimizers take turns: each steps with means, and all replicas hold the same weights, or it is refused."""
    weights, refused = defaultdict[int, set[tuple[float, ...]]](set), list[str]()

    def begin(replica: lighthouse.Replica) -> Any:
        model = Model()
        first, *others = model.parameters()
        optimizers = tuple(resolve(text).OPTIMIZER(members, lr=1e-2) for members in ([first], others))
        options = Options(resolve(text), optimizers, None, None, 1000, 0, None, None, Safety())
        wire = join(Replicas(model, replica, replica.comm), options, replica.comm.ledger)
        wire.attach()
        replica.follow(wire.turnover)

        def run() -> None:
            draw = torch.Generator().manual_seed(int(replica.name.split()[1]))
            for step in range(4):
                batch = [torch.randn(weight.shape, generator=draw) for weight in model.parameters()]
                pairs = zip(model.parameters(), batch, strict=True)
                try:
                    torch.stack([(weight * values).sum() for weight, values in pairs]).sum().backward()
                except thinwire.ThinwireError as error:
                    refused.append(str(error))
                    break
                optimizers[step % 2].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                weights[step].add(tuple(torch.cat([w.detach().reshape(-1) for w in model.parameters()]).tolist()))
            wire.close()

        return run

    lighthouse.Lighthouse(0, begin, replicas=2, quorums=0).run()
    assert all(len(values) == 1 for values in weights.values())
    assert len(weights) == (4 if resolve(text).card.adds_up else 1)
    assert all("step all optimizers after each exchange" in message for message in refused)


ROUNDS = [*((text, 0.0) for text in LOCAL), (LOCAL[3], 0.3), (LOCAL[0], 0.3)]


@pytest.mark.parametrize(("text", "drops"), spread(2, ROUNDS))
def test_local_steps_in_rounds(text: str, drops: float) -> None:
    """A replica that is lost in a round, or in its exchange, costs its own round; all hold W after each that counts."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS if ALL else 8):
        programs, events = play_rounds(seed, text, drops)
        assert not any("rounds that did not count" in program.wire.method.facts() for program in programs)
        for program in programs:  # what a replica has learnt is in the mean, and not replaced by the others' weights
            for (vote, healed), (following, later) in itertools.pairwise(program.rounds):
                assert later == healed or following > vote + 1, f"seed {seed}: {program.replica.name}, {following}"
        seen += events
    for what in ("killed", "joined", "behind", "lost", "stopped", "deaf", "followed"):
        assert seen[what] > 0, f"{what}: {seen[what]} times in all schedules, which show nothing about it"


@pytest.mark.parametrize("text", ["dense", "int8(smallest=0)", "trickle(smallest=0)"])
@pytest.mark.parametrize("unlike", ["", "optimizer", "clip_grad_norm_", "run"])
def test_replicas_of_unlike_settings_take_no_step(text: str, unlike: str) -> None:
    """Their weights would differ from then on, and nobody would notice; foreach=True makes no other step."""
    refusals, weights = list[str](), defaultdict[int, set[tuple[float, ...]]](set)

    def begin(replica: lighthouse.Replica) -> Any:
        model, other = Model(), replica.name.endswith("1")
        rate = 1e-2 * (1 + (other and unlike == "optimizer"))
        optimizer = resolve(text).OPTIMIZER(model.parameters(), lr=rate, foreach=other)
        options = Options(resolve(text), (optimizer,), None, None, 1000, 0, None, None, Safety())
        wire = join(Replicas(model, replica, replica.comm), options, replica.comm.ledger)
        wire.attach()
        assert wire.turnover is not None
        wire.turnover.run_settings = f"batch_size={2 + (other and unlike == 'run')}"

        def run() -> None:
            for step in range(2):
                torch.stack([weight.square().sum() for weight in model.parameters()]).sum().backward()
                try:
                    wire.clip_grad_norm_(1.0 + (other and unlike == "clip_grad_norm_"))
                    optimizer.step()
                except thinwire.ThinwireError as error:
                    refusals.append(str(error))
                    break
                optimizer.zero_grad()
                weights[step].add(tuple(torch.cat([w.detach().reshape(-1) for w in model.parameters()]).tolist()))
            wire.close()

        return run

    lighthouse.Lighthouse(0, begin, replicas=2, quorums=0).run()
    assert len(weights) == (0 if unlike else 2) and all(len(values) == 1 for values in weights.values())
    assert len(refusals) == (2 if unlike else 0) and len(set(refusals)) == len(refusals)
    assert all(f"{unlike} differ" in refusal and "give all the same" in refusal for refusal in refusals)


def test_a_checkpoint_within_a_round_keeps_the_steps_of_the_round() -> None:
    weights: dict[tuple[int, int], set[int]] = defaultdict(set)
    saved: list[Any] = []

    def first(replica: lighthouse.Replica) -> Any:
        program = Rounds(replica, "local-steps(every=4)", weights)

        def run() -> None:
            for step in range(6):
                for weight in program.model.parameters():
                    weight.grad = torch.full_like(weight, 1.0 + step)
                program.optimizer.step()
            program.wire.close()
            assert program.wire.turnover is not None
            copies = [weight.detach().clone() for weight in program.model.parameters()]
            saved.extend([copies, copy.deepcopy(program.optimizer.state_dict()), program.wire.turnover.saved()])

        return run

    def second(replica: lighthouse.Replica) -> Any:
        program = Rounds(replica, "local-steps(every=4)", weights)

        def run() -> None:
            with torch.no_grad():
                for weight, value in zip(program.model.parameters(), saved[0], strict=True):
                    weight.copy_(value)
            program.optimizer.load_state_dict(saved[1])
            assert program.wire.turnover is not None
            program.wire.turnover.resume(saved[2])
            assert program.wire.engine.ask()
            for weight, value in zip(program.model.parameters(), saved[0], strict=True):
                assert torch.equal(weight, value)
            program.wire.close()

        return run

    for begin in (first, second):
        lighthouse.Lighthouse(0, begin, replicas=1, quorums=0).run()


def test_after_a_skipped_step_every_optimizer_takes_the_next_one() -> None:
    """The second one left its part of the skipped step to come: nothing was exchanged in the next one."""
    model, members, comm = Model(), ScriptedMembers(), FaultyComm()
    both = tuple(torch.optim.SGD([weight], lr=1.0) for weight in model.parameters())
    options = Options(resolve("dense"), both, None, None, None, 0, None, None, Safety(outlier_clip=None))
    wire = join(Replicas(model, members, comm), options, comm.ledger)
    wire.attach()
    members.membership = Membership(0, (0,), 1, ("a",))
    for factor in (1.0, float("nan"), 1.0):
        members.world = Threads(1)
        comm.enter(members.world, 0, None, 1)
        torch.stack([factor * weight.sum() for weight in model.parameters()]).sum().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    wire.close()
    assert (wire.step, wire.skipped) == (3, 1) and all(bool((weight == -2).all()) for weight in model.parameters())


@pytest.mark.parametrize("inside", [0, 1])
def test_shards_keep_what_waits(inside: int) -> None:
    """On HSDP a rank has one of two shards: what waits on it stays where it is, for any number of replicas."""

    def header(ranks: int) -> Header:
        hops = (inside, 2, True), (0, ranks, False)
        return Header(inside, 2 * ranks, "hsdp", False, hops, "int8", {}, None, None, 0, None, {"a": ((6, 4), 12)})

    waiting = torch.arange(12.0).view(2, 6)
    moved = regroup({"residual/a": waiting}, header(2), header(5), resolve("int8(feedback='gradients')"))
    assert moved["residual/a"].shape == (5, 3)
    assert torch.equal(moved["residual/a"].view(-1)[:12], waiting.view(-1))


def test_who_follows_and_cannot_join_asks_again_and_takes_no_round_alone() -> None:
    """Its first ask fails, as it cannot reach the others: it must not step on in the place of the one it has heard."""
    weights: dict[tuple[int, int], set[int]] = defaultdict(set)
    programs: list[Rounds] = []

    def begin(replica: lighthouse.Replica) -> Any:
        program = Rounds(replica, "local-steps(every=4)", weights)
        programs.append(program)
        program.wire.turnover.tape.want(0)
        if len(programs) < 3:
            return program.run

        def deaf() -> Any:
            vars(replica).pop("ask")
            replica._wait("quorum")
            replica.received = None
            raise LostRank(0, [], "quorum", 0.0, "could not join")

        def run() -> None:
            program.wire.turnover.follows = MemoryFollower(programs[0].wire.turnover.tape, lambda: True)
            vars(replica)["ask"] = deaf  # once
            gradient = program.model.a.grad = torch.ones_like(program.model.a)
            assert not program.wire.engine.ask()
            assert program.model.a.grad is gradient
            assert not program.wire.turnover.met and program.wire.turnover.follows.count > 0
            program.run()

        return run

    played = lighthouse.Lighthouse(0, begin, replicas=2, quorums=0)
    played.join_at = 5
    played.run()
    assert played.seen["fetched nothing more"] == 1
    for program in programs:
        program.wire.close()
    assert all(len(bits) == 1 for bits in weights.values())


def test_what_fails_as_a_state_is_taken_fails_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is waited for a second time says nothing: the error would be gone, and the masks with it."""
    run = Run(maker("int8(smallest=0)"), 0, ADAM, conserves=False, calm=True)
    run.play(2)
    source = run.replicas[0].wire
    monkeypatch.setattr(source.method, "finish", partial(raises, LostRank(0, [], "all-gather", 0.0, "it is gone")))
    assert source.turnover._snapshot() is None and isinstance(source.engine.unsent, LostRank)


def raises(error: Exception) -> None:
    raise error


# Faults that are planted: the schedules must find each.


def residual_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joins gets what waits on another replica, which is then delivered twice."""
    monkeypatch.setattr(turnover.Turnover, "_is_own", lambda *arguments: False)


def server_row_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(values: Any, *arguments: Any) -> Any:
        return regroup({key: value for key, value in values.items() if not key.startswith("server/")}, *arguments)

    monkeypatch.setattr(turnover, "regroup", forgetful)


def doubt_is_always_in_favour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who failed alone takes the step as counted, which the others have not counted, or have taken again."""
    monkeypatch.setattr(turnover, "number_at", lambda history, step: ANY)


def doubt_is_never_in_favour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who failed alone sends a second time what the others have counted."""
    monkeypatch.setattr(turnover, "number_at", lambda history, step: None)


def what_is_held_is_taken_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has not taken all steps again keeps what it has, which the others have not."""
    monkeypatch.setattr(transport, "digest_of", lambda tensor: str(tensor.shape))


def what_was_fetched_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joins also delivers what waits on the replica that it has followed."""
    monkeypatch.setattr(turnover.Turnover, "_waits", lambda *given: False)


class _Any(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


ANY = _Any()


@pytest.mark.parametrize(
    "plant",
    [
        residual_heals,
        server_row_is_forgotten,
        doubt_is_always_in_favour,
        doubt_is_never_in_favour,
        what_is_held_is_taken_unseen,
        what_was_fetched_waits_again,
    ],
)
def test_planted_fault_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        for seed in sorted(range(SEEDS), key=lambda seed: seed % 2 == 0):  # first those in which who joins fetches
            play(seed)


@pytest.mark.parametrize("text", FORMS if ALL else dealt(FORMS, 0, range(12)))
def test_who_joins_needs_nothing_more_after_it_has_taken_the_others_steps_again(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of step 1, and what was heard in steps 2 to 4, are the state of step 4, bit for bit."""
    monkeypatch.setattr(tape, "sum", lambda values: 0, raising=False)  # of this small model the messages are as large
    run = Run(maker(text), 0, partial(resolve(text).OPTIMIZER, lr=1e-2), conserves=False, total=20, calm=True)
    joiner = run.join(3)
    run.play(8)
    assert joiner.fetches.count == 3
    assert run.seen["took all steps again"] == 1, f"{run.fetched} tensors came with the step in which it joined"
