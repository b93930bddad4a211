"""What is sent how: per parameter, decided once, shown to the user, and compared with what really happened."""

from __future__ import annotations

import functools
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from thinwire.collectives import Exchange
from thinwire.errors import ThinwireError
from thinwire.methods.base import Method, Parameter, columns_of
from thinwire.methods.baselines import Fp32

if TYPE_CHECKING:
    from thinwire.memory import Memory

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """The parameter's name in the user's own model: without what compile and checkpoint wrappers put before it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def role_of(name: str, module: nn.Module | None, shape: Sequence[int]) -> str:
    """matrix, embedding, head, router, norm or bias: from the module that holds the parameter, then from its name."""
    last = name.rsplit(".", 1)[-1]
    owner = name.rsplit(".", 2)[-2] if name.count(".") else ""
    if isinstance(module, nn.Embedding):
        return "embedding"
    if last == "bias":
        return "bias"
    if module is not None and "norm" in type(module).__name__.lower():
        return "norm"
    if owner in ("lm_head", "head", "unembed"):
        return "head"
    if "router" in name or owner == "gate":
        return "router"
    return "matrix"


Shape = tuple[int, ...]


def describe(model: nn.Module, shards: Mapping[int, tuple[Shape, Shape]] | None = None) -> dict[int, Parameter]:
    """id(parameter) -> what is known of it, for every trainable parameter; tied ones once, under their first name.

    ``shards``: id(parameter) -> its shape on this rank before the engine shards it, and the shape of the engine's
    padded shard; without it, nothing is sharded.
    """
    modules = dict(model.named_modules())
    found: dict[int, Parameter] = {}
    for full, tensor in model.named_parameters():
        if not tensor.requires_grad:
            continue
        name = clean_name(full)
        role = role_of(name, modules.get(full.rpartition(".")[0]), tensor.shape)
        shape: Shape = tuple(tensor.shape)
        part, shard = (shards or {}).get(id(tensor), (shape, shape))
        found[id(tensor)] = Parameter(name, shape, tensor.numel(), role, tensor.dtype, math.prod(shard), part)
    return found


@dataclass(frozen=True)
class Row:
    """One parameter's line in the plan. Bytes are sent per step and rank."""

    parameter: Parameter
    why_dense: str | None
    wire_bytes: float
    dense_bytes: float


_HELP = {
    "small": "lower smallest, or name them in send=",
    "named in dense=": "take them out of dense=",
    "rank": "lower rank",
    "not selected": "widen select, or name them in send=",
    "attention input": "take select='all', or name them in send=",
}
"""The knob that helps, by how a reason to stay dense begins. For any other reason it is ``send``."""


class Plan:
    """Every parameter: what is sent, how many bytes, what stays dense and why. ``str(plan)`` is a table.

    Attributes:
        rows: one :class:`Row` per trainable parameter.
        wire_bytes: sent per step and rank for gradients. dense_bytes: the same for the engine's own dense exchange.
        weight_bytes: sent per rank for one gathering of the weights, where the engine shards them.
        dense_weight_bytes: the same by the engine's own.
        compressed: share of the trained values that the method compresses, 0 to 1; None where it is not made to
            (dense, fp32, none). On HSDP with such a method across nodes: what the hop inside compresses.
        note: why so little is compressed and which knob helps, in one line; None if what stays dense is neither half
            of the values nor half of the bytes, and every pattern of names matches one.
        lost: what is not returned of the values that are compressed, in one phrase; "" where nothing is lost.
        memory, memory_bytes: beyond the stock engine's, found out by a rehearsal when first asked for.
    """

    def __init__(
        self,
        method: Method,
        parameters: Iterable[Parameter],
        exchange: Exchange,
        engine: str,
        wire_dtype: torch.dtype | None,
        intra: Plan | None = None,
    ) -> None:
        """``intra``: the plan of a hop inside the node that comes before this one; its bytes are added."""
        self.method, self.engine, self.exchange = str(method), engine, exchange
        self.rows = [self._row(method, parameter, exchange, wire_dtype) for parameter in parameters]
        if intra is not None:
            self.rows = [
                replace(row, wire_bytes=row.wire_bytes + hop.wire_bytes, dense_bytes=row.dense_bytes + hop.dense_bytes)
                for row, hop in zip(self.rows, intra.rows, strict=True)
            ]
        self.wire_bytes = sum(row.wire_bytes for row in self.rows)
        self.dense_bytes = sum(row.dense_bytes for row in self.rows)
        ranks = (exchange if intra is None else intra.exchange).rows
        sharded = engine in ("fsdp2", "hsdp")
        self.weight_bytes = sum(self._weights(method, row, ranks) for row in self.rows) if sharded else 0.0
        self.dense_weight_bytes = sum(Method().weight_bytes(row.parameter, ranks) for row in self.rows) * sharded
        self.compressed, self._little = self._share(method), self._why_little(method)
        self.lost = method.promise.lost if any(row.why_dense is None for row in self.rows) else ""
        self._unmatched = method.unmatched(row.parameter.name for row in self.rows)
        if intra is not None:
            self._unmatched = self._unmatched or intra._unmatched
            self.lost = "; ".join(filter(None, dict.fromkeys((self.lost, intra.lost))))
            if self.compressed is None:
                self.compressed, self._little = intra.compressed, intra._little
        self.rehearsal: Callable[[], Memory] | None = None
        self._why = {row.parameter.name: row.why_dense for row in self.rows}

    @property
    def note(self) -> str | None:
        return "; ".join(filter(None, (self._little, self._unmatched))) or None

    @property
    def warning(self) -> str | None:
        """``note``, if it has to be said at once: half of the values stay dense, or a pattern of names matches none."""
        little = self.compressed is not None and self.compressed < 0.5
        return self.note if little or self._unmatched else None

    @functools.cached_property
    def memory(self) -> Memory | None:
        """What the method will hold, and take at its peak; None where it reads values, or refuses: steps will tell."""
        try:
            return None if self.rehearsal is None else self.rehearsal()
        except (NotImplementedError, RuntimeError, ThinwireError):
            return None

    @property
    def memory_bytes(self) -> int | None:
        """What this rank needs for the method at its peak in the steady state, beyond the stock engine. In bytes."""
        return None if self.memory is None else self.memory.peak

    def why_dense(self, name: str) -> str | None:
        """Why the parameter stays dense, or None if it is compressed."""
        return self._why[name]

    def _share(self, method: Method) -> float | None:
        """``compressed``, of ``method`` itself."""
        if method.native or not method.rank_equal or isinstance(method, Fp32):
            return None
        return sum(row.parameter.numel for row in self.rows if row.why_dense is None) / self._values

    def _why_little(self, method: Method) -> str | None:
        """Where what stays dense is half of the values or of the bytes: the reason that keeps most, and its knob."""
        share, dense = self._share(method), [row for row in self.rows if row.why_dense is not None]
        if share is None or not dense or (share >= 0.5 and sum(row.wire_bytes for row in dense) <= self.wire_bytes / 2):
            return None
        values: Counter[str] = Counter()
        for row in dense:
            values[row.why_dense or ""] += row.parameter.numel
        why, most = values.most_common(1)[0]
        rows = [row for row in dense if row.why_dense == why]
        kept = f"{most / self._values:.1%} of the values"
        if self.wire_bytes:
            kept += f" and {sum(row.wire_bytes for row in rows) / self.wire_bytes:.1%} of the bytes"
        helps = next((knob for begins, knob in _HELP.items() if why.startswith(begins)), "name them in send=")
        return (
            f"{method.name} compresses {len(self.rows) - len(dense)} of {len(self.rows)} tensors ({share:.1%} of the "
            f"values): {why} keeps {len(rows)} tensors, {kept}, dense: {helps}"
        )

    @property
    def _values(self) -> int:
        return max(sum(row.parameter.numel for row in self.rows), 1)

    @staticmethod
    def _row(method: Method, parameter: Parameter, exchange: Exchange, wire_dtype: torch.dtype | None) -> Row:
        rows = exchange.bucket_rows(True)
        row_bytes = columns_of(parameter, exchange, rows) * (wire_dtype or parameter.dtype).itemsize
        dense = exchange.sent_bytes(row_bytes, row_bytes, rows, on_wire=True)
        why = method.keep_dense(parameter)
        if not method.rank_equal:
            return Row(parameter, why, 0.0, dense)
        if why:
            return Row(parameter, why, Fp32().sent_bytes(parameter, exchange), dense)
        return Row(parameter, None, dense if method.native else method.sent_bytes(parameter, exchange), dense)

    @staticmethod
    def _weights(method: Method, row: Row, ranks: int) -> float:
        return (method if row.why_dense is None else Method()).weight_bytes(row.parameter, ranks)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.method} on {self.engine}, {self.exchange.rows} ranks: sent per step and rank")
        for column in ("parameter", "shape", "role", "sent as"):
            table.add_column(column, overflow="fold")
        for column in ("wire", "dense"):
            table.add_column(column, justify="right")
        for row in self.rows:
            how = self.method.split("(")[0] if row.why_dense is None else f"dense: {row.why_dense}"
            shape = "x".join(map(str, row.parameter.shape))
            sent, dense = human(row.wire_bytes), human(row.dense_bytes)
            table.add_row(row.parameter.name, shape, row.parameter.role, how, sent, dense)
        share = self.wire_bytes / self.dense_bytes if self.dense_bytes else 1.0
        table.caption = f"{human(self.wire_bytes)} of {human(self.dense_bytes)} ({share:.1%}) for gradients"
        if self.weight_bytes < self.dense_weight_bytes:
            weights, dense_weights = human(self.weight_bytes), human(self.dense_weight_bytes)
            share = self.weight_bytes / self.dense_weight_bytes
            table.caption += f", {weights} of {dense_weights} ({share:.1%}) to gather the weights"
        if self.compressed is not None and self._little is None:
            table.caption += f"; {self.compressed:.1%} of the values compressed"
        if self.memory is not None:
            table.caption += f"; {human(self.memory.peak)} of memory beside the engine's"
        if self.lost:
            table.caption += f"\n{self.lost}"
        if self.note is not None:
            table.caption += f"\n{self.note}"
        out = io.StringIO()
        Console(file=out, width=120, color_system=None).print(table)
        return out.getvalue().rstrip()


def human(nbytes: float) -> str:
    """12345678 -> '12.3 MB' (decimal units, as link rates are)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError
