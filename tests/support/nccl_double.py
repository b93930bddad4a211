"""A stand-in for NCCL on a machine without a GPU: gloo underneath, as strict as NCCL, and every call is remembered.

    import nccl_double                       # knows the backend "strict" from now on
    torch.distributed.init_process_group("strict")
    ...                                                   # some steps of any training
    everybody = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, nccl_double.calls())
    nccl_double.check(everybody)

What NCCL lacks is refused where it is asked for: reductions of bits, dtypes, tensors that are not contiguous or not on
the group's device (here the CPU plays that part), buffers that overlap. :func:`check` then compares what the ranks
called: each group must have had the same calls on all of its ranks, and no two groups may be able to wait for each
other. A GPU runs the collectives of all streams in some order of its own, but each blocks until its peers have come: so
all ranks that share two groups have to call them in one order.

:func:`as_on_cuda` lets engines take the way that they take on CUDA: no worker, no group for it, one order of calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError

NAME = "strict"
DTYPES = frozenset({
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
})  # fmt: skip
"""Dtypes that NCCL carries."""
SUMMED = DTYPES - {torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}
"""Dtypes that NCCL reduces on every GPU."""
_REDUCTIONS = (
    (dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean"), (dist.ReduceOp.MAX, "max"), (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "product"),
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A collective, as one rank called it.

    Attributes:
        group: torch's name of the group, the same on all of its ranks. ranks: of the job, that belong to it.
        verb: "allreduce", ... dtype, numel: of what this rank hands in. options: the reduction, and the root, if any.
    """

    group: str
    ranks: tuple[int, ...]
    verb: str
    dtype: str
    numel: int
    options: str

    def __str__(self) -> str:
        return " ".join(filter(None, [self.verb, self.options, f"of {self.numel} {self.dtype}"]))


_calls: list[Call] = []
_lock = threading.Lock()


def calls() -> list[Call]:
    """Return the collectives of this process since the last :func:`forget`, in order, whatever the thread."""
    with _lock:
        return list(_calls)


def forget() -> None:
    """Start the record of :func:`calls` anew."""
    with _lock:
        _calls.clear()


def check(by_rank: Sequence[Sequence[Call]]) -> None:
    """Refuse calls on which NCCL would hang. ``by_rank``: the :func:`calls` of each rank of the job, in rank order.

    Raises:
        ThinwireError: a group's ranks called different things; or two groups can wait for each other.
    """
    by_group: dict[str, dict[int, list[Call]]] = {}
    for rank, rank_calls in enumerate(by_rank):
        for call in rank_calls:
            by_group.setdefault(call.group, {member: [] for member in call.ranks})[rank].append(call)
    for name, group_calls in by_group.items():
        _compare(name, group_calls)
    _order(by_rank)


def _compare(group: str, calls_by_rank: dict[int, list[Call]]) -> None:
    first, *peers = calls_by_rank
    for rank in peers:
        pairs = zip_longest(calls_by_rank[first], calls_by_rank[rank], fillvalue="nothing")
        for index, (expected, call) in enumerate(pairs):
            if expected != call:
                raise ThinwireError(
                    f"call {index} of group {group} is {expected} on rank {first}, and {call} on rank {rank}: they "
                    "would wait for each other for ever"
                )


def _order(by_rank: Sequence[Sequence[Call]]) -> None:
    """Refuse calls of which no one order is kept by every rank."""
    predecessors: dict[tuple[str, int], set[tuple[str, int]]] = {}
    call_of: dict[tuple[str, int], Call] = {}
    for rank_calls in by_rank:
        count: dict[str, int] = {}
        last = None
        for call in rank_calls:
            node = call.group, count.get(call.group, 0)
            count[call.group] = node[1] + 1
            call_of[node] = call
            predecessors.setdefault(node, set()).update([] if last is None else [last])
            last = node
    try:
        TopologicalSorter(predecessors).prepare()
    except CycleError as error:
        circle = "; ".join(f"call {node[1]} of group {node[0]}, {call_of[node]}" for node in error.args[1][:-1])
        raise ThinwireError(
            f"groups can wait for each other, because their ranks call them in different orders: {circle}"
        ) from None


class OverGloo(dist.ProcessGroup):
    """A process group with one of gloo's inside (``_inner``), for CPU tensors. ``NAME``: of the backend."""

    NAME: ClassVar[str]

    def __init__(self, options: Any) -> None:
        """``options``: what torch tells the maker of a backend."""
        store, rank, size = options.store, options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch declares another one
        self._inner = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        gloo._set_sequence_number_for_group()
        self._inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def getBackendName(self) -> str:
        return self.NAME

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]


class StrictGroup(OverGloo):
    """A process group of gloo's that refuses what NCCL's would, and writes down its collectives."""

    NAME = NAME

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._device = torch.device("cpu")

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        self._refuse("send", tensors, DTYPES)
        return self._inner.send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        self._refuse("recv", tensors, DTYPES)
        return self._inner.recv(tensors, rank, tag)

    def _collective(self, verb: str, arguments: tuple[Any, ...]) -> None:
        """Refuse, or write down, a call of ``verb``."""
        tensors, options = list(tensors_in(arguments)), cast(Any, arguments[-1] if arguments else None)
        op = getattr(options, "reduceOp", None)
        reduction = next((name for reduce_op, name in _REDUCTIONS if op == reduce_op), "")
        if op is not None and not reduction:
            raise ThinwireError(f"{verb}: NCCL reduces by sum, mean, max, min and product, not by {op.op}")
        self._refuse(verb, tensors, SUMMED if reduction else DTYPES)
        root = f"root {options.rootRank}" if hasattr(options, "rootRank") else ""
        sent = tensors[-1] if tensors else torch.empty(0)
        dtype, reduction = str(sent.dtype).removeprefix("torch."), " ".join(filter(None, [reduction, root]))
        call = Call(self.group_name, self._ranks, verb, dtype, sent.numel(), reduction)
        with _lock:
            _calls.append(call)

    def _refuse(self, verb: str, tensors: Sequence[Tensor], dtypes: frozenset[torch.dtype]) -> None:
        for tensor in tensors:
            if tensor.dtype not in dtypes:
                raise ThinwireError(f"{verb}: NCCL does not {'carry' if dtypes is DTYPES else 'reduce'} {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ThinwireError(f"{verb}: NCCL takes contiguous tensors, got strides {tensor.stride()}")
            if tensor.device.type != self._device.type or tensor.layout != torch.strided:
                raise ThinwireError(f"{verb}: a {tensor.layout} tensor on {tensor.device} in a group on {self._device}")
        for i, first in enumerate(tensors):
            for second in tensors[i + 1 :]:
                if _overlap(first, second) and not self._is_own_row(first, second):
                    raise ThinwireError(f"{verb}: what is read overlaps what is written")

    def _is_own_row(self, whole: Tensor, row: Tensor) -> bool:
        """Tell whether ``row`` is that of a gather or scatter in place, which NCCL has."""
        if whole.numel() == row.numel():
            return whole.data_ptr() == row.data_ptr() and self.size() == 1
        if whole.numel() < row.numel():
            whole, row = row, whole
        return whole.numel() == self.size() * row.numel() and row.data_ptr() == whole.data_ptr() + (
            self.rank() * row.nbytes
        )


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_in(argument)


def _overlap(first: Tensor, second: Tensor) -> bool:
    start, second_start = first.data_ptr(), second.data_ptr()
    apart = start >= second_start + second.nbytes or second_start >= start + first.nbytes
    return not apart and min(first.numel(), second.numel()) > 0


def _verb(name: str) -> Callable[..., Any]:
    def call(self: StrictGroup, *arguments: Any, **options: Any) -> Any:
        arguments = (*arguments, *options.values())
        self._collective(name, arguments)
        return getattr(self._inner, name)(*arguments)

    return call


VERBS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "gather", "scatter",
    "reduce_scatter", "alltoall", "barrier", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall_base", "all_to_all_single",
)  # fmt: skip
"""A group's collectives; torch 2.13 calls some of them by other names."""

for _name in VERBS:
    setattr(StrictGroup, _name, _verb(_name))

dist.Backend.register_backend(NAME, lambda options, _: StrictGroup(options), extended_api=True, devices=["cpu"])


class _Stream:
    """A stream that is always over: the CPU's operations are when they return."""

    def __init__(self, device: object = None, priority: int = 0) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


class _Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


def as_on_cuda() -> Any:
    """Patch ``thinwire.base.device``, as a context: a CPU has streams, each of which is always over."""
    one = _Stream()
    here = SimpleNamespace(
        Stream=_Stream, Event=_Event, current_stream=lambda device=None: one, stream=lambda stream: nullcontext(),
        synchronize=lambda device=None: None, is_current_stream_capturing=lambda: False,
    )  # fmt: skip
    return mock.patch.multiple(
        devices, streams=lambda device: here if device.type == "cpu" else None, keep=lambda tensor: None,
        host_memory=lambda shape, device, dtype=torch.float32: torch.zeros(tuple(shape), dtype=dtype),
        future=lambda device: torch.futures.Future(),
    )  # fmt: skip
