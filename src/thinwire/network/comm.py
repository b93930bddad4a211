"""The only access to the network: nothing else in Thinwire names a ``torch.distributed`` collective.

A :class:`Comm` is a group of ranks with a handful of verbs. Each verb counts the bytes that this rank hands to the
network, by link. Doubles with the same verbs stand in for the network: ranks as threads in :mod:`thinwire.proof.ranks`,
a counter without data for predictions.

Legend for the whole library: N ranks, L ranks per node, n elements per row, m elements of a row's wire.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.base.errors import DamagedMessage, LostRank
from thinwire.network.checksum import seal, unseal
from thinwire.network.ledger import Ledger

Work = dist.Work
"""A collective under way; ``wait()`` completes it."""

# torch 2.13 renamed the two and warns at the old names; 2.11 and 2.12 know only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class Membership(NamedTuple):
    """The ranks that take part: this is ``rank``; rank r is on node ``nodes[r]``, in the replica ``names[r]``. A later
    membership has a larger ``number``, the same on all ranks; a process that starts again has another name.

    ``spares`` further ranks contribute nothing, and hear what one of those that take part receives (spare j: rank
    j % N), so that they hold what all hold alike. spare: this rank's number among them, and ``rank`` is whom it hears.
    late: the ranks that were behind, and have taken over the state of another since the last step that counted.
    """

    rank: int
    nodes: tuple[int, ...]
    number: int = 0
    names: tuple[str, ...] = ()
    spares: int = 0
    spare: int | None = None
    late: tuple[int, ...] = ()


class Comm(ABC):
    """A group of ranks: this is ``rank`` of ``size``; rank r is ``ranks[r]`` in the job, and on node ``nodes[r]``.

    All ranks call the same verbs in the same order, which never depends on data or on the rank. Who takes part is the
    value ``membership``, which changes only through ``take``, between two steps, where replicas come and go.
    """

    def __init__(self, rank: int, nodes: Sequence[int], ledger: Ledger) -> None:
        self.ledger = ledger
        self.take(Membership(rank, tuple(nodes)))

    def take(self, membership: Membership) -> None:
        """Go on as ``membership`` says; nothing may be under way."""
        self.membership, self.rank, self.nodes = membership, membership.rank, membership.nodes
        self.size = len(self.nodes)
        self.ranks: Sequence[int] = range(self.size)
        self.one_node = len(set(self.nodes)) == 1
        self._peers = Counter(self.link(peer) for peer in range(self.size) if peer != self.rank)

    checksums = False
    """Append a checksum to every row that one rank sends another (:mod:`thinwire.network.checksum`)."""
    reduce_scatter_is_all_reduce = False
    """True where the backend's reduce-scatter moves as many bytes as an all-reduce (gloo's does)."""

    elastic = False
    """Do ranks come and go?"""
    heard: list[Tensor | None] | None = None
    """A list to which all that every rank receives alike is added: sums over all ranks, and gathered rows."""
    alike = 0
    """The bytes of all that every rank has received alike."""
    played: Iterator[Tensor | None] | None = None
    """All that another rank has ``heard``, to be received again without the network. In place of messages to one rank
    comes what this rank would send to itself."""

    def twin(self) -> Comm:
        """Make another group of the same ranks, which another thread may use beside this one; itself: there is none."""
        return self

    def release(self) -> None:  # noqa: B027 (where there is nothing to give back)
        """Give a group from ``twin`` back; the next call returns it again."""

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Wrap an exchange that travels while the rank computes on, where one thread plays both."""
        yield

    def link(self, peer: int) -> str:
        """Name the link from this rank to ``peer``."""
        return "intra" if self.nodes[peer] == self.nodes[self.rank] else "inter"

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` over all ranks, in place; ``op`` is "sum", "mean" or "max"."""
        if self.played is not None:
            return self._play("all-reduce", tensor)
        if self.size > 1:
            self._count_ring("all_reduce", tensor.nbytes)
            with self.ledger.span("wire", tensor):
                self._all_reduce(tensor, op)
        self._hear(tensor)
        return tensor

    def reduce_scatter(self, out: Tensor, rows: Tensor, op: str = "sum") -> Tensor:
        """Reduce all ranks' ``rows`` (N, n), and write row ``rank`` of the result to ``out`` (n,)."""
        if self.played is not None:
            return out.copy_(rows.view(self.size, -1)[self.rank].view_as(out))
        if self.size == 1:
            return out.copy_(rows.view_as(out))
        self._count_ring("reduce_scatter", rows.nbytes)
        with self.ledger.span("wire", rows):
            self._reduce_scatter(out, rows, op)
        return out

    def all_gather(self, out: Tensor, row: Tensor, *, async_op: bool = False) -> Work | None:
        """Gather all ranks' ``row`` (m,) into ``out`` (N, m), in rank order. With ``async_op``, return the work."""
        if self.played is not None:
            self._play("all-gather", out)
            return None
        if self.size == 1:
            if out.data_ptr() != row.data_ptr():
                out.copy_(row.view_as(out))
            self._hear(out)
            return None
        message = seal(row.reshape(1, -1))[0] if self.checksums else row
        received = message.new_empty((self.size, len(message))) if self.checksums else out
        self._count_peers("all_gather", message.nbytes)
        with nullcontext() if async_op else self.ledger.span("wire", row):
            work = self._all_gather(received, message, async_op=async_op)
        if work is not None and self.checksums:
            work = ChainedWork(work, lambda: self._unseal(received, out, "all-gather"))
        elif self.checksums:
            self._unseal(received, out, "all-gather")
        return self._hear(out, work)

    def all_to_all(self, out: Tensor, rows: Tensor) -> Tensor:
        """Fill row r of ``out`` (N, m) with row ``rank`` of rank r's ``rows`` (N, m)."""
        if self.played is not None:
            return out.copy_(rows[self.rank].expand_as(out))
        if self.size == 1:
            return out.copy_(rows)
        messages = seal(rows.reshape(self.size, -1)) if self.checksums else rows
        received = torch.empty_like(messages) if self.checksums else out
        self._count_peers("all_to_all", messages.nbytes / self.size)
        with self.ledger.span("wire", rows):
            self._all_to_all(received, messages)
        if self.checksums:
            self._unseal(received, out, "all-to-all")
        return out

    def _hear(self, result: Tensor, work: Work | None = None) -> Work | None:
        """Note ``result``, which all ranks have alike once ``work`` is over; return the work to wait for."""
        self.alike += result.nbytes
        if (heard := self.heard) is None:
            return work
        index = len(heard)
        heard.append(None if work is not None else result.clone())
        return None if work is None else ChainedWork(work, lambda: heard.__setitem__(index, result.clone()))

    def _play(self, verb: str, out: Tensor) -> Tensor:
        """Receive again what another rank has heard. Raises LostRank if it has not heard this."""
        assert self.played is not None
        value = next(self.played, None)
        if value is None or value.shape != out.shape or value.dtype != out.dtype:
            raise LostRank(self.rank, [], verb, 0.0, "what it received of this step does not fit")
        return out.copy_(value)

    def _unseal(self, received: Tensor, out: Tensor, verb: str) -> None:
        """Raise DamagedMessage if a row differs from the one sent."""
        damaged = unseal(received, out.view(self.size, -1))
        if damaged is not None:
            raise DamagedMessage(self.ranks[self.rank], self.ranks[damaged], verb)

    def ring_bytes(self, verb: str, nbytes: int) -> float:
        """Count the bytes that each rank hands to its neighbour when a ring reduces ``nbytes``."""
        passes = 2 if verb == "all_reduce" or self.reduce_scatter_is_all_reduce else 1
        return passes * (self.size - 1) / self.size * nbytes

    def _count_ring(self, verb: str, nbytes: int) -> None:
        """Count a ring's reduction of ``nbytes`` on the link to one neighbour, which gets all of this rank's bytes."""
        self.ledger.call(verb)
        self.ledger.count(self.link((self.rank - 1) % self.size), self.ring_bytes(verb, nbytes))

    def _count_peers(self, kind: str, nbytes: float) -> None:
        """Count ``nbytes`` to every other rank."""
        self.ledger.call(kind)
        for link, peers in self._peers.items():
            self.ledger.count(link, peers * nbytes)

    @contextmanager
    def waiting(self, verb: str, peer: int | None = None) -> Iterator[None]:
        """Wrap a wait in ``verb`` for all ranks or ``peer``; raise LostRank in place of the network's own error."""
        yield

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: str) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, rows: Tensor, op: str) -> None: ...

    @abstractmethod
    def _all_gather(self, out: Tensor, row: Tensor, async_op: bool) -> Work | None: ...

    @abstractmethod
    def _all_to_all(self, out: Tensor, rows: Tensor) -> None: ...


_IDLE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], timedelta | None], list[dist.ProcessGroup]]] = (
    WeakKeyDictionary()
)
"""The unused groups made for some ranks of a group."""


class CountingComm(Comm):
    """A group whose other ranks are taken to send what this rank sends: it counts the bytes and sends nothing.

    There are no other processes. On tensors without storage ("meta") it computes nothing either.
    """

    @classmethod
    def like(cls, comm: Comm, ledger: Ledger) -> Self:
        """Make a double of ``comm`` that writes to ``ledger``."""
        double = cls(comm.rank, comm.nodes, ledger)
        double.reduce_scatter_is_all_reduce, double.one_node = comm.reduce_scatter_is_all_reduce, comm.one_node
        return double

    def subset(self, chosen: Sequence[int]) -> Self:
        """Make a double of the ``chosen`` ranks, this rank among them."""
        double = type(self)(chosen.index(self.rank), [self.nodes[rank] for rank in chosen], self.ledger)
        double.reduce_scatter_is_all_reduce = self.reduce_scatter_is_all_reduce
        return double

    def _all_reduce(self, tensor: Tensor, op: str) -> None: ...

    def _reduce_scatter(self, out: Tensor, rows: Tensor, op: str) -> None:
        self._echo(out, rows.view(self.size, -1)[self.rank])

    def _all_gather(self, out: Tensor, row: Tensor, async_op: bool) -> None:
        self._echo(out, row)

    def _all_to_all(self, out: Tensor, rows: Tensor) -> None:
        self._echo(out, rows[self.rank])

    @staticmethod
    def _echo(out: Tensor, row: Tensor) -> None:
        if out.is_meta:
            return
        for received in out.view(-1, row.numel()):
            if received.data_ptr() != row.data_ptr():  # this rank's own row may be a part of ``out``
                received.copy_(row.view(-1))


class GroupComm(Comm):
    """The verbs on a ``torch.distributed`` process group (gloo on CPU, NCCL on CUDA).

    gloo's own all-to-all posts each send before the receive, so "ready to receive" queues behind the data and the two
    directions of a link take turns: half of its rate (all-gather: two thirds). On gloo we therefore send point to
    point, receives first, which fills the link (``benchmarks/speed/gloo.py`` prints both).

    Attributes:
        timeout: how long a rank waits for the others; None where torch does not say.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        nodes: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """``device``: of the tensors sent; a group may have a backend for each.

        ``nodes`` None: LOCAL_WORLD_SIZE ranks per node, in order; if that is not set, all links are ``inter``.
        """
        if nodes is None:  # torch's group, or the user's
            per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's nodes have consecutive ranks
            nodes = [rank // per_node for rank in dist.get_process_group_ranks(group)]
            _inherit_timeout(group)
        super().__init__(dist.get_rank(group), nodes, ledger)
        self.group, self.device = group, torch.device(device)
        self.reduce_scatter_is_all_reduce = _backend(group, self.device) == "gloo"
        # gloo moves device memory in its collectives only.
        self._point_to_point = self.reduce_scatter_is_all_reduce and self.device.type == "cpu"
        self.timeout = timeout_of(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._idle: list[dist.ProcessGroup] | None = None  # where ``release`` puts the group

    @classmethod
    def aside(cls, group: dist.ProcessGroup, device: torch.device) -> GroupComm:
        """Make a double of ``group`` for uncounted messages beside the exchange.

        They are CPU tensors if it carries those. If not (NCCL alone), they are on ``device``, the model's, with its
        number: "cuda" without one is the current device, which is cuda:0 on every rank until a program sets it.
        """
        return cls(group, Ledger(), device="cpu" if _carries_cpu_tensors(group) else device)

    def twin(self) -> GroupComm:
        """Make another process group of the same ranks, which another thread may use beside this one."""
        double = self.subset(range(self.size))
        double.checksums = self.checksums
        return double

    def subset(self, chosen: Sequence[int]) -> GroupComm:
        """Make a process group, with this group's timeout, of the ``chosen`` ranks, this rank among them.

        Collective over the chosen ranks only: other ranks of the job need not take part. The group lives until the
        job's ``destroy_process_group()``, and is used again after ``release``: torch names a group by its ranks and the
        number of groups alive, and would meet the keys of a destroyed one in the store and wait for ever.
        """
        ranks = [self.ranks[rank] for rank in chosen]
        idle = _IDLE.setdefault(self.group, {}).setdefault((tuple(ranks), self.timeout), [])
        group = idle.pop() if idle else self._new(ranks, dist.get_backend(self.group), self.timeout)
        double = GroupComm(group, self.ledger, [self.nodes[rank] for rank in chosen], self.device)
        double._idle = idle
        return double

    def release(self) -> None:
        """Give back this group from ``subset``, which returns it to the next call for these ranks.

        If one rank gives it back, all of its ranks must before any of them asks again.
        """
        if self._idle is not None:
            self._idle.append(self.group)
            self._idle = None

    @staticmethod
    def idle_groups(group: dist.ProcessGroup) -> int:
        """Count the released subsets of ``group``: as many on all ranks."""
        return sum(map(len, _IDLE.get(group, {}).values()))

    def wait_up_to(self, limit: timedelta) -> None:
        """Wait ``limit`` for a rank from now on, here and in groups that are made of this one."""
        _set_timeout(self.group, limit)
        self.timeout = timeout_of(self.group)

    def patient(self, seconds: float) -> GroupComm:
        """Make a gloo group of the same ranks, for CPU tensors, that waits ``seconds`` for a rank. Collective.

        It is for messages beside the training, when a rank may be busy with files.
        """
        return GroupComm(self._new(self.ranks, "gloo", timedelta(seconds=seconds)), self.ledger, self.nodes)

    def _new(self, ranks: Sequence[int], backend: str, limit: timedelta | None) -> dist.ProcessGroup:
        # After init_process_group(device_id=...) torch would split it off the job's communicator, which every rank of
        # the job has to join.
        whole: Any = dist.group.WORLD
        bound, whole.bound_device_id = whole.bound_device_id, None
        try:
            with self.waiting("new group"):
                return dist.new_group(list(ranks), timeout=limit, backend=backend, use_local_synchronization=True)
        finally:
            whole.bound_device_id = bound

    @contextmanager
    def waiting(self, verb: str, peer: int | None = None) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # torch's own DistError is one
            if not is_of_the_network(error):
                raise
            own_number = self.ranks[self.rank]
            lost = self.ranks if peer is None else [self.ranks[peer]]
            others_lost = [rank for rank in lost if rank != own_number]
            raise LostRank(own_number, others_lost, verb, time.monotonic() - began, network_words(error)) from error

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        with self.waiting("all-reduce"):
            dist.all_reduce(tensor, _OPS[op], group=self.group)

    def _reduce_scatter(self, out: Tensor, rows: Tensor, op: str) -> None:
        with self.waiting("reduce-scatter"):
            _reduce_scatter_single(out, rows.view(-1), _OPS[op], group=self.group)

    def _all_gather(self, out: Tensor, row: Tensor, async_op: bool) -> Work | None:
        if not self._point_to_point:
            with self.waiting("all-gather"):
                return _all_gather_single(out.view(-1), row, group=self.group, async_op=async_op)
        work = self._to_and_from_peers("all-gather", [row.view(-1)] * self.size, out.view(self.size, -1), tag=1)
        if async_op:
            return work
        work.wait()
        return None

    def _all_to_all(self, out: Tensor, rows: Tensor) -> None:
        if not self._point_to_point:
            with self.waiting("all-to-all"):
                dist.all_to_all_single(out, rows, group=self.group)
            return
        self._to_and_from_peers("all-to-all", rows, out, tag=2).wait()

    def _to_and_from_peers(self, verb: str, rows: Sequence[Tensor] | Tensor, out: Tensor, tag: int) -> Work:
        """Send ``rows[peer]`` to, and receive ``out[peer]`` from, every peer; each rank starts with its next neighbour.

        Messages of one tag between two ranks arrive in the order in which both post them.
        """
        if dropped := _DROPPED.pop(self.group, None):  # they come before ours, on all ranks
            _PeerMessages(self, verb, dropped).wait()
        works: list[tuple[int, Work | None]] = []
        for post, messages, step in ((self._receive, out, -1), (self._send, rows, 1)):
            for turn in range(1, self.size):
                peer = (self.rank + step * turn) % self.size
                with self.waiting(verb, peer):
                    works.append((peer, post(messages[peer], peer, tag)))
        if out[self.rank].data_ptr() != rows[self.rank].data_ptr():
            out[self.rank].copy_(rows[self.rank])
        return _PeerMessages(self, verb, works)

    def _send(self, message: Tensor, peer: int, tag: int) -> Work | None:
        return dist.isend(message, self.ranks[peer], group=self.group, tag=tag)

    def _receive(self, out: Tensor, peer: int, tag: int) -> Work | None:
        return dist.irecv(out, self.ranks[peer], group=self.group, tag=tag)


_HEARD = 3
"""The tag of what a rank has received, and repeats to spares."""


class ManagedComm(GroupComm):
    """The verbs on torchft's gloo group, which is made anew when ranks come or go: ``take`` then says who takes part.

    Any error of the group is a lost rank. ``timeout``: how long a rank waits for the others. Spares have the last ranks
    of the group: each hears what a rank that takes part receives, and adds nothing to a sum.
    """

    elastic = True

    def __init__(self, group: Any, ledger: Ledger, timeout: timedelta) -> None:
        self.group, self.device, self.timeout = group, torch.device("cpu"), timeout
        Comm.__init__(self, 0, [0], ledger)
        self._point_to_point = self.reduce_scatter_is_all_reduce = True
        self._idle = None

    def take(self, membership: Membership) -> None:
        super().take(membership)
        _DROPPED.pop(self.group, None)  # of a group that is gone
        if membership.spare is not None:
            self._peers.clear()  # it sends nothing

    @contextmanager
    def waiting(self, verb: str, peer: int | None = None) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, AssertionError) as error:  # an assertion: the group is gone
            lost = [rank for rank in self.ranks if rank != self.rank] if peer is None else [peer]
            raise LostRank(self.rank, lost, verb, time.monotonic() - began, network_words(error)) from None

    def _send(self, message: Tensor, peer: int, tag: int) -> Work | None:
        return self.group.send([message], peer, tag)

    def _receive(self, out: Tensor, peer: int, tag: int) -> Work | None:
        return self.group.recv([out], peer, tag)

    def _to_and_from_peers(self, verb: str, rows: Sequence[Tensor] | Tensor, out: Tensor, tag: int) -> Work:
        if self.membership.spare is not None:
            with self.waiting(verb, self.rank):
                return _PeerMessages(self, verb, [(self.rank, self._receive(out, self.rank, _HEARD))])
        works = super()._to_and_from_peers(verb, rows, out, tag)
        listeners = range(self.size + self.rank, self.size + self.membership.spares, self.size)
        return ChainedWork(works, lambda: self._repeat(verb, out, listeners)) if listeners else works

    def _repeat(self, verb: str, received: Tensor, listeners: Sequence[int]) -> None:
        """Send what this rank has ``received`` to the spares that hear it."""
        self.ledger.count("inter", len(listeners) * received.nbytes)
        works: list[tuple[int, Work | None]] = []
        for listener in listeners:
            with self.waiting(verb, listener):
                works.append((listener, self._send(received, listener, _HEARD)))
        _PeerMessages(self, verb, works).wait()

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        if self.membership.spare is not None:
            tensor.fill_(0 if op == "sum" else -torch.inf)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_OPS[op])
        options.timeout = self.timeout  # type: ignore[assignment]  # else it is that of connecting
        with self.waiting("all-reduce"):
            self.group.allreduce([tensor], options).wait(self.timeout)  # type: ignore[arg-type]


class _PeerMessages(Work):
    """The messages from and to all peers, as one work, with the group's timeout for each.

    (Without it gloo uses the group's first timeout, whatever it was set to later.)

    It may be dropped without a wait: a backward pass that raises leaves its next gather of weights behind. gloo forgets
    a message whose buffer is gone, but has already told the peer to send: the next message would take its place, and
    both ranks would wait for the one after that for ever. So dropped messages are kept for the group's next exchange,
    which waits for them first.
    """

    def __init__(self, comm: GroupComm, verb: str, works: Sequence[tuple[int, Work | None]]) -> None:
        super().__init__()
        self._comm, self._verb, self._works = comm, verb, works

    def wait(self, *timeout) -> bool:
        limit = timeout or (() if self._comm.timeout is None else (self._comm.timeout,))
        works, self._works = self._works, ()
        for peer, work in works:
            if work is not None:
                with self._comm.waiting(self._verb, peer):
                    work.wait(*limit)
        return True

    def __del__(self) -> None:
        if self._works:
            _DROPPED.setdefault(self._comm.group, []).extend(self._works)


_DROPPED: WeakKeyDictionary[dist.ProcessGroup, list[tuple[int, Work | None]]] = WeakKeyDictionary()
"""Each group's messages that were posted and never waited for."""


class ChainedWork(Work):
    """A work whose ``wait`` then calls ``callback``."""

    def __init__(self, work: Work, callback: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._callback = work, callback

    def wait(self, *timeout) -> bool:
        self._work.wait(*timeout)
        self._callback()
        return True


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name the backend that carries ``group``'s tensors of ``device``: "gloo", "nccl", ..."""
    pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
    return dict(pairs).get(device.type, pairs[-1][-1])


def local(weight: Tensor) -> Tensor:
    """Return this rank's part of a parameter or of its moments: the tensor itself, or a DTensor's shard."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Read the shortest timeout of ``group``'s backends (torch shows it only in their options); None: none says."""
    limits = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in _backends(group)]
    return min((limit for limit in limits if limit is not None), default=None)


def _inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give ``group`` the timeout of the job's own group, if it has torch's default.

    ``init_device_mesh`` does not pass on ``init_process_group(timeout=...)``.
    """
    whole, limit = timeout_of(dist.group.WORLD), timeout_of(group)  # type: ignore[arg-type]
    if whole is not None and limit is not None and limit in _DEFAULTS:
        _set_timeout(group, whole)


def _set_timeout(group: dist.ProcessGroup, limit: timedelta) -> None:
    for backend in _backends(group):
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(limit)


_DEFAULTS = [getattr(dist.constants, name, None) for name in ("default_pg_timeout", "default_pg_nccl_timeout")]


def _carries_cpu_tensors(group: dist.ProcessGroup) -> bool:
    kinds = {device.type for device in _devices(group)}
    return "cpu" in kinds or not kinds


def _devices(group: dist.ProcessGroup) -> Sequence[torch.device]:
    return getattr(group, "_device_types", ())


def _backends(group: dist.ProcessGroup) -> list[Any]:
    return [group._get_backend(device) for device in _devices(group)]


def is_of_the_network(error: BaseException) -> bool:
    """Does torch's ``error`` say that other ranks cannot be reached?"""
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "timed out", "timeout", "socket"))


def network_words(error: BaseException) -> str:
    """Return the network's own message, without the place in its source and without its advice."""
    words = (str(error).strip() or type(error).__name__).splitlines()[0].split("This is typically caused")[0]
    return re.sub(r"^\[[^]]*\] *", "", words).strip().rstrip(".")[:200]
