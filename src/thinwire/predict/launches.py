"""The kernels that a dry run launches, and the bytes that each reads and writes.

An operation that knows more than the sizes of its arguments has a row in ``TOUCHED``: a gather at k positions reads k
values, whatever it gathers from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor
from torch.utils._pytree import tree_leaves

from thinwire.ops.backends import launches
from thinwire.ops.rows import CopySegment, CopyTable
from thinwire.plan.doubles import Watch


class LaunchWatch(Watch):
    """Also tells of every kernel: "aten.add_", "thinwire.ops.sparse.largest". What only makes a view is none."""

    def launched(self, name: str, nbytes: float) -> None:
        """Called for each kernel with the bytes that it reads and writes."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._token = launches.set(lambda name, args: self.launched(name, own_bytes(name, args)))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        launches.reset(self._token)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if not is_free(function):
            without_storage = (isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((result, args)))
            if any(without_storage):
                self.launched(name_of(function), torch_bytes(function, args, kwargs or {}, result))
        return result


@functools.cache
def is_free(function: Any) -> bool:
    """Tell whether a torch operation launches no kernel: it makes memory, or another view of it."""
    schema = function._schema
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return views or schema.name.removeprefix("aten::").startswith(("empty", "new_empty", "detach", "_unsafe_view"))


def nbytes_of(*touched: Any) -> float:
    """Add up the bytes of the tensors in ``touched``, nested as they may be, each as often as it is there."""
    total = 0.0
    for value in touched:
        if isinstance(value, Tensor):
            total += value.nbytes
        elif isinstance(value, list | tuple):
            total += nbytes_of(*value)
    return total


def own_bytes(name: str, args: tuple[Any, ...]) -> float:
    """Count the bytes that our own operation ``name`` reads and writes: those of its arguments, once, if not known."""
    return TOUCHED.get(name.removeprefix("thinwire.ops."), nbytes_of)(*args)


_FILLS = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
"""Operations of torch that write their first argument without reading it."""
_PICKS = frozenset({"index", "gather", "index_select", "take"})
"""Operations that read as many values of their first argument as they return."""
_PUTS = frozenset({"index_put_", "scatter_", "index_copy_", "index_fill_", "masked_scatter_"})
"""Operations that write as many values of their first argument as the last one has."""


def name_of(function: Any) -> str:
    """Name an operation of torch as a kernel: "aten.add_"."""
    return f"aten.{function.overloadpacket.__name__}"


def torch_bytes(function: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Count the bytes that an operation of torch reads and writes."""
    name = function.overloadpacket.__name__
    if name in _PICKS:
        return nbytes_of(args[1:], result, result)
    if name in _PUTS:
        return nbytes_of(args[1:], args[-1])
    written = [args[index] if index < len(args) else kwargs.get(key) for index, key in _written(function)]
    read = [args[1:] if name in _FILLS else args, [value for key, value in kwargs.items() if key != "out"]]
    return nbytes_of(read, written, () if written else result)


@functools.cache
def _written(function: Any) -> list[tuple[int, str]]:
    """List position and name of each argument that an operation of torch writes."""
    arguments = enumerate(function._schema.arguments)
    return [(i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]


# Our own operations, with the arguments of their modules; what a kernel changes counts twice.


def _copied(table: CopyTable) -> int:
    """Count the values that ``table`` copies."""

    def values(segment: CopySegment) -> int:
        full = min(segment.rows, max((segment.numel - segment.span) // max(segment.step, 1) + 1, 0))
        lengths = (segment.numel - row * segment.step for row in range(full, min(segment.rows, full + 2)))
        return full * segment.span + sum(min(max(length, 0), segment.span) for length in lengths)

    return sum(map(values, table.segments))


def _pack(flat: Tensor, table: CopyTable, rows: Tensor) -> float:
    columns = sum(segment.rows * segment.width for segment in table.copied.segments)
    return _copied(table) * flat.element_size() + columns * rows.element_size()


def _unpack(rows: Tensor, table: CopyTable, flat: Tensor, add: bool) -> float:
    return _copied(table) * (rows.element_size() + (1 + add) * flat.element_size())


def _write(shard: Tensor, resident: Any, encoded: Any, copied: CopyTable, format: Any, codes: Tensor, scales: Tensor,
           message: Tensor, drawn: Any) -> float:  # fmt: skip
    return nbytes_of(shard, resident, codes, scales) + _copied(copied) * message.element_size()


def _read(codes: Tensor, scales: Tensor, messages: Tensor, encoded: Any, copied: CopyTable, format: Any, rows: Tensor,
          own_row: int, resident: Tensor | None) -> float:  # fmt: skip
    changed = () if resident is None else (rows, resident)
    return nbytes_of(codes, scales, rows, changed) + len(rows) * _copied(copied) * rows.element_size()


def _gather_keep(rows: Tensor, residual: Any, words: Tensor, payload: Tensor, residual_out: Any, offsets: Any) -> float:
    if residual_out is None:  # only what is at the mask
        return nbytes_of(words, payload, payload, None if residual is None else payload)
    return nbytes_of(rows, residual, words, payload, residual_out)


def _largest(rows: Tensor, residual: Any, segments: Any, total: Tensor | None, positions: Tensor, payload: Tensor,
             wire: Any, adam: Any, values: Any, decoded: Any, guess: Any) -> float:  # fmt: skip
    sent = () if values is None else (payload, positions, values, () if total is None else payload)
    return nbytes_of(rows, residual, total, positions, payload, wire, adam, sent)


def _renew(messages: Tensor, words: Tensor, segments: Any, copied: Any, rows: Tensor, offsets: Any) -> float:
    off_mask = sum(segment.numel - segment.k for segment in segments if segment.factor != 1)
    return nbytes_of(words, messages, messages) + 2 * len(rows) * off_mask * rows.element_size()


def _encode(payload: Tensor, positions: Tensor, segments: Any, whole: Tensor, out: Tensor) -> float:
    unchanged = sum(segment.width for segment in segments if not segment.cells)
    cells = [payload] * 6  # three of each value, read and written
    return nbytes_of(payload, positions, out, cells) + len(whole) * unchanged * whole.element_size()


def _moments(moments: Any) -> list[Tensor]:
    return [segment.moment for segment in moments.segments]


TOUCHED: Mapping[str, Callable[..., float]] = {
    "adams.adams": lambda weight, moment, *others: nbytes_of(weight, weight, moment, moment, *others),
    "direction.direction": lambda rows, *others: nbytes_of(rows, rows, *others),
    "mask.collect": lambda row, words, segments, copied, message, offsets: nbytes_of(words, message, message),
    "mask.gather_keep": _gather_keep,
    "mask.renew": _renew,
    "moments.add_up": lambda rows, residual, moments, *others: nbytes_of(rows, residual, _moments(moments), *others),
    "moments.advance": lambda payload, moments, *others: nbytes_of(payload, _moments(moments), *others),
    "rows.pack": _pack,
    "rows.unpack": _unpack,
    "shards.read": _read,
    "shards.write": _write,
    "sketch.encode": _encode,
    "sketch.gather": lambda rows, words, segments, positions, payload: nbytes_of(words, positions, payload, payload),
    "sketch.restore": lambda sent, residual, positions, *others: nbytes_of(sent, residual, positions, residual),
    "sketch.round_to": lambda payload, *others: nbytes_of(payload, payload, *others),
    "steps.take": lambda weights, changes, factors: nbytes_of(list(weights), list(weights), list(changes)),
    "sparse.decode": lambda wire, values, segments, out, scale, *scratch: nbytes_of(wire, values, out),
    "sparse.put": lambda payload, positions, out: nbytes_of(payload, payload, positions),
    "sparse.largest": _largest,
}
"""By operation: (its arguments) -> bytes."""
