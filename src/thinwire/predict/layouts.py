"""The buffers and groups that an engine would have on any number of ranks, made without processes.

The engines' own functions make them, from a model on the meta device and groups that only count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Layout, Shard
from thinwire.core.engine import Way
from thinwire.core.method import Method, Run, intra_of
from thinwire.core.names import clean_name, describe
from thinwire.core.road import Road, Stage, shard_of
from thinwire.core.selection import dense_among
from thinwire.engines import ddp, fsdp2
from thinwire.engines.fsdp2_module import columns
from thinwire.methods import resolve
from thinwire.network.comm import CountingComm
from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger
from thinwire.optim import AdamS
from thinwire.plan.plan import MB, plan_of
from thinwire.predict.record import Surroundings, record
from thinwire.predict.timeline import Memory, Timeline

Wrap = Callable[[str, nn.Module], bool]
"""(name, module) -> is it an FSDP module of its own?"""

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adams": AdamS, "sgd": torch.optim.SGD,
}  # fmt: skip
STATES = {"AdamW": 2, "Adam": 2, "AdamS": 1, "SGD": 1}
"""float32 values that an optimizer keeps of each weight; of others that nobody named: as many as Adam."""
PADDED = 0.05
"""Share of a sharded engine's bytes that is padding from which on a note says so."""


def timeline_of(
    model: nn.Module,
    method: Method | str,
    *,
    engine: str,
    nodes: int,
    per_node: int,
    two_level: bool | None = None,
    intra: Method | str | None = None,
    bucket_cap_mb: float | None = None,
    broadcast_buffers: bool = True,
    gather_dtype: torch.dtype | None = None,
    reshard: bool = True,
    wrap: Wrap | None = None,
    steps: int = 10_000,
    optimizer: str | None = None,
    gloo: bool = False,
) -> Timeline:
    """Record the steady state of ``method`` on ``model``, on ``nodes`` of ``per_node`` ranks each.

    Args:
        model: on the meta device. engine: "ddp", "fsdp2" or "hsdp", which shards inside a node.
        two_level, intra, steps: as for ``compress()``.
        bucket_cap_mb: of DDP's buckets; None: as suits the method, as in ``thinwire train``.
        broadcast_buffers: does DDP broadcast the module buffers before each forward pass?
        gather_dtype: of weights and gradients in computing, on sharded engines; None: the parameters'.
        reshard: free gathered weights after the forward pass. wrap: None: each block of the longest list of modules.
        optimizer: "adamw", "adams" or "sgd"; None: the one that the method is made for.
        gloo: the network is gloo's, whose reduce-scatter moves as many bytes as an all-reduce.

    Raises:
        ThinwireError: the method does not run on the engine, or refuses the model.
    """
    method, ledger = resolve(method), Ledger()
    if engine not in method.engines:
        raise ThinwireError(f"method '{method.name}' runs on {', '.join(method.engines)} only, not on {engine}")
    whole = CountingComm(0, [rank // per_node for rank in range(nodes * per_node)], ledger)
    whole.reduce_scatter_is_all_reduce = gloo
    virtual: _Virtual
    if engine == "ddp":
        virtual = _Replicated(model, method, whole, two_level, bucket_cap_mb)
    else:
        shard, inter = whole, None
        if engine == "hsdp":
            shard, inter = whole.subset(range(per_node)), whole.subset(range(0, whole.size, per_node))
        virtual = _Sharded(model, method, shard, inter, two_level, gather_dtype, wrap)
    make = method.OPTIMIZER if optimizer is None else OPTIMIZERS[optimizer]
    road, run = _road(virtual, method, intra, make, steps)
    buffers = model.buffers() if engine == "ddp" and broadcast_buffers else ()
    broadcast = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    computes = gather_dtype or next(model.parameters()).dtype
    around = Surroundings(per_node, virtual.comms, broadcast, reshard and engine != "ddp", computes)
    recording = record(virtual.layout, road, run, around)
    own = sum(parameter.local for parameter in run.parameters.values()) if engine != "ddp" else virtual.numel
    states = STATES.get(type(run.optimizers[0]).__name__, 2)
    return Timeline(
        str(method), engine, whole.size, per_node, {p.name: p.numel for p in run.parameters.values()},
        recording.steps, virtual.memory(recording.method_peak, own * 4 * states, reshard),
        own * 4 * (3 + 2 * states), virtual.notes(),
    )  # fmt: skip


def _road(
    virtual: _Virtual, method: Method, intra: Method | str | None, optimizer: Any, steps: int
) -> tuple[Road, Run]:
    """Make the road and begin its methods, as ``compress()`` does."""
    parameters, way = {p.name: p for p in virtual.way.parameters.values()}, virtual.way
    weights = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in virtual.shapes().items()}
    run = Run(
        parameters, way.hops[-1], steps, optimizers=(optimizer(list(weights.values()), lr=1e-3),), weights=weights,
        hop=len(way.hops), chunk=way.chunk, gathers=frozenset(shard.dtype for shard in virtual.layout.shards),
    )  # fmt: skip
    method.begin(run)
    hops = [method]
    if len(way.hops) > 1:
        hops.insert(0, intra_of(method) if intra is None else resolve(intra))
        hops[0].begin(replace(run, exchange=way.hops[0], hop=1))
    ledger = way.hops[-1].comm.ledger
    stages = [
        Stage(hop, dense_among(hop, parameters.values()), exchange, Guard([], False), ledger, way.levels is None)
        for hop, exchange in zip(hops, way.hops, strict=True)
    ]
    return Road(stages, way.levels), run


class _Virtual:
    """An engine without processes.

    Attributes:
        way: of its gradients. layout: of its buffers. comms: on which ranks agree.
    """

    way: Way
    layout: Layout
    comms: Sequence[CountingComm]

    def __init__(self, model: nn.Module) -> None:
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.trained:
            raise ThinwireError("no parameter of the model requires a gradient")
        self.numel = sum(parameter.numel() for parameter in self.trained)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter on this rank."""
        raise NotImplementedError

    def memory(self, method_peak: int, optimizer: float, reshard: bool) -> Memory:
        raise NotImplementedError

    def notes(self) -> tuple[str, ...]:
        return ()


class _Replicated(_Virtual):
    """DDP."""

    def __init__(
        self, model: nn.Module, method: Method, whole: CountingComm, two_level: bool | None, cap: float | None
    ) -> None:
        super().__init__(model)
        self.way, self.comms = ddp.way(model, whole, method, two_level), [whole]
        if cap is None and not method.card.native:
            flat = ddp.way(model, whole, method, False)
            cap = plan_of(method, flat.parameters.values(), *flat.hops).bucket_cap_mb
        self.layout = ddp.buckets(self.trained, self.way.parameters, None if cap is None else int(cap * MB))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {parameter.name: parameter.shape for parameter in self.way.parameters.values()}

    def memory(self, method_peak: int, optimizer: float, reshard: bool) -> Memory:
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in self.trained)
        return Memory(nbytes, nbytes, optimizer, method_peak)


class _Sharded(_Virtual):
    """FSDP2 over ``shard``; HSDP if replicated over ``inter``."""

    def __init__(
        self, model: nn.Module, method: Method, shard: CountingComm, inter: CountingComm | None,
        two_level: bool | None, gathers: torch.dtype | None, wrap: Wrap | None,
    ) -> None:  # fmt: skip
        super().__init__(model)
        ranks, self.comms = shard.size, [shard] if inter is None else [shard, inter]
        self._names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
        sizes = {id(p): (tuple(p.shape), (-(-p.shape[0] // ranks), *p.shape[1:])) for p in model.parameters()}
        self._widths = {key: math.prod(padded) for key, (_, padded) in sizes.items()}
        self.way = fsdp2.way(describe(model, sizes), shard, shard, inter, method, two_level)
        buffers, shards = [], []
        for members in reversed(list(_modules(model, wrap or _blocks(model)))):
            trained = [member for member in members if id(member) in self.way.parameters]
            if trained:
                buffers.append(columns(self._spans(trained), ranks))
            shards.append(self._shard(members, ranks, gathers or members[0].dtype))
        self.layout = Layout(buffers, [torch.float32] * len(buffers), shards, shard)

    def _spans(self, members: Sequence[Tensor]) -> dict[str, int]:
        return {self._names[id(member)]: self._widths[id(member)] for member in members}

    def _shard(self, members: Sequence[Tensor], ranks: int, dtype: torch.dtype) -> Shard:
        pieces = shard_of(columns(self._spans(members), ranks))
        pairs = list(zip(pieces, members, strict=True))
        trained = tuple(piece for piece, member in pairs if member.requires_grad)
        frozen = tuple(piece for piece, member in pairs if not member.requires_grad)
        return Shard(trained, frozen, sum(piece.numel for piece in pieces), dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {p.name: (p.local // max(math.prod(p.shape[1:]), 1), *p.shape[1:]) for p in self.way.parameters.values()}

    def memory(self, method_peak: int, optimizer: float, reshard: bool) -> Memory:
        """Two modules' weights are gathered at once, that which computes and the next one."""
        ranks, shards = self.layout.comm.size, self.layout.shards  # type: ignore[union-attr]
        gathered = sorted((ranks * shard.numel * shard.dtype.itemsize for shard in shards), reverse=True)
        own, largest = sum(4.0 * shard.numel for shard in shards), ranks * max(shard.numel * 4.0 for shard in shards)
        trained = 4.0 * sum(parameter.local for parameter in self.way.parameters.values())
        return Memory(own + sum(gathered[:2] if reshard else gathered), trained + largest, optimizer, method_peak)

    def notes(self) -> tuple[str, ...]:
        ranks = self.layout.comm.size  # type: ignore[union-attr]
        padded = ranks * sum(parameter.local for parameter in self.way.parameters.values())
        if padded <= (1 + PADDED) * self.numel:
            return ()
        share = padded / self.numel - 1
        return (f"FSDP2 pads dim 0 of each parameter to a multiple of {ranks} ranks: {share:.0%} more bytes",)


def _blocks(model: nn.Module) -> Wrap:
    """Choose the members of the longest list of modules: a transformer's blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = {id(block) for block in max(lists, key=len, default=())}
    return lambda name, module: id(module) in blocks


def _modules(model: nn.Module, wrap: Wrap) -> Iterator[list[Tensor]]:
    """Yield the parameters of each FSDP module, in the order of ``model.modules()``: the root's first."""
    wrapped = {id(module) for name, module in model.named_modules() if module is model or wrap(name, module)}
    taken: set[int] = set()

    def own(module: nn.Module) -> Iterator[Tensor]:
        """Yield as ``fully_shard`` does: those of children first."""
        for child in module.children():
            if id(child) not in wrapped:
                yield from own(child)
        yield from module.parameters(recurse=False)

    by_module = []
    for module in reversed([module for module in model.modules() if id(module) in wrapped]):  # inner ones first
        members = [parameter for parameter in dict.fromkeys(own(module)) if id(parameter) not in taken]
        taken |= {id(parameter) for parameter in members}
        by_module.append(members)
    yield from (members for members in reversed(by_module) if members)
