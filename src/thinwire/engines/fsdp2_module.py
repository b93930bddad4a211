"""The objects that torch calls for each FSDP2 module in place of its own reduce-scatter and all-reduce."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Piece, Shard
from thinwire.core.engine import Engine
from thinwire.core.method import Method
from thinwire.core.names import REPLACED, clean_name
from thinwire.core.road import Road, Stage, shard_of
from thinwire.core.step import StepLoop
from thinwire.core.weights import EarlySender, Replica, agree
from thinwire.core.worker import Worker
from thinwire.network.comm import GroupComm
from thinwire.network.ledger import Ledger


def has_own_gradient(fsdp_param: Any) -> bool:
    """Tell whether this rank has a gradient of the whole parameter that is not reduced yet."""
    return hasattr(fsdp_param, "_unsharded_param") and (
        fsdp_param.unsharded_accumulated_grad is not None or fsdp_param._unsharded_param.grad is not None
    )


def columns(widths: Mapping[str, int], ranks: int) -> tuple[Piece, ...]:
    """Lay parameters with shards of these ``widths`` side by side in a flat buffer (ranks, n)."""
    *offsets, total = itertools.accumulate(widths.values(), initial=0)
    return tuple(
        Piece(name, offset, width * ranks, ranks, total)
        for (name, width), offset in zip(widths.items(), offsets, strict=True)
    )


class ShardedEngine(Engine):
    """The part of ``FSDP2`` that the links between its modules and the road use.

    Attributes:
        groups: every FSDP module with its parameter group. fsdp_params: torch's parameter objects of all groups.
        links: one for each group, once attached.
        ranks: the number of ranks that average gradients. reduce_group: the group of torch's reduce-scatter.
        flags: the group in which ranks agree on changes of the weights.
        worker: runs exchanges beside the backward pass on devices without streams.
        tail: two events of the last reduction: gradients complete, means complete.
    """

    ranks: int
    reduce_group: dist.ProcessGroup
    flags: GroupComm
    worker: Worker | None

    def __init__(self, model: Any, method: Method, ledger: Ledger, groups: list[tuple[FSDPModule, Any]]) -> None:
        self.model, self.method, self.ledger, self.groups = model, method, ledger, groups
        self.fsdp_params = [fsdp_param for _, group in groups for fsdp_param in group.fsdp_params]
        self.links: list[GroupLink] = []
        self.sender = EarlySender()
        self.tail: tuple[Any, Any] | None = None
        self.closed = False
        self.names = {id(weight): clean_name(name) for name, weight in model.named_parameters()}
        self._comms: dict[int, GroupComm] = {}
        self._hooks: list[Any] = []  # on the model
        self._mode: tuple[bool, bool] | None = None  # the last forward pass: training? recording gradients?
        self._recorded: bool | None = None  # the model's forward pass, which is under way, records gradients
        self._asked: set[int] = set()  # links whose modules have asked for their weights in that pass
        self._between = True  # no forward pass has begun since the last step was over
        self.accumulates = False  # the last backward pass has exchanged nothing: more micro-batches follow
        self._refusal: str | None = None  # why weights forbid this step

    @property
    def replicas(self) -> list[Replica]:
        """The replicas of weights that the method encodes."""
        return [link.replica for link in self.links if link.replica is not None]

    def comm(self, group: dist.ProcessGroup) -> GroupComm:
        """Return the communicator of one of the engine's groups, always the same one."""
        if id(group) not in self._comms:
            device = next(self.model.parameters()).device
            self._comms[id(group)] = GroupComm(group, self.ledger, device=device)
        return self._comms[id(group)]

    def drain(self) -> None:
        """Wait for the exchanges beside the backward pass. Raise the errors that they have raised."""
        if self.worker is not None:
            with self.waited():
                self.worker.drain()

    @property
    def records(self) -> bool:
        """Does the model's forward pass record gradients? Inside a reentrant checkpoint that is off."""
        return torch.is_grad_enabled() if self._recorded is None else self._recorded

    @torch._disable_dynamo
    def enter_model(self) -> None:
        """Note how the model's forward pass begins."""
        self._recorded = torch.is_grad_enabled()

    @torch._disable_dynamo
    def leave_model(self) -> None:
        """Note that the model's forward pass is over, or has raised; what it was sent is the step's if it trains."""
        if self.model.training or self.records:
            self.ledger.current.passing.clear()
        self._recorded = None

    def begin_forward(self, link: GroupLink) -> None:
        """Note that a module is about to gather its weights before a backward pass. Collective where a pass begins.

        There ranks agree on whether the weights of any have changed, before each gathers or reads a message: as one may
        write into its shard alone. They do in a step's first pass, and again where gradients were exchanged since: the
        micro-batches between need not be as many on each rank. What is written between these, the gather misses.

        Some classes also write averaged weights for an evaluation through ``.data``, which torch does not count: that
        is looked for before every forward pass that records no gradients, and before training goes on after it. All
        ranks must evaluate together.
        """
        if not self.method.card.encodes_weights:
            return
        # As the step says, and the gather is the first exchange after a load.
        link.step_loop.compare_start(gathers=not self.records)
        if torch._C._current_graph_task_id() != -1:  # a pass made anew in the backward pass
            return
        mode = bool(self.model.training), self.records
        turns = self._mode is not None and mode != self._mode
        alone = link.group._training_state.name == "IDLE"  # the user's unshard(): the pass itself is still to begin
        again = id(link) in self._asked and not (self.accumulates and all(mode))
        if turns or again or alone or self._between:
            if self.replicas:
                self._agree(link, training=all(mode) and not turns)
            if alone:
                return
            self._asked.clear()
        self._mode, self._between = mode, False
        self._asked.add(id(link))

    def _agree(self, link: GroupLink, *, training: bool) -> None:
        self.drain()  # after a backward pass that raised, the worker may still talk in the same group
        names = map(link.name, link.group.fsdp_params)
        streams = devices.streams(link.device)
        stream = getattr(link.group.comm_ctx, "all_gather_stream", None)  # None before the root's first pass
        beside = nullcontext() if streams is None or stream is None else streams.stream(stream)
        # Its bytes, 8 for each module, are no step's, as an evaluation may have asked.
        with self.waited(), link.step_loop.exchanging("weights", names), self.ledger.aside(), beside:
            refusal = agree(self.replicas, self.flags, training=training)
        self._refusal = self._refusal or refusal

    def note_missed(self, replica: Replica) -> None:
        """Note that a gather, which is over, has missed a change: the others compute with the former weights."""
        if replica.missed:
            self._refusal = self._refusal or _MISSED.format(name=replica.shard.names[0])

    def missed(self) -> str | None:
        """Explain why a change of the weights since the last call forbids a step."""
        refusal, self._refusal = self._refusal, None
        return refusal

    @contextmanager
    def waited(self) -> Iterator[None]:
        """Count the time of the body as exposed, unless a device does the work."""
        began = time.perf_counter()
        yield
        if devices.streams(self.groups[0][1].device) is None:
            self.ledger.add("exposed", time.perf_counter() - began)


_MISSED = (
    "{name}, or a weight of the same module, was written on some ranks alone, after a micro-batch that exchanged "
    "nothing (also one that was dropped), or inside a forward or backward pass, so other ranks have computed with its "
    "former value: write between two steps on all ranks, or call wire.weights_changed() on all ranks after it"
)
_WRAPPED = ("unshard", "wait_for_unshard", "post_backward")
"""The functions of torch's parameter group that a link wraps."""
_REPLACED = (
    "_reduce_scatter_comm", "_all_gather_comm", "_all_reduce_hook", "mesh_info", "post_forward_mesh_info",
    "reduce_scatter_max_input_buffers",
)  # fmt: skip
"""The attributes of torch's parameter group that are replaced until the link is detached."""


class GroupLink:
    """The link between one FSDP parameter group and the road: the callable in place of torch's own reduce-scatter.

    torch runs it on its own stream, beside the backward pass. On a CPU, which has no streams, a worker runs it as on
    DDP, and torch makes views of an output that is not written yet. One module is exchanged at a time, as in torch.
    """

    def __init__(self, engine: ShardedEngine, group: Any, step_loop: StepLoop, road: Road) -> None:
        self.engine, self.group, self.step_loop, self.road = engine, group, step_loop, road
        self.replica: Replica | None = None
        self._stock = {name: getattr(group, name) for name in _REPLACED if hasattr(group, name)}
        self._active: list[Any] = []
        self._ranks = engine.reduce_group.size()
        self._expected: list[Tensor] | None = None
        self.device: torch.device = group.device
        self.gathered: Any = None  # an event: the last gather of the weights is over
        self.copied: Any = None  # an event: FSDP2 has copied the gathered weights
        self._computed: Any = None  # an event: the gradients of the next reduction are complete
        self._key: tuple[int, ...] = ()  # ids of the active parameters
        self._pieces: dict[tuple[int, ...], tuple[Piece, ...]] = {}
        for name in _WRAPPED:
            setattr(group, name, functools.partial(getattr(self, name), getattr(group, name)))

    def unshard(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Note that a forward pass asks for the module's weights, before torch's ``original`` gathers them."""
        gathers = self.group.is_sharded and getattr(self.group, "_all_gather_result", None) is None
        if gathers and self.group._training_state.name in ("FORWARD", "IDLE"):  # IDLE: the user's unshard()
            self.engine.begin_forward(self)
        with self._counting():
            return original(*arguments, **options)

    def _counting(self) -> AbstractContextManager[None]:
        """Count nothing inside if the model is being evaluated: its bytes are no step's."""
        trains = self.engine.model.training or self.engine.records or self.group._training_state.name != "FORWARD"
        return nullcontext() if trains else self.engine.ledger.evaluation()

    def wait_for_unshard(self, original: Callable[[], None]) -> None:
        """Note when, on a GPU, the computing stream reaches the point where it needs the weights."""
        with self._counting():
            if self.gathered is not None:
                self.engine.ledger.between("exposed", devices.mark(self.device), self.gathered)
                self.gathered = None
            original()
        self.copied = devices.mark(self.device)
        with self.engine.waited():  # this module has its weights, so the weights of others may leave
            self.engine.sender.go_on()

    def post_backward(self, original: Callable[..., Any], *arguments: Any) -> Any:
        """Find out here, where torch decides it, which parameters have a gradient and so are in the next reduction."""
        self._computed = devices.mark(self.device)
        self.engine.accumulates = not self.group.reduce_grads
        self.engine.ledger.current.passing.clear()  # what was sent for these passes stays this step's
        zeros = getattr(self.group, "reduce_scatter_unused_params", False)
        self._active = [
            fsdp_param
            for fsdp_param in self.in_order()
            if has_own_gradient(fsdp_param)
            or (zeros and hasattr(fsdp_param, "_unsharded_param") and fsdp_param._unsharded_param.requires_grad)
        ]
        self._key = tuple(map(id, self._active))
        # Read when first seen only: under tensor parallelism, reading may cost an all-reduce.
        is_known = self._key in self._pieces
        self._expected = None if is_known else [self._gradient(fsdp_param) for fsdp_param in self._active]
        return original(*arguments)

    def detach(self) -> None:
        """Put torch's own communication back in place."""
        for name in _WRAPPED:
            delattr(self.group, name)  # the class's own functions apply again
        for name, value in self._stock.items():
            setattr(self.group, name, value)

    def keep_inputs(self, count: int) -> None:
        """Let torch keep the gradients of up to ``count`` modules that wait for their reduction, or more if it does."""
        for holder in (self.group, self.group.comm_ctx):  # the second follows the first in the first forward pass only
            held = getattr(holder, "reduce_scatter_max_input_buffers", 1)
            holder.reduce_scatter_max_input_buffers = max(held, count)

    def in_order(self) -> list[Any]:
        """Return the parameters in the order in which the reduction packs them.

        torch 2.15 sorts them by the dtype of their gradients in the first forward pass, which keeps the order of the
        trained ones, because these have one dtype.
        """
        order = getattr(self.group, "_reduce_scatter_param_indices", ()) or range(len(self.group.fsdp_params))
        return [self.group.fsdp_params[index] for index in order]

    @property
    def divisor(self) -> float | None:
        """The user's divisor of the sum over ranks (``set_gradient_divide_factor``); None: the number of ranks."""
        return getattr(self.group, "gradient_divide_factor", None)

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.engine.drain()
        return torch.empty(*size, dtype=dtype, device=device)  # not reused, because the output becomes ``.grad``

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False) -> None:
        engine = self.engine
        if self.divisor is None and op != dist.ReduceOp.AVG:
            raise ThinwireError(
                f"FSDP2 asks for {op}, but Thinwire returns the mean: set reduce_dtype=torch.float32, and leave "
                "set_force_sum_reduction_for_comms() off"
            )
        if group is not engine.reduce_group:
            raise ThinwireError(
                f"FSDP2 reduces gradients over another group ({group.size()} ranks) than when compress() was called "
                f"({engine.reduce_group.size()} ranks): call set_separate_reduce_scatter_group() before compress()"
            )
        pieces = self.verify(input_tensor)
        if self.divisor is not None:  # sum / divisor = mean of values scaled by ranks / divisor
            input_tensor.mul_(engine.ranks / self.divisor)
        self.step_loop.enter([piece.name for piece in pieces])
        road = self.road.stages[0] if engine.kind == "hsdp" else self.road
        self.exchange(pieces, lambda: road.reduce(input_tensor, pieces, output_tensor), output_tensor)

    def exchange(self, pieces: Sequence[Piece], reduce: Callable[[], object], mean: Tensor) -> None:
        """Reduce the gradients of ``pieces`` to their ``mean``, now or, on a CPU, beside the backward pass."""

        def job() -> Tensor:
            with self.step_loop.exchanging("gradients", (piece.name for piece in pieces)):
                reduce()
            return mean

        worker = self.engine.worker
        if worker is None:
            job()
            self.engine.tail = self._computed, devices.mark(self.device)  # the last reduction's remain
            return
        worker.submit(job, mean.device, last=False)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self._only_views(mean):
            torch.autograd.Variable._execution_engine.queue_callback(self.engine.drain)  # at its end
        else:
            self.engine.drain()

    def _only_views(self, mean: Tensor) -> bool:
        """Tell whether torch only makes views of ``mean`` now and reads none of its values."""
        return self.divisor is None and all(
            weight.grad is None and weight.dtype == mean.dtype and not weight._post_accumulate_grad_hooks
            for weight in (fsdp_param.sharded_param for fsdp_param in self._active)
        )

    @staticmethod
    def _gradient(fsdp_param: Any) -> Tensor:
        """Return this rank's gradient before the reduction; a 0-dim tensor if there is none."""
        accumulates = hasattr(type(fsdp_param), "unsharded_accumulated_grad_data")  # until torch 2.14; later in .grad
        if accumulates and fsdp_param.unsharded_accumulated_grad is not None:
            return fsdp_param.unsharded_accumulated_grad_data
        if fsdp_param._unsharded_param.grad is not None:
            return fsdp_param.unsharded_grad_data
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The place of each active parameter in the flat input: columns of (ranks, n)."""
        if self._key not in self._pieces:
            self._pieces[self._key] = self.pieces_of(self._active)
        return self._pieces[self._key]

    def pieces_of(self, fsdp_params: list[Any]) -> tuple[Piece, ...]:
        """Locate each of ``fsdp_params`` in a flat input (ranks, n) of these."""
        return columns(
            {self.name(param): math.prod(param.padded_sharded_param_size) for param in fsdp_params}, self._ranks
        )

    def version(self) -> int:
        """Return a number that rises with each change of this rank's shards that torch counts (not by ``.data``)."""
        shards = [fsdp_param.sharded_param for fsdp_param in self.group.fsdp_params]
        return sum(shard._version + cast(Any, shard)._local_tensor._version for shard in shards)

    def shards(self) -> list[Tensor]:
        return [cast(Any, fsdp_param.sharded_param)._local_tensor for fsdp_param in self.group.fsdp_params]

    def shard(self, dtype: torch.dtype) -> Shard:
        """Locate each parameter in this rank's shard, gathered in ``dtype``."""
        trained, frozen, fsdp_params = [], [], self.group.fsdp_params
        pieces = shard_of(self.pieces_of(fsdp_params))
        for piece, fsdp_param in zip(pieces, fsdp_params, strict=True):
            if id(fsdp_param.sharded_param) in self.engine.parameters:
                trained.append(piece)
            elif fsdp_param.sharded_param.requires_grad:
                raise ThinwireError(f"{piece.name} was frozen when compress() was called: unfreeze it before")
            else:
                frozen.append(piece)
        return Shard(tuple(trained), tuple(frozen), sum(piece.numel for piece in pieces), dtype)

    def name(self, fsdp_param: Any) -> str:
        """Return the parameter's name in the user's model."""
        name = self.engine.names.get(id(fsdp_param.sharded_param))
        if name is None:  # torch has no name either for what was replaced before the first forward pass
            owner, last = fsdp_param._module_info.module, fsdp_param._module_info.param_name
            prefix = next(prefix for prefix, module in self.engine.model.named_modules() if module is owner)
            name = clean_name(f"{prefix}.{last}").removeprefix(".")
            if fsdp_param.sharded_param.requires_grad:
                raise ThinwireError(REPLACED.format(name=name))
        return name

    def verify(self, flat: Tensor, divisor: float = 1.0) -> tuple[Piece, ...]:
        """Return the pieces of ``flat``. For a set of parameters that is new, check where the values lie.

        ``divisor``: ``flat`` holds the gradients divided by it.
        """
        expected, self._expected = self._expected, None
        pieces, ranks = self.pieces, self._ranks
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
            divided = gradient.reshape(-1).to(flat.dtype) / divisor
            if not torch.equal(block.nan_to_num(), divided.nan_to_num()):
                raise ThinwireError(f"FSDP2 stores {piece.name} in a layout that Thinwire does not know")
        return pieces

    def all_reduce_hook(self, stage: Stage):
        """Make the hook that averages this rank's shard across nodes, after the reduce-scatter inside the node."""

        def hook(shard: Tensor) -> None:
            if not self.group.all_reduce_grads:  # torch asks for it only where it sums across nodes by itself
                raise ThinwireError(
                    "set_requires_all_reduce(False) would have no effect, as Thinwire sums across nodes: put "
                    "wire.accumulate(last=...) around each micro-batch"
                )
            devices.keep(shard)  # torch before 2.15 releases the buffer while this stream still reads it
            inter = shard_of(self.pieces)
            if self._ranks == 1:  # torch skips the reduce-scatter if one rank has the whole shard
                self.verify(shard, self.divisor or 1.0)  # by which torch has already divided
                if self.divisor is not None:
                    shard.mul_(self.engine.ranks)
                self.step_loop.enter([piece.name for piece in inter])
            self.exchange(inter, lambda: stage.reduce(shard, inter, shard), shard)

        return hook
