"""Several buckets of one engine buffer, packed and unpacked in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from thinwire.base.alignment import padded
from thinwire.core.bucket import Bucket
from thinwire.ops import rows as ops


class BucketGroup:
    """The buckets of one engine buffer: their rows lie in one memory, packed and unpacked in one pass."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """``buckets``: of one dtype, with one arena."""
        self._buckets = buckets
        self._rows = _Stack([bucket.shape for bucket in buckets])
        self._means = _Stack([(1, bucket.shape[1]) for bucket in buckets])
        self._copy_table = self._rows.join([bucket.copies.copy_table for bucket in buckets])
        self._own_copy_table = self._means.join([bucket.copies.own_copy_table for bucket in buckets])

    def load(self, flat: Tensor, out: Tensor) -> None:
        """Load all buckets, as ``Bucket.load`` does one."""
        head = self._buckets[0]
        memory = head.scratch("rows", (self._rows.size,), head.dtype)
        ops.pack(flat, self._copy_table, memory)
        for bucket, rows in zip(self._buckets, self._rows.views(memory), strict=True):
            bucket.rows = bucket.mean = rows
            bucket.copies.pack_formed(flat, rows)
        if head.owner:
            memory = head.scratch("mean", (self._means.size,), head.dtype)
            for bucket, mean in zip(self._buckets, self._means.views(memory), strict=True):
                bucket.mean = mean

    def store(self, out: Tensor) -> None:
        """Store all buckets, as ``Bucket.store`` does one."""
        head = self._buckets[0]
        if head.owner:
            ops.unpack(head.scratch("mean", (self._means.size,), head.dtype), self._own_copy_table, out)
            return
        ops.unpack(head.scratch("rows", (self._rows.size,), head.dtype), self._copy_table, out)
        for bucket in self._buckets:
            bucket.copies.unpack_formed(bucket.rows, out)

    def release(self) -> None:
        """Release all buckets."""
        for bucket in self._buckets:
            bucket.release()


class _Stack:
    """Rows of several ``shapes`` (R, n) in one memory, each from a multiple of 64 elements on."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._shapes = shapes
        *self._starts, self.size = itertools.accumulate((padded(rows * n, 64) for rows, n in shapes), initial=0)

    def views(self, memory: Tensor) -> list[Tensor]:
        """View ``memory`` (size,) as the rows, one tensor for each shape."""
        return [
            memory[start : start + r * n].view(r, n) for start, (r, n) in zip(self._starts, self._shapes, strict=True)
        ]

    def join(self, tables: Sequence[ops.CopyTable]) -> ops.CopyTable:
        """Join ``tables``, one for each shape alone, to one for the whole memory."""
        copies = [
            copy._replace(start=start + copy.start)
            for start, table in zip(self._starts, tables, strict=True)
            for copy in table.segments
        ]
        return ops.CopyTable(copies, tables[0].device)
