"""Every method of ``TABLE`` under every law, and faults that each law has to notice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

import thinwire
from breadth import dealt, spread
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import knobs_of
from thinwire.core.method import CONSERVES, EXACT, Card, Rounding
from thinwire.methods.baselines.localsteps import LocalSteps
from thinwire.methods.baselines.plain import Int8
from thinwire.methods.baselines.topk import TopK
from thinwire.methods.parts.feedback import GRADIENTS
from thinwire.network.ledger import Ledger
from thinwire.plan import plan as plans
from thinwire.plan.plan import Plan
from thinwire.proof.laws import EVERYWHERE, broken_laws, check_laws
from thinwire.proof.ranks import Threads, parameters_for
from thinwire.proof.record import Setup, small
from threaded import FlatMuon, exchange_on

HERE = (Setup("all_reduce", 3), Setup("reduce_scatter", 3))
GRADIENT = {"feedback": "gradients"}
KNOBS: list[tuple[str, dict[str, Any]]] = [
    ("int8", {"feedback": "gradients"}), ("radius", {"residual_scale": 1.0}), ("scape", {"refresh": 2}),
    ("scape", {"density": 1.0}), ("separate", {"beta": 0.5}),
    ("separate", {"beta": None}), ("separate", {"beta": None, "reset": 2}),
    ("separate", {"estimator": "paper", "beta": None, "reset": 2}),
    ("separate", {"estimator": "paper", "beta": None}), ("separate", {"beta": 0.5, "reset": 2}),
    ("tagc", GRADIENT), ("powersgd", GRADIENT), ("tagc", {"leftovers": "median"}), ("tagc", {**GRADIENT, "theta": 0.0}),
    ("sdp4bit", {"hadamard": False, "rounding": "nearest"}), ("sdp4bit", {"bits": 8}), ("sdp4bit", {"bits": 16}),
    ("sdp4bit", {"bits": 32, "intra_bits": 32}), ("loco", {"reset": 0}), ("loco", {"reset": 0, "beta": 0}),
    ("loco", {"reset": 2}), ("topk", GRADIENT), ("topk", {"feedback": None}),
    ("dgc", {"momentum": 0}),
    ("sign", {"scale": "rms"}), ("sign", {"feedback": "updates"}), ("onebit-adam", {"scale": "rms"}),
    ("onebit-adam", {"warmup_bits": 8}), ("onebit-adam", {"warmup_bits": 4}),
    ("local-steps", {"outer": "topk(feedback='gradients', smallest=0, density=0.25)"}),
    ("local-steps", {"outer": "int8(smallest=0)"}), ("local-steps", {"outer": "loco(smallest=0, group=32, reset=2)"}),
    ("local-steps", {"outer": "radius(smallest=0, density=0.25, start=1, T=2)", "every": 1}),
    ("local-steps", {"outer": "int8(smallest=0, feedback='gradients')", "every": 1, "second_moment": "mean"}),
    ("local-steps", {"fragments": 2}), ("local-steps", {"delay": 2}),
    ("local-steps", {"fragments": 2, "delay": 1, "mix": 0.25, "outer": "topk(feedback='gradients', smallest=0)"}),
    ("topk", {"feedback": "updates(delivered_share=1.0)"}),
    ("powersgd", {"feedback": "updates(delivered_share=0.5, beta1=0.5)"}),
    ("radius", {"feedback": "updates(delivered_share=0.5)"}),
    ("trickle", {"mask": "merged"}), ("trickle", {"mask": "merged", "bits": 4, "feedback": "gradients"}),
    ("local-steps", {"outer": "trickle(smallest=0, density=0.1, mask='merged', feedback='gradients')"}),
]  # fmt: skip
"""Knobs that change what is promised, or how it is kept."""


@pytest.mark.parametrize("cls", methods.TABLE, ids=lambda cls: cls.name)
def test_every_method_obeys_every_law(cls):
    check_laws(cls, setups=dealt(EVERYWHERE, methods.TABLE.index(cls) % 3, range(3)))


@pytest.mark.parametrize(("name", "knobs"), spread(2, KNOBS), ids=lambda of: of if isinstance(of, str) else str(of))
def test_so_it_does_with_other_knobs(name, knobs):
    check_laws(type(methods.resolve(name)), setups=HERE, **knobs)


class Matrices(methods.Trickle):
    """Trickle of a user whose matrices are Muon's."""

    OPTIMIZER: ClassVar[Any] = FlatMuon


@pytest.mark.parametrize("knobs", [{}, {"mask": "merged"}], ids=str)
def test_so_does_muons_direction_on_every_engine(knobs):
    check_laws(Matrices, setups=(*HERE, Setup("hsdp", 4, 2)), **knobs)


@pytest.mark.parametrize(("name", "knobs"), [(name, {}) for name in methods.names()] + KNOBS, ids=str)
def test_nobody_promises_less_than_it_keeps(name, knobs):
    """What is said to be rounded off or lost is: the books do not balance without it."""
    cls = type(methods.resolve(name))
    if "reset" in {knob.name for knob in knobs_of(cls)} and cls().reset:  # within the steps that are played
        knobs = {"reset": 2, **knobs}
    promise = small(cls, **knobs).card.promise
    if promise.kind not in ("rounds", "lossy"):
        return

    class Claims(cls):
        def describe(self) -> Card:
            return replace(super().describe(), promise=replace(promise, kind="conserves", rounding=None))

    found = broken_laws(partial(small, Claims, **knobs), Setup("all_reduce", 3))
    assert {law for law, _ in found} == {"promise"}


# What is promised, and where it is said.


def plan_of(where: Setup, method: thinwire.Method) -> Plan:
    exchange = exchange_on(where.topology, Threads(where.size), 0, Ledger())
    return plans.plan_of(method, parameters_for(exchange, {"w": (8, 32)}).values(), exchange)


def test_what_is_not_returned_is_said_in_one_line():
    for _, cls, does, promise in methods.listed():
        for made in (promise, *(cls(**knobs).card.promise for knobs in cls.PRESETS.values())):
            assert does.endswith(".") and bool(made.lost) == (made.kind in ("rounds", "lossy")), cls
            assert "\n" not in made.lost and (made.rounding is None) == (made.kind != "rounds"), cls


def test_thinwire_methods_says_it(capsys):
    methods.main([])
    printed = capsys.readouterr().out
    for name, _, does, promise in methods.listed():
        assert str(promise) in printed and does.replace("``", "") in printed, name
    methods.main(["separate"])
    assert str(methods.resolve("separate:paper").card.promise) in capsys.readouterr().out


def test_the_plan_says_what_is_not_returned():
    where, kept = Setup("all_reduce", 2), Int8(smallest=0, feedback="gradients")
    assert plan_of(where, Int8(smallest=0)).lost == Int8().card.promise.lost
    assert Int8().card.promise.lost in " ".join(str(plan_of(where, Int8(smallest=0))).split())
    assert plan_of(where, kept).lost == "" and "returned" not in str(plan_of(where, kept))
    assert plan_of(where, Int8()).lost == "", "nothing is compressed"


def test_one_line_makes_a_method_known(monkeypatch):
    monkeypatch.setattr(methods, "TABLE", (*methods.TABLE, Careful))
    assert thinwire.Careful is Careful and "Careful" in dir(thinwire)
    assert isinstance(methods.resolve("careful(density=0.5)"), Careful)
    monkeypatch.undo()
    for name in ("Careful", "careful"):
        with pytest.raises(AttributeError, match=name):
            getattr(thinwire, name)


# Planted faults.


@dataclass
class Careful(TopK):
    """A method without a fault, to be broken."""

    name: ClassVar[str] = "careful"
    feedback: methods.Gradients | methods.Updates = GRADIENTS


class LosesAValue(Careful):
    def compress(self, bucket, exchange):
        super().compress(bucket, exchange)
        row = bucket.mean[:1]
        row.scatter_(1, row.abs().argmax(1, keepdim=True), 0)


class ScalesWrongly(Careful):
    def compress(self, bucket, exchange):
        super().compress(bucket, exchange)
        bucket.mean.mul_(1.01)


class SendsAByteMore(Careful):
    def compress(self, bucket, exchange):
        super().compress(bucket, exchange)
        exchange.gather(torch.zeros((exchange.ranks, 1), dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))


class DiffersByABit(Careful):
    def compress(self, bucket, exchange):
        super().compress(bucket, exchange)
        if exchange.rank == 1:
            bucket.mean.mul_(1 + 2.0**-23)


class Forgets(Careful):
    def compress(self, bucket, exchange):
        super().compress(bucket, exchange)
        if bucket.step == 2:
            self.state.write("residual", bucket)[0, 0] += 1


class LeavesATrace(Careful):
    """Its residual lives outside of the state, where a step that does not count is not forgotten."""

    def compress(self, bucket, exchange):
        bucket.rows.add_(vars(self).setdefault("trace", torch.zeros(())), alpha=1e-7)
        super().compress(bucket, exchange)
        self.trace = bucket.mean.sum()


class NeverTheSame(Careful):
    """One play differs from the next by a bit, the same on all ranks."""

    worlds: ClassVar[list[Any]] = []

    def compress(self, bucket, exchange):
        super().compress(bucket, exchange)
        if bucket.mean.is_meta:
            return
        world = exchange.comm._world
        if world not in self.worlds:
            self.worlds.append(world)
        bucket.mean.mul_(1 + self.worlds.index(world) % 4 * 2.0**-23)


class Wanders(LocalSteps):
    """A rank's own step between rounds is not its own."""

    def before_step(self, step):
        super().before_step(step)
        if step.number == 1:
            self.run.exchange.all_mean(step.weights["a.weight"].grad)


class Drifts(LocalSteps):
    """After a round the ranks' weights differ by a bit."""

    def after_step(self, step):
        super().after_step(step)
        if self.run.exchange.rank == 1 and self.rank_equal:
            step.weights["a.weight"].data.mul_(1 + 2.0**-23)


class MovesTooFar(LocalSteps):
    def _conclude(self, fragment, averaged, agree):
        return super()._conclude(fragment, averaged._replace(mean=averaged.mean.mul_(1.01)), agree)


class LooksAside(LocalSteps):
    """A rank's own step between rounds is not its own, where all ranks never hold the same."""

    def after_step(self, step):
        super().after_step(step)
        if step.number == 2:
            self.run.exchange.all_mean(step.weights["a.weight"].data)


class OwnCommonWeights(LocalSteps):
    """What all should share is another one's by a bit."""

    def after_step(self, step):
        super().after_step(step)
        if self.run.exchange.rank == 1 and step.number == 2:
            self.state.get("anchor", "a.weight").mul_(1 + 2.0**-23)


class ClaimsToBeExact(Careful):
    def describe(self) -> Card:
        return replace(super().describe(), promise=EXACT)


@dataclass
class ClaimsToConserve(Int8):
    name: ClassVar[str] = "claims-to-conserve"

    def describe(self) -> Card:
        return replace(super().describe(), promise=CONSERVES)


@dataclass
class ClaimsMoreBits(Int8):
    name: ClassVar[str] = "claims-more-bits"

    @property
    def rounding(self) -> Rounding:
        return Rounding("10 bits", step=1 / 1022, group=self.group)


@dataclass
class TurnsRound(TopK):
    """Lossy, and sends the wrong way."""

    name: ClassVar[str] = "turns-round"
    feedback: methods.Gradients | methods.Updates | None = None

    def compress(self, bucket, exchange):
        super().compress(bucket, exchange)
        bucket.mean.neg_()


@dataclass
class MakesSomethingOfNothing(TopK):
    """Lossy, and adds."""

    name: ClassVar[str] = "makes-something"
    feedback: methods.Gradients | methods.Updates | None = None

    def compress(self, bucket, exchange):
        super().compress(bucket, exchange)
        bucket.mean[:, 0] += 1e-6


FAULTS = {
    LosesAValue: "promise", ScalesWrongly: "promise", SendsAByteMore: "bytes", DiffersByABit: "ranks",
    Forgets: "promise", LeavesATrace: "undone", NeverTheSame: "repeats", ClaimsToBeExact: "promise",
    ClaimsToConserve: "promise", ClaimsMoreBits: "promise", TurnsRound: "promise", MakesSomethingOfNothing: "promise",
}  # fmt: skip


BESIDE = {"fragments": 2, "delay": 1}


@pytest.mark.parametrize(
    ("cls", "knobs", "law"),
    [(Wanders, {}, {"ranks"}), (Drifts, {}, {"ranks"}), (MovesTooFar, {}, {"promise"}),
     (MovesTooFar, BESIDE, {"promise"}), (LooksAside, BESIDE, {"ranks"}), (OwnCommonWeights, BESIDE, {"ranks"})],
)  # fmt: skip
def test_a_fault_of_local_steps_is_noticed(cls, knobs, law):
    assert {law for law, _ in broken_laws(partial(small, cls, **knobs), Setup("all_reduce", 3))} >= law


@pytest.mark.parametrize(
    ("cls", "topology"),
    [(cls, topology) for cls in FAULTS for topology in ("all_reduce", "reduce_scatter", "hsdp")
     if (cls, topology) != (DiffersByABit, "reduce_scatter")],  # where each rank has a row of its own
)  # fmt: skip
def test_a_fault_breaks_the_law_that_is_there_to_notice(cls, topology):
    size, per_node = (4, 2) if topology == "hsdp" else (3, 1)
    found = broken_laws(partial(small, cls), Setup(topology, size, per_node))
    assert {law for law, _ in found} == {FAULTS[cls]}, found


def test_what_has_no_fault_breaks_none():
    check_laws(Careful, setups=HERE)
    assert not broken_laws(partial(small, Careful), Setup("all_reduce", 3))


def test_all_that_is_broken_is_said_at_once():
    with pytest.raises(AssertionError) as raised:
        check_laws(LosesAValue, setups=HERE)
    lines = str(raised.value).splitlines()
    assert all(" ranks: promise: step 1, a.weight: off by " in line for line in lines)
    assert {line.split()[2].strip(",") for line in lines} == {where.topology for where in HERE}


def test_a_method_that_compresses_nothing_here_is_not_taken_for_obedient():
    class Idle(TopK):
        def policy(self, parameter):
            return "no reason"

    with pytest.raises(ThinwireError, match="compresses none"):
        check_laws(Idle)
