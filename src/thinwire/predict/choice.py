"""``method="auto"``: a method is chosen by prediction and by trial, before the first step that counts.

Candidates are the methods whose loss was measured in runs of comparable length (:mod:`thinwire.plan.measured`) and is,
with its 95% interval, as low as is asked for, and that this engine, this optimizer and this memory take. The ranks run
dense; rank 0 predicts each candidate's step; the ranks run the two that are predicted to be fastest. Weights, moments
and random numbers are put back after each, so that what follows is the run of the method that was chosen, had the user
named it: bit for bit, but that DDP has rebuilt its buckets by then, each of which begins with an r of its own where
steps are sent (``methods/parts/updates.py``).

No rank chooses from its own clock: a trial's time is that of its slowest rank, and rank 0 hands out the choice.
"""

from __future__ import annotations

import copy
import gc
import inspect
import json
import math
import os
import random
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from thinwire.base import device as devices
from thinwire.base.errors import LostRank, ThinwireError, in_words
from thinwire.base.terminal import counted
from thinwire.core.agreement import Agreement
from thinwire.core.card import Card
from thinwire.core.exchange import AllReduce
from thinwire.core.method import Method
from thinwire.core.names import describe
from thinwire.engines.fsdp2 import FSDP2
from thinwire.methods import resolve
from thinwire.network.comm import CountingComm, GroupComm, local
from thinwire.network.ledger import Ledger
from thinwire.plan.dry_run import stand_in_run
from thinwire.plan.measured import MeasuredLoss, read_measured
from thinwire.predict.cluster import read_cluster
from thinwire.predict.links import agree
from thinwire.predict.play import WORTH, Prediction

DENSE = "dense"
TRIAL_STEPS = 20
TRIALS = 2
"""Candidates that are run beside dense."""
CLOSE = 1.25
"""Gains below this are confirmed by a second trial of dense."""
LENGTH = 10
"""A measured run speaks of runs from a tenth of its length to ten times its length."""


@dataclass(frozen=True)
class Auto:
    """Let ``compress()`` choose the method: ``compress(model, optimizer, Auto(step), steps=...)``.

    Args:
        step: takes one optimizer step as the training loop does, with the wire that it is given: forward and backward
            pass of a usual batch, ``wire.clip_grad_norm_``, ``optimizer.step()``, ``optimizer.zero_grad()``. It is
            called 60 to 105 times. The model's buffers, all weights that it or ``optimizer`` holds, the optimizers'
            state and settings, and the random numbers of torch, numpy and Python are put back each time; what else it
            moves is the caller's to put back: a scheduler, a scaler, an iterator; of a second module beside ``model``
            the buffers, and weights that ``optimizer`` does not hold.
        max_loss: largest loss above dense's, as a share of it, at the upper end of the 95% interval of any measured run
            of comparable length (lower: fewer candidates); math.inf: any, and runs of any length count.
        cluster: a cluster's name or TOML file, for the predictions. None: the links are measured now.
        finetune: the weights are trained already: runs that go on or fine-tune are comparable, not those from scratch.
        resumed: the state that ``wire.load_state_dict()`` will be given: its choice is taken, and nothing is tried.
    """

    step: Callable[[Any], object]
    max_loss: float = 0.01
    cluster: str | Path | None = None
    finetune: bool = False
    resumed: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise ThinwireError(f"Auto(step) takes a function of one step, step(wire), got {type(self.step).__name__}")
        if not (isinstance(self.max_loss, int | float) and self.max_loss >= 0):
            raise ThinwireError(f"max_loss is a share of dense's loss, 0 or more, got {self.max_loss!r}")

    def __str__(self) -> str:
        return f"auto(max_loss={self.max_loss:g}, cluster={self.cluster}, finetune={self.finetune})"


@dataclass(frozen=True)
class Option:
    """A method that was looked at. Times are milliseconds per step, averaged over start, warm-up and steady state.

    Attributes:
        loss: above dense's in percent, in that of the comparable runs whose 95% interval ends highest; None: there are
            none. error: half of that interval; None: not known. runs: which one it is.
        predicted, low, high: None: nothing was predicted. measured: None: it was not tried.
        reason: why it was not chosen; "" for the one that was.
    """

    method: str
    loss: float | None = None
    runs: str = ""
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    measured: float | None = None
    reason: str = ""
    error: float | None = None

    @property
    def loss_and_error(self) -> str:
        """``+0.8% ± 1.3% (2 seeds, 2400 steps, 82 tokens per parameter, the highest of 12 runs)``"""
        error = "?" if self.error is None else f"{self.error:.1f}%"
        return f"{self.loss:+.1f}% ± {error} ({self.runs})"

    def dropped(self, reason: str) -> Option:
        return replace(self, reason=reason)


@dataclass(frozen=True)
class Choice:
    """The method that was chosen, and why. ``options``: dense if measured, what was predicted, the rest."""

    method: str
    reason: str
    settings: str
    options: tuple[Option, ...]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Choice:
        """Read what ``dataclasses.asdict`` gave, perhaps by way of JSON."""
        return cls(**{**plain, "options": tuple(Option(**option) for option in plain["options"])})

    @property
    def headline(self) -> str:
        return f"chosen by {self.settings}: {self.method}: {self.reason}"

    def __str__(self) -> str:
        lines, unpredicted = [self.headline], defaultdict[str, list[str]](list)
        for option in self.options:
            facts = []
            if option.predicted is not None:
                facts.append(f"predicted {option.predicted:.4g} ms ({option.low:.4g} to {option.high:.4g})")
            if option.measured is not None:
                facts.append(f"measured {option.measured:.4g} ms")
            if not facts:
                loss = "" if option.loss is None else f" {option.loss_and_error}"
                unpredicted[option.reason].append(f"{option.method}{loss}")
                continue
            if option.loss is not None:
                facts.append(f"loss {option.loss_and_error}")
            lines.append(f"  {option.method}: {', '.join(facts)}: {option.reason or 'chosen'}")
        return "\n".join(lines + [f"  {reason}: {', '.join(methods)}" for reason, methods in unpredicted.items()])


@dataclass(frozen=True)
class Training:
    """The surroundings that a method has to fit. ``model``: without DDP's wrapper, or as FSDP2 has sharded it.

    Attributes:
        engine: "ddp", "fsdp2" or "hsdp". bucket_cap_mb: DDP's; None: as suits each method.
        steps: of the whole run, if known. two_level, intra: as for ``compress()``.
        broadcast_buffers: DDP sends the module buffers before each forward pass.
    """

    model: nn.Module
    engine: str
    optimizers: Sequence[torch.optim.Optimizer]
    steps: int | None
    two_level: bool | None = None
    intra: str | None = None
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True

    @classmethod
    def of(
        cls, model: Any, optimizers: Sequence[torch.optim.Optimizer], steps: int | None, options: Mapping[str, Any]
    ) -> Training:
        """Describe the training of a wrapped ``model``. ``options``: of ``compress()``."""
        hops = options["two_level"], None if options["intra"] is None else str(options["intra"])
        if isinstance(model, DistributedDataParallel):
            cap = model.bucket_bytes_cap / 2**20
            return cls(model.module, "ddp", optimizers, steps, *hops, cap, model.broadcast_buffers)
        engine = "fsdp2" if len(FSDP2.process_groups(model)) == 1 else "hsdp"
        return cls(model, engine, optimizers, steps, *hops)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def begun(self, name: str, ranks: int) -> Method:
        """Return the method, begun on stand-ins. Raise ThinwireError if it cannot work in this training."""
        method = resolve(name)
        exchange = AllReduce(CountingComm(0, range(ranks), Ledger()))
        run = stand_in_run(method, describe(self.model).values(), exchange)
        method.begin(replace(run, steps=self.steps))
        return method

    def warm_up(self, card: Card) -> float:
        """Return the share of the run's steps before the method's steady state, in which it is dense or nearly so."""
        return min(card.steady / self.steps, 1.0) if self.steps else 0.0


Start = Callable[[str], Any]
"""Begins to train with the method of a name; returns its wire. Only one is open at a time."""
Predictor = Callable[[Auto, Training, "Trials", float], Callable[[str], Prediction]]
"""Called on all ranks with the seconds of a dense step; rank 0 alone calls what it returns."""


def choose(auto: Auto, training: Training, start: Start, predictor: Predictor) -> Choice:
    """Choose the method of ``training``. Collective, before the first step.

    Raises:
        ThinwireError: the ranks differ, or a prediction or trial of dense failed on one of them.
    """
    trials = Trials(auto, training, start)
    ranks = trials.comm.size
    with Agreement([trials.comm]) as agreement:
        agreement.compare({"method": str(auto)})
    trials.from_rank_0(lambda: auto.cluster and read_cluster(auto.cluster).name)  # before anything takes time
    listed = trials.options(lambda: candidates(auto, training, ranks))
    if all(option.reason for option in listed):  # a step of dense would be measured for nothing
        return Choice(DENSE, f"no method can be taken: {_in_short(auto, listed)}", str(auto), tuple(listed))
    dense = trials.run(DENSE)
    memory_left = trials.memory_left()
    with _same_random_numbers(training.device):  # the model's own code runs once more, to be profiled
        predict = predictor(auto, training, trials, dense)
    options, tried = trials.options(lambda: _rank(listed, training, predict, dense, memory_left, ranks)), 0
    for number, option in enumerate(options):
        if option.reason or tried == TRIALS:
            continue
        try:
            warm_up = training.warm_up(training.begun(option.method, ranks).card)
            seconds = warm_up * dense + (1 - warm_up) * trials.run(option.method)
            options[number], tried = replace(option, measured=1e3 * seconds), tried + 1
        except LostRank:
            raise
        except ThinwireError as error:  # all ranks have raised: compress() and steps agree
            options[number] = option.dropped(f"its trial failed: {error}")
    fastest = min((1e-3 * option.measured for option in options if option.measured), default=math.inf)
    if WORTH <= dense / fastest < CLOSE:  # other work may have slowed down the first of the trials
        dense = min(dense, trials.run(DENSE))
    plain = trials.from_rank_0(lambda: asdict(decide(auto, dense, options)))
    return Choice.from_plain(plain)


def decide(auto: Auto, dense: float, options: Sequence[Option]) -> Choice:
    """Choose from what was measured. ``dense``: seconds of its step."""
    method, baseline, reason = DENSE, 1e3 * dense, "nothing could be tried"
    times = {option.method: option.measured for option in options if option.measured}
    if times:
        best = min(times, key=times.__getitem__)
        gain = baseline / times[best]
        if gain >= WORTH:
            method, reason = best, f"{gain:.2f} times as fast as dense in {TRIAL_STEPS} steps"
        else:
            reason = f"nothing is {WORTH - 1:.0%} faster (the best is {gain:.2f} times as fast: {best})"
    final = [Option(DENSE, measured=baseline, reason="" if method == DENSE else "slower")]
    for option in options:
        fate = option.reason or ("slower" if option.measured else "not tried")
        final.append(option.dropped("" if option.method == method else fate))
    return Choice(method, reason, str(auto), tuple(final))


def candidates(auto: Auto, training: Training, ranks: int) -> Iterator[Option]:
    """Yield all methods with a measured loss, those that cannot be taken with the reason."""
    rows: dict[str, list[MeasuredLoss]] = defaultdict(list)
    for row in read_measured():
        with suppress(ThinwireError):  # this version lacks the method or the knob
            if row.dense != "Muon":  # auto takes AdamW, or its kin, for all parameters
                rows[str(resolve(row.method))].append(row)
    for name, measured in rows.items():
        comparable = [row for row in measured if _is_comparable(row, auto, training.steps)]
        worst = max(comparable, key=lambda row: (math.isnan(row.error_percent), row.highest_percent), default=None)
        option = Option(name)
        if worst is not None:
            error = None if math.isnan(worst.error_percent) else worst.error_percent
            option = replace(option, loss=worst.gap_percent, error=error, runs=_in_words(worst, len(comparable)))
        yield option.dropped(_why_not(resolve(name), worst, auto, training, ranks))


def _is_comparable(row: MeasuredLoss, auto: Auto, steps: int | None) -> bool:
    """Does a measured run speak of a run of ``steps``, from scratch or not?"""
    any_length = steps is None or math.isinf(auto.max_loss) or row.steps / LENGTH <= steps <= row.steps * LENGTH
    return any_length and (row.regime in ("going-on", "finetune")) == auto.finetune


def _in_words(worst: MeasuredLoss, count: int) -> str:
    seeds = counted(worst.seeds, "seed")
    among = f", the highest of {count} runs" if count > 1 else ""
    return f"{seeds}, {worst.steps} steps, {worst.tokens_per_parameter:.2g} tokens per parameter{among}"


def _why_not(method: Method, worst: MeasuredLoss | None, auto: Auto, training: Training, ranks: int) -> str:
    """Say why ``method`` cannot be taken; "" if it can."""
    if worst is None:
        return "its loss was not measured in runs of this length and start"
    if not (math.isinf(auto.max_loss) or worst.highest_percent <= 100 * auto.max_loss):
        return f"loss not known to be at most {100 * auto.max_loss:.3g}% above dense's, ± included"
    if training.engine not in method.engines:
        return f"not for {training.engine}"
    made_for: Any = torch.optim.Adam if method.OPTIMIZER is torch.optim.AdamW else method.OPTIMIZER
    if not all(isinstance(optimizer, made_for) for optimizer in training.optimizers):
        return f"measured with {method.OPTIMIZER.__name__} only"
    try:
        training.warm_up(training.begun(str(method), ranks).card)  # which may be a share of a run of unknown length
    except ThinwireError as error:
        return str(error)
    return ""


def _in_short(auto: Auto, listed: Sequence[Option]) -> str:
    """Say why most of ``listed`` were not chosen, and what helps."""
    ((reason, count),) = Counter(option.reason for option in listed).most_common(1) or [("none was measured", 0)]
    remedy = "; --max-loss any (max_loss=inf) takes methods of any loss" if math.isfinite(auto.max_loss) else ""
    return f"{reason} ({count} of {len(listed)}){remedy}"


def _rank(
    listed: Sequence[Option],
    training: Training,
    predict: Callable[[str], Prediction],
    dense: float,
    memory_left: float,
    ranks: int,
) -> list[Option]:
    """Predict the candidates ``listed``; return the fastest first, and behind them what cannot be taken."""

    def predicted(option: Option) -> Option:
        try:
            prediction = predict(option.method)
        except (ThinwireError, NotImplementedError) as error:
            return option.dropped(f"not predicted: {' '.join(str(error).split())}")
        warm_up = training.warm_up(training.begun(option.method, ranks).card)
        predicted_ms, low, high = (
            1e3 * (warm_up * dense + (1 - warm_up) * seconds)
            for seconds in (prediction.seconds, prediction.low, prediction.high)
        )
        option = replace(option, predicted=predicted_ms, low=low, high=high)
        needed = prediction.memory.get("method", 0.0)
        if needed > memory_left:
            return option.dropped(f"needs {needed / 1e6:.0f} MB of memory, {memory_left / 1e6:.0f} MB are left")
        return option

    options = [option if option.reason else predicted(option) for option in listed]
    return sorted(options, key=lambda option: math.inf if option.reason else option.predicted or 0.0)


class Trials:
    """Runs of a few steps on all ranks, each from the same weights, moments and random numbers.

    Attributes:
        comm: all ranks, beside the training; network: by the backend that carries the gradients.
        inputs: of the model's last forward pass of dense, on the meta device.
    """

    def __init__(self, auto: Auto, training: Training, start: Start) -> None:
        assert dist.group.WORLD is not None
        self.comm = GroupComm.aside(dist.group.WORLD, training.device)
        self.network = GroupComm(dist.group.WORLD, Ledger(), device=training.device)
        self.inputs: tuple[Any, ...] = ()
        self._forwards = 0
        self._auto, self._training, self._start = auto, training, start

    @property
    def micro_batches(self) -> int:
        return max(self._forwards // TRIAL_STEPS, 1)

    def run(self, method: str) -> float:
        """Return the seconds of a step in the steady state of ``method``, on the slowest rank. Collective."""
        note = None
        if method == DENSE:
            note = self._training.model.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        with put_back(self._training):
            wire = self._start(method)
            try:
                if math.prod(hop.ranks for hop in wire.engine.hops) != self.comm.size:
                    raise ThinwireError("'auto' works with data parallelism over all ranks only: name a method")
                wire.skip_warm_up()
                card = wire.method.card
                opening = min(card.steady, 1)
                times = [self._time(wire) for _ in range(opening + max(TRIAL_STEPS, max(card.cycle) + 1))]
            finally:
                wire.close()
                if note is not None:
                    note.remove()
        del wire
        gc.collect()  # an engine and its buckets are a circle
        return agree(self.comm, _mean_over_cycle(card, times[opening:]))

    def _time(self, wire: Any) -> float:
        before, began = wire.step, time.perf_counter()
        self._auto.step(wire)
        devices.wait(self._training.device)
        if wire.step == before:
            raise ThinwireError("Auto's step(wire) took no optimizer step: make it a whole one, with optimizer.step()")
        return time.perf_counter() - began

    def _note_inputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a profile of ``model`` needs: its arguments, in the order of its signature, and how many passes."""
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        self.inputs = tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), bound.args)
        self._forwards += 1

    def memory_left(self) -> float:
        """Return the bytes that the fullest rank's device has left beside what the trials took at most. Collective."""
        device = self._training.device
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
            free_bytes = float(torch.cuda.mem_get_info(device)[0] + unused)
        else:
            free = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
            free_bytes = 1024.0 * int(free[1]) / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if free else math.inf
        return -agree(self.comm, -free_bytes)

    def options(self, work: Callable[[], Iterable[Option]]) -> list[Option]:
        """Return on all ranks the options that ``work`` returns on rank 0: see ``from_rank_0``. Collective."""
        return [Option(**plain) for plain in self.from_rank_0(lambda: [asdict(option) for option in work()])]

    def from_rank_0(self, work: Callable[[], Any]) -> Any:
        """Return on all ranks what ``work`` returned on rank 0, which JSON can hold. Collective.

        Raises:
            ThinwireError: on all ranks, if it failed there.
        """
        comm, result, failed = self.comm, dict[str, Any](), None
        if comm.rank == 0:
            try:
                result = {"value": work()}
            except Exception as error:
                failed, result = error, {"error": in_words(error)}
        text = json.dumps(result).encode() if comm.rank == 0 else b""
        length = int(comm.all_reduce(torch.tensor([len(text)], device=comm.device), "max"))
        data = torch.tensor([*text] or [0] * length, dtype=torch.uint8, device=comm.device)
        result = json.loads(bytes(comm.all_reduce(data, "max").tolist()))
        if failed is not None:
            raise failed
        if "error" in result:
            raise ThinwireError(f"rank 0 could not choose a method: {result['error']}")
        return result["value"]


def _mean_over_cycle(card: Card, seconds: Sequence[float]) -> float:
    """Average over the method's cycle. ``seconds``: of steps from the first of its steady state on.

    Steps beyond those that the cycle names are like the most frequent of these; the median of each kind counts.
    """
    usual = max(card.cycle, key=lambda offset: card.cycle[offset])
    kinds = defaultdict[int, list[float]](list)
    for offset, value in enumerate(seconds):
        if offset in card.cycle or offset > max(card.cycle):
            kinds[offset if offset in card.cycle else usual].append(value)
    return sum(share * statistics.median(kinds[offset]) for offset, share in card.cycle.items())


@contextmanager
def put_back(training: Training) -> Iterator[None]:
    """Put weights, gradients, buffers, the optimizers' state and settings, and random numbers back after the block.

    Weights are the model's and all others that its optimizers hold. A tensor in a setting (a learning rate that its
    scheduler fills) stays the same tensor.
    """
    optimizers = [
        (optimizer, {weight: copy.deepcopy(state) for weight, state in optimizer.state.items()},
         [{name: value if name == "params" else tree_map(lambda leaf: leaf, value) for name, value in group.items()}
          for group in optimizer.param_groups])  # lists and dicts are copied, what is in them is not
        for optimizer in training.optimizers
    ]  # fmt: skip
    held = [leaf for *_, groups in optimizers for leaf in tree_leaves(groups) if isinstance(leaf, Tensor)]
    every = {id(tensor): tensor for tensor in (*training.model.parameters(), *training.model.buffers(), *held)}.values()
    tensors = [local(tensor.detach()) for tensor in every]
    values = [tensor.clone() for tensor in tensors]
    gradients = [(tensor, None if tensor.grad is None else tensor.grad.clone()) for tensor in every if tensor.is_leaf]
    buffers = [(module._buffers, dict(module._buffers)) for module in training.model.modules()]  # some are assigned
    try:
        with _same_random_numbers(training.device):
            yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        for present, earlier in buffers:
            present.update(earlier)
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for optimizer, state, groups in optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.clear()  # some steps add settings, such as their count
                group.update(settings)


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """Put the random numbers of torch (the CPU's and ``device``'s), Python and numpy back after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
