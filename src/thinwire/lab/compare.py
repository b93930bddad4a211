"""Train with each method on one emulated network, beside a run that does not communicate, and report."""

from __future__ import annotations

import fcntl
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tyro.conf import Fixed, Suppress

from thinwire.base import extras, files, terminal
from thinwire.base.errors import ThinwireError, refuse_any
from thinwire.base.processes import Bytes
from thinwire.lab import framing, verdict
from thinwire.lab.cluster import Cluster
from thinwire.lab.entries import Entry, method_names, preset_flags, preset_of
from thinwire.lab.link import Network, share
from thinwire.lab.progress import Progress
from thinwire.lab.run import describe_machine, launch, open_cluster, say
from thinwire.lab.verdict import DENSE, SILENT, Run

NOTED = "counters noted at each step"
LOCK = ".lock"
"""The file in --out that a comparison holds locked."""
FAILED, LOSS_TOO_HIGH = 1, 3
"""Exit statuses: a method has failed; a method's loss is too high."""


@dataclass
class Comparison(Network):
    """Train the same model on the same data with each method, on one emulated network, and show what each gains.

    The first run always exchanges nothing (method "none"): no method can be faster. Options of `thinwire train` follow
    after --. Prints a verdict and a table; writes them with pictures to report.html (one file), report.md and
    report.json. Exit status: 0; 1: a method has failed; 3: the loss of one is too high (--fail-if-loss-worse-than).

    $ thinwire compare --methods dense,int8 --link 1gbit --out runs/compare
    $ thinwire compare --methods "dense,topk --lr 1e-4" --seeds 3 --out runs/a -- --batch-size 16
    """

    GROUPS: ClassVar[Mapping[str, str]] = {"methods": "Comparison", "nodes": "Emulated network"}

    methods: str = "dense,bf16,int8,sdp4bit,topk"
    """Methods, separated by commas, with or without knobs. Options of thinwire train after a name are for it alone:
    'dense,int8(group=64),topk --lr 1e-3'. `thinwire methods` lists the names.
    """
    preset: str | None = None
    """The model; see thinwire train --help. Default: that of a --config after --, or net20m (in tiny and small, most
    tensors are too small to be worth compressing)."""
    steps: int = 20
    """Optimizer steps of every run. 5 or more: the first two are not timed. For local-steps, take whole rounds."""
    seeds: int = 1
    """Runs of each method, with the seeds S, S + 1, ... (S: --seed after --, or 0). With 2 or more, losses and speeds
    have error bars."""
    fail_if_loss_worse_than: str | None = None
    """End with status 3 if a method's mean loss is above dense's by more than this: 1% or 0.01 (lower: stricter)."""
    out: Path = Path("runs/compare")
    """Folder for the report, with a folder for each run. It must be new."""
    limit_minutes: float = 60.0
    """If a run takes longer than this, its method has failed."""
    extra: Suppress[Fixed[tuple[str, ...]]] = ()
    """Flags for the training program, of all methods."""
    first_seed: Suppress[Fixed[int]] = 0
    """The first of several seeds. A single run of each method has the program's own."""
    model: Suppress[Fixed[str]] = ""
    """The model's name in the reports; "": the preset."""
    command: Suppress[Fixed[str]] = ""
    """The command line, for the reports."""
    program: Suppress[Fixed[tuple[str, ...]]] = ("thinwire", "train", "--no-checkpoints")
    """The training program; it keeps the contract of ``thinwire train`` (metrics.jsonl, summary.json)."""

    @property
    def name(self) -> str:
        return self.model or preset_of(self.preset, self.extra) or "the model of --config"

    @property
    def fail_above(self) -> float | None:
        """The share above dense's loss beyond which a method fails the comparison."""
        text = self.fail_if_loss_worse_than
        return None if text is None else share(text, "--fail-if-loss-worse-than, of dense's loss,")

    @property
    def seed_numbers(self) -> Sequence[int]:
        """The seeds of every method; empty: one run of each method, with the training program's seed."""
        return range(self.first_seed, self.first_seed + self.seeds) if self.seeds > 1 else ()

    def entries(self) -> dict[str, Entry]:
        """Check the settings (``ThinwireError``) and return the entries by label, the silent run first."""
        from thinwire.methods import AUTO, resolve

        Cluster(self.nodes, self.ranks_per_node, self.parse_link())  # checks its arguments; makes nothing yet
        entries = {entry.label: entry for entry in map(Entry.parse, [SILENT, *method_names(self.methods)])}
        for entry in entries.values():
            if entry.method != AUTO:
                resolve(entry.method)
        refuse_any({
            f"--steps is 5 or more, as the first two are not timed, got {self.steps}": self.steps < 5,
            "--nodes 1 --ranks-per-node 1 is one rank, which exchanges nothing: let there be two or more":
                self.nodes * self.ranks_per_node == 1,
            f"--seeds is the number of runs of each method, 1 or more, got {self.seeds}": self.seeds < 1,
            f"--limit-minutes must be above 0, got {self.limit_minutes:g}": not 0 < self.limit_minutes < math.inf,
            "--fail-if-loss-worse-than compares with dense: add it to --methods":
                self.fail_above is not None and DENSE not in entries,
        })  # fmt: skip
        self.check_empty()
        if len(set(map(directory_name, entries))) < len(entries):
            raise ThinwireError("two of --methods would share a folder in --out, as only their punctuation differs")
        return entries

    def check_empty(self) -> None:
        """Raise ThinwireError if ``out`` holds anything but a lock."""
        if self.out.exists() and not (self.out.is_dir() and {path.name for path in self.out.iterdir()} <= {LOCK}):
            kind = "is not empty: choose a new directory" if self.out.is_dir() else "is a file: name a directory"
            raise ThinwireError(f"{self.out} {kind} with --out")

    @contextmanager
    def folder(self) -> Iterator[None]:
        """Make ``out`` and hold it: two that begin at once both find it empty."""
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                line = f"{self.out} is in use by another comparison: choose a new directory with --out"
                raise ThinwireError(line) from None
            except OSError as error:
                say(f"thinwire: {self.out} cannot be locked ({error.strerror}): start no second comparison in it")
            self.check_empty()
            yield

    def flags(self, entry: Entry, seed: int | None, directory: Path) -> list[str]:
        """Return the training program's flags for one run."""
        flags = preset_flags(self.preset, self.extra)
        flags += ["--method", entry.method, "--steps", str(self.steps), "--out", str(directory), *self.extra]
        flags += [*entry.own_flags(self.extra), *([] if seed is None else ["--seed", str(seed)])]
        # Only DDP can exchange nothing: sharded weights must be gathered. The silent run is the floor for all engines.
        return flags + (["--engine", "ddp", "--shard-size", "None", "--intra", "None"] if entry.label == SILENT else [])


def compare(settings: Comparison) -> int:
    """Train per seed and method, one after the other in one cluster; write the reports and the pictures.

    A method that fails gets a row with the reason, and the others go on. Return the exit status.
    """
    entries = settings.entries()
    for package in ("matplotlib", "markdown_it"):  # of the report: missing, they are to be so before hours of runs
        extras.load(package)
    with settings.folder():
        return _compare(settings, entries)


def _compare(settings: Comparison, entries: dict[str, Entry]) -> int:
    with open_cluster(settings.nodes, settings.ranks_per_node, settings.parse_link()) as cluster:
        model, count = settings.name, len(entries) * settings.seeds
        say(f"compare: {count} runs of {model}, {settings.steps} steps each: {', '.join(entries)}")
        runs = _train_all(settings, entries, cluster)
        report = _facts(settings, cluster) | {"runs": runs}
    measure(report)
    report["verdict"] = verdict.line(report)
    _write(report, settings.out)
    too_high: list[str] = []
    if settings.fail_above is not None and (too_high := verdict.worse(report, settings.fail_above)):
        say(f"thinwire: loss is more than {100 * settings.fail_above:g}% above dense's: {', '.join(too_high)}")
    return FAILED if any(run["failed"] for run in runs) else LOSS_TOO_HIGH if too_high else 0


def _train_all(settings: Comparison, entries: dict[str, Entry], cluster: Cluster) -> list[Run]:
    """Train once per seed and entry, without the entries that have failed before. Return a run per entry."""
    runs, failed = {label: list[Run]() for label in entries}, dict[str, str]()
    seeds = settings.seed_numbers or (None,)
    progress = Progress(settings.steps, [label for _ in seeds for label in entries])
    for seed in seeds:
        for label, entry in entries.items():
            if label in failed:
                continue
            name = label if seed is None else f"{label} seed {seed}"
            directory = settings.out / directory_name(name)
            command = [*settings.program, *settings.flags(entry, seed, directory)]
            try:
                with progress.run(label, name, directory / "metrics.jsonl") as watch:
                    run = train(command, directory, cluster, 60 * settings.limit_minutes, watch)
            except (ThinwireError, OSError) as error:
                line = files.in_one_line(error)
                failed[label] = str(line) if seed is None else f"seed {seed}: {line}"
                progress.failed(label)
                say(f"thinwire: method {label}: {failed[label]}; its output is in {log_of(directory)}")
                continue
            runs[label].append(run | {"seed": seed})
            progress.ended(label, run, cluster)
    return [
        joined(entry, entry.own_flags(settings.extra), runs[label], failed.get(label))
        for label, entry in entries.items()
    ]


def _facts(settings: Comparison, cluster: Cluster) -> dict[str, Any]:
    """Return the report's entries without its runs, with an empty verdict."""
    settings_told = ("command", "steps", "nodes", "ranks_per_node", "mtu", "fail_above")
    link = cluster.link
    return {
        "verdict": "",
        **{name: getattr(settings, name) for name in settings_told},
        "preset": preset_of(settings.preset, settings.extra),
        "model": settings.name,
        "seeds": list(settings.seed_numbers),
        "extra": list(settings.extra),
        "machine": describe_machine(),
        "link": settings.parse_link().text,
        "distance": link.distance,
        "delay_s": link.delay,
        "jitter_s": link.jitter,
        "loss_share": link.loss,
        "reorder_share": link.reorder,
        "rate_bits_per_s": link.rate,
        "delayed_by": cluster.delayed_by,
        "forwarded": cluster.forwarded(),
        "emulated_network": cluster.emulated,
    }


def _write(report: dict[str, Any], out: Path) -> None:
    """Write the reports and the pictures to ``out`` and print the result, each also if the other meets a full disk."""
    from thinwire.lab import plots
    from thinwire.lab.report import markdown, page

    try:
        files.write(out / "report.json", json.dumps(for_json(report), indent=1) + "\n")
        pictures = plots.draw(report, out)
        files.write(out / "report.md", markdown(report, pictures))
        files.write(out / "report.html", page(report, pictures))
    finally:
        _print(report)
    terminal.say(f"{out / 'report.html'}, report.md, report.json and {len(pictures)} pictures")


def _print(report: dict[str, Any]) -> None:
    """Print the verdict, the table and the notes."""
    from rich import box
    from rich.console import Console

    from thinwire.lab.report import ALL, fitting, notes, table

    width = terminal.columns()
    if width is None:
        print(report["verdict"])
        Console(markup=False, width=1000, color_system=None).print(table(report, ALL, box.ASCII2))
    else:
        terminal.say(report["verdict"].replace("; ", "\n"))
        Console(markup=False, width=width).print(fitting(report, width))
    for note in notes(report):
        terminal.say(f"* {note}")


def directory_name(label: str) -> str:
    """Return ``int8-group-64`` for ``int8(group=64)``."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")


def log_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.log")


def train(
    command: Sequence[str], directory: Path, cluster: Cluster, limit_s: float, watch: Callable[[], None] = lambda: None
) -> Run:
    """Run ``command``; return the contents of its files, and the kernel's bytes of each node over the whole run.

    Raises:
        ThinwireError: it failed, took longer than ``limit_s``, left no readable files, or its loss is not finite.
    """
    log = log_of(directory)
    outcome = launch(cluster, command, log=log, limit_s=limit_s, watch=watch)
    if outcome.failed_rank is not None:
        lines = log.read_text(errors="replace").splitlines()
        say("\n".join(lines[-12:]))
        messages = [line.partition("thinwire: ")[2] for line in lines if "thinwire: " in line] or lines
        status = f"rank {outcome.failed_rank} failed with exit status {outcome.returncode}"
        raise ThinwireError(": ".join([status, *(re.sub(r"^\[rank ?\d+\]:? ", "", line) for line in messages[-1:])]))
    try:
        summary = json.loads((directory / "summary.json").read_text())
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        windows = verdict.read_windows(directory / verdict.WINDOWS)
    except (OSError, ValueError, KeyError) as error:
        raise ThinwireError(f"no readable run in {directory}: {error}") from None
    if not math.isfinite(verdict.final_loss(summary)):
        raise ThinwireError("it diverged: its loss is not finite")
    return {
        "directory": directory.name,
        "seconds": outcome.seconds,
        "summary": summary,
        "rows": [row for row in rows if "loss" in row],  # rows of steps, without rows of evaluations
        "windows": windows,
        "node_totals": None if outcome.traffic is None else [traffic._asdict() for traffic in outcome.traffic],
    }


def joined(entry: Entry, flags: Sequence[str], runs: Sequence[Run], failed: str | None) -> Run:
    """Join a method's runs, one per seed, into one: the means of their summaries and of their losses at each step."""
    return {
        "method": entry.label,
        "flags": list(flags),
        "failed": failed,
        "directory": runs[0]["directory"] if runs else "",
        "seconds": sum(run["seconds"] for run in runs),
        "summary": None if failed else mean([run["summary"] for run in runs]),
        "rows": [] if failed else curve(runs),
        "parts": list(runs),
    }


def mean(values: Sequence[Any]) -> Any:
    """Average numbers, also inside dictionaries, where all have them; of other values, return the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean([value[key] for value in values]) for key in first if all(key in value for value in values)}
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return statistics.fmean(values) if numbers and len(values) > 1 else first


def curve(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return for each step: mean, least and largest loss over seeds, mean seconds, and bytes sent so far by a node."""
    rows, sent_bytes = list[dict[str, Any]](), 0.0
    for step in zip(*(run["rows"] for run in runs), strict=True):
        losses = [row["loss"] for row in step]
        sent_bytes += statistics.fmean(row["node_bytes"] for row in step)
        rows.append({
            "step": step[0]["step"], "loss": statistics.fmean(losses), "least": min(losses), "largest": max(losses),
            "wall_s": statistics.fmean(row["wall_s"] for row in step), "sent": sent_bytes,
        })  # fmt: skip
    return rows


def measure(report: dict[str, Any]) -> None:
    """Fill in each run's ratios, kernel bytes, link use, and the step at which it reached dense's loss."""
    finished = {run["method"]: run for run in report["runs"] if not run["failed"]}
    silent, dense = finished.get(SILENT), finished.get(DENSE)
    unknown = ("step_to_dense", "step_to_none", "faster", "final", "loss_gap", "bytes_per_step", "link_use", "to_dense")
    for run in report["runs"]:
        run |= dict.fromkeys(unknown)
    for run in finished.values():
        summary = run["summary"]
        if dense:
            pairs = list(zip(run["parts"], dense["parts"], strict=True))
            run["faster"], run["loss_gap"] = verdict.faster(pairs), verdict.above(pairs)
            run["step_to_dense"] = 1 / run["faster"].mean
            rows = [verdict.reached(*pair) for pair in pairs]
            run["to_dense"] = [row and {key: row[key] for key in ("step", "wall_s", "tokens")} for row in rows]
        if silent:
            run["step_to_none"] = 1 / verdict.faster(list(zip(run["parts"], silent["parts"], strict=True))).mean
        run["final"] = verdict.interval([verdict.final_loss(seed_run["summary"]) for seed_run in run["parts"]])
        payload = run["rows"][-1]["sent"] / len(run["rows"])
        exchanges = run is not silent and payload > 0  # the silent run sends only a flag of a few bytes
        kernel, source = None, "no interface of its own"
        if report["emulated_network"]:
            kernel, source = kernel_bytes(run["parts"][0], silent and silent["parts"][0], report["steps"])
        rows = run["parts"][0]["rows"][source == NOTED :]  # the kernel is first asked at the end of the first step
        counted = statistics.fmean(row["node_bytes"] for row in rows)
        ratio = kernel.tx / counted if kernel and exchanges and counted else None
        rounds = ratio is not None and verdict.round_steps(run) > 1  # those steps are no whole rounds
        busy = statistics.fmean(row["wire_ms"] for row in rows) if rounds else summary["wire_ms"]
        carried = busy / 1000 * (report["rate_bits_per_s"] or 0)  # bits that the link could carry meanwhile
        run["link_use"] = kernel.tx * 8 / carried if kernel and exchanges and carried else None
        if kernel and rounds:
            kernel = Bytes(*(round(count * payload / counted) for count in kernel))
        run["bytes_per_step"] = {
            "ledger": payload,
            "framed": framing.frames(round(payload), report["mtu"]),
            "kernel": kernel._asdict() if kernel else None,
            "kernel_source": source,
            "kernel_to_ledger": ratio,
            "kernel_to_framed": ratio and ratio * framing.efficiency(report["mtu"]),
        }


def kernel_bytes(run: Run, silent: Run | None, steps: int) -> tuple[Bytes | None, str]:
    """Return node 0's bytes per step by the interface's counters, and their source.

    The best source are the cumulative counters in the run's rows (``link_tx_bytes``): last minus first, over the steps
    between. The other: the node's total less that of the silent run, which has the same set-up and evaluation.
    """
    keys = ("link_tx_bytes", "link_rx_bytes")
    noted = [row for row in run["rows"] if all(row.get(key) is not None for key in keys)]
    if len(noted) > 1:
        first, last = noted[0], noted[-1]
        tx, rx = ((last[key] - first[key]) / (last["step"] - first["step"]) for key in keys)
        return Bytes(round(tx), round(rx)), NOTED
    if silent and run["node_totals"] and silent["node_totals"]:
        extra = Bytes(**run["node_totals"][0]) - Bytes(**silent["node_totals"][0])
        return Bytes(round(extra.tx / steps), round(extra.rx / steps)), "whole run less the silent run"
    return None, "no counters"


def for_json(value: Any) -> Any:
    """Return the report without steps' rows and windows' losses, and named tuples as dictionaries."""
    if isinstance(value, dict):
        return {key: for_json(item) for key, item in value.items() if key not in ("rows", "windows")}
    if hasattr(value, "_asdict"):
        return for_json(value._asdict())
    if isinstance(value, float) and math.isinf(value):
        return None
    return [for_json(item) for item in value] if isinstance(value, list) else value
