"""Random training programs: a seeded search for an innocent act that changes a bit. One integer makes a program.

    verdict = judge(rank, world, draw(17))     # on every rank of a process group of ``world`` processes

A program trains a small model on an engine with a method. Strewn into it are *acts* that must not be felt: an
evaluation, a look at the report, weights that are swapped and swapped back, a forward pass that raises and is caught, a
state that is saved and loaded, a program that ends and goes on from what it saved. What must hold, after each step:

    the same program without its acts has the same weights and losses on every rank, and in the end the same state, step
    number and skipped steps, and no warning more
    all ranks have the same weights (not with local steps)
    a step that is spoilt on one rank is as if it had not been (not with a scaler, nor with local steps)
    with ``dense``, the weights are those of the engine without Thinwire, whose spoilt steps are left out
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import ranks
import staged
import thinwire
from engines import build, same_on_all_ranks
from models import Net, flat, loss_of
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.methods import resolve
from threaded import entries

METHODS = (
    "dense", "fp32", "bf16", "int8(smallest=100)", "int8(smallest=100, feedback='gradients')",
    "sdp4bit(smallest=100)", "zeropp(smallest=100)", "qsdp(smallest=100)", "loco(smallest=100)",
    "radius(smallest=100, density=0.2, T=2, start=1)", "scape(smallest=100, density=0.1, warmup=2)",
    "separate(smallest=100, ratio=2, block=16)", "tagc(smallest=100)", "lhc(smallest=100)",
    "powersgd(smallest=100, rank=2)", "topk(smallest=100, density=0.1)",
    "topk(smallest=100, density=0.1, feedback='gradients')", "trickle(smallest=100, density=0.1)",
    "trickle(smallest=100, density=0.1, start=2)", "trickle:merged(smallest=100)", "trickle:muon(smallest=100)",
    "dgc(smallest=100, density=0.1)", "sign(smallest=100)", "onebit-adam(smallest=100, warmup=2)",
    "local-steps(every=2)", "local-steps(every=4, fragments=2, delay=1)",
    "local-steps:recommended(every=2, start=2)", "none",
)  # fmt: skip
WORLDS = {"ddp": 2, "fsdp2": 2, "fsdp2-keep": 2, "hsdp": 4}
OPTIMIZERS = ("adamw", "adamw fused", "two adamw", "groups")
ONLY = {"scape": "adams", "dgc": "sgd", "trickle:muon": "muon", "onebit-adam": "adamw"}
COUNTS = ("radius", "scape", "separate", "local-steps", "start=")
"""Methods with a schedule of their own: it counts skipped steps, too."""
STEPS = 7
AT_ONCE = 10
"""Programs that one group of processes plays."""


@dataclass(frozen=True)
class Act:
    """Something that is done at a ``place`` of step number ``step``, by ``name``."""

    step: int
    place: str
    name: str


@dataclass(frozen=True)
class Program:
    """One run.

    Attributes:
        spoilt: by step, the rank whose loss is not finite. rates: by step, a factor on the learning rates.
        passes: backward passes of a step. net: what is special about the model. acts: what is strewn in.
    """

    seed: int
    engine: str
    method: str
    optimizer: str
    scaler: bool
    clip: bool
    passes: int
    net: str
    by_hand: bool
    spoilt: dict[int, int] = field(hash=False)
    rates: dict[int, float] = field(hash=False)
    acts: tuple[Act, ...]

    @property
    def counts(self) -> bool:
        """Has the method a schedule that counts skipped steps?"""
        return any(word in self.method for word in COUNTS)

    def __str__(self) -> str:
        passes = f"{self.passes} passes{' by hand' * self.by_hand}"
        options = f"{self.net}{', scaler' * self.scaler}{', clip' * self.clip}, spoilt {self.spoilt}"
        acts = ", ".join(f"{act.name} at {act.place} {act.step}" for act in self.acts)
        return (
            f"--case {self.seed}: {self.method} on {self.engine}, {self.optimizer}, {passes}, {options}, "
            f"rates {self.rates}: {acts}"
        )


def draw(seed: int) -> Program:
    """Draw the program of ``seed``."""
    pick = random.Random(seed)
    method = METHODS[seed % len(METHODS)]
    base = method.partition("(")[0]
    engines = resolve(method).engines
    engine = pick.choice([kind for kind in ("ddp", "ddp", "fsdp2", "fsdp2-keep", "hsdp") if kind[:5] in engines])
    optimizer = ONLY.get(base) or pick.choice(OPTIMIZERS)
    scaler = pick.random() < 0.2 and "local-steps" not in method
    spoilt = {step: pick.randrange(WORLDS[engine]) for step in range(1, STEPS) if pick.random() < 0.12}
    rates = {step: pick.choice([0.0, 0.5, 2.0]) for step in range(STEPS) if pick.random() < 0.15}
    places = [(place, name) for name, (_, allowed) in ACTS.items() for place in allowed]
    acts = []
    for step in range(STEPS):
        for place, name in pick.sample(places, pick.choice([0, 1, 2, 3])):
            acts.append(Act(step, place, name))
    passes = pick.choice([1, 1, 2, 3])
    net = "plain" if optimizer == "muon" else pick.choice(["plain", "plain", "tied", "frozen", "checkpointed"])
    clip = pick.random() < 0.7
    by_hand = pick.random() < 0.3
    return Program(seed, engine, method, optimizer, scaler, clip, passes, net, by_hand, spoilt, rates, tuple(acts))


class Run:
    """The program under way on this rank: what acts may touch."""

    def __init__(self, program: Program, rank: int, world: int, *, stock: bool = False, spoilt: bool = True) -> None:
        """``stock``: without Thinwire. ``spoilt``: with the spoilt steps."""
        self.program, self.rank, self.world, self.stock, self.spoilt = program, rank, world, stock, spoilt
        self.device = "cpu" if dist.get_backend() == "gloo" else "cuda"
        self.to_none = True
        self.weights: list[Tensor] = []
        self.losses: list[float] = []
        self.alike = True
        self.begin()

    def begin(self) -> None:
        """Make the model, its optimizers and the wire anew, as a program that starts."""
        program = self.program
        self.model = build(program.engine, self.world, net=lambda: Net(layers=1, tied=program.net == "tied"),
                           prepare=PREPARE[program.net], device=self.device)  # fmt: skip
        self.parameters = nn.ParameterList(self.model.parameters())  # on FSDP2 the shards, whatever is gathered
        self.optimizers = optimizers_of(self.model, program.optimizer)
        self.rates = [[group["lr"] for group in one.param_groups] for one in self.optimizers]
        self.scaler = (
            torch.amp.GradScaler(self.device, init_scale=1024.0, growth_interval=2) if program.scaler else None
        )
        self.wire: Any = None
        self.trained = False
        if not self.stock:
            given = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
            self.wire = thinwire.compress(self.model, given, program.method, scaler=self.scaler)

    def play(self) -> None:
        """Take all steps, with the acts."""
        for step in range(STEPS):
            self.act(step, "before")
            if self.spoilt or step not in self.program.spoilt:
                self.train(step)
            self.act(step, "after")
            self.weights.append(flat(self.parameters))
            self.alike = self.alike and same_on_all_ranks(self.parameters)

    def train(self, step: int) -> None:
        program, self.trained = self.program, True
        for one, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(one.param_groups, rates, strict=True):
                group["lr"] = rate * program.rates.get(step, 1.0)
        for number in range(program.passes):
            last = number == program.passes - 1
            with self.pass_of(last):
                loss = loss_of(self.model, 10 * step + number, self.rank) / program.passes
                self.losses.append(loss.item())
                if program.spoilt.get(step) == self.rank and last:
                    loss = loss * torch.inf
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if not last:
                self.act(step, "between")
        self.act(step, "backward")
        if self.scaler is not None:
            for one in self.optimizers:
                self.scaler.unscale_(one)
        if program.clip:
            if self.wire is None:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            else:
                self.wire.clip_grad_norm_(1.0)
        self.act(step, "clipped")
        for one in self.optimizers:
            one.step() if self.scaler is None else self.scaler.step(one)
        if self.scaler is not None:
            self.scaler.update()
        self.act(step, "stepped")
        for one in self.optimizers:
            one.zero_grad(set_to_none=self.to_none)
        self.to_none = True

    @contextlib.contextmanager
    def pass_of(self, last: bool) -> Iterator[None]:
        """Enter one backward pass of a step, as the engine or the wire wants it to be said."""
        if self.wire is not None and not (self.program.by_hand and self.program.acts):
            with self.wire.accumulate(last=last):
                yield
        elif self.program.engine == "ddp":
            with contextlib.nullcontext() if last else self.model.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(last)
            yield

    def act(self, step: int, place: str) -> None:
        for act in self.program.acts:
            if (act.step, act.place) == (step, place):
                ACTS[act.name][0](self)

    def end(self) -> dict[str, Any]:
        """Close the wire; what must be as without acts, beside weights and losses.

        A forward pass comes first: only then is what FSDP2 gathers of the last step's weights on all ranks.
        """
        evaluate(self)
        state = entries(self.wire.state_dict())
        counts = {"steps": self.wire.step, "skipped": self.wire.skipped}
        self.wire.close()
        return {"state": state, **counts}


def freeze(model: nn.Module) -> None:
    model.embedding.weight.requires_grad_(False)
    model.blocks[0].up.bias.requires_grad_(False)


def recompute(model: nn.Module) -> None:
    """Forget the activations of each block, and compute them again in the backward pass."""
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


PREPARE: dict[str, Callable[[nn.Module], None]] = {
    "plain": lambda model: None, "tied": lambda model: None, "frozen": freeze, "checkpointed": recompute,
}  # fmt: skip


def optimizers_of(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if kind == "sgd":
        return [torch.optim.SGD(weights, lr=0.1)]
    if kind == "adams":
        return [thinwire.AdamS(weights, lr=3e-3)]
    if kind == "groups":
        return [torch.optim.AdamW([{"params": weights[:3], "weight_decay": 0.0}, {"params": weights[3:], "lr": 1e-3}],
                                  lr=3e-3)]  # fmt: skip
    if kind == "two adamw":
        return [torch.optim.AdamW(weights[::2], lr=3e-3), torch.optim.AdamW(weights[1::2], lr=1e-3)]
    if kind == "muon":
        named = dict(model.named_parameters())
        hidden = [weight for name, weight in named.items() if "blocks" in name and weight.ndim == 2]
        rest = [weight for weight in weights if all(weight is not one for one in hidden)]
        return [torch.optim.Muon(hidden, lr=0.01), torch.optim.AdamW(rest, lr=3e-3)]
    return [torch.optim.AdamW(weights, lr=3e-3, fused=kind == "adamw fused")]


# Acts. None of them may be felt.


def reshard(run: Run) -> None:
    """Free what FSDP2 has gathered for a forward pass without a backward pass: it would be stale after the step."""
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def evaluate(run: Run, mode: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad) -> None:
    run.model.eval()
    with mode():
        loss_of(run.model, 990, run.rank)
    run.model.train()
    reshard(run)


def infer(run: Run) -> None:
    if run.program.engine != "ddp" and not run.trained:
        return  # torch's FSDP2 makes its memory in the first forward pass, and could not write to it in training
    evaluate(run, torch.inference_mode)


def evaluate_in_training_mode(run: Run) -> None:
    with torch.no_grad():
        loss_of(run.model, 992, run.rank)
    reshard(run)


def look(run: Run) -> None:
    str(run.wire.plan), str(run.wire.report()), run.wire.stats(), run.wire.last_step(), run.wire.memory_bytes()


def save(run: Run) -> None:
    file = io.BytesIO()
    torch.save([run.model.state_dict(), *(one.state_dict() for one in run.optimizers)], file)


def save_wire(run: Run) -> None:
    run.wire.state_dict()


def reload(run: Run) -> None:
    run.wire.load_state_dict(run.wire.state_dict())


def reload_optimizers(run: Run) -> None:
    for one in run.optimizers:
        one.load_state_dict(one.state_dict())


def start_anew(run: Run) -> None:
    """End the program, and go on in another one from what it saved."""
    reshard(run)
    weights = [weight.detach().clone() for weight in run.parameters]
    optimizers, wire = [one.state_dict() for one in run.optimizers], run.wire.state_dict()
    scaler = None if run.scaler is None else run.scaler.state_dict()
    run.wire.close()
    run.begin()
    with torch.no_grad():
        for weight, value in zip(run.parameters, weights, strict=True):
            weight.copy_(value)
    for one, state in zip(run.optimizers, optimizers, strict=True):
        one.load_state_dict(state)
    run.wire.load_state_dict(wire)
    if run.scaler is not None:
        run.scaler.load_state_dict(scaler)


def swap_weights(run: Run) -> None:
    """Put averaged weights in for an evaluation, and the others back.

    On FSDP2 methods that send rounded weights send them anew then, rounded in another way.
    """
    if run.program.engine != "ddp" and run.program.method.startswith(("sdp4bit", "zeropp", "qsdp")):
        return
    reshard(run)
    kept = [weight.detach().clone() for weight in run.parameters]
    with torch.no_grad():
        for weight in run.parameters:
            weight.mul_(0.5)
    evaluate(run)
    with torch.no_grad():
        for weight, value in zip(run.parameters, kept, strict=True):
            weight.copy_(value)


def draw_random(run: Run) -> None:
    torch.rand(3), random.random(), np.random.rand()


def fail_forward(run: Run) -> None:
    """Raise in the middle of a forward pass, as a batch that does not fit into memory, and go on."""
    head = run.model.module.head if run.program.engine == "ddp" else run.model.head

    def refuse(module: nn.Module, inputs: Any) -> None:
        raise MemoryError

    handle = head.register_forward_pre_hook(refuse)
    with contextlib.suppress(MemoryError):
        loss_of(run.model, 993, run.rank)
    handle.remove()
    reshard(run)


def there_and_back(run: Run) -> None:
    for one in run.optimizers:
        for group in one.param_groups:
            group["lr"] *= 4
            group["lr"] /= 4


def freeze_and_thaw(run: Run) -> None:
    trained = [weight for weight in run.parameters if weight.requires_grad]
    for weight in trained:
        weight.requires_grad_(False)
    for weight in trained:
        weight.requires_grad_(True)


def zero_twice(run: Run) -> None:
    for one in run.optimizers:
        one.zero_grad(set_to_none=False)
        one.zero_grad()


def look_at_gradients(run: Run) -> None:
    [weight.grad.norm() for weight in run.model.parameters() if weight.grad is not None]


def collect(run: Run) -> None:
    gc.collect()


def hook(run: Run) -> None:
    for one in run.optimizers:
        one.register_step_pre_hook(lambda *_: None)
        one.register_step_post_hook(lambda *_: None)


def idle_step(run: Run) -> None:
    """Step without a gradient, as some do before they make a schedule. (Zeros are gradients: momentum steps on.)"""
    if all(parameter.grad is None for parameter in run.model.parameters()):
        for one in run.optimizers:
            one.step()


def schedule(run: Run) -> None:
    for one in run.optimizers:
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1.0)


def zero_in_place(run: Run) -> None:
    """Let the gradients of this step become zeros, and not None."""
    run.to_none = False


class Broken(Exception):
    """What a hook of the user's raises."""


def fail_step(run: Run) -> None:
    """Raise in a hook before an optimizer's step, and go on: the step is taken again."""

    def refuse(*_: Any) -> None:
        raise Broken

    handle = run.optimizers[0].register_step_pre_hook(refuse)
    with contextlib.suppress(Broken):
        run.optimizers[0].step()
    handle.remove()


def evaluate_on_rank_0(run: Run) -> None:
    if run.program.engine == "ddp" and run.rank == 0:
        run.model.eval()
        with torch.no_grad():
            loss_of(run.model.module, 994, run.rank)
        run.model.train()


def save_on_rank_0(run: Run) -> None:
    if run.program.engine == "ddp" and run.rank == 0:
        save(run)


def look_on_rank_0(run: Run) -> None:
    if run.rank == 0:
        look(run)


def discard_pass(run: Run) -> None:
    """Throw away a pass that was not exchanged. (FSDP2 keeps its gradients where ``zero_grad`` does not see them.)"""
    if run.program.engine == "ddp":
        with run.wire.accumulate(last=False):
            loss_of(run.model, 995, run.rank).backward()
        for one in run.optimizers:
            one.zero_grad()


def discard_step(run: Run) -> None:
    """Throw away a step's exchanged gradients: it is skipped."""
    if run.program.counts:
        return
    with run.wire.accumulate(last=True):
        loss_of(run.model, 996, run.rank).backward()
    for one in run.optimizers:
        one.zero_grad()


OUTSIDE = ("before", "after")
INSIDE = ("between", "backward", "clipped", "stepped")
EVERYWHERE = (*OUTSIDE, *INSIDE)
ACTS: dict[str, tuple[Callable[[Run], None], tuple[str, ...]]] = {
    "evaluate": (evaluate, EVERYWHERE),
    "infer": (infer, EVERYWHERE),
    "evaluate in training mode": (evaluate_in_training_mode, EVERYWHERE),
    "look": (look, EVERYWHERE),
    "save": (save, EVERYWHERE),
    "save wire": (save_wire, OUTSIDE),
    "reload": (reload, OUTSIDE),
    "reload optimizers": (reload_optimizers, OUTSIDE),
    "start anew": (start_anew, OUTSIDE),
    "swap weights": (swap_weights, OUTSIDE),
    "draw random": (draw_random, EVERYWHERE),
    "fail forward": (fail_forward, OUTSIDE),
    "there and back": (there_and_back, OUTSIDE),
    "freeze and thaw": (freeze_and_thaw, OUTSIDE),
    "zero twice": (zero_twice, OUTSIDE),
    "look at gradients": (look_at_gradients, INSIDE),
    "collect": (collect, EVERYWHERE),
    "hook": (hook, OUTSIDE),
    "idle step": (idle_step, OUTSIDE),
    "schedule": (schedule, OUTSIDE),
    "zero in place": (zero_in_place, ("stepped",)),
    "fail step": (fail_step, ("clipped",)),
    "evaluate on rank 0": (evaluate_on_rank_0, EVERYWHERE),
    "save on rank 0": (save_on_rank_0, EVERYWHERE),
    "look on rank 0": (look_on_rank_0, EVERYWHERE),
    "discard pass": (discard_pass, OUTSIDE),
    "discard step": (discard_step, OUTSIDE),
}
"""By name: what is done, and where it may be done."""


@dataclass
class Verdict:
    """What is wrong with a program (empty: nothing); ``refusal``: why it was refused without its acts."""

    program: Program
    problem: str = ""
    refusal: str = ""


def judge(rank: int, world: int, program: Program) -> Verdict:
    """Play ``program`` with its acts and without; collective."""
    verdict = Verdict(program)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        plain = acted = None
        try:
            plain = Run(replace(program, acts=()), rank, world)
            plain.play()
            expected = plain.end()
        except ThinwireError as refused:
            verdict.refusal = str(refused)
            if plain is not None:
                plain.wire.close()
            return verdict
        known = warned(noted)
        try:
            acted = Run(program, rank, world)
            acted.play()
            verdict.problem = differs(plain, expected, acted, acted.end())
            if not verdict.problem and (new := warned(noted) - known):
                verdict.problem = f"warned of {sorted(new)}"
        except Exception as error:
            verdict.problem = f"{type(error).__name__}: {error}"
            if acted is not None:
                with contextlib.suppress(Exception):
                    acted.wire.close()
        alone = "local-steps" in program.method or program.method == "none"
        if not plain.alike and not alone:
            verdict.problem = verdict.problem or "ranks have unlike weights"
        if program.spoilt and not program.scaler and not program.counts and not alone and not verdict.problem:
            without = Run(replace(program, acts=()), rank, world, spoilt=False)
            without.play()
            without.wire.close()
            verdict.problem = unlike("weights without the spoilt steps", without.weights, plain.weights)
        if program.method == "dense" and not verdict.problem:
            stock = Run(replace(program, acts=()), rank, world, stock=True, spoilt=program.scaler)
            stock.play()
            verdict.problem = unlike("weights beside the stock engine's", stock.weights, plain.weights)
    return verdict


def warned(noted: list[warnings.WarningMessage]) -> set[str]:
    """Return what Thinwire has warned of."""
    return {str(one.message) for one in noted if issubclass(one.category, ThinwireWarning)}


def differs(plain: Run, expected: dict[str, Any], acted: Run, ended: dict[str, Any]) -> str:
    """Say what the acts have changed; empty: nothing."""
    problem = unlike("weights", plain.weights, acted.weights) or (
        "" if plain.losses == acted.losses or any(loss != loss for loss in plain.losses) else "losses differ"
    )
    state, other = expected.pop("state"), ended.pop("state")
    thrown_away = ended["skipped"] - expected["skipped"]
    if thrown_away in known_discards(acted.program):
        expected["skipped"] += thrown_away
        expected["steps"] += thrown_away
    state.pop("skipped", None), other.pop("skipped", None)
    if not problem and expected != ended:
        problem = f"{ended} in place of {expected}"
    if not problem and state.keys() != other.keys():
        problem = f"the states have other entries: {sorted(state.keys() ^ other.keys())}"
    # What was loaded last, and not used yet, lies on the CPU.
    apart = [key for key in state if key in other and not torch.equal(state[key].cpu(), other[key].cpu())]
    return problem or (f"the states differ in {apart}" if apart else "")


def known_discards(program: Program) -> range:
    """Return how many thrown-away steps may be known in the end.

    One is when the next step begins, or, with a scaler, when a state is saved; not if the program starts anew before.
    """
    if program.counts:
        return range(1)
    places = [(act.step, act.place) for act in program.acts if act.name == "discard step"]
    forgets = any(act.name == "start anew" for act in program.acts)
    return range(0 if forgets else len(places) - places.count((STEPS - 1, "after")), len(places) + 1)


def unlike(what: str, ones: list[Tensor], others: list[Tensor]) -> str:
    """Name the first step after which ``what`` differ; empty: none."""
    for step, (one, other) in enumerate(zip(ones, others, strict=True)):
        if not torch.equal(one, other):
            return f"{what} differ after step {step}, by {(one - other).abs().max():.2g}"
    return ""


def world_of(seed: int) -> int:
    """Return the number of ranks that the program of ``seed`` runs on."""
    return WORLDS[draw(seed).engine]


def judge_all(rank: int, world: int, seeds: Iterable[int], device: str) -> list[Verdict]:
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        store = dist.PrefixStore("cuda", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group(staged.NAME, store=store, rank=rank, world_size=world)
    return [judge(rank, world, draw(seed)) for seed in seeds]


def search(seeds: Iterable[int], device: str = "cpu") -> list[Verdict]:
    """Judge the programs of ``seeds``, each on as many ranks as its engine needs; one verdict each.

    ``device``: "cpu", or "cuda": ranks share a GPU, their messages go through the host (staged.py).
    """
    verdicts = []
    for world, seeds_of_world in itertools.groupby(sorted(seeds, key=world_of), world_of):
        for chosen in iter(lambda several=seeds_of_world: list(itertools.islice(several, AT_ONCE)), []):
            for several in zip(*ranks.run(judge_all, world, chosen, device), strict=True):
                verdicts.append(next((one for one in several if one.problem), several[0]))
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=140)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits on whichever stream
    first, count = (args.seed, args.cases) if args.case is None else (args.case, 1)
    verdicts = search(range(first, first + count), args.device)
    for verdict in verdicts:
        if verdict.problem:
            print(f"{verdict.program}\n    {verdict.problem}", flush=True)
    refused = Counter(verdict.refusal for verdict in verdicts if verdict.refusal)
    for text, number in refused.most_common():
        print(f"refused {number}: {text[:160]}")
    print(f"{len(verdicts)} programs, {refused.total()} refused, {sum(bool(one.problem) for one in verdicts)} failed")
    return 1 if any(verdict.problem for verdict in verdicts) else 0
