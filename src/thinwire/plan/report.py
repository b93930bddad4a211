"""The report of a run: bytes sent and where the time went, beside the plan."""

from __future__ import annotations

from typing import Any

from thinwire.base import extras
from thinwire.network.ledger import KINDS
from thinwire.plan.plan import Plan, human, in_text


class Report:
    """A table of what was sent and where the time went."""

    def __init__(self, stats: dict[str, Any], plan: Plan) -> None:
        """``stats``: as ``Wire.stats`` gives them."""
        self.stats, self.plan = stats, plan

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
            "memory held": human(stats["memory_bytes"]),
            "memory at its peak, as planned": None if planned is None else human(planned),
        }
        title = f"{self.plan.method} on {self.plan.engine}: {stats['steps']} steps, this rank"
        table = extras.load("rich.table").Table("", title=title, caption=self.plan.note)
        table.add_column("per step (times: median)", justify="right")
        for name, text in rows.items():
            if text is not None:
                table.add_row(name, text)
        return in_text(table, 100)
