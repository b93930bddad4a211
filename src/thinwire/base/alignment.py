"""Sizes that are multiples of a group, and where tensors lie in memory."""

from __future__ import annotations

from torch import Tensor


def padded(span: int, group: int) -> int:
    """Round ``span`` up to a multiple of ``group``."""
    return -(-span // group) * group


def viewable(wire: Tensor) -> Tensor:
    """Return ``wire`` (R, m) ready for view() to a wider dtype, which checks even a single row's stride."""
    return wire.as_strided(wire.shape, (wire.shape[1], 1)) if len(wire) == 1 or not wire.numel() else wire


def same_memory(values: Tensor, out: Tensor) -> bool:
    """Do ``values`` and ``out`` begin at the same place in memory? (Tensors without storage have no address.)"""
    same_storage = values.untyped_storage()._cdata == out.untyped_storage()._cdata
    return same_storage and values.storage_offset() == out.storage_offset()
