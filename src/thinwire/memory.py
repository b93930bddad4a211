"""What a method costs in memory: what it holds now, and, before the first step, what it will take at its peak.

No method says what it needs. The prediction rehearses its steady state: the method's own code, buckets, state and
codecs, on tensors that have a shape and no storage (torch's "meta" device), with no network and no arithmetic. A watch
sees each of them come and go.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.bucket import Layout, Piece
from thinwire.collectives import Exchange
from thinwire.comm import Comm, local
from thinwire.guard import Guard
from thinwire.ledger import Ledger
from thinwire.methods.base import Method, Run, Step
from thinwire.plan import Plan
from thinwire.road import Road
from thinwire.state import State
from thinwire.weights import Replica

META = torch.device("meta")
E = TypeVar("E", bound=Exchange)


@dataclass(frozen=True)
class Memory:
    """Bytes on the device beyond what engine, model and optimizer take, on one rank, in the steady state.

    ``held``: from step to step. ``peak``: with what comes and goes inside a step, at its largest.
    """

    held: int
    peak: int


def held(device: torch.device, *roots: object) -> int:
    """Bytes of all tensors on ``device`` that can be reached from ``roots`` by attributes and containers.

    Each storage counts once. What belongs to others is not entered: models, optimizers and process groups.
    """
    storages = [tensor.untyped_storage() for tensor in _tensors(roots, set()) if tensor.device == device]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(thing: object, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from _tensors(key, seen)
            yield from _tensors(value, seen)
    elif isinstance(thing, tuple | list | set):
        for value in thing:
            yield from _tensors(value, seen)
    elif isinstance(thing, Run | Comm | Ledger | type):
        return
    elif isinstance(thing, Method) or type(thing).__module__.startswith("thinwire."):
        yield from _tensors(getattr(thing, "__dict__", {}), seen)


class _Watch(TorchDispatchMode):
    """Adds up the storages of meta tensors that are made while it is on, for as long as each lives."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._note(tensor, tensor.untyped_storage().nbytes())
        return result

    def lend(self, *tensors: Tensor) -> None:
        """These are the engine's: they do not count."""
        for tensor in tensors:
            self._note(tensor, 0)
            key = tensor.untyped_storage()._cdata
            self.live, self._known[key] = self.live - self._known[key], 0

    def _note(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = nbytes
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key)


class _Mute(Comm):
    """A group like another one, on which nothing is said."""

    def __init__(self, like: Comm) -> None:
        super().__init__(like.rank, like.size, like.nodes, Ledger())

    def _all_reduce(self, tensor: Tensor, op: str) -> None: ...

    def _reduce_scatter(self, out: Tensor, rows: Tensor, op: str) -> None: ...

    def _all_gather(self, out: Tensor, row: Tensor, async_op: bool) -> None: ...

    def _all_to_all(self, out: Tensor, rows: Tensor) -> None: ...


class _State(State):
    """The state of a rehearsal. What it keeps elsewhere than on the device does not count."""

    def __init__(self, offload: Collection[str], watch: _Watch | None) -> None:
        super().__init__(offload)
        self._watch = watch

    def _new(self, kind: str, shape: Sequence[int], device: torch.device) -> Tensor:
        values = torch.zeros(shape, dtype=torch.float32, device=device)
        if kind in self._offload and self._watch is not None:
            self._watch.lend(values)
        return values


def rehearse(layout: Layout, plans: Sequence[tuple[Method, Plan]], run: Run) -> Memory:
    """The memory of a method in its steady state. Nothing of that size is allocated.

    Args:
        plans: the method and its plan; then those of the hop inside the node that comes before, if there is one.
    """
    watch, on_cpu = _Watch(), all(local(weight).device.type == "cpu" for weight in run.weights.values())
    weights = {name: nn.Parameter(torch.empty_like(local(w), device=META)) for name, w in run.weights.items()}
    optimizers = _stand_ins(run, weights)
    for weight in weights.values():
        assert weight.grad is not None
        watch.lend(weight, weight.grad)
    for optimizer in optimizers:
        for moments in optimizer.state.values():
            watch.lend(*moments.values())
    roads = []
    for method, plan in plans:
        exchange, double = _muted(plan.exchange), replace(method)
        double.intra_codec = method.intra_codec
        double.state = _State(method.offloads, None if on_cpu else watch)
        double.begin(replace(run, exchange=exchange, weights=weights, optimizers=optimizers))
        roads.append(Road(double, plan, exchange, Guard([], False), Ledger()))
    method, peak = roads[0].method, 0
    buffers = _buffers(layout, watch)
    with torch.no_grad(), watch:
        replicas = _replicas(layout, method, watch)
        for number in range(max(method.steady - 1, 0), method.steady + 3):
            watch.peak = watch.live
            for replica, out in replicas:
                replica.gather(out, number)
            for flat, out, pieces in buffers:
                for road in reversed(roads):
                    road.step = number
                    road.carry(flat, pieces, out)
                    flat, pieces = out, tuple(Piece(p.name, p.offset, p.numel // p.rows) for p in pieces)
            _settle(method, Step(number, optimizers, weights, torch.ones((), device=META)))
            if number >= method.steady:
                peak = max(peak, watch.peak)
        return Memory(watch.live, peak)


def _settle(method: Method, step: Step) -> None:
    """What the wire does around an optimizer's step."""
    assert method.state is not None
    method.state.commit()
    method.before_step(step)
    method.after_step(step)
    method.state.commit()
    method.finish()


def _buffers(layout: Layout, watch: _Watch) -> list[tuple[Tensor, Tensor, tuple[Piece, ...]]]:
    """The engine's buffers, where the means of each go, and what is in it."""
    found = []
    for pieces in layout.buffers:
        flat = torch.empty(sum(piece.numel for piece in pieces), dtype=layout.dtype, device=META)
        out = torch.empty(pieces[0].stride, dtype=layout.dtype, device=META) if pieces[0].stride else flat
        watch.lend(flat, out)
        found.append((flat, out, pieces))
    return found


def _replicas(layout: Layout, method: Method, watch: _Watch) -> list[tuple[Replica, Tensor]]:
    """The weights of every module, and where they are gathered: in the engine's memory, unless the method needs it."""
    if layout.comm is None or not method.encodes_weights:
        return []
    comm, found = _Mute(layout.comm), []
    for shard in layout.shards:
        replica = Replica(method, shard, comm, META)
        found.append((replica, replica.allocate()))
        if not replica.message.resident:
            watch.lend(found[-1][1])
    return found


def _muted(exchange: E) -> E:
    double = copy.copy(exchange)
    for name, value in vars(exchange).items():
        if isinstance(value, Comm):
            setattr(double, name, _Mute(value))
    return double


def _stand_ins(run: Run, weights: dict[str, nn.Parameter]) -> tuple[Any, ...]:
    """Optimizers of the user's classes that hold ``weights`` and Adam's moments of them, and are never stepped."""
    for weight in weights.values():
        weight.grad = torch.empty_like(weight)
    known = {id(weight): weights[name] for name, weight in run.weights.items()}
    return tuple(_stand_in(optimizer, known) for optimizer in run.optimizers)


def _stand_in(original: torch.optim.Optimizer, known: dict[int, nn.Parameter]) -> Any:
    double: Any = object.__new__(type(original))
    double.__dict__.update({name: copy.copy(v) if isinstance(v, dict) else v for name, v in vars(original).items()})
    double.param_groups = [
        {**group, "params": [known[id(weight)] for weight in group["params"] if id(weight) in known]}
        for group in original.param_groups
    ]
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    double.state = {
        weight: {"step": torch.tensor(1.0), **{name: torch.empty_like(weight) for name in moments}}
        for group in double.param_groups
        for weight in group["params"]
    }
    return double
