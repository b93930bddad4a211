"""What a rehearsal on tensors without storage would launch and hold: kernels by name, and bytes while they live."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.ops.backends import launches


class Watch(TorchDispatchMode):
    """Counts kernels, and adds up the storages of meta tensors that are made while it is on, while each lives."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.launches: Counter[str] = Counter()
        self._known: dict[int, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Be on, for torch's operations and ours."""
        token = launches.set(self.launches)
        try:
            with self:
                yield
        finally:
            launches.reset(token)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = args[0] if _in_place(function) and args[0].is_meta else function(*args, **kwargs)
        without_storage = _without_storage(result)
        for tensor in without_storage:
            self._note(tensor, tensor.untyped_storage().nbytes())
        if not _is_free(function) and (without_storage or _without_storage(args)):
            self.launches[f"aten.{function.overloadpacket.__name__}"] += 1
        return result

    def lend(self, *tensors: Tensor) -> None:
        """These are the engine's: they do not count."""
        for tensor in tensors:
            self._note(tensor, 0)
            key = tensor.untyped_storage()._cdata
            if key in self._known:
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


def _without_storage(values: Any) -> list[Tensor]:
    leaves = [values] if isinstance(values, Tensor) else tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta]


@functools.cache
def _in_place(function: Any) -> bool:
    """Does a torch operation change the values of its first argument, and no more? Torch may take 1 ms over it."""
    schema = function._schema
    written = [result.alias_info is not None and result.alias_info.is_write for result in schema.returns]
    return schema.name.endswith("_") and written == [True] and torch.Tag.inplace_view not in function.tags


@functools.cache
def _is_free(function: Any) -> bool:
    """Does a torch operation launch no kernel: makes memory, or another view of it?"""
    schema = function._schema
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return views or schema.name.removeprefix("aten::").startswith(("empty", "new_empty", "detach", "_unsafe_view"))
