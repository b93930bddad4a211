"""``compress()``, the one call that turns compression on, and what it returns."""

from __future__ import annotations

import functools
import json
import math
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from thinwire.base.errors import LostRank, ThinwireError, ThinwireWarning, Unsavable, name_exchange
from thinwire.base.extras import load
from thinwire.base.version import __version__, torch_warning
from thinwire.core.agreement import Agreement, describe_settings, host_facts, model_facts, optimizer_facts
from thinwire.core.bucket import Bucket
from thinwire.core.card import StepMaker
from thinwire.core.engine import Engine
from thinwire.core.exchange import Exchange
from thinwire.core.method import Run, check_engine, drop_waiting, intra_of
from thinwire.core.optimizers import parameters, unwrapped
from thinwire.core.outliers import STEP, OutlierClip
from thinwire.core.road import Road, Stage, shard_of
from thinwire.core.run import find_holders
from thinwire.core.safety import Safety
from thinwire.core.selection import dense_among
from thinwire.core.state import State, dump_state, load_state
from thinwire.core.step import StepLoop, fault_of_counts, serves, split_counts
from thinwire.engines.ddp import DDP
from thinwire.engines.fsdp2 import FSDP2
from thinwire.engines.replicas import Replicas
from thinwire.methods import Method, resolve
from thinwire.methods.parts.own_adam import average_moments
from thinwire.network.comm import GroupComm, local
from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger
from thinwire.plan.dry_run import compile_kernels, largest_state
from thinwire.plan.memory import resident_bytes
from thinwire.plan.plan import Plan, Report
from thinwire.predict.choice import Auto, Choice, Training, choose
from thinwire.predict.forecast import predictor
from thinwire.saved.format import Form, Header, any_header, choice_in, own_of
from thinwire.saved.resize import move
from thinwire.saved.turnover import Turnover

EngineClass = type[DDP] | type[FSDP2]
DEFAULT_SAFETY = Safety()


def compress(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    method: Method | str | Auto = "dense",
    *,
    two_level: bool | None = None,
    intra: Method | str | None = None,
    steps: int | None = None,
    seed: int = 0,
    stages: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    safety: Safety = DEFAULT_SAFETY,
) -> Wire:
    """Exchange ``model``'s gradients with ``method`` from now on.

    Collective: all ranks call it with the same arguments, before the first step. The ranks compare arguments, model,
    optimizer settings and versions; if one rank differs or fails, all raise. (If one rank alone has not wrapped its
    model, the others wait for the process group's timeout.) Later changes, such as a learning rate's, are not compared.

    Args:
        model: a ``DistributedDataParallel``; or a model after ``fully_shard`` on a 1-D mesh (FSDP2) or on a 2-D mesh,
            replicated across dim 0 and sharded along dim 1 (HSDP); compiled or not.
        optimizer: any ``torch.optim.Optimizer``, or several (Muon for matrices and AdamW for the rest, say), which hold
            every parameter that requires a gradient. Several make one step together, which counts or is skipped for all
            of them. Wrappers and containers that hold them as ``optimizer`` or ``optimizers`` are opened.
        method: a method, or its name: ``"bf16"``, ``"int8(group=64)"``; ``thinwire methods`` lists them. An ``Auto``
            tries your own step with a few, puts the weights back and takes the fastest.
        two_level: reduce inside each node first, so that values cross the slow links once per node (several ranks per
            node; needs torchrun's LOCAL_WORLD_SIZE). The rank that sends across then keeps the method's residual, one
            per node. None: only for methods made for it (sdp4bit, zeropp).
        intra: the method of the hop inside a node, on HSDP or with two_level=True: "dense" (what None means for most
            methods), "bf16", "int8", ...: any method without error feedback.
        steps: optimizer steps of the whole run; a start or warm-up below 1 is a share of them.
        seed: the seed of every random stream that a method draws from.
        stages: under pipeline parallelism, the group of the ranks that hold the other stages of this replica
            (``mesh["pp"].get_group()``): a step is skipped on all stages or none, and gradients are clipped by the
            norm of all stages. Other dimensions of the parameters' own mesh (tensor parallelism) are detected.
        scaler: the ``GradScaler`` of the loss, if any. A method then keeps its state free of the scale, which changes.
        safety: the guard against values that are not finite, and other protections.

    Raises:
        ThinwireError: something is not supported (the message names it and an alternative), or the ranks do not agree
            (the message names the rank and what differs).
        LostRank: another rank does not come within the timeout of the process group.
    """
    if isinstance(method, Auto):
        options = dict(two_level=two_level, intra=intra, seed=seed, stages=stages, scaler=scaler, safety=safety)
        return _compress_by_choice(method, model, optimizer, steps, options)
    engine_class, wrapped = _engine_class(model)
    engine_class.renew(wrapped)
    comms = [GroupComm.aside(group, _device_of(model)) for group in engine_class.process_groups(wrapped)]
    with name_exchange(None, lambda: "compress()"), Agreement(comms, _stage_comm(stages, model)) as agreement:
        optimizers, inside = tuple(unwrapped(optimizer)), None if intra is None else resolve(intra)
        settings = Options(resolve(method), optimizers, two_level, inside, steps, seed, stages, scaler, safety)
        wire = _join(engine_class, wrapped, settings, agreement)
    wire.attach()
    if wire.engine.rank == 0:
        _warn_of_torch(torch.__version__)
    _warn_of_plan(wire)
    return wire


def _compress_by_choice(auto: Auto, model: nn.Module, optimizer: Any, steps: int | None, options: dict) -> Wire:
    """Choose a method as ``auto`` says, or take the choice of the state that it resumes; ``compress()`` with it."""
    start: Callable[[str], Wire] = functools.partial(compress, model, optimizer, steps=steps, **options)
    if auto.resumed is None:
        training = Training.of(_engine_class(model)[1], tuple(unwrapped(optimizer)), steps, options)
        choice = choose(auto, training, start, predictor)
    else:
        choice = choice_in(auto.resumed)
    wire = start(choice.method)
    wire.note(choice)
    return wire


@dataclass(frozen=True)
class Options:
    """The arguments of ``compress()`` except the model, checked (ThinwireError); ``intra`` is None if not given."""

    method: Method
    optimizers: tuple[torch.optim.Optimizer, ...]
    two_level: bool | None
    intra: Method | None
    steps: int | None
    seed: int
    stages: dist.ProcessGroup | None
    scaler: torch.amp.GradScaler | None
    safety: Safety

    def __post_init__(self) -> None:
        if hasattr(self.method, "state"):
            raise ThinwireError(
                f"this {self.method.name} object already serves another model: make a new one for each compress()"
            )
        for optimizer in self.optimizers:
            _require(optimizer, torch.optim.Optimizer, "an optimizer must be a torch.optim.Optimizer")
            if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
                raise ThinwireError(
                    "ZeroRedundancyOptimizer steps each parameter on one rank alone, with an optimizer that it hides: "
                    "pass an ordinary one, or shard the model and its optimizer with fully_shard"
                )
        if len(set(map(id, self.optimizers))) < len(self.optimizers) or not self.optimizers:
            raise ThinwireError("pass each optimizer once, and one at least")
        if (taken := next(filter(serves, self.optimizers), None)) is not None:
            raise ThinwireError(
                f"another wire, still open, has this {type(taken).__name__}, whose step counts or is skipped as one: "
                "give each model an optimizer of its own, or wrap the models as one module; to compress a model anew, "
                "call wire.close() first"
            )
        if self.scaler is not None:
            _require(self.scaler, torch.amp.GradScaler, "scaler must be a torch.amp.GradScaler")
        _require(self.safety, Safety, "safety must be a thinwire.Safety")
        if self.two_level is not None:
            _require(self.two_level, bool, "two_level is True, False or None")
        _require(self.seed, Integral, "seed is a whole number")
        _require(1 if self.steps is None else self.steps, Integral, "steps is a whole number")
        if self.steps is not None and self.steps < 1:
            raise ThinwireError(f"steps is the number of optimizer steps of the whole run, got {self.steps}")

    def facts(self, engine_class: EngineClass, model: Any) -> tuple[dict[str, str], dict[str, str]]:
        """Describe in words what ranks that share gradients must have in common, and what pipeline stages must."""
        safety, groups = self.safety, engine_class.process_groups(model)
        two_level = self.method.two_level if self.two_level is None else self.two_level
        settings = {
            "engine": engine_class.__name__, "method": self.method, "seed": self.seed, "two_level": self.two_level,
            "intra": self.intra, "outlier_clip": safety.outlier_clip, "check_every": safety.check_every,
            "checksum": safety.checksum, "scaled by": None if self.scaler is None else self.scaler.get_scale(),
            "process groups of closed wires": sum(map(GroupComm.idle_groups, groups)),
            "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE") if two_level else None,
        }  # fmt: skip
        shared = {
            "guard": safety.guard, "max_skipped": safety.max_skipped, "steps": self.steps, "thinwire": __version__,
            "torch": torch.__version__,
        }  # fmt: skip
        facts = describe_settings(settings | shared) | model_facts(model)
        facts |= optimizer_facts(self.optimizers, model) | engine_class.facts(model)
        replicated = engine_class is DDP or len(groups) > 1
        facts = host_facts(self.method, self.optimizers, _device_of(model), replicated=replicated) | facts
        return facts, describe_settings(shared)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _stage_comm(stages: object, model: nn.Module) -> GroupComm | None:
    if stages is None:
        return None
    _require(stages, dist.ProcessGroup, 'stages is a process group, as mesh["pp"].get_group()')
    return GroupComm.aside(cast(dist.ProcessGroup, stages), _device_of(model))


def _require(value: object, kind: type | tuple[type, ...], rule: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ThinwireError(f"{rule}, got {type(value).__name__}")


def _join(engine_class: EngineClass, model: Any, options: Options, agreement: Agreement) -> Wire:
    """Build the engine, begin the method and make the wire; the ranks compare their facts on the way."""
    ledger, method = Ledger(), options.method
    compare = functools.partial(agreement.compare, *options.facts(engine_class, model))
    check_parameters(model, method)
    engine = engine_class(model, method, ledger, two_level=options.two_level, meet=compare)
    agreement.undo = engine.close
    return join(engine, options, ledger)


def join(engine: Engine, options: Options, ledger: Ledger) -> Wire:
    """Begin the method of ``options`` on ``engine`` and make the wire, which is not attached yet."""
    method, scaler = options.method, options.scaler
    check_engine(method, engine.kind)
    if options.safety.checksum:
        _seal(engine, _device_of(engine.model).type)
    inner = _intra(engine, method, options.intra)
    run = Run(
        {parameter.name: parameter for parameter in engine.parameters.values()}, engine.hops[-1], options.steps,
        options.seed, options.optimizers, _weights(engine, options.optimizers), engine.rank,
        scaler is not None and scaler.is_enabled(), len(engine.hops), engine.chunk, engine.gathers,
        engine.hops[0] if len(engine.hops) > 1 else None,
    )  # fmt: skip
    run = replace(run, shows_late=engine.shows_late and not run.scaled)
    method.begin(run)
    if inner is not None:
        inner.begin(replace(run, exchange=engine.hops[0], hop=1, inside=None))
    return Wire(engine, run, options, ledger, inner)


def _warn_of_plan(wire: Wire) -> None:
    warning = None
    with suppress(ThinwireError, NotImplementedError, RuntimeError):  # all ranks will refuse in a step what it refuses
        warning = wire.plan.warning if wire.engine.rank == 0 else None
    if warning:
        warnings.warn(warning, ThinwireWarning, stacklevel=3)


@functools.cache  # once per process
def _warn_of_torch(torch_version: str) -> None:
    if warning := torch_warning(torch_version):
        warnings.warn(warning, ThinwireWarning, stacklevel=3)


def _seal(engine: Engine, device: str) -> None:
    """Let all messages of ``engine`` carry checksums."""
    if device != "cpu":
        raise ThinwireError(
            f"checksum=True is for tensors on a CPU, not on {device}: the host would wait for every message there, and "
            "links between GPUs have checksums of their own: leave it out"
        )
    load("xxhash")
    inside = getattr(engine.levels, "intra", None)
    for comm in [*engine.comms, *(hop.comm for hop in engine.hops), inside]:
        if comm is not None:
            comm.checksums = True


def _intra(engine: Engine, method: Method, intra: Method | None) -> Method | None:
    """Choose the method of the hop inside the node: ``intra`` or ``method``'s own; None without such a hop."""
    inner = intra_of(method) if intra is None else intra
    if intra is not None and len(engine.hops) == 1:
        raise ThinwireError("intra= is for HSDP, or two_level=True on several nodes of several ranks")
    if intra is not None and method.card.intra is not None:
        raise ThinwireError(f"{method.name} compresses inside the node itself: set its knob intra_bits instead")
    random = inner.codec is not None and inner.codec.draws
    if inner.card.keeps_state or not inner.rank_equal or inner.card.encodes_weights or (intra is not None and random):
        raise ThinwireError(f"intra={intra}: choose a method without state, such as dense, bf16 or int8")
    return None if len(engine.hops) == 1 else inner


def _engine_class(model: nn.Module) -> tuple[EngineClass, Any]:
    """Find the engine that ``model`` is wrapped in; return it and the model as it wraps it."""
    _require(model, nn.Module, "the model must be a torch module")
    if not torch.distributed.is_initialized():
        raise ThinwireError("torch.distributed is not initialized: start under torchrun and call init_process_group()")
    model = getattr(model, "_forward_module", model)  # Lightning Fabric's wrapper
    if not isinstance(model, FSDPModule):  # compiled first, then sharded, it is one itself
        model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        return DDP, model
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return FSDP2, model
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ThinwireError("FSDP1 (FullyShardedDataParallel) is not supported: use fully_shard (FSDP2)")
    raise ThinwireError(
        f"{type(model).__name__} is not wrapped for data parallelism: pass DistributedDataParallel(model), "
        "or call fully_shard(model) first"
    )


def check_parameters(model: Any, method: Method) -> None:
    """Refuse a model without memory or gradients, or with gradients that ``method`` does not carry."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ThinwireError(
            "the model is still on 'meta', and how gradients travel depends on its device: call to_empty(device=...), "
            "and give its weights their values, before compress()"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ThinwireError("no parameter of the model requires a gradient")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ThinwireError(
                f"{name} is {parameter.dtype}: no method carries complex gradients; make it a real parameter, and use "
                "torch.view_as_complex() in the model"
            )
        carried = method.card.native or parameter.dtype in (torch.float32, torch.bfloat16)
        if parameter.requires_grad and not carried:
            raise ThinwireError(
                f"{name} is {parameter.dtype}: {method.name} supports float32 and bfloat16 gradients; convert the "
                "model, or use method 'dense'"
            )


def _weights(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Name the trained parameters. Raises ThinwireError unless the optimizers hold each of them once."""
    weights = {engine.parameters[id(p)].name: p for p in engine.model.parameters() if id(p) in engine.parameters}
    counts = Counter(id(p) for optimizer in optimizers for p in parameters(optimizer))
    duplicate = next((name for name, weight in weights.items() if counts[id(weight)] > 1), None)
    if duplicate is not None:
        raise ThinwireError(f"{duplicate} is in two optimizers, or in two groups of one: leave it in one only")
    missing = [name for name, weight in weights.items() if not counts[id(weight)]]
    if len(missing) == len(weights):
        raise ThinwireError(
            "the optimizer holds none of the model's parameters: build it after wrapping, from model.parameters()"
        )
    if missing:
        raise ThinwireError(
            f"no optimizer holds {missing[0]}"
            + (f" nor {len(missing) - 1} other parameters" if missing[1:] else "")
            + ", so that nothing would guard its steps: pass all optimizers as a list, or freeze it with "
            "requires_grad_(False) before wrapping"
        )
    return weights


_step_loops: weakref.WeakSet[StepLoop] = weakref.WeakSet()  # of all wires of this process


@torch._disable_dynamo
def _show_optimizer(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    for step_loop in list(_step_loops):
        step_loop.stranger(optimizer)


@functools.cache
def _hook_on_all_optimizers() -> None:
    """Show every optimizer of this process that is about to step to all wires.

    Once, for good: torch walks through its hooks while they run, and a hook that went away with its wire, whenever that
    is collected, would end the step of another model.
    """
    register_optimizer_step_pre_hook(_show_optimizer)


_BESIDE = (
    "{method} with feedback='updates' beside tensor parallelism: steps are scaled by how alike the ranks' gradients "
    "are, of which tensor-parallel ranks hold different parts, so what they hold in common would drift apart. Take "
    "feedback='gradients', or another method"
)


class Wire:
    """A model's exchange: its plan, its bytes and times, its state.

    Attributes:
        plan: what is sent how; ``print(wire.plan)`` shows it.
        manager: torchft's, where replicas come and go.
    """

    manager: Any = None

    def __init__(self, engine: Engine, run: Run, options: Options, ledger: Ledger, inner: Method | None) -> None:
        """``inner``: the method of the hop inside the node; None without such a hop."""
        method, safety, scaler = options.method, options.safety, options.scaler
        self.engine, self.method, self.ledger = engine, method, ledger
        self._run = run
        self._hooks: list[RemovableHandle] = []
        self._met = -1.0  # the step after which all ranks were given the same weights
        self._state = method.state = State(method.card.offloaded_kinds)
        replicas = engine.rank, math.prod(hop.ranks for hop in engine.hops)
        rank_and_size = replicas if isinstance(engine, Replicas) else (dist.get_rank(), dist.get_world_size())
        self._about = Header.of_run(*rank_and_size, engine, run, method, inner, safety.outlier_clip)
        self._stages = None if options.stages is None else GroupComm(options.stages, ledger, device=self._device)
        self._guard = Guard([*engine.comms, *([] if self._stages is None else [self._stages])], safety.guard)
        stages = [
            Stage(hop, dense_among(hop, run.parameters.values()), exchange, self._guard, ledger, engine.levels is None)
            for hop, exchange in zip([method] if inner is None else [inner, method], engine.hops, strict=True)
        ]
        self._road, self._stage, card = Road(stages, engine.levels), stages[-1], method.card
        compresses = len(self._stage.dense) < len(run.parameters)
        if engine.beside and card.step_maker is not None and compresses:
            raise ThinwireError(_BESIDE.format(method=method.name))
        # Where ranks go their own ways, gradients are clipped before they move what is kept.
        if safety.outlier_clip is not None and card.keeps_state and card.alone_from is None and compresses:
            # Tensor-parallel ranks hold different parts: each parameter is held against its own norms alone.
            sizes = {name: parameter.local for name, parameter in run.parameters.items()}
            leaves = None if card.promise.of == "gradients" else STEP
            self._stage.bound = OutlierClip(safety.outlier_clip, sizes, leaves, apart=bool(engine.beside))
        if scaler is not None and run.scaled and card.keeps_state:
            self._stage.scale = lambda device: scaler.scale(torch.ones((), dtype=torch.float32, device=device))
        compile_kernels(self._road, run, self._device)  # which may refuse: nothing is hooked yet
        self._step_loop = StepLoop(engine, run, self._road, safety, scaler)
        self.turnover: Turnover | None = None
        if isinstance(engine, Replicas):
            self.turnover = engine.attempts = Turnover(
                engine.members, engine.across, self._step_loop, run, self._about, self._renew
            )
            self.turnover.clip = self.clip_grad_norm_

    @functools.cached_property
    def plan(self) -> Plan:
        engine, guard = self.engine, self._guard
        return Plan(
            self._road, self._run, engine.kind, layout=engine.layout, guards=guard.comms if guard.enabled else ()
        )

    def __reduce__(self) -> tuple[type[WireCopy], tuple[()]]:  # what a copy of a model that keeps its wire gets
        return WireCopy, ()

    def _renew(self, header: Header, run: Run) -> None:
        """Go on in another membership."""
        self._about, self._run = header, run
        for name in ("plan", "_form"):
            self.__dict__.pop(name, None)

    def attach(self) -> None:
        """Hook into optimizers and engine; ``compress()`` calls this once all ranks have agreed."""
        self._hooks += self._step_loop.attach()
        for optimizer in self._step_loop.optimizers:
            self._hooks += [
                optimizer.register_load_state_dict_post_hook(self._step_loop.weight_watch.optimizer_was_loaded),
                optimizer.register_state_dict_post_hook(self._add_moments),
            ]
        _hook_on_all_optimizers()
        _step_loops.add(self._step_loop)
        self.engine.attach(self._step_loop, self._road)

    @property
    def step(self) -> int:
        """Optimizer steps taken or skipped so far, with one that not all optimizers have joined yet."""
        return self._road.step + self.skipped + self._step_loop.open

    @property
    def skipped(self) -> int:
        """Optimizer steps that were skipped because a gradient was not finite or was thrown away: on all ranks, or on
        this rank alone if the method lets ranks go their own ways (local-steps)."""
        return self._step_loop.skipped

    @property
    def step_was_skipped(self) -> bool:
        """Was the last optimizer step skipped, also by a GradScaler? Do not move a schedule of the learning rate then,
        or it runs ahead. False where this rank skipped it alone (local-steps): the others have stepped."""
        return (self._step_loop.step_was_skipped or self._step_loop.left_out) and not self._step_loop.ended

    @property
    def _device(self) -> torch.device:
        """The device of the weights."""
        return next(iter(self._run.weights.values())).device

    @contextmanager
    def accumulate(self, *, last: bool = True) -> Iterator[None]:
        """Wrap forward and backward of a micro-batch: gradients are exchanged only in the ``last`` of a step.

        Gradients that are exchanged and then set to None or zero without ``optimizer.step()`` (as a GradScaler does)
        count as a skipped step: the next micro-batch starts from the state before them.
        """
        self._step_loop.begin_micro_batch()
        self._step_loop.closed = not last
        try:
            with self.engine.accumulate(last):
                yield
        finally:
            self._step_loop.closed = False

    @torch._disable_dynamo
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the averaged gradients down to ``max_norm``, on any engine. Returns the norm before, 0-dim.

        If a gradient is not finite, or ``max_norm`` NaN, the guard skips the step. Gradients that became steps of the
        weights already (feedback="updates") are not scaled, since those steps do not depend on their size.
        They do count in the norm, so that ``max_norm`` means what it means without a method: with r the share of the
        ranks' gradients that they have in common, r mean_n |g_n|^2 stands for |mean_n g_n|^2.

        Raises:
            ThinwireError: ``max_norm`` is negative or no number, or ``norm_type`` is not 2 and some gradients are steps
                already: their 2-norm alone is known.
        """
        _require(max_norm, (Real, Tensor), "max_norm is a number: write wire.clip_grad_norm_(1.0), without the weights")
        if max_norm < 0:
            raise ThinwireError(f"max_norm must be 0 or more, got {max_norm}: gradients would be turned round")
        self._step_loop.exchange()
        if self.turnover is not None:
            self.turnover.note_clip(max_norm, norm_type)
        power = self._power_of_moves()
        if power is not None and norm_type != 2:
            raise ThinwireError(
                f"{self.method.name} with feedback='updates' knows only the 2-norm of the gradients: use "
                f"norm_type=2, not {norm_type}"
            )
        meshes: dict[object, list[Tensor]] = {}  # torch takes no norm over DTensors of several meshes
        step_maker = self.method.card.step_maker
        steps = () if step_maker is None else step_maker.names
        for name, parameter in self._step_loop.weights.items():  # not what was thawed late
            if name not in steps and (gradient := parameter.grad) is not None:
                mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
                meshes.setdefault(mesh, []).append(parameter)
        with self._step_loop.inside("clip_grad_norm_()"), self.engine.comms[0].waiting("all-reduce"):
            norms = [get_total_norm([p.grad for p in of if p.grad is not None], norm_type) for of in meshes.values()]
            norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        if power is not None:
            norms.append(power.sqrt())
        if not norms:
            norms = [torch.zeros((), dtype=torch.float32, device=self._device)]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if self._stages is not None:
            every = torch.zeros(self._stages.size, 1, dtype=torch.float32, device=self._device)
            with self._step_loop.inside("clip_grad_norm_()"):
                self._stages.all_gather(every, norm.float().reshape(1).to(self._device))
            norm = torch.linalg.vector_norm(every, norm_type)
        self._step_loop.warn_of_writes()
        factor, former = (max_norm / (norm + 1e-6)).clamp(max=1.0), self._step_loop.clip_factor
        for weights in meshes.values():
            with torch.no_grad():
                torch._foreach_mul_([p.grad for p in weights if p.grad is not None], factor)  # type: ignore[arg-type]
        self._step_loop.gradient_watch.note()  # which may share memory, and its count, with what was clipped
        self._step_loop.clip = None if steps else (norm, factor)  # of all that the optimizers will see, or of none
        self._step_loop.clip_factor = factor.float() if former is None else former * factor
        return norm

    def _power_of_moves(self) -> Tensor | None:
        """Estimate the squared norm of the mean gradient of what became steps already, on all ranks, 0-dim."""
        step_maker = self.method.card.step_maker
        power = None if step_maker is None else step_maker.power()
        if power is None:
            return None
        power = power.reshape(1)
        # A hop inside the node leaves this rank a part of each gradient.
        with self._step_loop.inside("clip_grad_norm_()"):
            for comm in (hop.comm for hop in self.engine.hops[:-1]):
                assert isinstance(comm, GroupComm)
                GroupComm.aside(comm.group, power.device).all_reduce(power, "sum")
        return power[0]

    def flush(self, *, with_next: bool = False) -> None:
        """Deliver everything that waits on all ranks, to stop using the method, say. Collective, between two steps.

        Do not flush for an evaluation in the middle of a run: delivered at once, what waits is a step far too large
        (docs/state.md). With feedback="updates", steps of the weights wait: one dense exchange delivers them, and the
        weights are as if none had waited; only of parameters that are frozen, or in no optimizer's groups, it goes on
        waiting. With any other method gradients wait, which need an optimizer:

        ``with_next``: the next step that counts delivers them. Call it before that step's last backward pass: the
        step's exchange is dense, whatever the method, and its bytes are counted. With local-steps it ends the round.

        Raises:
            ThinwireError: the method keeps nothing that waits, or needs ``with_next=True``; or the next step's
                gradients have been exchanged already.
        """
        self._step_loop.finish()
        card = self.method.card
        if not self._waits:
            raise ThinwireError(
                f"{self.method}: no unsent values are kept from step to step, so there is nothing to deliver"
            )
        if with_next:
            self._step_loop.begin_micro_batch()
        self._refuse_exchanged("wire.flush()")
        if with_next:
            self._stage.flush_at = self._road.step
            return
        if card.step_maker is None:
            raise ThinwireError(
                f"{self.method.name}: unsent values can only be delivered with an optimizer's step: call "
                "flush(with_next=True) before the next backward pass"
            )
        self._step_loop.compare_start()
        if self._step_maker is None:
            return
        weights, stepped = self._step_loop.weights, self._stepped
        stay = {name for name, weight in weights.items() if not (weight.requires_grad and name in stepped)}
        with torch.no_grad(), self.ledger.aside():
            for name, change in self._means(functools.partial(Method.deliver, self.method)):
                if name not in stay:
                    local(weights[name].detach()).sub_(change)
        self._state.rollback(stay, kinds=card.promise.waits)
        self._state.commit()
        self.weights_changed()

    @property
    def _stepped(self) -> Collection[str]:
        """The names of the parameters that are in an optimizer's groups now."""
        return find_holders(self._run.optimizers, self._step_loop.weights)

    @property
    def _step_maker(self) -> StepMaker | None:
        """The object that steps weights in the optimizer's place, once it has begun to."""
        card = self.method.card
        return None if self._road.step <= card.steady else card.step_maker

    def _refuse_exchanged(self, call: str) -> None:
        self._step_loop.look_for_dropped(None)
        if self._step_loop.exchanged():
            raise ThinwireError(f"{call} after an exchange: call it before the step's backward pass")

    def _means(self, send: Callable[[Bucket, Exchange], None]) -> Iterator[tuple[str, Tensor]]:
        """Exchange all compressed parameters with ``send``, between two steps; yield each trained parameter's name and
        result in the shape of this rank's part (zeros for dense ones). Collective."""
        layout = self.engine.layout()
        for pieces, dtype in zip(layout.buffers, layout.dtypes, strict=True):
            flat = torch.zeros(sum(piece.numel for piece in pieces), dtype=dtype, device=self._device)
            out = flat.new_zeros(pieces[0].stride) if pieces[0].stride else flat
            self._road.carry(flat, pieces, out, send)
            for piece in shard_of(pieces) if pieces[0].stride else pieces:
                shape = local(self._step_loop.weights[piece.name]).shape
                yield piece.name, out[piece.columns][: shape.numel()].view(shape)

    def hand_over(self) -> None:
        """Give the optimizer the moments with which to go on without the method. Collective, between two steps.

        With feedback="updates" the optimizer has no state of the compressed parameters: without the method, training
        would go on with steps of lr for each value. After this call, ``optimizer.state`` holds the moments that
        docs/state.md describes, until the method's next step. ``optimizer.state_dict()``, which is not collective,
        holds moments made of this rank's own second moments. Where ranks step alone (local-steps), each holds weights
        and moments of its own: all get their means, and the round goes on from there. With other methods the call does
        nothing.

        Raises:
            ThinwireError: between ``backward()`` and ``optimizer.step()``; replicas may come and go; a rank has no
                moments of a parameter, or they have no mean.
        """
        self._step_loop.finish()
        self._refuse_exchanged("wire.hand_over()")
        self._step_loop.compare_start()
        if self.method.card.alone(self._road.step) or not self.method.rank_equal:
            self.method.finish()
            with torch.no_grad(), self.ledger.aside(), self._step_loop.inside("wire.hand_over()"):
                self._meet("wire.hand_over()")
                average_moments(self._run)
            self.weights_changed()
        if (step_maker := self._step_maker) is not None:
            with torch.no_grad(), self.ledger.aside():
                stepped = self._stepped
                for name, second in self._means(step_maker.send_second):
                    if name in stepped:
                        step_maker.hand_over(name, second)

    def reset(self) -> None:
        """Drop what waits to be sent; call it on all ranks, between two steps, after putting earlier weights back.

        What waits belongs to the replaced weights. Averages stay (the second moments of feedback="updates", say). With
        local steps a new round begins, from the mean of the ranks' weights: one exchange, in float64. A
        ``wire.load_state_dict()`` that fits the weights makes this call unnecessary.

        Raises:
            ThinwireError: between ``backward()`` and ``optimizer.step()``.
        """
        self._step_loop.finish()
        self._refuse_exchanged("wire.reset()")
        self._step_loop.compare_start()
        self.method.finish()
        if self.method.card.alone(self._road.step):
            with torch.no_grad(), self.ledger.aside(), self._step_loop.inside("wire.reset()"):
                self._meet("wire.reset()")
        drop_waiting(self.method)
        self._stage.flush_at, self._step_loop.in_a_row = None, 0
        self.weights_changed()

    def _meet(self, call: str) -> None:
        """Give all ranks the mean of their weights; it is exact where these are the same."""
        comm = self.engine.hops[-1].comm
        if comm.elastic:
            raise ThinwireError(
                f"{self.method.name}: {call} would average the weights, and replicas may come and go meanwhile: "
                "go on from earlier weights with wire.load_state_dict()"
            )
        for weight in self._run.weights.values():
            values = local(weight.detach())
            values.copy_(comm.all_reduce(values.double()).div_(comm.size))
        self._met = self.step

    def _add_moments(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Add to ``optimizer.state_dict()`` the moments of what the method steps: checkpoints need them."""
        if (step_maker := self._step_maker) is None:
            return
        for number, weight in enumerate(parameters(optimizer)):
            name = self._step_loop.name_of(weight)
            # Those that it has are of a step that torch took to make a state, if the method knows better.
            if name is not None and (moments := step_maker.moments_of(name)) is not None:
                state["state"][number] = moments

    def weights_changed(self) -> None:
        """Call this on all ranks after changing weights through ``.data``, or inside a step's passes or between them.

        Other changes in place are noticed, but on a GPU those on some ranks alone are refused in the next step: call it
        after them, too. It matters to methods that do not send the values of sharded weights themselves (sdp4bit,
        zeropp, qsdp, scape, trickle:merged): the weights are gathered anew.
        """
        self.engine.weights_changed()
        self._step_loop.weight_watch.trust()

    def note(self, choice: Choice) -> None:
        """Keep in the plan and in saved states how the method was chosen."""
        self.plan.choice, self._about = choice, replace(self._about, choice=json.dumps(asdict(choice)))

    def skip_warm_up(self) -> None:
        """Let the next step be the last before the method's steady state, to measure it: not for training."""
        self._met = math.inf  # nobody wants what is trained
        self._road.step = max(self.method.card.steady - 1, 0)

    def report(self) -> Report:
        """Return bytes by link (mean) and time by stage (median) per step since ``reset_stats``; ``print`` it."""
        return Report(self.stats(), self.plan)

    def stats(self) -> dict:
        """Return the report as a dict: steps, skipped, wire_bytes_per_step {link: B}, weight_bytes_per_step (of those,
        for weights), dense_bytes_per_step, encode_ms, ... (without the first two steps of more than four); memory_bytes
        held, memory_planned_bytes at the peak; lost
        (name, step, norm): what waited on each replica that left. What is exchanged between two steps (evaluations,
        checks, ``flush()``, ``hand_over()``, ``reset()``) is in none of these bytes."""
        memory = {"memory_bytes": self.memory_bytes(), "memory_planned_bytes": self.plan.memory_bytes}
        cut = {} if self._stage.bound is None else self._stage.bound.facts()
        lost = [] if self.turnover is None else [loss._asdict() for loss in self.turnover.losses.values()]
        times = self.ledger.stats(round_steps=self.method.card.round_steps)
        return {**times, **memory, "method": self.method.facts(), "bound": cut, "lost": lost}

    def memory_bytes(self) -> int:
        """Count the bytes that this rank holds now for the method: state, workspaces of buckets and codecs, weights."""
        own = self._run.weights, [optimizer.state for optimizer in self._run.optimizers]  # which a state may show
        return resident_bytes(self._device, self._road, getattr(self.engine, "replicas", None), without=own)

    def last_step(self) -> dict:
        """Return ``stats`` of the last optimizer step alone."""
        return {**self.ledger.stats(last=True), "method": self.method.facts()}

    def reset_stats(self) -> None:
        """Start ``stats`` anew."""
        self.ledger.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's own state of the method, a flat dict of tensors.

        Keys are ``"rank-0003-of-0004/kind/parameter"`` (see :mod:`thinwire.saved.format`). Keys, shapes and dtypes are
        the same in every step; what does not exist yet is zero. ``torch.distributed.checkpoint`` takes the wire itself:
        ``dcp.save({"wire": wire})``.
        """
        self._step_loop.finish()
        self.method.finish()
        self.engine.wait_for_weights()
        return self._form.pack({**self._step_loop.counts(), **dump_state(self._state)}, self._device)

    def load_state_dict(
        self, state: Mapping[str, Tensor], resize: Literal["flush", "redistribute", "reset"] | None = None
    ) -> None:
        """Go on from ``state_dict()`` of the same rank, with the same method, settings, model and ranks.

        Args:
            state: this rank's state; with ``resize``, the states of all ranks that saved, merged in one mapping. Each
                value of it is looked up once, but for headers ("about").
            resize: how to treat what waits if another number of ranks, or another engine, saved the state.
                "redistribute": every rank takes the mean of it, which contributes as much to the next mean as before.
                "flush": the same, and the next step is dense and delivers it (:meth:`flush`). "reset": it is dropped,
                with a warning. If ranks and engine are the same, each rank gets its own state back.

        Raises:
            ThinwireError: the state is another rank's or run's, lacks an entry, has one too many or a value that is not
                finite, or cannot be moved to these ranks. The wire is then as it was.
        """
        if resize not in (None, "flush", "redistribute", "reset"):
            raise ThinwireError(f"resize is 'flush', 'redistribute' or 'reset', got '{resize}'")
        if not isinstance(state, Mapping):
            raise ThinwireError(f"a state maps names to tensors, as wire.state_dict() does, got {type(state).__name__}")
        own_state, former = state if resize is None else own_of(state, self._about), self._about.steps
        try:
            if header := any_header(state):
                self._count_from(header.steps)
            if own_state is not None:
                self._restore(self._form.unpack(own_state))
                return
            values, dropped = move(state, self._form, self.method, drop=resize == "reset")
            self._restore(values)
        except ThinwireError:
            self._count_from(former)
            raise
        if resize == "flush" and self._waits:
            self._stage.flush_at = self._road.step
        if resize == "reset" and self.engine.rank == 0:
            warnings.warn(
                f"{self.method.name}: unsent values were dropped, worth a norm of {dropped:.3g} in the next mean; "
                "resize='redistribute' keeps them", ThinwireWarning, stacklevel=2,
            )  # fmt: skip

    def _count_from(self, began: int | None) -> None:
        """Let the run be one that ``began`` with so many steps. Raise ThinwireError if it ends inside a start."""
        if began != self._about.steps:
            self._about, self._run = replace(self._about, steps=began), replace(self._run, began=began)
            self.__dict__.pop("_form", None)
            for method in (stage.method for stage in self._road.stages):
                method.run = replace(method.run, began=began)
                method.card = method.describe()

    @property
    def _waits(self) -> bool:
        """Does the method keep state that waits?"""
        return any(key.partition("/")[0] in self.method.card.promise.waits for key in self._form.shapes)

    def _restore(self, values: dict[str, Tensor]) -> None:
        """Go on from ``values``, by key without the rank; their shapes have been checked."""
        if fault := self.method.card.fault_of(values) or fault_of_counts(values):
            raise ThinwireError(f"{self.method.name}: the saved state is damaged: {fault}")
        self._met = -1.0
        self._step_loop.reset()
        self._step_loop.take_counts(split_counts(values))
        # A method reads its counters; on the device, each read would make the host wait.
        host = {key for key, like in self._form.shapes.items() if like.device.type == "cpu"}
        # A tensor of zeros needs no memory before it is used.
        needed = {key: value for key, value in values.items() if key.startswith("=") or bool(value.any())}
        placed = {key: value.to("cpu" if key in host else self._device) for key, value in needed.items()}
        load_state(self._state, placed)
        self.method.state_changed()
        if self.method.card.alone(self._road.step):  # with this rank's own weights: a model loaded later has another's
            self._step_loop.weight_watch.step_is_over()

    @functools.cached_property
    def _form(self) -> Form:
        """The form of this rank's state, found by a dry run."""
        shapes = largest_state(self.engine.layout(), self._road, self._run)
        return Form(self._about, {**self._step_loop.counts(), **shapes})

    def close(self) -> None:
        """End the worker thread and what is under way; all ranks call it. After it, ``accumulate`` and backward passes
        that would exchange gradients raise, until ``compress()`` is called again with the same model. Inside a round of
        local steps it warns: what ranks have learnt in it stays with each of them."""
        card = self.method.card
        apart = card.alone_from is not None and not self.method.rank_equal and self._met < self.step
        if apart and not self._step_loop.ended and self.engine.rank == 0:
            warnings.warn(
                f"{self.method} is closed inside a round, or before every optimizer has joined its last step, so each "
                "rank holds other weights: to leave it here, call wire.hand_over() on all ranks before, which gives "
                "all the mean of weights and moments",
                ThinwireWarning, stacklevel=2,
            )  # fmt: skip
        with suppress(LostRank, Unsavable):  # ranks that are there have sent what is under way; nothing is to be saved
            try:
                self._step_loop.close()
                self.method.finish()
            finally:
                for hook in self._hooks:
                    hook.remove()
                self.engine.close()


class _CopyError(ThinwireError, AttributeError):
    """Tells who asks a copy with ``hasattr`` that it has no such attribute."""


class WireCopy:
    """Stands in a copy of a model (an EMA's, a saved one) for the wire that the model keeps: any use is refused."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy and pickle, which go on without it
            raise AttributeError(name)
        raise _CopyError(
            f"wire.{name}: this is a copy, made with a model or by pickle, and a wire has none: compress() the copied "
            "model to train it; save wire.state_dict() of the wire itself"
        )
