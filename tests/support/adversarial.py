"""Adversarial inputs: a seeded search over all methods. One integer makes a case; ``judge`` says what is wrong with it.

    verdict = judge(draw(12345))

A case is a method with settings, a topology, ranks, some small tensors, an engine's dtype and, for every rank and
tensor, a kind of input: zeros, ties, subnormal numbers, one huge value, ... It is played on virtual ranks, with a step
in between that has a NaN or an infinity in it and is taken back; every third case also without that step. What must
hold is in ``adversarial_laws``; what is searched and why in docs/adversarial.md.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

import adversarial_laws as laws
import adversarial_weights as weights
from adversarial_laws import Array, Played, Taken, View
from thinwire import AdamS, methods
from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import knobs_of
from thinwire.core.method import Method, Run, Step, bucket_of
from thinwire.core.state import State, dump_state
from thinwire.network.ledger import Ledger
from thinwire.plan.plan import plan_of
from thinwire.proof.ranks import Shapes, ThreadEngine, Threads
from threaded import first_moment

Random = np.random.Generator
AGAIN = 3
"""Every third case is played twice."""
PLANNED = 4
"""The bytes of every fourth case are held against its plan, whose dry run takes longer than the case."""
SPARE = 2
"""Steps that a run is said to have more than are taken: one is taken back, one is only looked at."""


# What a rank may hold: numel -> values, float32.


def _normal(random: Random, n: int) -> Array:
    return random.standard_normal(n).astype(np.float32)


def _with_one(random: Random, n: int, value: float) -> Array:
    values = _normal(random, n)
    values[random.integers(n)] = random.choice([-value, value])
    return values


def _wide(random: Random, n: int) -> Array:
    return (np.sign(_normal(random, n)) * np.exp2(random.uniform(-100, 100, n))).astype(np.float32)


def _halves(random: Random, n: int) -> Array:
    """In the middle between two codes of 8 bits (of 4 bits), where the rounding of ties shows."""
    levels = random.choice([7, 127, 448])
    values = (random.integers(-levels, levels, n) + 0.5) / levels
    values[random.integers(n)] = 1
    return values.astype(np.float32)


def _bf16(random: Random, n: int) -> Array:
    return (_normal(random, n).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _sparse(random: Random, n: int) -> Array:
    return _normal(random, n) * (random.random(n) < 0.1)


def _one(random: Random, n: int) -> Array:
    values = np.zeros(n, np.float32)
    values[random.integers(n)] = random.standard_normal()
    return values


KINDS: dict[str, Callable[[Random, int], Array]] = {
    "normal": _normal,
    "zeros": lambda random, n: np.zeros(n, np.float32),
    "minus zeros": lambda random, n: np.full(n, -0.0, np.float32),
    "subnormal": lambda random, n: (_normal(random, n) * 1e-40).astype(np.float32),
    "smallest": lambda random, n: (_normal(random, n) * np.float32(2.0**-125)).astype(np.float32),
    "one huge": lambda random, n: _with_one(random, n, 1e30),
    "one at the top": lambda random, n: _with_one(random, n, 3e38),
    "all at the top": lambda random, n: np.float32(3e38) * np.sign(_normal(random, n)),
    "ties": lambda random, n: (random.integers(-2, 3, n) / 4).astype(np.float32),
    "equal": lambda random, n: np.full(n, random.standard_normal(), np.float32),
    "scaled": lambda random, n: _normal(random, n) * np.float32(10 ** random.uniform(-6, 6)),
    "wide": _wide,
    "halves": _halves,
    "bf16": _bf16,
    "sparse": _sparse,
    "one": _one,
    "alternating": lambda random, n: (np.float32(random.standard_normal()) * (-1) ** np.arange(n)).astype(np.float32),
}
ZEROS = ("zeros", "minus zeros")
POISON = (np.nan, np.inf, -np.inf)


# Which settings a method may have: they are few values each, at the edges and in the middle.

Pick = Callable[..., Any]
Knobs = dict[str, Any]


def _grouped(pick: Pick) -> Knobs:
    return {"group": pick(8, 16, 32, 128), "feedback": pick("gradients", None)}


def _radius(pick: Pick) -> Knobs:
    return {
        "density": pick(0.01, 0.1, 0.4, 1.0), "T": pick(1, 2, 3), "start": pick(0, 1),
        "residual_scale": pick(1.0, 0.3),
    }  # fmt: skip


def _scape(pick: Pick) -> Knobs:
    return {
        "density": pick(0.01, 0.03, 0.1, 0.5, 1.0), "warmup": pick(0, 1, 2), "refresh": pick(1, 2),
        "offload": pick(False, True),
    }  # fmt: skip


def _separate(pick: Pick) -> Knobs:
    estimator = pick("cyclic_srht", "cyclic_srht", "paper")
    beta = pick(None, 1.0, 0.97) if estimator == "paper" else pick(None, 0.0, 0.5, 1.0)
    restart = pick({}, {"reset": pick(2, 3)})
    return {
        "ratio": pick(1, 2, 4, 8), "block": pick(8, 16, 32), "estimator": estimator, "beta": beta, **restart,
        "start": pick(0, 0, 1),
    }  # fmt: skip


def _tagc(pick: Pick) -> Knobs:
    return {
        "theta": pick(0.0, 0.5, 0.9, 0.98), "start": pick(0, 0, 1), "feedback": "gradients",
        "leftovers": pick("accumulate", "accumulate", "median"),
    }  # fmt: skip


def _levels(pick: Pick) -> Knobs:
    hadamard = pick(True, False)
    return {
        "hadamard": hadamard, "bits": pick(4, 8, 16, 32), "intra_bits": pick(4, 8, 16, 32),
        "group": pick(32, 128) if hadamard else pick(16, 32, 128), "rounding": pick("stochastic", "nearest"),
    }  # fmt: skip


def _weights(pick: Pick) -> Knobs:
    bits = pick(4, 8)
    return {
        "weights": pick("difference", "plain"), "weight_bits": bits, "weight_group": pick(16, 64, 2048),
        "weight_rounding": pick("nearest", "stochastic", "shift") if bits == 8 else pick("nearest", "stochastic"),
        "dense": pick((), "a"),
    }  # fmt: skip


def _topk(pick: Pick) -> Knobs:
    return {
        "density": pick(0.003, 0.01, 0.1, 0.5, 1.0), "start": pick(0, 0, 1),
        "feedback": pick("gradients", "gradients", None),
    }  # fmt: skip


def _dgc(pick: Pick) -> Knobs:
    return {"density": pick(0.003, 0.1, 0.5, 1.0), "start": pick(0, 0, 1), "momentum": pick(0.0, 0.9)}


def _trickle(pick: Pick) -> Knobs:
    mask, bits = pick("own", "own", "merged"), pick(4, 8)
    return {
        "density": pick(0.003, 0.1, 0.5, 1.0), "start": pick(0, 0, 1), "mask": mask, "group": pick(8, 64),
        "bits": bits, "feedback": pick("updates", "gradients"),
    }  # fmt: skip


DRAWS: dict[str, Callable[[Pick], Knobs]] = {
    "int8": _grouped,
    "radius": _radius,
    "scape": _scape,
    "separate": _separate,
    "tagc": _tagc,
    "sdp4bit": _levels,
    "loco": lambda pick: {
        "beta": pick(0.0, 0.5, 0.8), "reset": pick(0, 2, 3), "group": pick(16, 32, 128), "start": pick(0, 0, 1)
    },
    "powersgd": lambda pick: {"rank": pick(1, 2, 4), "start": pick(0, 0, 1), "feedback": "gradients"},
    "topk": _topk,
    "trickle": _trickle,
    "dgc": _dgc,
    "onebit-adam": lambda pick: {
        "warmup": pick(1, 1, 2), "group": pick(32, 64, 128), "scale": pick("mean", "mean", "rms")
    },
    "sign": lambda pick: {
        "group": pick(32, 64, 128), "scale": pick("mean", "mean", "rms"), "start": pick(0, 0, 1)
    },
    "local-steps": lambda pick: {
        "every": pick(1, 1, 2), "start": pick(0, 0, 1), "outer_momentum": pick(0.0, 0.9),
        "outer": pick(
            "dense", "int8(smallest=0)", "topk:feedback:gradients(smallest=0, density=0.2)",
            "powersgd:feedback:gradients(smallest=0, rank=1)",
        ),
    },
}  # fmt: skip


class Poison(NamedTuple):
    """What is not finite in a step that is taken back: ``where`` is one place, or all of the tensor on the rank.

    Or it is both: one infinity on the rank and its opposite on the next.
    """

    step: int
    rank: int
    tensor: int
    value: float
    where: str


@dataclass(frozen=True)
class Case:
    """One case; all of it follows from ``seed``.

    Attributes:
        method: as ``methods.resolve`` reads it. topology: of gradients, or "weights". per_node: ranks on a node.
        kinds: of the input, by step, rank and tensor. same: every step has the first one's values. opposed: the last
            rank holds the opposite of the first's.
        dtype: of the engine's buffer.
        optimizer: "sgd", "adam", "adams" or none. max_norm: gradients are clipped to it. only: the method asked for.
    """

    seed: int
    method: str
    topology: str
    size: int
    per_node: int
    shapes: Shapes
    steps: int
    kinds: tuple[tuple[tuple[str, ...], ...], ...]
    same: bool
    opposed: bool
    dtype: torch.dtype
    poison: Poison
    optimizer: str
    max_norm: float
    only: str = ""

    @property
    def owner(self) -> bool:
        return self.topology in ("reduce_scatter", "weights")

    @property
    def only_zeros(self) -> bool:
        return all(kind in ZEROS for step in self.kinds for kinds in step for kind in kinds)

    @property
    def command(self) -> str:
        """What repeats it."""
        only = f" --method {self.only}" if self.only else ""
        return f"python benchmarks/proofs/adversarial.py --case {self.seed}{only}"

    def __str__(self) -> str:
        shapes = " ".join(f"{name}{tuple(shape)}" for name, shape in self.shapes.items())  # type: ignore[arg-type]
        kinds = ["; ".join(", ".join(kinds) for kinds in step) for step in self.kinds]
        shown = kinds[0] if len(set(kinds)) == 1 or self.same else "] [".join(kinds)
        more = [f"opt={self.optimizer}"] if self.optimizer else []
        more += [word for word, said in (("same", self.same), ("opposed", self.opposed)) if said]
        return (
            f"{self.method} on {self.topology} of {self.size} by {self.per_node}, {shapes}, {self.steps} steps, "
            f"{str(self.dtype)[6:]} {' '.join(more)} [{shown}]"
        )


def draw(seed: int, only: str = "") -> Case:
    """The case of ``seed``; ``only``: of this method."""
    random = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[random.integers(len(values))]

    cls = pick(*methods.TABLE)
    if only:
        cls = next(method for method in methods.TABLE if method.name == only)
    knobs = DRAWS.get(cls.name, lambda pick: {})(pick)
    gathers = issubclass(cls, methods.SDP4Bit) and pick(True, False, False, False)
    if gathers and cls is methods.SDP4Bit:
        knobs |= _weights(pick)
    if any(knob.name == "send" for knob in knobs_of(cls)):
        knobs["send"] = "*"  # small tensors, too
    method = f"{cls.name}({', '.join(f'{knob}={value!r}' for knob, value in knobs.items())})"
    topology, size, per_node = _place(cls, pick)
    if gathers:
        topology = "weights"
    shapes: Shapes = {name: _shape(random, pick) for name in "abc"[: pick(1, 2, 2, 3)]}
    palette = [pick(*KINDS) for _ in range(pick(1, 2, 3))]
    if random.random() < 0.04:
        palette = list(ZEROS)
    kind = {
        "scape": "adams", "onebit-adam": "adam", "radius": pick("adam", "sgd"),
        "local-steps": "sgd", "trickle": "adam",
    }  # fmt: skip
    optimizer = kind.get(cls.name, "")
    steps = pick(2, 2, 2, 3, 3, 4)
    kinds = [tuple(tuple(pick(*palette) for _ in shapes) for _ in range(size)) for _ in range(steps)]
    return Case(
        seed, method, topology, size, per_node, shapes, steps,
        kinds=pick(tuple(kinds), (kinds[0],) * steps),
        same=pick(True, False, False, False), opposed=pick(True, False, False, False, False),
        dtype=pick(torch.float32, torch.float32, torch.float32, torch.bfloat16),
        poison=Poison(
            pick(*range(steps)), pick(*range(size)), pick(*range(len(shapes))), pick(*POISON),
            pick("one", "one", "all", "both"),
        ),
        optimizer=optimizer, max_norm=pick(np.inf, 1.0), only=only,
    )  # fmt: skip


def _place(cls: type[Method], pick: Pick) -> tuple[str, int, int]:
    """Topology, ranks, ranks on a node."""
    topologies = ["all_reduce", "all_reduce"] + ["reduce_scatter", "reduce_scatter"] * ("fsdp2" in cls.engines)
    topology = pick(*topologies)
    size = pick(1, 2, 2, 2, 2, 3, 3, 3, 5, 7)
    return topology, size, pick(1, 1, size)


def _shape(random: Random, pick: Pick) -> tuple[int, ...]:
    """1 to 300 elements, 1-D or 2-D."""
    if pick(True, False):
        return (int(pick(1, 2, 7, 8, 63, 64, 65, 128, random.integers(1, 301))),)
    rows = int(pick(1, 2, 3, 5, 8, 16, 17))
    return rows, int(random.integers(1, 300 // rows + 1))


def numels_of(case: Case) -> list[int]:
    """Elements of each tensor in one row of the engine's buffer: FSDP2 cuts dim 0 in equal chunks."""
    chunks = case.size if case.owner else 1
    return [-(-shape[0] // chunks) * int(np.prod(shape[1:])) for shape in case.shapes.values()]


def inputs_of(case: Case) -> list[list[Array]]:
    """By step and rank: the engine's flat gradient."""
    random = np.random.default_rng([case.seed, 1])
    rows, numels, found = (case.size if case.owner else 1), numels_of(case), []
    for step in range(case.steps):
        if step and case.same:
            found.append(found[0])
            continue
        ranks = []
        for kinds in case.kinds[step]:
            parts = [KINDS[kind](random, rows * numel) for kind, numel in zip(kinds, numels, strict=True)]
            ranks.append(np.concatenate([part.reshape(rows, -1) for part in parts], 1).reshape(-1))
        if case.opposed and case.size > 1:
            ranks[-1] = -ranks[0]
        found.append([_in_dtype(values, case.dtype) for values in ranks])
    return found


def _in_dtype(values: Array, dtype: torch.dtype) -> Array:
    """``values`` as the engine's buffer holds them, in float32; what would overflow in bfloat16 stays finite."""
    if dtype == torch.float32:
        return values
    return torch.from_numpy(values.clip(-3e38, 3e38)).to(dtype).float().numpy()


def poisoned(case: Case, ranks: list[Array]) -> list[Array]:
    """``ranks`` with values that are not finite."""
    poison = case.poison
    rows, numels = (case.size if case.owner else 1), numels_of(case)
    first = sum(numels[: poison.tensor])
    place = (case.seed % rows, first + case.seed % numels[poison.tensor])
    if poison.where == "all":
        place = (slice(None), slice(first, first + numels[poison.tensor]))
    spoilt = [values.reshape(rows, -1).copy() for values in ranks]
    spoilt[poison.rank][place] = poison.value
    if poison.where == "both" and case.size > 1:
        spoilt[(poison.rank + 1) % case.size][place] = -poison.value
    return [values.reshape(-1) for values in spoilt]


def weights_of(case: Case) -> list[Array]:
    """By step: the sharded weights (N, n). One of a rank's last ones is not finite."""
    steps = [np.stack([flat.reshape(case.size, -1)[0] for flat in ranks]) for ranks in inputs_of(case)]
    numels, (_, rank, tensor, value, _) = numels_of(case), case.poison
    last = steps[-1].copy()
    last[rank, sum(numels[:tensor]) + case.seed % numels[tensor]] = value
    return [*steps, last]


@dataclass(frozen=True)
class Turn:
    """One step to play: ``number`` optimizer steps were taken before it. ``end``: "keep", "forget" or "look"."""

    number: int
    ranks: list[Array]
    end: str = "keep"


class VirtualRank:
    """One rank of a case: engine, method, state and optimizer."""

    def __init__(self, case: Case, world: Threads, rank: int, make: Callable[[], Method]) -> None:
        self.case, self.world, self.rank = case, world, rank
        self.ledger, self.method = Ledger(), make()
        self.state = self.method.state = State(self.method.card.offloaded_kinds)
        engine = ThreadEngine(case.topology, world, rank, self.ledger, case.shapes, case.per_node)
        self.exchange = engine.hops[0]
        self.parameters = {name: replace(parameter, dtype=case.dtype) for name, parameter in engine.parameters.items()}
        self.weights = {name: torch.nn.Parameter(torch.zeros(of.local)) for name, of in self.parameters.items()}
        self.optimizer = _optimizer(case.optimizer, list(self.weights.values()))
        optimizers = () if self.optimizer is None else (self.optimizer,)
        self.method.begin(Run(
            parameters=self.parameters, exchange=self.exchange, steps=case.steps + SPARE, seed=case.seed,
            optimizers=optimizers, weights=self.weights, rank=rank,
        ))  # fmt: skip
        self.bucket = bucket_of(self.method, engine.pieces, self.exchange, torch.device("cpu"))
        self.bucket.dtype = case.dtype if self.method.card.native else torch.float32

    def take(self, turn: Turn) -> Taken:
        """One step."""
        self._clip = 1.0
        flat = torch.from_numpy(turn.ranks[self.rank].copy()).to(self.case.dtype)
        numel = flat.numel() // self.exchange.ranks
        out = torch.full((numel,), torch.nan, dtype=flat.dtype) if self.exchange.owner else flat
        self.bucket.step = turn.number
        self.bucket.load(flat, out)
        if not self.method.card.alone(turn.number):
            self.method.reduce(self.bucket, self.exchange)
        self.bucket.store(out)
        if (step_maker := self.method.card.step_maker) is not None:
            step_maker.end_pass({})
        mean = out.float()
        counts = turn.end == "keep" and all(self.world.swap(self.rank, bool(mean.isfinite().all())))
        if counts:
            self.state.commit()
            self._optimize(mean, turn.number)
            self.state.commit()
        elif turn.end == "look":
            self.state.commit()
        else:
            self.state.rollback()
            self.method.undo()
        self.method.finish()
        state = dump_state(self.state)
        taken = Taken(
            counts, mean.numpy().copy(), float(sum(self.ledger.current.bytes.values())),
            {key: value.numpy() for key, value in state.items()}, self._moments(state),
            {name: weight.detach().numpy().copy() for name, weight in self.weights.items()}, self._clip,
        )  # fmt: skip
        self.ledger.close_step()
        return taken

    def _optimize(self, mean: torch.Tensor, number: int) -> None:
        if self.optimizer is None:
            return
        squares = float(mean.double().square().sum())
        if self.exchange.owner:
            squares = sum(self.world.swap(self.rank, squares))
        clip = torch.tensor(min(self.case.max_norm / (squares**0.5 + 1e-6), 1.0))
        parts = mean.split([weight.numel() for weight in self.weights.values()])
        for weight, values in zip(self.weights.values(), parts, strict=True):
            weight.grad = values * clip
        self._clip = float(clip)
        step = Step(number, (self.optimizer,), self.weights, clip)
        self.method.before_step(step)
        self.optimizer.step()
        step.restore()
        self.method.after_step(step)

    def _moments(self, state: dict[str, torch.Tensor]) -> dict[str, Array]:
        if self.optimizer is None:
            return {}
        found = {
            name: first_moment(self.optimizer, weight, state.get(f"=counted/{name}"))
            for name, weight in self.weights.items()
        }
        return {name: value.numpy().copy() for name, value in found.items() if value is not None}

    def plan(self) -> float:
        """Bytes of a step that the method announces."""
        return plan_of(self.method, self.parameters.values(), self.exchange).wire_bytes


def _optimizer(kind: str, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    if kind == "sgd":
        return torch.optim.SGD(weights, lr=0.1)
    if kind == "adam":
        return torch.optim.AdamW(weights, lr=1e-3)
    return AdamS(weights, lr=1e-3) if kind == "adams" else None


def play(case: Case, make: Callable[[], Method], *, disturbed: bool) -> Played:
    """All steps of ``case``; ``disturbed``: with one in between that is not finite, and another one at the end."""
    world = Threads(case.size)
    inputs = inputs_of(case)
    schedule = [(ranks, "keep") for ranks in inputs]
    if disturbed:
        at = case.poison.step
        schedule.insert(at, (poisoned(case, inputs[at]), "forget"))
        schedule.append((poisoned(case, inputs[-1]), "look"))

    def body(rank: int) -> tuple[list[Turn], list[Taken], VirtualRank]:
        me = VirtualRank(case, world, rank, make)
        turns: list[Turn] = []
        taken: list[Taken] = []
        number = 0
        for ranks, end in schedule:
            if end == "look" and not me.method.card.keeps_state:
                continue  # nothing waits
            turns.append(Turn(number, ranks, end))
            taken.append(me.take(turns[-1]))
            number += taken[-1].counts
        return turns, taken, me

    ranks = world.run(body)
    turns, _, me = ranks[0]
    return Played(
        numbers=[turn.number for turn in turns], ends=[turn.end for turn in turns],
        inputs=[turn.ranks for turn in turns], ranks=[taken for _, taken, _ in ranks],
        method=me.method, exchange=me.exchange, spans={s.name: (s.span, s.width) for s in me.bucket.segments},
        rows=me.bucket.shape[0], plan=me.plan if case.seed % PLANNED == 0 else None,
    )  # fmt: skip


@dataclass
class Verdict:
    """What came of a case: refused with a message, or ``problems``, one line each."""

    case: Case
    refusal: str = ""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.case}", *(f"  {line}" for line in self.problems), f"  again: {self.case.command}"])


def judge(case: Case, spoil: Callable[[Method], Method] = lambda method: method) -> Verdict:
    """Play ``case`` and hold it against the laws. ``spoil``: does something to each rank's method, for tests."""
    verdict = Verdict(case)

    def make() -> Method:
        return spoil(methods.resolve(case.method))

    try:
        if case.topology == "weights":
            verdict.problems += weights.problems_of(case, make, weights_of(case))
            return verdict
        disturbed = View(case, play(case, make, disturbed=True))
        plain = View(case, play(case, make, disturbed=False)) if case.seed % AGAIN == 0 else None
    except ThinwireError as error:
        verdict.refusal = str(error)
        if not laws.names_a_knob(str(error), make):
            verdict.problems.append(f"refused, and no knob is named: {error}")
        return verdict
    except Exception as error:
        verdict.problems.append(f"{type(error).__name__}: {error}")
        return verdict
    verdict.problems += laws.of_one_play(disturbed)
    if plain is not None:
        verdict.problems += laws.of_two_plays(plain, disturbed)
    return verdict


@dataclass
class Search:
    """What a search found, by method."""

    cases: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0  # of the processor

    def table(self) -> str:
        failed = Counter(_name(verdict.case) for verdict in self.failures)
        lines = [f"{'method':<14}{'cases':>8}{'refused':>9}{'failed':>8}"]
        for name in [*(cls.name for cls in methods.TABLE if self.cases[cls.name]), "all"]:
            numbers = (of.total() if name == "all" else of[name] for of in (self.cases, self.refusals, failed))
            lines.append("{:<14}{:>8}{:>9}{:>8}".format(name, *numbers))
        return "\n".join(lines)


def _name(case: Case) -> str:
    return case.method.partition("(")[0]


def search(
    seeds: Iterable[int],
    only: str = "",
    *,
    spoil: Callable[[Method], Method] = lambda method: method,
    say: Callable[[str], object] = lambda line: None,
) -> Search:
    """Judge the cases of ``seeds``; arguments as for ``draw`` and ``judge``."""
    found, start = Search(), time.process_time()
    for seed in seeds:
        verdict = judge(draw(seed, only), spoil)
        name = _name(verdict.case)
        found.cases[name] += 1
        found.refusals[name] += bool(verdict.refusal and not verdict.problems)
        if verdict.problems:
            found.failures.append(verdict)
            say(str(verdict))
    found.seconds = time.process_time() - start
    return found


def main(argv: list[str] | None = None) -> int:
    """The longer search: ``python benchmarks/proofs/adversarial.py --cases 100000 --seed 1``."""
    parser = argparse.ArgumentParser(description="A seeded search for inputs that break a method.")
    parser.add_argument("--cases", type=int, default=500, help="how many (default: 500)")
    parser.add_argument("--seed", type=int, default=1, help="of the search: case i has seed * 10^9 + i (default: 1)")
    parser.add_argument("--case", type=int, help="one case again, by the seed that a failure printed")
    parser.add_argument("--method", default="", help="cases of this method only")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    if given.case is not None:
        verdict = judge(draw(given.case, given.method))
        print(verdict if verdict.problems else f"{verdict.case}\n  {verdict.refusal or 'nothing wrong'}")
        return bool(verdict.problems)
    first = given.seed * 10**9
    found = search(range(first, first + given.cases), given.method, say=functools.partial(print, flush=True))
    print(f"{found.table()}\n{found.seconds:.0f} s")
    return bool(found.failures)
