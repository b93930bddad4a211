"""The buckets of one engine buffer, packed and unpacked in one pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.base.alignment import padded
from thinwire.core.bucket import Bound, Bucket, pack
from thinwire.ops import rows as ops
from thinwire.ops.norms import Bounds


class BucketGroup:
    """The buckets of one engine buffer, whose rows lie in one memory and are packed and unpacked in one pass."""

    def __init__(self, buckets: Sequence[Bucket], *, in_place: bool = False, ahead: int = 0) -> None:
        """``buckets``: of one dtype, with one arena. ``in_place``: the first one's rows stay in the engine's buffer.

        ``ahead``: bytes of the wire that travels before each row of the last one, for which there is room there.
        """
        self._buckets, self._in_place, self._packed = buckets, buckets[:in_place], buckets[in_place:]
        head, shapes = self._packed[0], [bucket.shape for bucket in self._packed]
        tables = [bucket.copies.copy_table for bucket in self._packed]
        room = 0 if ahead % 4 or buckets[-1].copies.formed else ahead // 4
        self._means = self._rows = _Stack("rows", head, shapes, tables, room)
        stay = [segment for bucket in self._in_place for segment in bucket.copies.stay_table.segments]
        whole = ops.CopyTable([*stay, *self._rows.copy_table.segments], head.device)
        names, rest = ([name for bucket in some for name in bucket.names] for some in (buckets, self._packed))
        self._rest = tuple(rest), self._rows.copy_table  # of what is packed; below: of what is bounded with it, too
        self._whole = (tuple(names), whole) if in_place else self._rest
        if head.owner:
            tables = [bucket.copies.own_copy_table for bucket in self._packed]
            use = "mean beside" if in_place else "mean"  # the first one's may be there
            self._means = _Stack(use, head, [(1, n) for _, n in shapes], tables)

    def load(self, flat: Tensor, out: Tensor, bound: Bound | None = None) -> Bounds | None:
        for bucket in self._in_place:
            bucket.load(flat, out)
        names, table = self._rest if any(bucket.limit is not None for bucket in self._in_place) else self._whole
        bounds = pack(names, flat, table, self._rows.borrow(), bound)
        for bucket, rows, mean in zip(self._packed, self._rows.views(), self._means.views(), strict=True):
            bucket.rows, bucket.mean = rows, mean
            bucket.copies.pack_formed(flat, rows)
        return bounds

    def store(self, out: Tensor) -> None:
        for bucket in self._in_place:
            bucket.store(out)
        ops.unpack(self._means.borrow(), self._means.copy_table, out)
        for bucket in self._packed:
            bucket.copies.unpack_formed(bucket.rows, out)

    def release(self) -> None:
        for bucket in self._buckets:
            bucket.release()


class _Stack:
    """Rows of several ``shapes`` (R, n) in one memory, the last first, aligned to 64 elements, and their copies."""

    def __init__(
        self, use: str, head: Bucket, shapes: Sequence[Sequence[int]], tables: Sequence[ops.CopyTable], room: int = 0
    ) -> None:
        """``use``: the key in ``head``'s scratch memory. ``tables``: the copies for each shape alone.

        ``room``: elements before each row of the last shape, with which they are messages that begin the memory.
        """
        self._use, self._head, rooms = use, head, [0] * (len(shapes) - 1) + [room]
        sizes = [padded(rows * (n + room), 64) for (rows, n), room in zip(shapes, rooms, strict=True)]
        starts, self._size = [sum(sizes[i:]) for i in range(1, len(sizes) + 1)], sum(sizes)
        self._places = [(i, r, n + room, room) for i, (r, n), room in zip(starts, shapes, rooms, strict=True)]
        copies = [
            copy if copy.start == ops.STAYS else copy._replace(start=start + room + copy.start, stride=stride)
            for (start, _, stride, room), table in zip(self._places, tables, strict=True)
            for copy in table.segments
        ]
        self.copy_table = ops.CopyTable(copies, head.device)

    def borrow(self) -> Tensor:
        return self._head.scratch(self._use, (self._size,), self._head.dtype)

    def views(self) -> list[Tensor]:
        memory = self.borrow()
        return [memory[i : i + r * stride].view(r, stride)[:, room:] for i, r, stride, room in self._places]
