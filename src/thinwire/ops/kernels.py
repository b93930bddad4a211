"""Compile numba kernels and hand them tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

inlined = numba.njit(nogil=True, error_model="numpy", forceinline=True)
"""Compiles into the caller, which saves counting references to the slices that are handed over."""


def njit(function: Callable[..., Any], suffix: str = "") -> Callable[..., Any]:
    """Compile at first call, keep the machine code on disk, release the GIL, divide by zero as IEEE says.

    ``suffix``: of a copy's name, for other constants. It has an index file of its own in
    numba's cache: in a shared one ranks that save two variants at the same time can leave one under the other's name.
    """
    if suffix:
        variant = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
        variant.__qualname__ = function.__qualname__ + suffix
        function = variant
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's directory nor the user's cache can be written
        compiled = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


def flat(rows: Tensor) -> tuple[np.ndarray, int]:
    """Return the memory from the first element of ``rows`` (R, n) to the last, 1-D, and the distance between rows."""
    count, n = rows.shape
    stride = rows.stride(0) if count > 1 else n
    size = (count - 1) * stride + n if rows.numel() else 0
    memory = rows.detach().as_strided((size,), (1,))
    return (memory.view(torch.uint16) if rows.dtype == torch.bfloat16 else memory).numpy(), stride
