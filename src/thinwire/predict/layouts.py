"""The buffers and groups that an engine would have on any number of ranks, made without processes.

The engines' own functions make them, from a model on the meta device and groups that only count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Layout, Shard
from thinwire.core.engine import Way
from thinwire.core.exchange import AllReduce
from thinwire.core.method import Method, Run, check_engine, intra_of
from thinwire.core.names import clean_name, describe
from thinwire.core.road import Road, Stage, shard_of
from thinwire.core.selection import dense_among
from thinwire.engines import ddp, fsdp2
from thinwire.engines.fsdp2_module import columns
from thinwire.methods import resolve
from thinwire.network.comm import CountingComm
from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger
from thinwire.plan.plan import MB, plan_of
from thinwire.predict.record import Recording, Surroundings, record
from thinwire.predict.timeline import Memory, Timeline

Wrap = Callable[[str, nn.Module], bool]
"""(name, module) -> is it an FSDP module of its own?"""

STATES = {"AdamS": 1, "SGD": 0}
"""float32 values that an optimizer keeps of each weight; others keep as many as Adam, 2."""
PADDED = 0.05
"""The share of padding in a sharded engine's buffers from which on a note tells of it."""


@dataclass(frozen=True)
class Virtual:
    """An engine of rank 0 without processes.

    Attributes:
        kind, layout: as of an engine. way: of its gradients. comms: the groups on which ranks agree.
        shapes: of each trained parameter on this rank, by name. held: bytes of this rank's part of all weights.
    """

    kind: str
    way: Way
    layout: Layout
    comms: Sequence[CountingComm]
    shapes: Mapping[str, tuple[int, ...]]
    held: float

    def road(self, method: Method, intra: Method | str | None, steps: int) -> tuple[Road, Run]:
        """Make the road of ``method`` and begin it, as ``compress()`` does."""
        parameters, hops = {p.name: p for p in self.way.parameters.values()}, self.way.hops
        weights = {
            name: nn.Parameter(torch.empty(shape, dtype=parameters[name].dtype, device="meta"))
            for name, shape in self.shapes.items()
        }
        optimizer = method.OPTIMIZER(list(weights.values()), lr=1e-3)
        run = Run(
            parameters, hops[-1], steps, optimizers=(optimizer,), weights=weights, hop=len(hops),
            chunk=self.way.chunk, gathers=frozenset(shard.dtype for shard in self.layout.shards),
            inside=hops[0] if len(hops) > 1 else None, shows_late=self.kind == "ddp",
        )  # fmt: skip
        method.begin(run)
        methods = [method]
        if len(hops) > 1:
            methods.insert(0, intra_of(method) if intra is None else resolve(intra))
            methods[0].begin(replace(run, exchange=hops[0], hop=1, inside=None))
        stages = [
            Stage(hop, dense_among(hop, parameters.values()), exchange, Guard([], False), Ledger())
            for hop, exchange in zip(methods, hops, strict=True)
        ]
        return Road(stages, self.way.levels), run

    def memory(self, recording: Recording, states: int, around: Surroundings) -> Memory:
        """Return this rank's bytes. Two modules are gathered at once, that which computes and the next one."""
        ranks, shards = 1 if self.layout.comm is None else self.layout.comm.size, self.layout.shards
        gathered = [ranks * shard.numel * shard.dtype.itemsize for shard in shards]  # the root's comes last
        freed = gathered[: len(gathered) - around.keeps_root] if around.reshards else []
        reduced = max((4 * ranks * shard.numel for shard in shards), default=0)
        own_values = sum(map(math.prod, self.shapes.values()))
        weights = self.held + sum(sorted(freed)[-2:]) + sum(gathered[len(freed) :])
        return Memory(weights, 4.0 * own_values + reduced, 4.0 * states * recording.held, recording.method_peak)

    def notes(self) -> tuple[str, ...]:
        """Tell of padding, if it is much."""
        if self.layout.comm is None:
            return ()
        ranks, parameters = self.layout.comm.size, self.way.parameters.values()
        padding = ranks * sum(p.local for p in parameters) / sum(p.numel for p in parameters) - 1
        note = f"FSDP2 pads dim 0 of each parameter to a multiple of {ranks} ranks: {padding:.0%} more bytes"
        return (note,) if padding > PADDED else ()


def replicated(
    model: nn.Module, method: Method, whole: CountingComm, *, two_level: bool | None, bucket_cap_mb: float | None
) -> Virtual:
    """Make DDP over ``whole``."""
    if bucket_cap_mb is None and not method.card.native:
        bucket_cap_mb = plan_of(method, describe(model).values(), AllReduce(whole)).bucket_cap_mb
    way = ddp.way(model, whole, method, two_level)
    trained: list[Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
    layout = ddp.buckets(trained, way.parameters, None if bucket_cap_mb is None else int(bucket_cap_mb * MB))
    held_bytes = sum(weight.nbytes for weight in model.parameters())
    return Virtual("ddp", way, layout, [whole], {p.name: p.shape for p in way.parameters.values()}, held_bytes)


def sharded(
    model: nn.Module, method: Method, shard: CountingComm, inter: CountingComm | None = None, *,
    two_level: bool | None, gather_dtype: torch.dtype | None, wrap: Wrap | None,
) -> Virtual:  # fmt: skip
    """Make FSDP2 over ``shard``; HSDP if it is replicated over ``inter``."""
    names = {id(weight): clean_name(name) for name, weight in model.named_parameters()}
    sizes = {id(w): (tuple(w.shape), (-(-w.shape[0] // shard.size), *w.shape[1:])) for w in model.parameters()}
    way = fsdp2.way(describe(model, sizes), shard, shard, inter, method, two_level)
    buffers, shards, held_bytes = [], [], 0
    for members in reversed(list(_modules(model, wrap or _blocks(model)))):
        pieces = columns({names[id(member)]: math.prod(sizes[id(member)][1]) for member in members}, shard.size)
        trained = {piece.name: piece.numel // shard.size for piece, of in zip(pieces, members, strict=True)
                   if of.requires_grad}  # fmt: skip
        if trained:
            buffers.append(columns(trained, shard.size))
        own_pieces = shard_of(pieces)
        numel = sum(piece.numel for piece in own_pieces)
        shards.append(Shard(
            tuple(piece for piece in own_pieces if piece.name in trained),
            tuple(piece for piece in own_pieces if piece.name not in trained), numel, gather_dtype or members[0].dtype,
        ))  # fmt: skip
        held_bytes += numel * members[0].element_size()
    layout = Layout(buffers, [torch.float32] * len(buffers), shards, shard)
    shapes = {names[key]: padded for key, (_, padded) in sizes.items() if key in way.parameters}
    comms = [shard] if inter is None else [shard, inter]
    return Virtual("fsdp2" if inter is None else "hsdp", way, layout, comms, shapes, held_bytes)


def virtual_of(
    model: nn.Module, method: Method, *, engine: str, nodes: int, per_node: int, two_level: bool | None = None,
    bucket_cap_mb: float | None = None, gather_dtype: torch.dtype | None = None, wrap: Wrap | None = None,
    gloo: bool = False,
) -> Virtual:  # fmt: skip
    """Make the engine of ``timeline_of``."""
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ThinwireError("no parameter of the model requires a gradient")
    check_engine(method, engine)
    whole = CountingComm(0, [rank // per_node for rank in range(nodes * per_node)], Ledger())
    whole.reduce_scatter_is_all_reduce = gloo
    if engine == "ddp":
        return replicated(model, method, whole, two_level=two_level, bucket_cap_mb=bucket_cap_mb)
    groups = [whole]
    if engine == "hsdp":
        groups = [whole.subset(range(per_node)), whole.subset(range(0, whole.size, per_node))]
    return sharded(model, method, *groups, two_level=two_level, gather_dtype=gather_dtype, wrap=wrap)


def timeline_of(
    model: nn.Module, method: Method | str, *, engine: str, nodes: int, per_node: int, two_level: bool | None = None,
    intra: Method | str | None = None, bucket_cap_mb: float | None = None, broadcast_buffers: bool = True,
    gather_dtype: torch.dtype | None = None, reshard: bool = True, keep_root: bool = False, wrap: Wrap | None = None,
    steps: int = 10_000, gloo: bool = False,
) -> Timeline:  # fmt: skip
    """Record the steady state of ``method`` on ``model``, on ``nodes`` of ``per_node`` ranks each.

    Args:
        model: on the meta device. engine: "ddp", "fsdp2", or "hsdp", which shards inside a node.
        two_level, intra, steps: as for ``compress()``.
        bucket_cap_mb: of DDP's buckets; None: as suits the method, as in ``thinwire train``.
        broadcast_buffers: does DDP broadcast the module buffers before each forward pass?
        gather_dtype: of weights and gradients in computing, on sharded engines; None: that of the parameters.
        reshard: gathered weights are freed after the forward pass. keep_root: but for the root module's own.
        wrap: None: the members of the longest list of modules are FSDP modules, and the root.
        gloo: the network is gloo's, whose reduce-scatter moves as many bytes as an all-reduce.

    Raises:
        ThinwireError: the method does not run on the engine, or refuses the model.
    """
    method = resolve(method)
    virtual = virtual_of(
        model, method, engine=engine, nodes=nodes, per_node=per_node, two_level=two_level, bucket_cap_mb=bucket_cap_mb,
        gather_dtype=gather_dtype, wrap=wrap, gloo=gloo,
    )  # fmt: skip
    road, run = virtual.road(method, intra, steps)
    stored, buffers = next(model.parameters()).dtype, model.buffers() if engine == "ddp" and broadcast_buffers else ()
    around = Surroundings(
        virtual.layout, road, per_node, virtual.comms, sum(buffer.nbytes for buffer in buffers),
        reshards=reshard and engine != "ddp", keeps_root=keep_root, stored=stored,
        computed=stored if gather_dtype is None or engine == "ddp" else gather_dtype,
    )  # fmt: skip
    recording = record(run, around)
    states = STATES.get(type(run.optimizers[0]).__name__, 2)
    return Timeline(
        str(method), nodes * per_node, per_node, {p.name: p.numel for p in run.parameters.values()},
        recording.steps, virtual.memory(recording, states, around),
        4.0 * (3 + 2 * states) * recording.stepped, virtual.notes(),
    )  # fmt: skip


def _blocks(model: nn.Module) -> Wrap:
    """Choose the members of the longest list of modules: a transformer's blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = {id(block) for block in max(lists, key=len, default=())}
    return lambda name, module: id(module) in blocks


def _modules(model: nn.Module, wrap: Wrap) -> Iterator[list[Tensor]]:
    """Yield the parameters of each FSDP module, in the order of ``model.modules()``: the root's first."""
    wrapped = {id(module) for name, module in model.named_modules() if module is model or wrap(name, module)}
    listed: set[int] = set()

    def own(module: nn.Module) -> Iterator[Tensor]:
        """Yield as ``fully_shard`` does: those of children first."""
        for child in module.children():
            if id(child) not in wrapped:
                yield from own(child)
        yield from module.parameters(recurse=False)

    by_module = []
    for module in reversed([module for module in model.modules() if id(module) in wrapped]):  # inner ones first
        members = [parameter for parameter in dict.fromkeys(own(module)) if id(parameter) not in listed]
        listed |= {id(parameter) for parameter in members}
        by_module.append(members)
    yield from (members for members in reversed(by_module) if members)
