"""DistributedDataParallel, through its communication hook."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Layout, Piece
from thinwire.core.engine import Divisible, Engine, Meet, Way, all_zero, split_by_node, wants_two_levels
from thinwire.core.exchange import AllReduce, ReduceScatter
from thinwire.core.method import Method, Parameter
from thinwire.core.names import LEFT_OUT, describe
from thinwire.core.road import Road, ScatterAndShare
from thinwire.core.step import ALREADY, ENDED, StepLoop
from thinwire.core.worker import Worker
from thinwire.network.comm import Comm, GroupComm
from thinwire.network.ledger import Ledger

DEFAULT_CAP = 25 * 2**20
"""Bytes of a bucket if the user does not say."""


class CommHook:
    """The state of the hook that DDP calls for each bucket. A model keeps it for good; the next engine takes it over.

    Attributes:
        reduce: the engine's function that reduces a bucket. free: that engine is closed; another may take its place.
        registered: the model's reducer calls it. A copy of a model has a new reducer, without a hook.
    """

    reduce: Callable[[dist.GradBucket], Any]
    free, registered = True, False

    def __reduce__(self) -> tuple[type[CommHook], tuple[()]]:  # what copy.deepcopy and torch.save make of it
        return CommHook, ()

    @staticmethod
    def find(model: DistributedDataParallel) -> CommHook | None:
        return next((state for _, state in model._comm_hooks if isinstance(state, CommHook)), None)


def refuse_bucket(bucket: dist.GradBucket) -> Any:
    raise ThinwireError(ENDED.format(what="gradients were exchanged"))


def thinwire_hook(state, bucket):  # DDP compares annotations with the types themselves, not with their names
    return state.reduce(bucket)


def _kept(flat: Tensor) -> torch.futures.Future[Tensor]:
    """Leave DDP its own gradients, ``flat``, as it would in ``no_sync()``."""
    future = devices.future(flat.device)
    future.set_result(flat)
    return future


def way(model: nn.Module, comm: Divisible, method: Method, two_level: bool | None) -> Way:
    """Make the way of the gradients of ``model``, which DDP wraps, over ``comm``."""
    stock = AllReduce(comm)
    if not wants_two_levels(comm, method, two_level):
        return Way((stock,), describe(model))
    intra, inter = split_by_node(comm)
    parameters = describe(model, chunks=intra.size)
    levels = ScatterAndShare(stock, intra, {parameter.name: parameter.local for parameter in parameters.values()})
    hops = ReduceScatter(intra), AllReduce(inter, divide="after")
    return Way(hops, parameters, levels, (intra.rank, intra.size), [intra, inter])


def buckets(trained: Sequence[Tensor], parameters: Mapping[int, Parameter], cap: int | None) -> Layout:
    """Return DDP's buckets of all steps but the first, if gradients come in reverse order of the ``trained`` ones.

    ``cap``: bytes of a bucket; None: torch's default, which makes the first one smaller.
    """
    order, sizes = list(trained[::-1]), [dist._DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_CAP] if cap is None else [cap]
    buffers, dtypes = [], []
    for indices in dist._compute_bucket_assignment_by_size(order, sizes)[0]:
        members = [parameters[id(order[index])] for index in indices]
        *offsets, _ = itertools.accumulate((member.numel for member in members), initial=0)
        buffers.append(tuple(Piece(m.name, offset, m.numel) for m, offset in zip(members, offsets, strict=True)))
        dtypes.append(members[0].dtype)
    return Layout(buffers, dtypes)


class DDP(Engine):
    """Every bucket of the reducer takes the road on a worker, in bucket order, beside the backward pass.

    With a hook the reducer does not divide; the exchange returns the mean.
    """

    kind = "ddp"
    shows_late = True

    def __init__(
        self, model: DistributedDataParallel, method: Method, ledger: Ledger, *, two_level: bool | None, meet: Meet
    ) -> None:
        self.model = model
        self._check(model, method)
        meet()
        self._check_reducer(model)
        # Our own group: the worker's collectives must not mix with DDP's (buffer broadcasts) on one group.
        comm = GroupComm(model.process_group, ledger, device=next(model.parameters()).device).twin()
        self.comms = [comm]
        self.rank = comm.rank
        self.hops, self.parameters, self.levels, self.chunk, groups = way(model.module, comm, method, two_level)
        self._own_comms = [comm, *groups]  # released when the engine closes
        self.worker = Worker(ledger)
        self._pieces: dict[tuple[int, ...], tuple[Piece, ...]] = {}
        self._shown: dict[str, Tensor] = {}  # gradients of this pass, in DDP's buckets
        self._watches: list[RemovableHandle] = []
        self._late_watches: dict[str, RemovableHandle] = {}  # of gradients that have come after an exchange
        self._dropped = False  # were gradients that this step has exchanged thrown away before another backward pass?
        self._inspected = False  # have the values been searched for zeros?
        self._lacks_buckets = False  # did the last backward pass that exchanged any end before the last bucket?

    @staticmethod
    def process_groups(model: DistributedDataParallel) -> list[dist.ProcessGroup]:
        """Return the user's group of all ranks that train together."""
        return [model.process_group]

    @staticmethod
    def facts(model: DistributedDataParallel) -> dict[str, str]:
        """Describe the settings that must be the same on all ranks, so that their buckets are the same."""
        names = ("bucket_bytes_cap", "find_unused_parameters", "static_graph", "gradient_as_bucket_view")
        return {name: str(getattr(model, name)) for name in names}

    @staticmethod
    def _check(model: DistributedDataParallel, method: Method) -> None:
        hook = CommHook.find(model)
        if hook is not None and not hook.free:
            raise ThinwireError(ALREADY.format(kind="DDP"))
        if model._comm_hooks and hook is None:
            raise ThinwireError("this DDP model already has a communication hook: compress() must be the only one")
        for name, weight in model.module.named_parameters():
            if weight.requires_grad and name in model.parameters_to_ignore:
                raise ThinwireError(LEFT_OUT.format(name=name))
        if model.mixed_precision is not None:
            raise ThinwireError(
                "DDP(mixed_precision=...) uses the communication hook that Thinwire needs: use torch.autocast, or a "
                "bf16 model, instead"
            )
        # torch puts other parameters in the place of DTensors, before and after each forward pass.
        if any(hasattr(parameter, "_st_info") or isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ThinwireError(
                "tensor parallelism under DDP is not supported (gradient norms would cover one part only): use "
                "fully_shard(model, mesh=mesh['dp']), or a ('replicate', 'shard') mesh with one rank to shard over"
            )
        if method.card.keeps_state and model.find_unused_parameters:
            raise ThinwireError(
                f"{method} keeps unsent values, and find_unused_parameters=True would lose those of a parameter that "
                "no rank used: turn that off, or take a method that keeps none, such as int8"
            )
        for name, module in model.module.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ThinwireError(f"{name}: sparse gradients cannot be compressed: use sparse=False")
        if torch._dynamo.config.optimize_ddp == "python_reducer":
            raise ThinwireError(
                "torch._dynamo.config.optimize_ddp='python_reducer' bypasses DDP's buckets: set it to True"
            )

    @staticmethod
    def _check_reducer(model: DistributedDataParallel) -> None:
        """Refuse a model of which parameters were frozen, unfrozen or added after DDP wrapped it, as on all ranks."""
        exchanged = model._get_ddp_logging_data().get("num_parameter_tensors")
        trained = sum(weight.requires_grad for weight in model.module.parameters())
        if exchanged not in (None, trained):
            raise ThinwireError(
                f"{trained} parameters are trained, and DDP exchanges {exchanged}: freeze, unfreeze and add parameters "
                "before DDP wraps the model"
            )

    def attach(self, step_loop: StepLoop, road: Road) -> None:
        def reduce(bucket: dist.GradBucket) -> Any:
            if self.model._join_config.enable:
                raise ThinwireError(
                    "DDP.join() is not supported, because a rank without data cannot take part in an exchange: give "
                    "all ranks the same number of steps (a sampler with drop_last=True)"
                )
            if step_loop.closed or not self.model.require_backward_grad_sync:
                # DDP calls all the same after a forward pass that was begun outside, or had no backward pass.
                return _kept(bucket.buffer())
            flat, pieces = bucket.buffer(), self._map(bucket)
            names = [piece.name for piece in pieces]
            step_loop.enter(names)
            if road.last.method.run.shows_late and road.last.method.card.step_maker is not None:
                for piece, gradient in zip(pieces, bucket.gradients(), strict=True):
                    # Where it is not plain, DDP's own view has the order of memory.
                    self._shown[piece.name] = gradient if piece.form is None else piece.strided(flat)
            is_last = bucket.is_last()
            self._lacks_buckets = not is_last

            def job() -> Tensor:
                with step_loop.exchanging("gradients", names):
                    mean = road.reduce(flat, pieces)
                    if is_last:
                        road.end_pass(self._shown)
                        self._shown.clear()
                return mean

            if is_last:
                # Before DDP's own callback, which would hide an error in the future behind "not a tensor".
                torch.autograd.Variable._execution_engine.queue_callback(self.worker.drain)
            return self.worker.submit(job, flat.device, last=is_last)

        hook = CommHook.find(self.model) or CommHook()
        if not hook.registered:
            self.model.register_comm_hook(hook, thinwire_hook)
        hook.reduce, hook.free, hook.registered = reduce, False, True
        # Watch each gradient: when a second backward pass calls the hook, autograd has already added the new gradients
        # to the earlier ones or replaced them, so the hook cannot see whether those were dropped.
        self._watches = [weight.register_hook(partial(self._watch, step_loop, weight)) for weight in self._trained()]

    def _watch(self, step_loop: StepLoop, weight: Tensor, gradient: Tensor) -> None:
        """Find out, when a gradient of ``weight`` comes, whether those of an earlier backward pass were dropped."""
        name = self.parameters[id(weight)].name
        if not step_loop.seen(name):
            return
        if name not in self._late_watches:
            # torch exchanges one backward pass for each forward pass: a second one adds this rank's gradient to the
            # mean. torch.autograd.grad adds nothing, and comes to the present hook all the same. Most programs never
            # get here, so they pay for no second hook.
            note = step_loop.note_gradient
            self._late_watches[name] = weight.register_post_accumulate_grad_hook(lambda _: note(name))
        if self._dropped:
            return
        if weight.grad is None:
            self._dropped = all(weight.grad is None for weight in step_loop.exchanged())
        elif not self._inspected:  # once, because it waits for the device
            self._inspected = True
            self._dropped = all_zero(weight.grad for weight in step_loop.exchanged())

    def _trained(self) -> list[Tensor]:
        return [weight for weight in self._all_parameters if id(weight) in self.parameters]

    def cut_short(self) -> bool:
        # Buckets leave in order: none follows one that lacks a gradient. torch says so in the next forward pass only.
        return self._lacks_buckets

    def missing(self) -> str | None:
        return next((self.parameters[id(weight)].name for weight in self._trained() if weight.grad is None), None)

    def dropped(self, weights: Sequence[Tensor], *, look: bool, comms: Sequence[Comm] | None = None) -> bool:
        dropped = self._dropped
        self.end_step()
        return dropped

    def end_step(self) -> None:
        self._dropped = self._inspected = False

    def _map(self, bucket: dist.GradBucket) -> tuple[Piece, ...]:
        """Locate each parameter in the bucket's buffer, and check new buckets against the buffer's own views."""
        key = tuple(id(parameter) for parameter in bucket.parameters())
        if key not in self._pieces:
            flat, pieces, offset = bucket.buffer(), [], 0
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                described = self.parameters.get(id(parameter))
                elsewhere = gradient.data_ptr() != flat.data_ptr() + offset * flat.element_size()
                if described is None or (elsewhere and gradient.numel()):
                    raise ThinwireError("DDP's bucket has another layout than in torch 2.11 to 2.15: use one of these")
                pieces.append(Piece(described.name, offset, parameter.numel(), form=_form(parameter)))
                if pieces[-1].form is not None and parameter.grad is not None:
                    laid_out, gradient = pieces[-1].strided(flat), parameter.grad
                    if not torch.equal(laid_out.nan_to_num(), gradient.to(flat.dtype).nan_to_num()):
                        raise ThinwireError(
                            f"DDP stores {described.name} in a layout that Thinwire does not know: make the parameter "
                            "contiguous before you wrap the model"
                        )
                offset += parameter.numel()
            if offset != flat.numel():
                raise ThinwireError(f"DDP's bucket has {flat.numel()} values, its parameters {offset}")
            self._pieces[key] = tuple(pieces)
        return self._pieces[key]

    def layout(self) -> Layout:
        """Return the buckets of all steps but the first, if gradients come in reverse order of the parameters."""
        default = getattr(self.model, "bucket_bytes_cap_default", False)
        return buckets(self._trained(), self.parameters, None if default else self.model.bucket_bytes_cap)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()

    def close(self) -> None:
        for watch in (*self._watches, *self._late_watches.values()):
            watch.remove()
        self._shown.clear()
        self.worker.close()
        if (hook := CommHook.find(self.model)) is not None:
            hook.reduce, hook.free = refuse_bucket, True  # DDP holds it beyond Python's sight: a circle would stay
        for comm in self._own_comms:
            comm.release()


def _form(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape and strides of a gradient in DDP's bucket if they are not plain: those of a dense parameter."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return None if parameter.is_contiguous() or not dense else (tuple(parameter.shape), parameter.stride())
