"""Radius (MLSys 2025): one mask for T steps."""

from __future__ import annotations

from frame import Headline, Paper, Published, Result, Settings, headline

PAPER = Paper("radius", "Radius (MLSys 2025)")
FIGURES = Published.read("radius")
SPEED = "Table 3"


@PAPER.experiment("headline", minutes=6)
def speedup(settings: Settings) -> Result:
    """1.27x at density 0.4, at the paper's ratio of communication to computing, with its loss."""
    dense, exchange = (FIGURES(SPEED, "dense", quantity) for quantity in ("step", "all-reduce"))
    claim = Headline(
        method="radius(density=0.4,T=200,start=0)",
        dense_ms=dense,
        none_ms=dense - exchange,
        speedup=dense / FIGURES(SPEED, "d=0.4", "step"),
        derived=f"{SPEED}: {dense} ms a step, {exchange} ms of them all-reduce, which Megatron did not overlap",
    )
    return headline(settings, "radius", claim)
