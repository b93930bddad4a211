"""Train with each method on one emulated network, beside a run that does not communicate, and report."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.errors import ThinwireError
from thinwire.lab import framing
from thinwire.lab.cluster import Cluster
from thinwire.lab.counters import Bytes
from thinwire.lab.link import Link
from thinwire.lab.run import Outcome, launch, open_cluster

SILENT = "none"  # the method that exchanges nothing

Run = dict[str, Any]


def compare(
    methods: Sequence[str],
    preset: str,
    steps: int,
    out: Path,
    *,
    nodes: int = 2,
    ranks_per_node: int = 1,
    link: str = "200mbit",
    mtu: int = 1500,
    limit_s: float | None = None,
    extra: Sequence[str] = (),
    program: Sequence[str] = ("thinwire", "train", "--no-checkpoints"),
) -> int:
    """Run ``program`` once per method within one cluster, one after the other; write report.json, report.md, pictures.

    Args:
        methods: names as ``thinwire.methods.resolve`` takes them; "none" is run first in any case.
        preset, steps, extra: handed to the training program.
        out: a directory that does not exist yet, or is empty.
        limit_s: for each run.
        program: the training program; it keeps the contract of ``thinwire train`` (metrics.jsonl, summary.json).

    Returns:
        0, or the exit status of the run that failed.
    """
    from thinwire.methods import resolve

    Cluster(nodes, ranks_per_node, Link.parse(link, mtu))  # refuses what cannot be; nothing is made yet
    for method in methods:
        resolve(method)
    if steps < 1:
        raise ThinwireError(f"{steps} steps cannot be compared: choose 1 or more (5 for usable times)")
    if limit_s is not None and not 0 < limit_s < math.inf:
        raise ThinwireError(f"a limit of {limit_s / 60:g} minutes ends nothing in time: choose one above 0")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ThinwireError(f"{out} is not empty: choose a new directory with --out")
    out.mkdir(parents=True, exist_ok=True)

    order = [SILENT, *dict.fromkeys(method for method in methods if method != SILENT)]
    runs: list[Run] = []
    with open_cluster(nodes, ranks_per_node, link, mtu) as cluster:
        for method in order:
            directory = out / directory_name(method)
            flags = ["--preset", preset, "--method", method, "--steps", str(steps), "--out", str(directory)]
            print(f"compare: {method} ...", end=" ", file=sys.stderr, flush=True)
            log = out / f"{directory.name}.log"
            # Nothing is exchanged on DDP only: sharded weights must be gathered. It is the floor for all engines.
            engine = ["--engine", "ddp"] if method == SILENT and "--engine" in extra else []
            outcome = launch(cluster, [*program, *flags, *extra, *engine], log=log, limit_s=limit_s)
            print(f"{outcome.seconds:.1f} s", file=sys.stderr)
            if outcome.failed_rank is not None:
                tail = log.read_text(errors="replace").splitlines()[-12:]
                print("\n".join(tail), file=sys.stderr)
                status = f"rank {outcome.failed_rank} failed with exit status {outcome.returncode}"
                print(f"thinwire: method {method}: {status}; its output is in {log}", file=sys.stderr)
                return outcome.returncode
            runs.append(read_run(method, directory, outcome, cluster))
        report = {
            "preset": preset,
            "steps": steps,
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "link": link,
            "mtu": mtu,
            "rate_bits_per_s": cluster.link.rate,
            "emulated_network": cluster.emulated,
            "extra": list(extra),
            "runs": runs,
        }
        measure(report)
    (out / "report.json").write_text(json.dumps(without_rows(report), indent=1) + "\n")
    from thinwire.lab.plots import draw

    pictures = draw(report, out)
    (out / "report.md").write_text(markdown(report, pictures))
    terminal = sys.stdout.isatty()
    Console(width=None if terminal else 200, color_system="auto" if terminal else None).print(table(report, terminal))
    for note in notes(report):
        print(f"* {note}")
    print(f"{out / 'report.md'}, report.json and {len(pictures)} pictures")
    return 0


def directory_name(method: str) -> str:
    """``int8(group=64)`` -> ``int8-group-64``."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", method).strip("-")


def read_run(method: str, directory: Path, outcome: Outcome, cluster: Cluster) -> Run:
    """A run's files, and the kernel's bytes of each node over the whole of it."""
    try:
        summary = json.loads((directory / "summary.json").read_text())
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ThinwireError(f"method {method} left no readable run in {directory}: {error}") from None
    return {
        "method": method,
        "directory": directory.name,
        "seconds": outcome.seconds,
        "summary": summary,
        "rows": rows,
        "node_totals": None if outcome.traffic is None else [traffic._asdict() for traffic in outcome.traffic],
    }


def measure(report: dict[str, Any]) -> None:
    """Fill in each run's ratios, bytes by the kernel's count, and the use of the link."""
    runs = {run["method"]: run for run in report["runs"]}
    silent, dense = runs[SILENT], runs.get("dense")
    for run in report["runs"]:
        summary = run["summary"]
        run["step_to_dense"] = summary["step_ms"] / dense["summary"]["step_ms"] if dense else None
        run["step_to_none"] = summary["step_ms"] / silent["summary"]["step_ms"]
        payload = summary["wire_bytes_per_step"]["inter"] * report["ranks_per_node"]
        exchanges = run is not silent and payload > 0  # the silent run sends a flag of a few bytes, no gradients
        kernel, source = kernel_bytes(run, silent, report["steps"])
        run["bytes_per_step"] = {
            "ledger": payload,
            "framed": framing.frames(payload, report["mtu"]),
            "kernel": kernel._asdict() if kernel else None,
            "kernel_source": source,
            "kernel_to_ledger": kernel.tx / payload if kernel and exchanges else None,
            "kernel_to_framed": kernel.tx / framing.frames(payload, report["mtu"]) if kernel and exchanges else None,
        }
        busy = summary["wire_ms"] / 1000
        rate = report["rate_bits_per_s"]
        run["link_use"] = kernel.tx * 8 / (busy * rate) if kernel and exchanges and busy and rate else None


def kernel_bytes(run: Run, silent: Run, steps: int) -> tuple[Bytes | None, str]:
    """Node 0's bytes per step by the interface's counters, and how they were had.

    Best are the cumulative counters that the run itself noted at each step (``link_tx_bytes``): last minus first, over
    the steps between. Otherwise the node's total over the run less that of the silent run, which has the same set-up
    and evaluation and exchanges nothing.
    """
    keys = ("link_tx_bytes", "link_rx_bytes")
    noted = [row for row in run["rows"] if "loss" in row and all(row.get(key) is not None for key in keys)]
    if len(noted) > 1:
        first, last = noted[0], noted[-1]
        tx, rx = ((last[key] - first[key]) / (last["step"] - first["step"]) for key in keys)
        return Bytes(round(tx), round(rx)), "counters noted at each step"
    if run["node_totals"] and silent["node_totals"]:
        mine, base = Bytes(**run["node_totals"][0]), Bytes(**silent["node_totals"][0])
        extra = mine - base
        return Bytes(round(extra.tx / steps), round(extra.rx / steps)), "whole run less the silent run"
    return None, "no counters on loopback"


def without_rows(report: dict[str, Any]) -> dict[str, Any]:
    """The report without the copies of metrics.jsonl."""
    return report | {"runs": [{key: value for key, value in run.items() if key != "rows"} for run in report["runs"]]}


def network(report: dict[str, Any]) -> str:
    """One line that says what the runs ran on."""
    world = f"{report['nodes']} nodes x {report['ranks_per_node']}"
    if not report["emulated_network"]:
        return f"{world}, plain loopback, NO rate limit"
    frames = f", MTU {report['mtu']}" if report["mtu"] != 1500 else ""
    return f"{world}, {report['link']} per node{frames}"


def human(count: float | None) -> str:
    """Bytes in decimal units, as link rates are."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


COLUMNS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("method", lambda run: run["method"]),
    ("step, ms", lambda run: f"{run['summary']['step_ms']:.0f}"),
    ("x none", lambda run: f"{run['step_to_none']:.2f}"),
    ("x dense", lambda run: "-" if run["step_to_dense"] is None else f"{run['step_to_dense']:.2f}"),
    ("exposed, ms", lambda run: f"{run['summary']['exposed_ms']:.0f}"),
    ("codec, ms", lambda run: f"{run['summary']['encode_ms'] + run['summary']['decode_ms']:.0f}"),
    ("compressed values", lambda run: _share(run["summary"].get("compressed_values"))),
    ("sent/step", lambda run: human(run["bytes_per_step"]["ledger"])),
    ("kernel", lambda run: human((run["bytes_per_step"]["kernel"] or {}).get("tx"))),
    ("kernel/framed", lambda run: _ratio(run["bytes_per_step"]["kernel_to_framed"])),
    ("link use", lambda run: "-" if run["link_use"] is None else f"{run['link_use']:.0%}"),
    ("train loss", lambda run: f"{run['summary']['train_loss']:.4f}"),
    ("valid loss", lambda run: _loss(run["summary"].get("valid_loss"))),
)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def title(report: dict[str, Any]) -> str:
    return f"{report['preset']}, {report['steps']} steps, {network(report)}"


def table(report: dict[str, Any], terminal: bool = False) -> Table:
    out = Table(title=title(report), box=box.SIMPLE_HEAD if terminal else box.ASCII2)
    for index, (name, _) in enumerate(COLUMNS):
        out.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for run in report["runs"]:
        out.add_row(*(cell(run) for _, cell in COLUMNS))
    return out


def notes(report: dict[str, Any]) -> list[str]:
    """For each run of which a large part stays dense: what, why, and the knob that helps."""
    found = ((run["method"], run["summary"].get("note")) for run in report["runs"])
    return [note if note.startswith(method) else f"{method}: {note}" for method, note in found if note]


def markdown(report: dict[str, Any], pictures: Sequence[Path]) -> str:
    """report.md: the table, what its columns mean, the pictures."""
    lines = [f"# {title(report)}", ""]
    if not report["emulated_network"]:
        lines += ["**No network was emulated: the ranks ran on plain loopback without a rate limit.**", ""]
    lines += ["| " + " | ".join(name for name, _ in COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(cell(run) for _, cell in COLUMNS) + " |" for run in report["runs"]]
    if notes(report):
        lines += ["", *(f"* {note}" for note in notes(report))]
    source = report["runs"][-1]["bytes_per_step"]["kernel_source"]
    lines += [
        "",
        "* step: median milliseconds per optimizer step. x none, x dense: against the run that exchanges nothing "
        "(its ranks drift apart; it is there for its speed, not for its loss), and against dense.",
        "* exposed: communication that computation did not hide. codec: encoding and decoding, hidden or not.",
        "* compressed values: share of the model's values that the method compresses; the others are sent in fp32.",
        "* sent/step: payload bytes that a node's ranks sent to other nodes, by Thinwire's ledger.",
        f"* kernel: bytes that node 0's interface sent per step ({source}).",
        f"* kernel/framed: against the ledger's bytes in full frames ({framing.frame(report['mtu'])} bytes for "
        f"{framing.segment(report['mtu'])} of payload); above 1: acknowledgements and small messages.",
        "* link use: kernel bytes over what the link could carry while a collective was in flight (small messages can "
        "pass 100%: a burst of 66 kB, or 1 ms of the rate, goes through at once).",
        "",
    ]
    lines += [f"![{path.stem.replace('_', ' ')}]({path.name})\n" for path in pictures]
    return "\n".join(lines)
