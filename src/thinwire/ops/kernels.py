"""What all numba kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor


def njit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at first call, keep the machine code on disk, release the GIL, divide by zero as IEEE says."""
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's directory nor the user's cache can be written
        compiled = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


def flat(rows: Tensor) -> tuple[np.ndarray, int]:
    """The memory from the first element of ``rows`` (R, n) to the last, 1-D, and the distance between rows."""
    count, n = rows.shape
    stride = rows.stride(0) if count > 1 else n
    size = (count - 1) * stride + n if rows.numel() else 0
    memory = rows.detach().as_strided((size,), (1,))
    return (memory.view(torch.uint16) if rows.dtype == torch.bfloat16 else memory).numpy(), stride


