"""The plan, which says how each parameter is sent, and the report, which compares it with what really happened."""

from __future__ import annotations

import functools
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinwire.base import extras
from thinwire.base.errors import ThinwireError
from thinwire.base.terminal import columns, fold
from thinwire.core.bucket import Layout
from thinwire.core.exchange import Exchange, on_comm
from thinwire.core.method import Fp32, Method, Parameter, Run, carrier_of
from thinwire.core.road import Road, Stage
from thinwire.core.selection import dense_among, keep_dense, unmatched
from thinwire.network.comm import Comm, CountingComm
from thinwire.network.guard import Guard
from thinwire.network.ledger import KINDS, Ledger
from thinwire.plan.doubles import Watch
from thinwire.plan.dry_run import DryRun, dry_run, separate_buffers, stand_in_run
from thinwire.plan.measured import describe_measured

SLOW_BETA2 = 0.98
"""Below it a beta2 is named as fast. Between those that ran with steps of each rank's own: 0.95, and 0.99 and 0.997."""


@dataclass(frozen=True)
class Row:
    """A parameter's line in the plan. Bytes are per step and rank."""

    parameter: Parameter
    why_dense: str | None
    wire_bytes: float
    dense_bytes: float


MB = 2**20
"""The unit of torch's ``bucket_cap_mb``."""
BUCKETS = 16
"""The number of buckets of the gradients, within the limits below. The last bucket's exchange begins when the backward
pass ends, so 1 / BUCKETS of the exchange (or of the backward pass, if shorter) is left then. Higher => less is left,
more and smaller messages."""
MIN_SENT = 0.5e6
"""Fewest bytes that a rank sends of a bucket: 4 ms at 1 Gbit/s, while starting an exchange takes up to 1 ms. Lower =>
smaller buckets for methods that compress most."""
MAX_MB = 25.0
"""The size of torch's own buckets. Larger ones gain nothing, even for a large model."""
WIDEST = 120
"""Columns of a plan's table where it goes to a file."""
_HELP = {
    "small": "lower smallest, or name them in send=",
    "named in dense=": "take them out of dense=",
    "rank": "lower rank",
    "not selected": "widen select, or name them in send=",
    "attention input": "take select='all', or name them in send=",
}
"""The knob that helps, by the first words of a reason to stay dense. For other reasons it is ``send``."""


class Plan:
    """Every parameter: what is sent, how many bytes, what stays dense and why. ``str(plan)`` is a table.

    Attributes:
        wire_bytes: bytes sent per step and rank, for gradients and what goes with them.
        dense_bytes: the same for the engine's own dense exchange.
        weight_bytes: bytes sent per step and rank to gather the weights, if the engine shards them, with one
            micro-batch in a step.
        dense_weight_bytes: the same for the engine's own gathers.
        compressed: share of the trained values that the method compresses, 0 to 1; None for dense, fp32 and none. On
            HSDP with such a method across nodes: the share that the method inside the node compresses.
        measured: one line on the loss of the longest measured runs of such knobs, if any; "" if nothing is compressed.
        note: one line on why so little is compressed, which knob helps, and patterns that match no name; None if less
            than half of the values and of the bytes stay dense, and every pattern matches.
        lost: one phrase on what the compressed values lose for good; "" for nothing.
        bucket_cap_mb: the ``bucket_cap_mb`` of DistributedDataParallel that suits the method. None on other engines,
            for methods that do not compress, and where ranks step alone.
        choice: how ``Auto`` chose the method, with what it measured; None: the user named it.
    """

    choice: Any = None

    def __init__(
        self,
        road: Road,
        run: Run,
        engine: str = "ddp",
        *,
        layout: Callable[[], Layout] | None = None,
        guards: Sequence[Comm] = (),
    ) -> None:
        """Make the plan. A dry run finds out bytes and memory when they are first read.

        Args:
            run: of the method.
            layout: of the engine; None: the plan knows neither memory nor bytes for weights.
            guards: the groups on which ranks agree whether a step counts.
        """
        method = road.last.method
        self.method, self.engine = str(method), engine
        self._road, self._run, self._layout, self._guards = road, run, layout, guards
        self.ranks = math.prod(stage.exchange.ranks for stage in road.stages)
        self._parameters = list(run.parameters.values())
        self._values = max(sum(parameter.numel for parameter in self._parameters), 1)
        self._reasons = {parameter.name: keep_dense(method, parameter) for parameter in self._parameters}
        stages = list(reversed(road.stages))
        lines = (unmatched(carrier_of(stage.method), self._reasons) for stage in stages)
        self._unmatched = next(filter(None, lines), None)
        self._speaks = next((stage for stage in stages if self._share(stage) is not None), road.last)
        self.compressed = self._share(self._speaks)
        losses = [stage.method.card.promise.lost for stage in stages if self._sent(stage)]
        self.lost = "; ".join(filter(None, dict.fromkeys(losses)))

    @functools.cached_property
    def rows(self) -> list[Row]:
        """A row for each trainable parameter."""
        sent = self._by_parameter.parameters
        return [Row(p, self._reasons[p.name], sent[p.name], self._road.dense_bytes(p)) for p in self._parameters]

    @functools.cached_property
    def wire_bytes(self) -> float:
        return sum(self._by_parameter.sent.values())

    @functools.cached_property
    def dense_bytes(self) -> float:
        return sum(row.dense_bytes for row in self.rows)

    @functools.cached_property
    def measured(self) -> str:
        method = self._road.last.method
        return describe_measured(method, self.ranks) if self.compressed and not method.card.native else ""

    @functools.cached_property
    def bucket_cap_mb(self) -> float | None:
        if self.engine != "ddp" or self.compressed is None or not self._road.last.method.rank_equal:
            return None
        gradients = sum(p.numel * p.dtype.itemsize for p in self._parameters)
        minimum = MIN_SENT * gradients / self.wire_bytes if self.wire_bytes else math.inf
        return max(round(min(max(gradients / BUCKETS, minimum) / MB, MAX_MB), 1), 0.1)

    @property
    def _splits(self) -> bool:
        """Whether ``bucket_cap_mb`` would split a bucket of DDP's: torch closes one once it has as many bytes."""
        if self.bucket_cap_mb is None or self._layout is None:
            return False
        layout, cap = self._layout(), self.bucket_cap_mb * MB
        sizes = (sum(piece.numel for piece in pieces[:-1]) for pieces in layout.buffers)
        return any(size * dtype.itemsize >= cap for size, dtype in zip(sizes, layout.dtypes, strict=True))

    @functools.cached_property
    def weight_bytes(self) -> float:
        if self._layout is None:
            return 0.0
        return self.dry_run.weights if self._road.last.method.card.encodes_weights else self.dense_weight_bytes

    @functools.cached_property
    def dense_weight_bytes(self) -> float:
        layout = None if self._layout is None else self._layout()
        if layout is None or layout.comm is None:
            return 0.0
        size = layout.comm.size
        return sum(
            (size - 1 + (size - size / ranks if ranks else 0)) * shard.numel * shard.dtype.itemsize
            for shard, ranks in zip(layout.shards, layout.regathers, strict=True)
        )

    @functools.cached_property
    def dry_run(self) -> DryRun:
        """The dry run with the engine's buffers: memory and collectives. ThinwireError without the engine's layout."""
        if self._layout is None:
            raise ThinwireError("a plan without an engine's layout has no dry run of its buffers")
        return dry_run(self._layout(), self._road, self._run, self._guards, Watch())

    @functools.cached_property
    def _by_parameter(self) -> DryRun:
        layout = separate_buffers(self._parameters, self._road)
        return dry_run(layout, self._road, self._run, self._guards)

    @functools.cached_property
    def dense_from(self) -> int | None:
        """The number of ranks from which dense sends less, estimated by the largest parameter; None: never.

        A message m to all costs (N - 1) m, a ring of D bytes 2 (N - 1) / N D. ``largest_bytes`` at two N tells m and D.
        """
        last, sent = self._road.last, self._sent(self._road.last)
        replicates = len(self._road.stages) == 1 < self.ranks and not last.exchange.owner
        if not (last.method.card.grows_with_ranks and sent and replicates):
            return None
        largest, ranks = max(sent, key=lambda parameter: parameter.numel), self.ranks
        layout = separate_buffers([largest], self._road)

        def largest_bytes(size: int) -> float:
            exchange = on_comm(last.exchange, CountingComm(0, range(size), Ledger()))
            dry = dry_run(layout, Road([replace(last, exchange=exchange)]), self._run, self._guards)
            return dry.parameters[largest.name] * size / (size - 1)

        single, double = largest_bytes(ranks), largest_bytes(2 * ranks)
        dense = self._road.dense_bytes(largest) * ranks / (ranks - 1)
        return max(int((dense - 2 * single + double) / (double - single) * ranks) + 1, 2)

    @property
    def _grows(self) -> str | None:
        if self.dense_from is None:
            return None
        at_scale = self._road.last.method.card.instead_at_scale
        instead = f"; {at_scale} does not grow" if at_scale else ""
        return f"what {self.method} sends grows with the ranks: from {self.dense_from} on, dense sends less{instead}"

    @property
    def note(self) -> str | None:
        return "; ".join(filter(None, (self._little, self._unmatched))) or None

    @property
    def warning(self) -> str | None:
        """The warning to give at once: most values stay dense, a pattern matches no name, or dense would send less."""
        little = self.compressed is not None and self.compressed < 0.5
        many = self._grows if self.dense_from is not None and self.ranks >= self.dense_from else None
        return "; ".join(filter(None, (self.note if little or self._unmatched else None, many))) or None

    @property
    def memory_bytes(self) -> int | None:
        """The bytes that this rank needs at its peak, beyond the stock engine's; None without the engine's layout."""
        memory = None if self._layout is None else self.dry_run.memory
        return None if memory is None or self._layout is None else memory.peak + self._layout().held

    def _share(self, stage: Stage) -> float | None:
        carrier = carrier_of(stage.method)
        if carrier.card.native or not carrier.rank_equal or isinstance(carrier, Fp32):
            return None
        return sum(p.numel for p in self._sent(stage)) / self._values

    def _sent(self, stage: Stage) -> list[Parameter]:
        """List the parameters that the method of ``stage`` compresses."""
        return [parameter for parameter in self._parameters if keep_dense(stage.method, parameter) is None]

    @functools.cached_property
    def _little(self) -> str | None:
        """Name the reason that keeps most values dense, and its knob, if half of the values or bytes stay dense."""
        method, share = self._speaks.method, self.compressed
        why_dense = {p.name: reason for p in self._parameters if (reason := keep_dense(method, p)) is not None}
        if share is None or not why_dense:
            return None
        dense = [row for row in self.rows if row.parameter.name in why_dense]
        if share >= 0.5 and sum(row.wire_bytes for row in dense) <= self.wire_bytes / 2:
            return None
        values: Counter[str] = Counter()
        for row in dense:
            values[why_dense[row.parameter.name]] += row.parameter.numel
        reason, count = values.most_common(1)[0]
        rows = [row for row in dense if why_dense[row.parameter.name] == reason]
        share_text = f"{count / self._values:.1%} of the values"
        if self.wire_bytes:
            share_text += f" and {sum(row.wire_bytes for row in rows) / self.wire_bytes:.1%} of the bytes"
        remedy = next((knob for begins, knob in _HELP.items() if reason.startswith(begins)), "name them in send=")
        return (
            f"{method.name} compresses {len(self.rows) - len(dense)} of {len(self.rows)} tensors ({share:.1%} of "
            f"the values): {reason} keeps {len(rows)} tensors, {share_text}, dense: {remedy}"
        )

    def __str__(self) -> str:
        return self.text(min(columns() or WIDEST, WIDEST))

    def text(self, width: int = WIDEST) -> str:
        """Write the plan as text of ``width`` columns; ``print(plan)`` has the terminal's."""
        title = f"{self.method} on {self.engine}, {self.ranks} ranks: sent per step and rank"
        narrow = {} if width >= WIDEST else {"box": extras.load("rich.box").SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
        table = extras.load("rich.table").Table(title=title, **narrow)
        for column in ("parameter", "shape", *(() if narrow else ("role",)), "sent as"):
            table.add_column(column, overflow="fold")
        for column in ("wire", "dense"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            encoding = self.method.split("(")[0] if row.why_dense is None else f"dense: {row.why_dense}"
            shape = "x".join(map(str, row.parameter.shape))
            sent, dense = human(row.wire_bytes), human(row.dense_bytes)
            role = () if narrow else (row.parameter.role,)
            table.add_row(row.parameter.name, shape, *role, encoding, sent, dense)
        lines = filter(None, [*self._summary(), self.choice and str(self.choice)])
        return "\n".join([in_text(table, width), *(fold(line, width) for line in lines)])

    def _summary(self) -> Iterator[str | None]:
        """Yield the lines below the table; None or "" for no line."""
        share = self.wire_bytes / self.dense_bytes if self.dense_bytes else 1.0
        totals = f"{human(self.wire_bytes)} of {human(self.dense_bytes)} ({share:.1%}) for gradients"
        if self.dense_weight_bytes:
            weights, dense_weights = human(self.weight_bytes), human(self.dense_weight_bytes)
            share = self.weight_bytes / self.dense_weight_bytes
            totals += f", {weights} of {dense_weights} ({share:.1%}) to gather weights, with one micro-batch"
        if self.compressed is not None and self._little is None:
            totals += f"; {self.compressed:.1%} of the values compressed"
        if self.memory_bytes is not None:
            totals += f"; {human(self.memory_bytes)} of memory beside the engine's"
        yield totals
        yield self._road.last.method.card.why_whole if self.dense_weight_bytes else None
        yield self.lost
        yield self.measured
        if self._splits:
            cap = f"DistributedDataParallel(model, bucket_cap_mb={self.bucket_cap_mb:g})"
            yield f"smaller buckets let the exchange begin earlier: {cap}"
        yield self._grows
        yield self._noisy
        yield self.note

    @property
    def _noisy(self) -> str | None:
        """Name a beta2 with which the second moments that divide each rank's own steps are noisy."""
        last, holders = self._road.last, self._run.holders
        sent = [] if last.method.card.step_maker is None else self._sent(last)
        groups = [holders[parameter.name].group for parameter in sent if parameter.name in holders]
        beta2 = min((float(group["betas"][1]) for group in groups if "betas" in group), default=1.0)
        if beta2 >= SLOW_BETA2:
            return None
        return (
            f"with beta2 {beta2:g} each rank's own second moments, of few sequences, are noisy: with 0.99 trickle "
            "ended lower in most settings, most where ranks have few sequences (docs/quality.md)"
        )


@dataclass(frozen=True)
class Report:
    """A table of bytes sent and times beside the plan. ``stats``: from ``Wire.stats``."""

    stats: dict[str, Any]
    plan: Plan

    def __str__(self) -> str:
        stats, sent, dense = self.stats, self.stats["wire_bytes_per_step"], self.stats["dense_bytes_per_step"]
        for_weights, cut, planned = stats["weight_bytes_per_step"], stats["bound"], stats["memory_planned_bytes"]
        rows = {
            "sent across nodes": human(sent["inter"]),
            "sent inside the node": human(sent["intra"]),
            "  of that for weights": human(for_weights) if for_weights else None,
            "dense would send": human(dense),
            "share of dense": f"{sum(sent.values()) / dense:.1%}" if dense else "-",
            "values compressed": None if self.plan.compressed is None else f"{self.plan.compressed:.1%}",
            **{kind: f"{stats[f'{kind}_ms']:.2f} ms" for kind in KINDS},
            **{name: f"{value:.4g}" for name, value in stats["method"].items()},
            "gradients cut by the bound, so far": f"{cut['cut']}" if cut.get("cut") else None,
            "  norm cut off": f"{cut['norm']:.4g}" if cut.get("cut") else None,
            "skipped steps": str(stats["skipped"]),
            **{f"lost with a replica, step {loss['step']}": f"{loss['norm']:.4g}" for loss in stats.get("lost", ())},
            "memory held": human(stats["memory_bytes"]),
            "memory at its peak, as planned": None if planned is None else human(planned),
        }
        title = f"{self.plan.method} on {self.plan.engine}: {stats['steps']} steps, this rank"
        table = extras.load("rich.table").Table("", title=title, caption=self.plan.note)
        table.add_column("per step (times: median)", justify="right")
        for name, text in rows.items():
            if text is not None:
                table.add_row(name, text)
        return in_text(table, min(columns() or 100, 100))


def plan_of(method: Method, parameters: Iterable[Parameter], *exchanges: Exchange, intra: Method | None = None) -> Plan:
    """Make the plan of ``method`` on the last of ``exchanges``, and of ``intra`` on the one before, if there are two.

    The plan is that of ``compress()``, without an engine's layout. The method need not have begun.
    """
    parameters = list(parameters)
    run = method.run if hasattr(method, "run") else stand_in_run(method, parameters, exchanges[-1])
    return Plan(road_of(method, parameters, *exchanges, intra=intra), run, "ddp" if intra is None else "hsdp")


def road_of(method: Method, parameters: Iterable[Parameter], *exchanges: Exchange, intra: Method | None = None) -> Road:
    """Make the road of ``method`` and, if given, ``intra``; arguments as for :func:`plan_of`."""
    parameters, methods = list(parameters), [method] if intra is None else [intra, method]
    return Road([
        Stage(stage_method, dense_among(stage_method, parameters), exchange, Guard([], False), Ledger())
        for stage_method, exchange in zip(methods, exchanges, strict=True)
    ])  # fmt: skip


def in_text(table: Any, width: int) -> str:
    """Print a rich ``table`` as plain text, ``width`` characters wide."""
    out = io.StringIO()
    extras.load("rich.console").Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue().rstrip()


def human(nbytes: float) -> str:
    """Write 12345678 as '12.3 MB' (decimal units, like link rates)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError
