"""The bytes that a method holds now. (A dry run finds out how many it will need.)"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.core.method import Method, Run
from thinwire.network.comm import Comm, local
from thinwire.network.ledger import Ledger
from thinwire.ops.moments import Moments


def resident_bytes(device: torch.device, *roots: object, without: object = ()) -> int:
    """Add up the bytes of all tensors on ``device`` that can be reached from ``roots`` by attributes and containers.

    Each storage counts once, and none that can be reached from ``without``. Models, optimizers and process groups are
    left out.
    """
    storages = [tensor.untyped_storage() for tensor in _tensors(roots, set()) if tensor.device == device]
    others = {local(tensor).untyped_storage()._cdata for tensor in _tensors(without, set())}
    return sum({of._cdata: of.nbytes() for of in storages if of._cdata not in others}.values())


def _tensors(owner: object, visited: set[int]) -> Iterator[Tensor]:
    if id(owner) in visited:
        return
    visited.add(id(owner))
    if isinstance(owner, Tensor):
        yield owner
    elif isinstance(owner, dict | tuple | list | set):
        for value in [*owner, *owner.values()] if isinstance(owner, dict) else list(owner):
            yield from _tensors(value, visited)
    elif isinstance(owner, Run | Comm | Ledger | Moments | type):
        return
    elif isinstance(owner, Method) or type(owner).__module__.startswith("thinwire."):
        yield from _tensors(getattr(owner, "__dict__", {}), visited)
