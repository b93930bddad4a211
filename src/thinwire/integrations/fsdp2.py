"""FSDP2 (``fully_shard``) and HSDP, by custom reduce-scatter, custom all-gather and the all-reduce hook.

FSDP2: rank r owns row r of every buffer, so the method's exchange is a reduce-scatter. HSDP: the reduce-scatter inside
the node stays dense, and the method's exchange is an all-reduce of the shards across nodes.

All private names of torch's FSDP2 that Thinwire needs are used in this file and nowhere else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from thinwire import device as devices
from thinwire.bucket import Layout, Piece, Shard
from thinwire.collectives import AllReduce, Exchange, ReduceScatter
from thinwire.comm import Comm, GroupComm, Work
from thinwire.errors import ThinwireError
from thinwire.integrations.base import Meet, all_zero, split_by_node, wants_two_levels
from thinwire.ledger import Ledger
from thinwire.methods.base import Method, Parameter
from thinwire.plan import clean_name, describe
from thinwire.road import Levels, Regroup, Road, Stage, shard_of
from thinwire.weights import Ahead, Replica

if TYPE_CHECKING:
    from thinwire.turn import Turn


def param_groups(model: nn.Module) -> list[tuple[FSDPModule, Any]]:
    """Every FSDP module of ``model`` with its parameter group; modules without parameters of their own are left out."""
    found: list[tuple[FSDPModule, Any]] = []
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if id(state) in seen:  # fully_shard([a, b]) gives two modules one state
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and newer
        if groups is None:
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        if len(groups) > 1:
            raise ThinwireError(
                f"{type(module).__name__} has several FSDP parameter groups (from shard_placement_fn with several "
                "meshes): torch cannot replace their communication; shard each mesh's parameters as a module of its own"
            )
        found += [(module, group) for group in groups]
    return found


def _other_groups(model: nn.Module, known: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """The groups of the meshes of ``model``'s parameters that have other ranks than those ``known``."""
    taken = {tuple(dist.get_process_group_ranks(group)) for group in known}
    found: list[dist.ProcessGroup] = []
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        for group in [] if mesh is None else mesh.get_all_groups():
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks not in taken:
                taken.add(ranks)
                found.append(group)
    return found


class FSDP2:
    """One communication object per FSDP module; torch calls it with the module's flat gradient and takes our row."""

    kind = "fsdp2"

    def __init__(self, model: Any, method: Method, ledger: Ledger, *, two_level: bool | None, meet: Meet) -> None:
        self.model, self.method, self.ledger = model, method, ledger
        self.groups = param_groups(model)
        if not self.groups:
            raise ThinwireError("the model has FSDP modules but no sharded parameters: call fully_shard() on its parts")
        if not isinstance(model, FSDPModule):
            raise ThinwireError("the root module is not sharded: call fully_shard(model) after its parts")
        self._check()
        meet()
        shards = {
            id(fsdp_param.sharded_param): (tuple(fsdp_param._orig_size), tuple(fsdp_param.padded_sharded_param_size))
            for _, group in self.groups
            for fsdp_param in group.fsdp_params
        }
        self.parameters: dict[int, Parameter] = describe(cast(nn.Module, model), shards)
        self._comms: dict[int, GroupComm] = {}
        self._gathers: list[_AllGather] = []
        self._ahead = Ahead()
        self.tail: tuple[Any, Any] | None = None  # events of the last reduction: gradients were there; means were
        info = self.groups[0][1].mesh_info
        self.wire_dtype: torch.dtype | None = self._reduce_dtype(self.groups[0][1])
        shard = self.comm(info.shard_process_group)
        self.comms: list[Comm] = [shard]
        self.rank = shard.rank
        self.reduces = self.comm(_reduce_group(self.groups[0][1]))
        self.hops: tuple[Exchange, ...] = (ReduceScatter(self.reduces),)
        self.levels: Levels | None = None
        self.chunk: tuple[int, int] | None = None
        if hasattr(info, "replicate_process_group"):
            self.kind = "hsdp"
            inter = self.comm(info.replicate_process_group)
            self.hops = *self.hops, AllReduce(inter, divide="after")
            self.comms.append(inter)
            self.rank += shard.size * inter.rank
            if two_level:
                raise ThinwireError("two_level=True is what HSDP does anyway: leave it out")
        elif wants_two_levels(shard, method, two_level):
            intra, inter = split_by_node(shard)
            self.levels = Regroup(self.hops[0], intra.size, inter.size)
            self.hops = ReduceScatter(intra), ReduceScatter(inter)
        self.ranks = math.prod(comm.size for comm in self.comms)
        self.comms += self._beside()

    @staticmethod
    def process_groups(model: nn.Module) -> list[dist.ProcessGroup]:
        """Those of the user's that cross, one after the other, to every rank that trains with this one."""
        info = param_groups(model)[0][1].mesh_info
        names = ("shard_process_group", "replicate_process_group")
        found = [getattr(info, name) for name in names if hasattr(info, name)]
        return found + _other_groups(model, found)

    @staticmethod
    def facts(model: nn.Module) -> dict[str, str]:
        """What must be the same on all ranks, for buffers of theirs to be the same: modules, dtypes, when they gather.
        """
        names = {id(module): clean_name(name) for name, module in model.named_modules()}
        found = {}
        for module, group in param_groups(model):
            after = None if group.post_forward_mesh_info is None else group.post_forward_mesh_info.shard_mesh_size
            found[f"FSDP module '{names[id(module)]}'"] = f"{len(group.fsdp_params)} parameters, {group.mp_policy}, " \
                f"resharded over {after}"
        return found

    def _beside(self) -> list[Comm]:
        """The mesh dimensions that are not data parallel (tensor parallelism): their ranks share the guard's flag."""
        return [self.comm(group) for group in _other_groups(self.model, [of.group for of in self._comms.values()])]

    @property
    def gathers(self) -> frozenset[torch.dtype]:
        """In which the weights are gathered."""
        return frozenset(
            group.mp_policy.param_dtype or fsdp_param.sharded_param.dtype
            for _, group in self.groups
            for fsdp_param in group.fsdp_params
        )

    @staticmethod
    def _reduce_dtype(group: Any) -> torch.dtype | None:
        policy = group.mp_policy
        return policy.reduce_dtype or policy.param_dtype

    def _check(self) -> None:
        meshes, reducing = set(), set()
        for module, group in self.groups:
            info = group.mesh_info
            if not hasattr(info, "shard_process_group"):
                raise ThinwireError(
                    "composable replicate() cannot be compressed (torch calls its all-reduce directly): use "
                    "DistributedDataParallel, or fully_shard on a ('replicate', 'shard') mesh"
                )
            reducing.add(id(_reduce_group(group)))
            meshes.add((id(info.shard_process_group), id(getattr(info, "replicate_process_group", None))))
            if getattr(group, "force_sum_reduction_for_comms", False):
                raise ThinwireError("set_force_sum_reduction_for_comms(): Thinwire returns the mean; turn it off")
            if type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy":
                raise ThinwireError(
                    f"{type(module).__name__}: CPUOffloadPolicy is not carried: keep the shards on the device"
                )
            dtypes = {fsdp_param.sharded_param.dtype for fsdp_param in group.fsdp_params} | {self._reduce_dtype(group)}
            if torch.float16 in dtypes:
                raise ThinwireError(
                    f"{type(module).__name__}: float16 gradients are not carried: use MixedPrecisionPolicy("
                    "param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
                )
            custom = (getattr(group, "_reduce_scatter_comm", None), getattr(group, "_all_gather_comm", None))
            if any(comm is not None and not type(comm).__name__.startswith("Default") for comm in custom):
                raise ThinwireError(
                    f"{type(module).__name__} already has custom or symmetric-memory communication: "
                    "compress() must be the only one"
                )
            if getattr(group, "_all_reduce_hook", None) is not None:
                raise ThinwireError(
                    f"{type(module).__name__} already has an all-reduce hook: compress() must be the only one"
                )
        if len(meshes) > 1:
            raise ThinwireError("the FSDP modules are sharded on different meshes: compress() needs one mesh for all")
        if len(reducing) > 1:
            raise ThinwireError(
                "the FSDP modules reduce gradients over different groups: call set_separate_reduce_scatter_group() on "
                "the root module, for all of them"
            )

    def comm(self, group: dist.ProcessGroup) -> GroupComm:
        """The verbs on one of the engine's own groups."""
        if id(group) not in self._comms:
            device = next(self.model.parameters()).device
            self._comms[id(group)] = GroupComm(group, self.ledger, device=device)
        return self._comms[id(group)]

    def attach(self, turn: Turn, road: Road) -> None:
        """Give every FSDP module its communication objects; on HSDP torch calls both stages of the road by itself."""
        for module, group in self.groups:
            link = _GroupLink(self, group, turn, road)
            # Duck-typed: torch does not look at the type, and the base classes are private names.
            module.set_custom_reduce_scatter(cast(Any, link.reduce_scatter))
            self._gathers.append(_AllGather(link, road))
            module.set_custom_all_gather(cast(Any, self._gathers[-1]))
            if self.kind == "hsdp":
                # FSDP's own all-reduce cannot be replaced, only left out: it believes that it is 1-D, and our hook
                # averages across nodes. Parameters keep their (Replicate, Shard) placements.
                one_dimensional = _shard_only(group.mesh_info)
                group.mesh_info = one_dimensional
                if group.post_forward_mesh_info is not None:
                    group.post_forward_mesh_info = one_dimensional
                module.set_all_reduce_hook(link.all_reduce_hook(road.last))

    @property
    def replicas(self) -> list[Replica]:
        """The weights whose gathers the method has a hand in."""
        return [gather.replica for gather in self._gathers if gather.replica is not None]

    def layout(self) -> Layout:
        """One buffer and one shard per FSDP module, last module first, if every parameter has a gradient."""
        buffers, dtypes, shards = [], [], []
        comm = self.comm(self.groups[0][1].mesh_info.shard_process_group)
        for gather in reversed(self._gathers):
            link = gather.link
            params = link.group.fsdp_params
            if trained := [param for param in params if id(param.sharded_param) in self.parameters]:
                buffers.append(link.place(trained, comm.size))
                dtypes.append(self.wire_dtype or trained[0].sharded_param.dtype)
            dtype = link.group.mp_policy.param_dtype or params[0].sharded_param.dtype
            numel = sum(math.prod(param.padded_sharded_param_size) for param in params)
            shards.append(link.shard(numel, dtype))
        return Layout(buffers, dtypes, shards, comm)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """No exchange in this backward pass unless it is the ``last`` of the optimizer step."""
        self.model.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.requires_grad]

    def close(self) -> None:
        """The communication objects live as long as the model, but nothing is under way any more."""
        self._ahead.stop()

    @property
    def exchanges(self) -> bool:
        """Are we called at all? torch leaves out what a single rank would exchange with itself."""
        return any(hop.rows > 1 for hop in self.hops)

    def accumulated(self) -> bool:
        """Has this rank gradients that torch keeps from the optimizer, until a backward pass that exchanges them?"""
        return any(_has_own_gradient(fsdp_param) for _, group in self.groups for fsdp_param in group.fsdp_params)

    def dropped(self, weights: Sequence[Tensor], *, look: bool) -> bool:
        """Have the gradients of ``weights``, exchanged in an earlier backward pass of this step, been thrown away?

        ``look``: at their values too, whether they were set to zero. Collective then.
        """
        if not look:
            return weights[0].grad is None and all(weight.grad is None for weight in weights)
        return all_zero((weight.grad for weight in weights), self.comms)

    def settled(self) -> None:
        """The step is over."""
        self.tail = None

    def stepping(self) -> None:
        """An optimizer is about to give the weights new values; any others that they were given are news."""
        if self.tail is not None:
            self.ledger.between("exposed", *self.tail)
            self.tail = None
        self._ahead.stop()
        for replica in self.replicas:
            replica.look()

    def stepped(self) -> None:
        """The optimizer has done so."""
        for replica in self.replicas:
            replica.stepped()

    def ahead(self, step: int) -> None:
        """Weights leave for the next forward pass, in the order in which the last one asked for them."""
        with self._waited():
            self._ahead.begin(step)

    def arrive(self) -> None:
        """Wait for what has left."""
        for replica in self.replicas:
            replica.arrive()

    def asks(self, gather: _AllGather, replica: Replica) -> None:
        """torch gathers a module's weights."""
        self._ahead.asks(replica, gather.send)

    def go_on(self) -> None:
        """A module has got its weights: those of others may leave."""
        with self._waited():
            self._ahead.go_on()

    @contextmanager
    def _waited(self) -> Iterator[None]:
        """The training loop waits for what is done inside, unless that is for a device to do."""
        began = time.perf_counter()
        yield
        if devices.streams(self.groups[0][1].device) is None:
            self.ledger.add("exposed", time.perf_counter() - began)

    def weights_changed(self) -> None:
        """They were, and torch may not have noticed."""
        for replica in self.replicas:
            replica.changed = True


def _reduce_group(group: Any) -> dist.ProcessGroup:
    """Over which torch reduces gradients: the one that it gathers weights over, or one of the same ranks beside it
    (``set_separate_reduce_scatter_group``, torch 2.13)."""
    info = group.mesh_info
    return getattr(info, "reduce_scatter_process_group", None) or info.shard_process_group


def _has_own_gradient(fsdp_param: Any) -> bool:
    """Has this rank a gradient of the whole parameter that has not been reduced?"""
    return hasattr(fsdp_param, "_unsharded_param") and (
        fsdp_param.unsharded_accumulated_grad is not None or fsdp_param._unsharded_param.grad is not None
    )


def _shard_only(info: Any) -> Any:
    """The same mesh, seen as sharded only."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    found = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
    if hasattr(info, "reduce_scatter_process_group"):
        found.reduce_scatter_process_group = info.reduce_scatter_process_group
    return found


class _GroupLink:
    """What stands between one FSDP parameter group and the road."""

    def __init__(self, engine: FSDP2, group: Any, turn: Turn, road: Road) -> None:
        self.engine, self.group, self.turn, self.road = engine, group, turn, road
        self.reduce_scatter = _ReduceScatter(self)
        self.entered = False  # is this reduction known to the turn?
        self._active: list[Any] = []
        self._expected: list[Tensor] | None = None
        self.device: torch.device = group.device
        self.gathered: Any = None  # an event: the last gather of the weights is over
        self.copied: Any = None  # an event: FSDP2 has read what it gave
        self._computed: Any = None  # an event: the gradients of the next reduction are there
        self._seen: set[tuple[Piece, ...]] = set()
        self._pieces: dict[tuple[int, ...], tuple[Piece, ...]] = {}
        self._watch()

    def _watch(self) -> None:
        """Know which parameters are in the next reduction: torch leaves out those without a gradient, and says nothing.

        The numel can be the same for other parameters, so the set has to be read where torch decides it. On a GPU, know
        also when the stream that computes has come to where it needs what is on its way.
        """
        original, original_wait = self.group.post_backward, self.group.wait_for_unshard

        def wait_for_unshard() -> None:
            if self.gathered is not None:
                self.engine.ledger.between("exposed", devices.mark(self.device), self.gathered)
                self.gathered = None
            original_wait()
            self.copied = devices.mark(self.device)
            self.engine.go_on()

        self.group.wait_for_unshard = wait_for_unshard

        def post_backward(*unused: Any) -> Any:
            self._computed = devices.mark(self.device)
            zeros = getattr(self.group, "reduce_scatter_unused_params", False)
            self._active = [
                fsdp_param
                for fsdp_param in self.group.fsdp_params
                if _has_own_gradient(fsdp_param)
                or (zeros and hasattr(fsdp_param, "_unsharded_param") and fsdp_param._unsharded_param.requires_grad)
            ]
            # Read when first seen only: under tensor parallelism, reading may cost an all-reduce.
            known = self._key() in self._pieces
            self._expected = None if known else [self._gradient(fsdp_param) for fsdp_param in self._active]
            return original(*unused)

        self.group.post_backward = post_backward

    @property
    def divisor(self) -> float | None:
        """What the user has the sum over all ranks divided by (``set_gradient_divide_factor``); None: their number."""
        return getattr(self.group, "gradient_divide_factor", None)

    def reduced(self, began: float) -> None:
        """Gradients have been reduced, on the current stream, since ``began``: the compute stream may have to wait."""
        if (end := devices.mark(self.device)) is None:
            self.engine.ledger.add("exposed", time.perf_counter() - began)
        else:
            self.engine.tail = self._computed, end  # of a backward pass, the last one's

    @staticmethod
    def _gradient(fsdp_param: Any) -> Tensor:
        """This rank's gradient before the reduction; 0-dim where there is none."""
        if fsdp_param.unsharded_accumulated_grad is not None:
            return fsdp_param.unsharded_accumulated_grad_data
        if fsdp_param._unsharded_param.grad is not None:
            return fsdp_param.unsharded_grad_data
        return torch.zeros(())

    def _key(self) -> tuple[int, ...]:
        return tuple(id(fsdp_param) for fsdp_param in self._active)

    def pieces(self, ranks: int) -> tuple[Piece, ...]:
        """Where each parameter lies in the flat input: columns of (ranks, n), in the group's order."""
        key = self._key()
        if key not in self._pieces:
            self._pieces[key] = self.place(self._active, ranks)
        return self._pieces[key]

    def place(self, fsdp_params: list[Any], ranks: int) -> tuple[Piece, ...]:
        """Where ``fsdp_params`` lie in a flat input of theirs."""
        widths = [math.prod(fsdp_param.padded_sharded_param_size) for fsdp_param in fsdp_params]
        total, pieces, column = sum(widths), [], 0
        for fsdp_param, width in zip(fsdp_params, widths, strict=True):
            pieces.append(Piece(self.name(fsdp_param), column, width * ranks, ranks, total))
            column += width
        return tuple(pieces)

    def version(self) -> int:
        """Rises with every change of this rank's shard in place that torch counts (not those through ``.data``)."""
        shards = [fsdp_param.sharded_param for fsdp_param in self.group.fsdp_params]
        return sum(shard._version + cast(Any, shard)._local_tensor._version for shard in shards)

    def shard(self, numel: int, dtype: torch.dtype) -> Shard:
        """Where each parameter lies in this rank's shard of ``numel`` values, gathered in ``dtype``."""
        trained, frozen, column = [], [], 0
        for fsdp_param in self.group.fsdp_params:
            width = math.prod(fsdp_param.padded_sharded_param_size)
            piece = Piece(self.name(fsdp_param), column, width)
            if id(fsdp_param.sharded_param) in self.engine.parameters:
                trained.append(piece)
            elif fsdp_param.sharded_param.requires_grad:
                raise ThinwireError(
                    f"{piece.name} was frozen when compress() was called, or is another object now "
                    "(load_state_dict(assign=True)): thaw and load it before"
                )
            else:
                frozen.append(piece)
            column += width
        if column != numel:
            names = ", ".join(piece.name for piece in trained)
            raise ThinwireError(f"FSDP2 gathers {numel} values per rank, but the shards of {names} have {column}")
        return Shard(tuple(trained), tuple(frozen), numel, dtype)

    def name(self, fsdp_param: Any) -> str:
        """Of the parameter in the user's model."""
        known = self.engine.parameters.get(id(fsdp_param.sharded_param))
        if known is not None:
            return known.name
        if fsdp_param._param_fqn is not None:
            return clean_name(fsdp_param._param_fqn)
        # Frozen, and before the first forward pass, in which torch fills it in.
        named = self.engine.model.named_parameters()
        return next(clean_name(name) for name, weight in named if weight is fsdp_param.sharded_param)

    def verify(self, flat: Tensor, ranks: int) -> tuple[Piece, ...]:
        """The pieces; the first time a composition is seen, the values must lie where they should."""
        expected, self._expected = self._expected, None
        pieces = self.pieces(ranks)
        if sum(piece.numel for piece in pieces) != flat.numel():
            names = ", ".join(piece.name for piece in pieces)
            raise ThinwireError(f"FSDP2's buffer has {flat.numel()} values, but not those of {names}")
        if expected is None:
            return pieces
        rows = flat.view(ranks, -1)
        for piece, fsdp_param, gradient in zip(pieces, self._active, expected, strict=True):
            if gradient.dim() == 0 or fsdp_param.fsdp_placement.dim != 0:
                continue
            block = rows[:, piece.offset : piece.offset + piece.numel // ranks].reshape(-1)[: gradient.numel()]
            if not torch.equal(block.nan_to_num(), gradient.reshape(-1).to(flat.dtype).nan_to_num()):
                raise ThinwireError(f"FSDP2 laid {piece.name} out in a way that Thinwire does not know")
        return pieces

    def all_reduce_hook(self, stage: Stage):
        """The hook that averages this rank's shard across nodes, after the reduce-scatter inside the node."""

        def hook(shard: Tensor) -> None:
            began = time.perf_counter()
            devices.keep(shard)  # torch 2.11 to 2.13 let go of the buffer while this stream still reads it
            ranks = self.engine.hops[0].rows
            if self.divisor is not None and ranks == 1:  # torch has divided by it already
                shard.mul_(self.divisor)
            if self._expected is not None and ranks == 1:
                self.verify(shard, 1)
            if self.divisor is not None and ranks == 1:
                shard.mul_(self.engine.ranks / self.divisor)
            inter = shard_of(self.pieces(ranks))
            if not self.entered:  # torch leaves the reduce-scatter out where one rank has all of the shard
                self.turn.enter([piece.name for piece in inter])
            self.entered = False
            with self.turn.exchanging("gradients", (piece.name for piece in inter)):
                stage.reduce(shard, inter, shard)
            self.reduced(began)

        return hook


class _ReduceScatter:
    """What torch calls instead of its own reduce-scatter. The output becomes ``.grad``, so it is fresh every time."""

    def __init__(self, link: _GroupLink) -> None:
        self.link = link

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False) -> None:
        factor = self.link.divisor
        if factor is None and op != dist.ReduceOp.AVG:
            raise ThinwireError(f"FSDP2 asks for {op}: Thinwire returns the mean; see reduce_dtype")
        if group is not self.link.engine.reduces.group:
            raise ThinwireError(
                f"FSDP2 reduces gradients over another group of {group.size()} ranks than when compress() was called, "
                f"of {self.link.engine.reduces.size}: call set_separate_reduce_scatter_group() before compress()"
            )
        began = time.perf_counter()
        pieces = self.link.verify(input_tensor, group.size())
        if factor is not None:  # the sum divided by it is the mean of what is so many times as large
            input_tensor.mul_(self.link.engine.ranks / factor)
        self.link.turn.enter([piece.name for piece in pieces])
        self.link.entered = True
        with self.link.turn.exchanging("gradients", (piece.name for piece in pieces)):
            if self.link.engine.kind == "hsdp":
                self.link.road.stages[0].reduce(input_tensor, pieces, output_tensor)
            else:
                self.link.road.reduce(input_tensor, pieces, output_tensor)
        self.link.reduced(began)


class _AllGather:
    """What torch calls instead of its own all-gather of the weights.

    torch asks for the buffer, copies this rank's shard to its place there, and calls. Where the method encodes weights,
    both are the replica's.
    """

    def __init__(self, link: _GroupLink, road: Road) -> None:
        self.link, self.road, self.engine = link, road, link.engine
        self.replica: Replica | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._encoded:
            return torch.empty(*size, dtype=dtype, device=device)
        method = self.engine.method
        if dtype == torch.uint8:
            raise ThinwireError(
                f"{method} encodes weights, and the parameters of one FSDP module have several dtypes: give them one, "
                "or MixedPrecisionPolicy(param_dtype=...)"
            )
        comm = self.engine.comm(self.link.group.mesh_info.shard_process_group)
        shard = self.link.shard(math.prod(size) // comm.size, dtype)
        if self.replica is None or (self.replica.shard, self.replica.device) != (shard, device):
            message = method.weight_message(shard, comm.rank)
            if self.replica is not None:
                self.replica.drop()
            self.replica = Replica(message, method.state, shard, comm, device, self.link.version)
        if self.link.copied is not None:  # a module may be called twice in one forward pass
            devices.streams(device).current_stream(device).wait_event(self.link.copied)
        return self.replica.allocate()

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False) -> Work | None:
        comm, ledger = self.engine.comm(group), self.engine.ledger
        ledger.count_dense((comm.size - 1) * input_tensor.nbytes)
        began = time.perf_counter()
        with self._exchanging(), ledger.weights(), torch.no_grad():
            if self.replica is not None and self._encoded:
                # While some optimizers have stepped and others have not, weights change without a step being over.
                unsettled = self.link.turn.open
                self.engine.asks(self, self.replica)
                work = self.replica.gather(output_tensor, self.road.step, unsettled=unsettled, async_op=async_op)
            else:
                work = comm.all_gather(output_tensor, input_tensor, async_op=async_op)
        if (end := devices.mark(input_tensor.device)) is not None:
            self.link.gathered = end if work is None else None
            return work
        ledger.add("exposed", time.perf_counter() - began)
        return None if work is None else _TimedWork(work, ledger, self._exchanging)

    def send(self, step: int) -> None:
        """Let this rank's message of ``step`` leave, if one can; on a GPU, beside the stream that computes."""
        group = self.link.group
        if self.replica is None or not group.is_sharded or not self.replica.sends(step):
            return
        with self._exchanging(), self.engine.ledger.weights(), torch.no_grad():
            # A copy on the stream that computes: weights that change from now on need not wait for its reader.
            own = torch.cat([values.view(-1) for param in group.fsdp_params for values in param.all_gather_inputs])
            with self._beside(own):
                self.replica.send(own, step)

    @contextmanager
    def _beside(self, own: Tensor) -> Iterator[None]:
        if (there := devices.streams(own.device)) is None:
            yield
            return
        stream = self.link.group.comm_ctx.all_gather_stream
        stream.wait_stream(there.current_stream(own.device))
        with there.stream(stream):
            devices.keep(own)
            yield

    def _exchanging(self) -> AbstractContextManager[None]:
        names = (self.link.name(fsdp_param) for fsdp_param in self.link.group.fsdp_params)
        return self.link.turn.exchanging("weights", names)

    @property
    def _encoded(self) -> bool:
        """Are we asked for weights that the method encodes?

        After ``reshard_after_forward=<int>`` fewer ranks gather what the first gather of the step has left them.
        """
        return self.engine.method.encodes_weights and not self.link.group.is_sharded_post_forward


class _TimedWork(Work):
    """A work whose wait is written down as exposed time. (FSDP2 waits only for what is a ``Work``.)"""

    def __init__(self, work: Work, ledger: Ledger, exchanging: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._work, self._ledger, self._exchanging = work, ledger, exchanging

    def wait(self, *timeout: Any) -> bool:
        began = time.perf_counter()
        with self._exchanging():
            done = self._work.wait(*timeout)
        waited = time.perf_counter() - began
        self._ledger.add("exposed", waited)
        self._ledger.add("wire", waited)
        return done
