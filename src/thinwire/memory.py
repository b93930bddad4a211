"""What a method costs in memory: what it holds now, and, before the first step, what it will take at its peak.

No method says what it needs. The prediction rehearses its steady state: the method's own code, buckets, state and codecs,
on tensors that have a shape and no storage (torch's "meta" device), with no network and no arithmetic. A watch sees each
of them come and go.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.bucket import Piece, Shards
from thinwire.codecs.base import Codec
from thinwire.collectives import Exchange
from thinwire.comm import Comm
from thinwire.guard import Guard
from thinwire.ledger import Ledger
from thinwire.methods.base import Method, Run, Step, local
from thinwire.plan import Plan
from thinwire.road import Road
from thinwire.state import State

META = torch.device("meta")
E = TypeVar("E", bound=Exchange)


@dataclass(frozen=True)
class Memory:
    """Bytes beyond what the engine, the model and the optimizer take, on one rank, in the steady state.

    ``held``: from step to step. ``peak``: with what comes and goes inside a step, at its largest.
    """

    held: int
    peak: int


@dataclass(frozen=True)
class Engine:
    """What a rehearsal has to know of an engine.

    Attributes:
        buffers: where the parameters lie in each flat buffer of a backward pass, in order. dtype: of the buffers.
        shards: where they lie in this rank's shard of each module, its numel and dtype; none where nothing is sharded.
    """

    buffers: Sequence[tuple[Piece, ...]]
    dtype: torch.dtype
    shards: Sequence[tuple[tuple[Piece, ...], int, torch.dtype]] = ()


def held(*roots: object) -> int:
    """Bytes of all tensors that can be reached from ``roots`` by attributes and containers, each storage once.

    What belongs to others is not entered: models, optimizers and process groups.
    """
    storages = {storage._cdata: storage.nbytes() for storage in (t.untyped_storage() for t in _tensors(roots, set()))}
    return sum(storages.values())


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
    elif isinstance(thing, Method | Codec) or type(thing).__module__.startswith("thinwire."):
        if not isinstance(thing, Run | Comm | Ledger | type):
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

    def lent(self, *tensors: Tensor) -> None:
        """These are the engine's, and outlive the watch: they do not count."""
        for tensor in tensors:
            self._note(tensor, 0)

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


def rehearse(engine: Engine, plans: Sequence[tuple[Method, Plan]], run: Run) -> Memory:
    """The memory of a method in its steady state. Nothing of that size is allocated.

    Args:
        plans: the method and its plan; then those of the hop inside the node that comes before, if there is one.
    """
    weights = {name: nn.Parameter(torch.empty_like(local(w), device=META)) for name, w in run.weights.items()}
    optimizer = _stand_in(run, weights)
    roads, methods = [], []
    for method, plan in plans:
        exchange, double = _muted(plan.exchange), dataclasses.replace(method)
        double.inside_codec = copy.deepcopy(method.inside_codec)
        double.state = State()
        double.begin(dataclasses.replace(run, exchange=exchange, weights=weights, optimizer=optimizer))
        methods.append(double)
        roads.append(Road(double, plan, exchange, Guard([], False), Ledger()))
    method, state = methods[0], methods[0].state
    assert state is not None
    watch = _Watch()
    lent: list[Tensor] = []

    def lend(numel: int, dtype: torch.dtype) -> Tensor:
        lent.append(torch.empty(numel, dtype=dtype, device=META))
        watch.lent(lent[-1])
        return lent[-1]

    watch.lent(*weights.values())
    flats = [lend(_numel(pieces), engine.dtype) for pieces in engine.buffers]
    rows = [lend(pieces[0].stride, engine.dtype) if pieces[0].stride else flat
            for flat, pieces in zip(flats, engine.buffers, strict=True)]  # fmt: skip
    across = plans[0][1].exchange
    sizes = across.ranks if len(plans) == 1 else plans[1][1].exchange.ranks
    gathered: list[Tensor] = []
    peak = 0
    with torch.no_grad(), watch:
        if method.encodes_weights:
            for _, numel, dtype in engine.shards:
                gathered.append(torch.empty(sizes * numel, dtype=dtype) if method.resident else lend(sizes * numel, dtype))
        for number in range(max(method.steady - 1, 0), method.steady + 3):
            watch.peak = watch.live
            for out, (pieces, numel, _) in zip(gathered, engine.shards, strict=False):
                comm = roads[-1].exchange._group()
                own = out[comm.rank * numel : (comm.rank + 1) * numel]
                method.gather(Shards(pieces, comm, own, out, number))
            for flat, row, pieces in zip(flats, rows, engine.buffers, strict=True):
                parts = pieces
                for road in reversed(roads):
                    road.step = number
                    road.carry(flat, parts, row)
                    flat, parts = row, tuple(Piece(p.name, p.offset, p.numel // p.rows) for p in pieces)
            state.commit()
            step = Step(number, optimizer, weights, torch.ones((), device=META))
            method.before_step(step)
            method.after_step(step)
            state.commit()
            method.finish()
            if number >= method.steady:
                peak = max(peak, watch.peak)
        return Memory(watch.live, peak)


def _numel(pieces: Sequence[Piece]) -> int:
    return sum(piece.numel for piece in pieces)


def _muted(exchange: E) -> E:
    double = copy.copy(exchange)
    for name, value in vars(exchange).items():
        if isinstance(value, Comm):
            setattr(double, name, _Mute(value))
    return double


def _stand_in(run: Run, weights: dict[str, nn.Parameter]) -> Any:
    """An optimizer of the user's class that holds ``weights`` and Adam's moments of them, and is never stepped."""
    original = run.optimizer
    double: Any = object.__new__(type(original))
    double.__dict__.update({name: copy.copy(v) if isinstance(v, dict) else v for name, v in vars(original).items()})
    known = {id(weight): weights[name] for name, weight in run.weights.items()}
    assert original is not None
    double.param_groups = [
        {**group, "params": [known[id(w)] for w in group["params"] if id(w) in known]} for group in original.param_groups
    ]
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    double.state = {
        weight: {"step": torch.tensor(1.0), **{name: torch.empty_like(weight) for name in moments}}
        for weight in weights.values()
    }
    for weight in weights.values():
        weight.grad = torch.empty_like(weight)
    return double
