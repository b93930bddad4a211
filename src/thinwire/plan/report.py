"""The report of a run: bytes sent and where the time went, beside the plan."""

from __future__ import annotations

from typing import Any

from thinwire.base import extras
from thinwire.network.ledger import KINDS, LINKS
from thinwire.plan.plan import Plan, human, in_text


class Report:
    """A table of what was sent and where the time went."""

    def __init__(self, stats: dict[str, Any], plan: Plan) -> None:
        """``stats``: as ``Wire.stats`` gives them."""
        self.stats, self.plan = stats, plan

    def __str__(self) -> str:
        stats = self.stats
        title = f"{self.plan.method} on {self.plan.engine}: {stats['steps']} steps, this rank"
        table = extras.load("rich.table").Table(title=title)
        table.add_column("")
        table.add_column("per step (times: median)", justify="right")
        sent = sum(stats["wire_bytes_per_step"].values())
        for link in LINKS:
            label = "across nodes" if link == "inter" else "inside the node"
            table.add_row(f"sent {label}", human(stats["wire_bytes_per_step"][link]))
        if stats["weight_bytes_per_step"]:
            table.add_row("  of that for weights", human(stats["weight_bytes_per_step"]))
        dense = stats["dense_bytes_per_step"]
        table.add_row("dense would send", human(dense))
        table.add_row("share of dense", f"{sent / dense:.1%}" if dense else "-")
        if self.plan.compressed is not None:
            table.add_row("values compressed", f"{self.plan.compressed:.1%}")
        for kind in KINDS:
            table.add_row(kind, f"{stats[f'{kind}_ms']:.2f} ms")
        for name, value in stats["method"].items():
            table.add_row(name, f"{value:.4g}")
        if stats["bound"].get("cut"):
            table.add_row("gradients cut by the bound, so far", f"{stats['bound']['cut']}")
            table.add_row("  norm cut off", f"{stats['bound']['norm']:.4g}")
        table.add_row("skipped steps", str(stats["skipped"]))
        table.add_row("memory held", human(stats["memory_bytes"]))
        if stats["memory_planned_bytes"] is not None:
            table.add_row("memory at its peak, as planned", human(stats["memory_planned_bytes"]))
        table.caption = self.plan.note
        return in_text(table, 100)
