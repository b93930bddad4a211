"""What a method costs in memory: what it holds now. What it will take is found out by a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.method import Method, Run
from thinwire.network.comm import Comm
from thinwire.network.ledger import Ledger
from thinwire.ops.moments import Moments


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
    elif isinstance(thing, Run | Comm | Ledger | Moments | type):
        return
    elif isinstance(thing, Method) or type(thing).__module__.startswith("thinwire."):
        yield from _tensors(getattr(thing, "__dict__", {}), seen)
