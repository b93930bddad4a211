"""Nothing is lost where the composition of buckets changes or weights change under way; held on given gradients.

What the other ``test_edges_*`` files share is here too: the methods with small settings, and the books.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ranks
import thinwire
from breadth import alternating, dealt, falls_on, spread
from engines import build
from models import flat
from thinwire.methods import TABLE, resolve
from threaded import entries, first_moment

SHAPES = {"w0": (37, 53), "w1": (41, 37), "w2": (29, 31)}
Found = dict[str, dict[str, Any]]
LAW = 1e-6
"""Largest violation of a law of conservation, as a share of the largest sum of inputs: some roundings to float32."""


@dataclass(frozen=True)
class Case:
    """A method with small settings: ``law`` says what waits ("" if nothing does, or part is lost)."""

    method: str
    law: str = ""
    optimizer: str = "sgd"

    @property
    def name(self) -> str:
        return self.method.partition("(")[0]

    def knob(self, name: str) -> Any:
        return getattr(resolve(self.method), name)

    def make(self, parameters: Iterable[Any], lr: float = 0.01) -> torch.optim.Optimizer:
        """The optimizer that the method asks for, else plain SGD."""
        kinds: dict[str, Callable] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "adams": thinwire.AdamS}
        return kinds[self.optimizer]([p for p in parameters if p.requires_grad], lr=lr)


CASES = [
    Case("dense"), Case("fp32"), Case("bf16"), Case("int8(smallest=0)"),
    Case("int8(smallest=0, feedback='gradients')", "residual"),
    Case("radius(smallest=0, start=0, T=3, density=0.3)", "residual", "adamw"),
    Case("scape(smallest=0, density=0.1, warmup=3)", "moment", "adams"),
    Case("scape(smallest=0, density=0.02, warmup=3)", "moment", "adams"),  # masks as positions
    Case("separate(beta=None, smallest=0, ratio=4, block=64)", "residual"),
    Case("tagc(feedback='gradients', smallest=0, theta=0.9)", "residual"),
    Case("lhc(smallest=0)", "residual"),
    Case("sdp4bit(smallest=0)"), Case("zeropp(smallest=0)"), Case("qsdp(smallest=0)"),
    Case("loco(smallest=0, beta=0.0, reset=0)", "error"), Case("loco(smallest=0)"),
    Case("powersgd(feedback='gradients', smallest=0, rank=2)", "residual"),
    Case("topk(feedback='gradients', smallest=0, density=0.1)", "residual"),
    Case("dgc(smallest=0, density=0.1)", "velocity"),
    Case("trickle(smallest=0, density=0.1)", "", "adamw"),
    Case("trickle(smallest=0, density=0.05, mask='merged')", "", "adamw"),
    Case("sign(smallest=0, group=32)", "ends"),
    Case("onebit-adam(smallest=0, warmup=1, group=32)", "moment", "adamw"),
    Case("local-steps(every=1, outer='int8(smallest=0)', outer_momentum=0.0)"),
    Case("none"),
]  # fmt: skip
NO_SCALER = ("local-steps", "none")
"""Those that refuse a GradScaler."""
STATEFUL = [case for case in CASES if resolve(case.method).card.keeps_state]


def on(engine: str, cases: Iterable[Case] = CASES, among: Sequence[str] = ()) -> list[Case]:
    """Those that run on ``engine``; where a test goes over the engines ``among``, those that fall on it."""
    found = []
    for number, case in enumerate(cases):
        places = [place for place in among or [engine] if place in resolve(case.method).engines]
        if engine in places and falls_on(number, engine, places):
            found.append(case)
    return found


def error_of(action: Callable[[], Any]) -> str:
    """``Type: message`` of what ``action`` raised, "" if nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def findings(cases: Iterable[Case], look: Callable[[Case], dict[str, Any]]) -> Found:
    """What ``look`` found in every case, by method; "error": what it raised, or "". For ranks to return."""
    found: Found = {}
    for case in cases:
        found[case.method] = {"error": ""}
        try:
            found[case.method] |= look(case)
        except Exception as error:
            found[case.method]["error"] = f"{type(error).__name__}: {error}"
    return found


def each(results: list[Found], engine: str, check: Callable[[str, dict[str, Any]], list[str]]) -> None:
    """Fails with everything that ``check(method, what one rank found)`` complains of, by method, engine and ranks."""
    wrong: dict[str, list[int]] = {}
    for rank, found in enumerate(results):
        for method, what in found.items():
            for complaint in [what["error"]] if what["error"] else check(method, what):
                wrong.setdefault(f"{method} on {engine}: {complaint}", []).append(rank)
    if wrong:
        pytest.fail("\n".join(f"{complaint} (ranks {who})" for complaint, who in wrong.items()), pytrace=False)


class Given(nn.Module):
    """Parameters whose gradients are what forward is given: it is the sum of their products. ``seen``: its weights."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.1 * torch.randn(shape)))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        self.seen = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        return torch.stack([(getattr(self, name) * values).sum() for name, values in given.items()]).sum()


def full(values: Tensor) -> Tensor:
    return (values.full_tensor() if hasattr(values, "full_tensor") else values).detach()


def parts(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by the name that the wire knows them by."""
    return {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}


def summed(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything in the optimizer's state, whole."""
    return [
        full(value).clone()
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    left, right = list(left), list(right)
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---------------------------------------------------------------------------------------------- laws of conservation


@dataclass
class Books:
    """Reads what waits for one parameter on all ranks, as float64 of the parameter's shape."""

    engine: str
    rank: int
    world: int
    optimizer: torch.optim.Optimizer
    wire: Any
    shards: int = field(init=False)

    def __post_init__(self) -> None:
        self.shards = 2 if self.engine == "hsdp" else 1  # the hop inside a node hands the method means of 2 ranks

    def read(self, law: str, name: str, shape: tuple[int, ...], weight: Tensor) -> dict[str, Tensor]:
        """By kind, summed over ranks: of each rank its own, of the owners' theirs, and of the moment the one."""
        state = entries(self.wire.state_dict())
        own = {"moment": ("residual",), "ends": ("residual",), "velocity": ("residual", "velocity")}.get(law, (law,))
        found = {kind: summed(self._place(state.get(f"{kind}/{name}"), shape, served=False)) for kind in own}
        if law == "moment":
            served = [self._place(state.get(f"{kind}/{name}"), shape, served=True) for kind in ("server", "common")]
            moment = first_moment(self.optimizer, weight, state.get(f"=counted/{name}"))
            found["owner"] = summed(served[0] + served[1])
            found["moment"] = torch.zeros(shape).double() if moment is None else full(moment).double()
        if law == "ends":
            found["owner"] = summed(self._place(state.get(f"server/{name}"), shape, served=True))
        return found

    def _place(self, values: Tensor | None, shape: tuple[int, ...], *, served: bool) -> Tensor:
        """This rank's ``values`` where they belong in the parameter; one row of all, where they are ``served``."""
        numel = math.prod(shape)
        whole = torch.zeros(numel).double()
        if values is None:
            return whole.view(shape)
        start, end, row = 0, numel, self.rank
        if self.engine == "hsdp":  # ranks 0 and 2 hold the first shard, 1 and 3 the second
            width = -(-shape[0] // 2) * (numel // shape[0])
            start, row = (self.rank % 2) * width, self.rank // 2
            end = min(start + width, numel)
        if served:
            start += row * values.numel()
        count = max(min(values.numel(), end - start), 0)
        whole[start : start + count] = values.reshape(-1)[:count].double() * (1 if served else self.shards)
        return whole.view(shape)


def _owed(case: Case, law: str, books: Books, before: dict, after: dict, given: Tensor, mean: Tensor) -> Tensor:
    """What came in (summed over ranks) and neither went out nor waits: 0 if the method conserves."""
    n = books.world
    if law == "moment":  # m' + mean e' + x' = b1 m + (1 - b1) mean g + mean e + x
        b1 = books.optimizer.param_groups[0]["betas"][0]
        moments = n * (b1 * before["moment"] - after["moment"] + before["owner"] - after["owner"])
        return moments + (1 - b1) * given + before["residual"] - after["residual"]
    if law == "velocity":
        pushed = case.knob("momentum") * before["velocity"]
        return before["residual"] + pushed + given - after["residual"] - n * mean
    if law == "ends":
        return n * (before["owner"] - after["owner"] - mean) + given + before["residual"] - after["residual"]
    kept = case.knob("beta") if law == "momentum" else 1
    return kept * before[law] + given - after[law] - n * mean


STEPWISE = ("moment", "velocity", "momentum")
"""Laws in which what waits decays: they hold of every step. The others are held against a whole run at once."""


def conserve(
    rank: int, world: int, engine: str, case: Case, steps: list[str], *, wrap: bool = True,
    change: Callable[[nn.Module, str], None] = lambda model, when: None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train on given gradients, and hold the books.

    ``steps``: one word per optimizer step, one letter per backward pass: A uses all parameters, B w0 and w1, C w1 and
    w2; b and c say the same by freezing the others. ``wrap``: each pass in ``accumulate()``. ``change(model, when)`` is
    called "before" and "after" each optimizer step.

    Returns: "broken": the largest violation of the law. "apart": the largest difference between the weights that a
    forward pass of scape's saw and the owners'. "weights", "skipped"; "warned": what compress() and training warned of.
    """
    uses = {"A": ("w0", "w1", "w2"), "B": ("w0", "w1"), "C": ("w1", "w2")}
    model = build(engine, world, net=Given)
    inner = getattr(model, "module", model)
    optimizer = case.make(model.parameters())
    generator = torch.Generator().manual_seed(100 + rank)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        safety = thinwire.Safety(outlier_clip=None)
        wire = thinwire.compress(model, optimizer, case.method, steps=len(steps), safety=safety, **options)
        books = Books(engine, rank, world, optimizer, wire)
        weights = parts(model)
        stepwise = case.law in STEPWISE
        before = {n: books.read(case.law, n, SHAPES[n], w) for n, w in weights.items()} if case.law else {}
        came = {n: torch.zeros(shape).double() for n, shape in SHAPES.items()}
        went = {n: torch.zeros(shape).double() for n, shape in SHAPES.items()}
        total = {n: torch.zeros(shape).double() for n, shape in SHAPES.items()}
        owed = {n: 0.0 for n in SHAPES}
        apart = 0.0
        for number, passes in enumerate(steps):
            for letter in passes:
                used = uses[letter.upper()]
                for n, weight in weights.items():
                    weight.requires_grad_(letter.isupper() or n in used)
                given = {n: torch.randn(SHAPES[n], generator=generator) for n in used}
                if case.name == "lhc":  # made for gradients that are sparse by themselves
                    given = {n: g * (torch.rand(g.shape, generator=generator) < 0.1) for n, g in given.items()}
                for n, g in given.items():
                    came[n] += g
                if wrap:
                    with wire.accumulate():
                        model(given).backward()
                else:
                    model(given).backward()
                if case.name == "scape":
                    differences = [(inner.seen[n] - full(weight)).abs().max() for n, weight in weights.items()]
                    apart = max(apart, *map(float, differences))
            for n, weight in weights.items():
                if weight.grad is not None:
                    went[n] += full(weight.grad)
            change(model, "before")
            optimizer.step()
            change(model, "after")
            optimizer.zero_grad()
            if case.law and (stepwise or number == len(steps) - 1):
                for n, weight in weights.items():
                    after = books.read(case.law, n, SHAPES[n], weight)
                    given_to_all = summed(came[n])
                    if stepwise and not any(n in uses[letter.upper()] for letter in passes):
                        left = sum((after[kind] - before[n][kind]).abs() for kind in after)
                    else:
                        left = _owed(case, case.law, books, before[n], after, given_to_all, went[n])
                    owed[n] = max(owed[n], float(left.abs().max()))
                    total[n] += given_to_all
                    before[n], came[n], went[n] = after, torch.zeros_like(came[n]), torch.zeros_like(went[n])
    broken = max(owed[n] / max(float(total[n].abs().max()), 1e-9) for n in SHAPES)
    result = {
        "broken": broken, "apart": apart, "weights": flat(model).numpy().tobytes(),
        "skipped": wire.skipped, "steps": wire.step,
        "warned": [str(w.message) for w in heard if w.category.__name__ == "ThinwireWarning"],
    }  # fmt: skip
    wire.close()
    return result


def test_every_method_is_among_the_cases():
    assert {case.name for case in CASES} == {method.name for method in TABLE}
    for case in CASES:
        assert "smallest" not in {f.name for f in fields(resolve(case.method))} or case.knob("smallest") == 0 or (
            case.name == "bf16"  # it sends everything anyway
        ), case.method  # fmt: skip


# ------------------------------------------------------------------------------------- buckets that change, FSDP2, HSDP

TURNS = [*"AABBACABcAb"]
LATE = [*"BCBA"]


def _turns(rank, world, engine):
    def look(case):
        if engine == "hsdp":  # four processes
            found = conserve(rank, world, engine, case, TURNS[:5] + TURNS[-2:])
            return {"turns": found["broken"], "late": 0.0, "apart": found["apart"]}
        found = conserve(rank, world, engine, case, TURNS)
        late = {"broken": 0.0}
        if case.name != "onebit-adam":  # it refuses a parameter without gradient in the warm-up
            late = conserve(rank, world, engine, case, LATE)
        return {"turns": found["broken"], "late": late["broken"], "apart": found["apart"]}

    return findings(on(engine, spread(2, [case for case in CASES if case.law]), ("fsdp2", "fsdp2", "hsdp")), look)


@pytest.mark.parametrize(("engine", "world"), alternating(1, [("fsdp2", 2), ("hsdp", 4)]))
def test_nothing_is_lost_when_parameters_have_no_gradient_by_turns(engine, world):
    """sum over ranks of inputs = N * sum of means + sum over ranks of what waits, per parameter."""

    def check(method, what):
        lost = [(key, what[key]) for key in ("turns", "late") if what[key] > LAW]
        wrong = [f"{key}: {share:.2g} of the inputs is lost or sent twice" for key, share in lost]
        return wrong + [f"forward saw other weights than the owners': {what['apart']:.2g}"] * (what["apart"] > 0)

    each(ranks.run(_turns, world, engine), engine, check)


# --------------------------------------------------------------------------------------------- scape on sharded weights


def _scape(rank, world, engine):
    """Weights that are changed in place around the steps; and parameters that come late or not in the warm-up."""

    def shrink(when):
        def change(model, now):
            if now == when:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.99)

        return change

    cases = {
        **{f"weights changed {when} the step": (["A"] * 6, {"change": shrink(when)}) for when in ("before", "after")},
        "unused in the warm-up": ([*"ABBAABA"], {}),
        "first used late": ([*"BBBAAB"], {}),
        "all by turns": ([*"CBCBAACB"], {}),
    }
    found: Found = {}
    for density in dealt([0.1, 0.02], engine, ("fsdp2", "hsdp")):  # masks as bits; below 1/32, as positions
        case = Case(f"scape(smallest=0, density={density}, warmup=3)", "moment", "adams")
        for label, (steps, options) in cases.items():
            found |= findings([case], lambda case: conserve(rank, world, engine, case, steps, **options))  # noqa: B023
            found[f"{case.method}, {label}"] = found.pop(case.method)
    return found


@pytest.mark.parametrize(("engine", "world"), alternating(0, [("fsdp2", 2), ("hsdp", 4)]))
def test_scape_computes_with_the_owners_weights_whatever_happens_around_its_steps(engine, world):
    """And conserves moments: m' + mean of e' + x' = b1 m + (1 - b1) mean of g + mean of e + x, with x the owner's."""

    def check(method, what):
        wrong = [f"forward saw other weights than the owners': {what['apart']:.2g}"] * (what["apart"] > 0)
        return wrong + [f"{what['broken']:.2g} of the moments is lost or sent twice"] * (what["broken"] > LAW)

    each(ranks.run(_scape, world, engine), engine, check)
