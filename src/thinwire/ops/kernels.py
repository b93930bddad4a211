"""Compile numba kernels and hand them tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

inlined = numba.njit(nogil=True, error_model="numpy", forceinline=True)
"""Compiles into the caller, which saves counting references to the slices passed."""


def njit(function: Callable[..., Any], suffix: str = "") -> Callable[..., Any]:
    """Compile at first call, keep the machine code on disk if it can be, release the GIL, divide by zero as IEEE says.

    ``suffix`` names a variant with other constants and gives it an index file of its own in numba's cache: in a shared
    one, ranks that save two variants at the same time can leave one under the other's name.
    """
    if suffix:
        variant = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
        variant.__qualname__ = function.__qualname__ + suffix
        function = variant
    try:
        compiled: Any = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's directory nor the user's cache can be written
        return numba.njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]
    cache = compiled._cache
    cache.load_overload, cache.save_overload = map(_unless_disk_fails, (cache.load_overload, cache.save_overload))
    return compiled  # type: ignore[no-any-return]


def _unless_disk_fails(use: Callable[..., Any]) -> Callable[..., Any]:
    """Do without numba's cache where its disk is full: it has no other use than to save time."""

    def attempt(*arguments: Any) -> Any:
        with contextlib.suppress(OSError):
            return use(*arguments)
        return None

    return attempt


def array_of(tensor: Tensor) -> np.ndarray:
    """Return the memory of ``tensor``: int64 (mask words) as uint64, and bfloat16 as uint16."""
    unsigned = {torch.bfloat16: torch.uint16, torch.int64: torch.uint64}.get(tensor.dtype)
    return (tensor.detach() if unsigned is None else tensor.detach().view(unsigned)).numpy()


def rows_of(*tensors: Tensor) -> Iterator[tuple[np.ndarray, ...]]:
    """Iterate over the rows of all ``tensors`` (R, n) together, as contiguous 1-D arrays."""
    return zip(*map(array_of, tensors), strict=True)


def by_row(function: Callable[..., Any], table: Callable[[Any], Any] = tuple) -> Callable[..., bool]:
    """Compile ``function`` of one row, and return an operation on tensors (R, n) that calls it for each row.

    Tensors of one dimension become arrays, and ``table`` converts the segments of a row. The operation stops at the
    first row for which ``function`` returns False, and returns False.
    """
    kernel = njit(function)

    def run(*arguments: Any) -> bool:
        rows: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                array = array_of(argument)
                rows.append(array if array.ndim == 2 else itertools.repeat(array))
            else:
                rows.append(itertools.repeat(table(argument) if isinstance(argument, Iterable) else argument))
        return all(kernel(*row) is not False for row in zip(*rows, strict=False))

    return run


def flat(rows: Tensor) -> tuple[np.ndarray, int]:
    """Return the memory of ``rows`` (R, n), from first to last element, as one array, and the distance between rows."""
    count, n = rows.shape
    stride = rows.stride(0) if count > 1 else n
    size = (count - 1) * stride + n if rows.numel() else 0
    memory = rows.detach().as_strided((size,), (1,))
    return (memory.view(torch.uint16) if rows.dtype == torch.bfloat16 else memory).numpy(), stride
