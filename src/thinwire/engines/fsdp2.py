"""FSDP2 (``fully_shard``) and HSDP, through custom reduce-scatter, custom all-gather and the all-reduce hook.

FSDP2: rank r owns row r of every buffer, so the method's exchange is a reduce-scatter. HSDP: the reduce-scatter inside
the node stays dense, and the method's exchange is an all-reduce of the shards across nodes.

Only this file, ``fsdp2_module.py`` and ``fsdp2_weights.py`` use private names of torch's FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Layout
from thinwire.core.engine import Divisible, Meet, ModuleHook, Way, all_zero, split_by_node, wants_two_levels
from thinwire.core.exchange import AllReduce, ReduceScatter
from thinwire.core.method import Method, Parameter
from thinwire.core.names import clean_name, describe
from thinwire.core.road import Regroup, Road
from thinwire.core.step import ALREADY, StepLoop
from thinwire.core.worker import Worker
from thinwire.engines.fsdp2_module import GroupLink, ShardedEngine, has_own_gradient
from thinwire.engines.fsdp2_weights import ModuleAllGather
from thinwire.network.comm import Comm, GroupComm
from thinwire.network.ledger import Ledger


def param_groups(model: nn.Module) -> list[tuple[FSDPModule, Any]]:
    """List the FSDP modules of ``model`` that have parameters of their own, each with its parameter group."""
    modules: dict[Any, FSDPModule] = {}
    for candidate in model.modules():
        if isinstance(candidate, FSDPModule):
            modules.setdefault(candidate._get_fsdp_state(), candidate)  # fully_shard([a, b]) gives both one state
    pairs: list[tuple[FSDPModule, Any]] = []
    for state, module in modules.items():
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and newer
        if groups is None:
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        if len(groups) > 1:
            raise ThinwireError(
                f"{type(module).__name__} has several FSDP parameter groups (from shard_placement_fn with several "
                "meshes): torch cannot replace their communication; shard each mesh's parameters as a module of its own"
            )
        pairs += [(module, group) for group in groups]
    return pairs


def _other_groups(model: nn.Module, listed: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """List the groups of the parameters' meshes that have other ranks than each ``listed`` group."""
    covered = {tuple(dist.get_process_group_ranks(group)) for group in listed}
    groups: list[dist.ProcessGroup] = []
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        for group in [] if mesh is None else mesh.get_all_groups():
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks not in covered:
                covered.add(ranks)
                groups.append(group)
    return groups


def way(
    parameters: dict[int, Parameter], shard: Divisible, reduces: Comm, inter: Comm | None, method: Method,
    two_level: bool | None,
) -> Way:  # fmt: skip
    """Make the way of the gradients of ``parameters``.

    Args:
        shard: the group over which they are sharded. reduces: that of their reduction, of the same ranks. inter: that
            over which shards are replicated (HSDP), or None.
    """
    stock = ReduceScatter(reduces)
    if inter is not None:
        if two_level:
            raise ThinwireError("two_level=True is what HSDP does anyway: leave it out")
        return Way((stock, AllReduce(inter, divide="after")), parameters)
    if not wants_two_levels(shard, method, two_level):
        return Way((stock,), parameters)
    intra, across = split_by_node(shard)
    levels = Regroup(stock, intra.size, across.size)
    return Way((ReduceScatter(intra), ReduceScatter(across)), parameters, levels, None, [intra, across])


class FSDP2(ShardedEngine):
    """Every FSDP module has a communication object. torch calls it with the flat gradient and takes our row."""

    kind = "fsdp2"

    def __init__(self, model: Any, method: Method, ledger: Ledger, *, two_level: bool | None, meet: Meet) -> None:
        super().__init__(model, method, ledger, param_groups(model))
        if not self.groups:
            raise ThinwireError("the model has FSDP modules but no sharded parameters: call fully_shard() on its parts")
        if not isinstance(model, FSDPModule):
            raise ThinwireError("the root module is not sharded: call fully_shard(model) after its parts")
        self._check()
        meet()
        shards = {
            id(fsdp_param.sharded_param): (tuple(fsdp_param._orig_size), tuple(fsdp_param.padded_sharded_param_size))
            for fsdp_param in self.fsdp_params
        }
        dtypes = {
            id(fsdp_param.sharded_param): _reduce_dtype(group, fsdp_param)
            for _, group in self.groups
            for fsdp_param in group.fsdp_params
        }
        described = describe(self.model, shards)
        self.parameters = {key: replace(parameter, dtype=dtypes[key]) for key, parameter in described.items()}
        info = self.groups[0][1].mesh_info
        shard = self.comm(info.shard_process_group)
        if shard.device.type == "cuda" and shard.size > 1 and shard.reduce_scatter_is_all_reduce:  # by gloo
            raise ThinwireError(
                "torch's FSDP2 ends in a segmentation fault where gloo gathers a GPU's weights: use NCCL, "
                "init_process_group('nccl'), with a GPU for each rank; or DDP"
            )
        self.comms = [shard]
        self.rank = shard.rank
        self.reduce_group = _reduce_group(self.groups[0][1])
        # On a CPU a worker reduces, on groups of its own: others are the gathers', or those of another wire's worker.
        self.worker = None if devices.streams(shard.device) else Worker(ledger)
        reduces = self.comm(self.reduce_group)
        self._own_comms: list[GroupComm] = []  # released when the engine closes
        if self.worker:
            reduces = reduces.twin()
            self._own_comms.append(reduces)
        # Beside the messages under way: on a CPU in a group that is idle in a forward pass.
        self.flags = shard if self.worker is None else reduces
        inter = self.comm(info.replicate_process_group) if hasattr(info, "replicate_process_group") else None
        if inter is not None:
            self.kind = "hsdp"
            if self.worker:
                inter = inter.twin()
                self._own_comms.append(inter)
            self.comms.append(inter)
            self.rank += shard.size * inter.rank
        self.hops, _, self.levels, _, groups = way(self.parameters, shard, reduces, inter, method, two_level)
        self._own_comms += groups
        self.ranks = math.prod(comm.size for comm in self.comms)
        listed = [comm.group for comm in self._comms.values()]
        self.beside = [self.comm(group) for group in _other_groups(self.model, listed)]
        self.comms += self.beside
        self.exchanges = any(hop.ranks > 1 for hop in self.hops)
        self.gathers = frozenset(p.mp_policy.param_dtype or p.sharded_param.dtype for p in self.fsdp_params)

    @staticmethod
    def process_groups(model: nn.Module) -> list[dist.ProcessGroup]:
        """List the user's groups that together reach all ranks that train together."""
        info = param_groups(model)[0][1].mesh_info
        names = ("shard_process_group", "replicate_process_group")
        groups = [getattr(info, name) for name in names if hasattr(info, name)]
        return groups + _other_groups(model, groups)

    @staticmethod
    def facts(model: nn.Module) -> dict[str, str]:
        """Describe what must be the same on all ranks, so that their buffers are: modules, dtypes, gathers."""
        names = {id(module): clean_name(name) for name, module in model.named_modules()}
        facts = {}
        for module, group in param_groups(model):
            resharded = getattr(group.post_forward_mesh_info, "shard_mesh_size", None)
            described = f"{len(group.fsdp_params)} parameters, {policy_of(group)}, resharded over {resharded}"
            facts[f"FSDP module '{names[id(module)]}'"] = described
        return facts

    def _check(self) -> None:
        for module, group in self.groups:
            name, params = type(module).__name__, group.fsdp_params
            if not hasattr(group.mesh_info, "shard_process_group"):
                raise ThinwireError(
                    "composable replicate() cannot be compressed (torch calls its all-reduce directly): use "
                    "DistributedDataParallel, or fully_shard on a ('replicate', 'shard') mesh"
                )
            if group.force_sum_reduction_for_comms:
                raise ThinwireError(
                    "set_force_sum_reduction_for_comms() is not supported, because Thinwire returns the mean: turn "
                    "it off"
                )
            if isinstance(group.offload_policy, CPUOffloadPolicy):
                raise ThinwireError(f"{name}: CPUOffloadPolicy is not supported: keep the shards on the device")
            if len({id(param.sharded_param) for param in params}) < len(params):
                raise ThinwireError(f"{name}: some of its weights were tied after fully_shard(): tie them before it")
            if len({param.mp_policy.param_dtype for param in params}) > 1:
                raise ThinwireError(
                    f"{name}: gathering weights in several dtypes is not supported: leave out MixedPrecisionPolicy's "
                    "param_dtype_override_fn"
                )
            weights = (param.sharded_param.dtype for param in params)
            if torch.float16 in (*(_reduce_dtype(group, param) for param in params), *weights):
                raise ThinwireError(
                    f"{name}: float16 gradients are not supported: use "
                    "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
                )
            comms = group._reduce_scatter_comm, group._all_gather_comm
            if any(isinstance(comm, ModuleAllGather) for comm in comms):
                raise ThinwireError(ALREADY.format(kind="FSDP"))
            if not all(type(comm).__name__.startswith("Default") for comm in comms):
                raise ThinwireError(
                    f"{name} already has custom or symmetric-memory communication: compress() must be the only one"
                )
            if group._all_reduce_hook is not None:
                raise ThinwireError(f"{name} already has an all-reduce hook: compress() must be the only one")
        infos = [group.mesh_info for _, group in self.groups]
        if len({(info.shard_process_group, getattr(info, "replicate_process_group", None)) for info in infos}) > 1:
            raise ThinwireError("the FSDP modules are sharded on different meshes: compress() needs one mesh for all")
        if len({_reduce_group(group) for _, group in self.groups}) > 1:
            raise ThinwireError(
                "the FSDP modules reduce gradients over different groups: call set_separate_reduce_scatter_group() on "
                "the root module, for all of them"
            )

    def attach(self, step_loop: StepLoop, road: Road) -> None:
        """Give every FSDP module its communication objects. On HSDP torch itself calls both stages of the road."""
        self._step_loop, self._road = step_loop, road
        self._hooks += [
            self.model.register_forward_pre_hook(ModuleHook(self.enter_model), prepend=True),
            self.model.register_forward_hook(ModuleHook(self.leave_model), always_call=True),
        ]
        for module, group in self.groups:
            link = GroupLink(self, group, step_loop, road)
            self.links.append(link)
            if self._inputs > 1:
                link.keep_inputs(self._inputs)
            # Duck-typed: torch does not look at the type, and the base classes are private names.
            module.set_custom_reduce_scatter(cast(Any, link))
            module.set_custom_all_gather(cast(Any, ModuleAllGather(link)))
            if self.kind == "hsdp":
                # FSDP's all-reduce cannot be replaced, only left out: with a 1-D mesh torch runs none, and our hook
                # averages across nodes. Parameters keep their (Replicate, Shard) placements.
                one_dimensional = _shard_only(group.mesh_info)
                group.mesh_info = one_dimensional
                if group.post_forward_mesh_info is not None:
                    group.post_forward_mesh_info = one_dimensional
                module.set_all_reduce_hook(link.all_reduce_hook(road.last))

    def exchange(self) -> None:  # torch does not tell which module's gradients are the last
        with self._step_loop.inside("the exchange of samples of gradients"), self.waited():
            self._road.end_pass()

    def layout(self) -> Layout:
        """Return a buffer and a shard per FSDP module, the last module first, as if every parameter had a gradient."""
        buffers, dtypes, shards, regathers = [], [], [], []
        root = self.model._get_fsdp_state()
        for (module, group), link in zip(reversed(self.groups), reversed(self.links), strict=True):
            params = link.in_order()
            if trained := [param for param in params if id(param.sharded_param) in self.parameters]:
                buffers.append(link.pieces_of(trained))
                dtypes.append(self.parameters[id(trained[0].sharded_param)].dtype)
            dtype = policy_of(link.group).param_dtype or params[0].sharded_param.dtype
            shards.append(link.shard(dtype))
            stays = root._auto_reshard_after_forward and module._get_fsdp_state() is root  # from its first pass on
            regathers.append(0 if stays else getattr(group.post_forward_mesh_info, "shard_mesh_size", 0))
        sizes = [sum(of.numel for of in pieces) * dtype.itemsize for pieces, dtype in zip(buffers, dtypes, strict=True)]
        held = (self._inputs - 1) * max(sizes, default=0)
        comm = self.comm(self.groups[0][1].mesh_info.shard_process_group)
        return Layout(buffers, dtypes, shards, comm, held, regathers)

    @property
    def _inputs(self) -> int:
        """The number of modules whose gradients may wait for a reduction at once (torch 2.13).

        torch keeps one: then the stream that computes waits with the next module's gradients until those of the one
        before have been sent, which on a slow link takes longer than computing them. A user's larger number stands.
        """
        settable = hasattr(self.groups[0][1], "reduce_scatter_max_input_buffers")
        return 2 if settable and self.worker is None else 1

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def close(self) -> None:
        """Close the worker. The communication objects stay on the model until ``renew``."""
        self.sender.stop()
        for hook in self._hooks:
            hook.remove()
        for replica in self.replicas:
            replica.drop()
        if self.worker is not None:
            self.worker.close()
        self.closed = True
        for comm in self._own_comms:
            comm.release()

    @staticmethod
    def renew(model: Any) -> None:
        """Put back torch's own communication objects for those of a closed engine, and shards for whole weights.

        A forward pass without a backward one, an evaluation say, leaves weights whole; the optimizer has the shards.
        torch takes over what the model was given after ``fully_shard`` in its first forward pass only.
        """
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for _, group in param_groups(model):
            link = group._reduce_scatter_comm
            if isinstance(link, GroupLink) and link.engine.closed:
                link.detach()
            for fsdp_param in [] if getattr(group, "_reset_sharded_params", True) else group.fsdp_params:
                weight = getattr(fsdp_param._module_info.module, fsdp_param._module_info.param_name)
                if isinstance(weight, DTensor):
                    fsdp_param.reset_sharded_param()

    def accumulated(self) -> bool:
        return any(map(has_own_gradient, self.fsdp_params))

    def dropped(self, weights: Sequence[Tensor], *, look: bool, comms: Sequence[Comm] | None = None) -> bool:
        gradients = [weight.grad for weight in weights]
        if not look:
            return all(gradient is None for gradient in gradients)
        return all_zero(gradients, self.comms if comms is None else comms)

    def end_step(self) -> None:
        self.tail, self._between = None, True

    def stepping(self, *, retry: bool = False) -> None:
        if self.tail is not None:
            self.ledger.between("exposed", *self.tail)
            self.tail = None
        self.sender.stop()
        for replica in self.replicas:
            # Changes of the weights before now are not the optimizer's. (On a GPU samples would wait.)
            replica.look(samples=self.worker is not None and not retry)

    def stepped(self) -> None:
        for replica in self.replicas:
            replica.stepped()

    def send_weights(self, step: int) -> None:
        with self.waited():
            self.sender.begin(step)

    def wait_for_weights(self) -> None:
        for replica in self.replicas:
            replica.wait_for_message()

    def weights_changed(self) -> None:
        for replica in self.replicas:
            replica.distrust()


def _reduce_dtype(group: Any, fsdp_param: Any) -> torch.dtype:
    """Return the dtype in which a parameter's gradient is reduced.

    Without ``reduce_dtype`` that is the parameter's own, or its ``grad_dtype``, from torch 2.15 on, and before
    ``param_dtype``.
    """
    policy = policy_of(group)
    default = getattr(fsdp_param, "sharded_grad_dtype", None) or policy.param_dtype or fsdp_param.sharded_param.dtype
    return policy.reduce_dtype or default


def policy_of(group: Any) -> Any:
    """Return a module's MixedPrecisionPolicy, which torch 2.15 keeps with each parameter only."""
    return group.fsdp_params[0].mp_policy


def _reduce_group(group: Any) -> dist.ProcessGroup:
    """Return the group over which torch reduces: that of the gathers, or another of the same ranks (torch 2.13)."""
    info = group.mesh_info
    return getattr(info, "reduce_scatter_process_group", None) or info.shard_process_group


def _shard_only(info: Any) -> Any:
    """Return the mesh info without the replicate dimension."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    sharded_info = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
    if hasattr(info, "reduce_scatter_process_group"):
        sharded_info.reduce_scatter_process_group = info.reduce_scatter_process_group
    return sharded_info
