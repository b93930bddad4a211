"""``thinwire status``: who is there in a run of ``thinwire train --elastic``, how far it is, and what was lost."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from thinwire.base.errors import ThinwireError
from thinwire.base.terminal import columns, counted, fold
from thinwire.train.job.replica_log import ELASTIC, REPLICAS, read_log, summary_time
from thinwire.train.job.run_folder import where_set_aside

HELP = """usage: thinwire status RUN

Show which replicas take part in a run of `thinwire train --elastic`, the last
step that counted, the share of the time in which steps counted (goodput), and
what was lost. RUN is the folder of --out.

  $ thinwire status runs/train"""
ANSWER_S = 1.0
"""Seconds to wait for the lighthouse."""
SEEN_S = 1.0
"""Seconds within which all replicas see that an attempt at a step has failed."""
FEW = 3
"""The fewest undisturbed gaps that say what is usual for their kind."""
WIDTH = 80


def main(argv: list[str]) -> int:
    """Print the status of a run. Return the exit status."""
    if len(argv) != 1:
        raise ThinwireError(f"thinwire status takes the folder of a run, got '{' '.join(argv)}'")
    run = read_run(Path(argv[0]))
    print(fold(shown(run, time.time(), ask_lighthouse(run.lighthouse)), columns() or WIDTH))
    return 0


@dataclass
class Run:
    """The facts in a run's files.

    Attributes:
        rows: of metrics.jsonl, those of steps. logs: what each replica has written down, by its name.
    """

    path: Path
    lighthouse: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    logs: dict[str, list[dict[str, Any]]]
    ended: bool

    @functools.cached_property
    def members(self) -> dict[str, Any]:
        """The last event that says who takes part; {} before the first."""
        return max(self._all("members"), key=lambda event: event["time"], default={})

    @property
    def losses(self) -> list[tuple[str, int, float]]:
        """(name, step, norm) of what waited on each replica that left, as those who take part know it: one that has
        come since does not know of those before."""
        logs = [self.logs.get(name, []) for name in self.members.get("names", [])]
        events = [event for log in logs for event in [e for e in log if e["event"] == "members"][-1:]]
        return sorted({tuple(loss) for event in events for loss in event["losses"]}, key=lambda loss: loss[1])

    def _all(self, kind: str) -> list[dict[str, Any]]:
        return [event for log in self.logs.values() for event in log if event["event"] == kind]

    @property
    def gaps(self) -> list[Gap]:
        """The times between steps, without evaluations and checkpoints: ``wall_s`` is the time of attempts at steps.
        Of local steps, one in which a round ends is of another kind than those between."""
        changed: dict[int, list[float]] = defaultdict(list)
        for event in (*self._all("members"), *self._all("dropped")):
            changed[event["step"]].append(event["time"])
        gaps = []
        for earlier, later in itertools.pairwise(self.rows):
            # The same steps may have been taken before, in an earlier life of the run.
            began, ended = earlier["time"] - SEEN_S, later["time"] + SEEN_S
            times = [time for step in range(earlier["step"] + 1, later["step"] + 1) for time in changed.get(step, ())]
            kind = later.get("replicas"), any((later.get("wire_bytes") or {}).values())
            disturbed = any(began <= time <= ended for time in times)
            gaps.append(Gap(later["wall_s"] - earlier["wall_s"], kind, disturbed))
        return gaps

    @property
    def dropped(self) -> int:
        """The attempts that did not count, each counted once although several replicas have seen it."""
        attempts = sorted((event["step"], event["time"]) for event in self._all("dropped"))
        pairs = itertools.pairwise([(-1, 0.0), *attempts])
        return sum(step != earlier_step or time - earlier > SEEN_S for (earlier_step, earlier), (step, time) in pairs)


def read_run(path: Path) -> Run:
    """Read the folder of a run.

    Raises:
        ThinwireError: there is no run, or it is not of replicas that come and go.
    """
    if not path.is_dir():
        raise ThinwireError(f"there is no run in {path}: name the folder of --out")
    try:
        facts = json.loads((path / ELASTIC).read_text())
        lighthouse = str(facts["lighthouse"])
    except FileNotFoundError:
        is_run = (path / "metrics.jsonl").exists() or (path / "checkpoints").exists()
        nothing = f"it holds no run{where_set_aside(path)}"
        reason = "its ranks are fixed: it was not started with --elastic" if is_run else nothing
        raise ThinwireError(f"{path}: {reason}") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ThinwireError(f"cannot read {path / ELASTIC}: it is damaged, or not yours to read") from None
    settings: Any = {}
    with contextlib.suppress(OSError, yaml.YAMLError):
        settings = yaml.safe_load((path / "config.yaml").read_text())
    rows = [row for row in read_log(path / "metrics.jsonl") if "loss" in row and "time" in row]
    logs = {
        log.stem: [event for event in read_log(log) if "event" in event and "time" in event]
        for log in sorted((path / REPLICAS).glob("*.jsonl"))
    }
    summary_s = summary_time(path)
    ended = summary_s > 0 and (not rows or summary_s >= rows[-1]["time"] - SEEN_S)
    return Run(path, lighthouse, settings if isinstance(settings, dict) else {}, rows, logs, ended)


class Gap(NamedTuple):
    """The time between two steps that counted. kind: on what else than the replicas' turnover it depends, such as how
    many they are. disturbed: did an attempt fail in it, or did a replica leave or come?"""

    seconds: float
    kind: Hashable = None
    disturbed: bool = False


def goodput(gaps: Sequence[Gap]) -> float | None:
    """Return the share of the time in which steps counted; None: there are too few gaps, or all were disturbed.

    Of a disturbed gap, what is beyond the mean of the others of its kind is wasted: attempts that failed, waits for
    who is dead and for who joins. Seconds count, not how many steps they are, so that the shares of fast and of slow
    steps can be compared. Gaps that nothing disturbed are part of the work, long ones, too: an undisturbed run has 1.
    """
    total = sum(gap.seconds for gap in gaps)
    if len(gaps) < 2 or total <= 0:
        return None
    calm: dict[Hashable, list[float]] = defaultdict(list)
    for gap in gaps:
        if not gap.disturbed:
            calm[gap.kind].append(gap.seconds)
    every = [seconds for kind in calm.values() for seconds in kind]
    if not every:
        return None
    usual = {kind: statistics.fmean(calm[kind] if len(calm[kind]) >= FEW else every) for kind in {g.kind for g in gaps}}
    wasted = sum(gap.seconds - usual[gap.kind] for gap in gaps if gap.disturbed)
    return 1 - max(wasted, 0.0) / total  # by chance those that were disturbed may be the shorter ones


def ask_lighthouse(address: str) -> list[str] | None:
    """Return the names of the replicas of which torchft's lighthouse hears now; None: it does not answer."""
    page = _page_of(address)
    return None if page is None else alive_on(page)


def goes_on(address: str) -> bool:
    """Has a run whose replicas live counted a step with the lighthouse at ``address``?"""
    page = _page_of(address) or ""
    return bool(alive_on(page)) and re.search(r"Step:\s*[1-9]", page) is not None


def _page_of(address: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/status", timeout=ANSWER_S) as answer:
            return answer.read(1 << 20).decode(errors="replace")
    except (OSError, ValueError):
        return None


def alive_on(page: str) -> list[str]:
    """Read the lighthouse's page: its list of heartbeats, without those that are old."""
    beats = re.findall(r'<li class="heartbeat\s*(\w*)\s*">\s*([^:<\s]+)', page)
    return sorted(name for age, name in beats if age != "old")


def shown(run: Run, clock: float, alive: Sequence[str] | None) -> str:
    """Write the status, at most ``WIDTH`` columns wide where names are short."""
    settings, last = run.settings, run.rows[-1] if run.rows else None
    total = f" of {settings['steps']}" if "steps" in settings else ""
    head = f"{run.path}: {settings.get('method', '?')} on {settings.get('init') or settings.get('preset', '?')}"
    if last is None:
        lines = [f"{head}, before its first step"]
    else:
        age = "ended" if run.ended else f"{since(clock - last['time'])} ago"
        tokens = f"{last['tokens']:,} tokens"
        lines = [f"{head}", f"last step     {last['step']}{total}, {age}; loss {last['loss']:.4f}, {tokens}"]
    if (share := goodput(gaps := run.gaps)) is not None:
        longest = max(gap.seconds for gap in gaps)
        lines.append(f"goodput       {share:.1%} of {since(run.rows[-1]['wall_s'])}; longest gap {longest:.2f} s")
    lines.append(f"dropped       {counted(run.dropped, 'attempt')} at a step, to be taken again")
    losses = run.losses
    lines += [f"lost          what waited on replica {name} after step {step}, of norm {norm:.3g}"
              for name, step, norm in losses]  # fmt: skip
    lines += [] if losses else ["lost          nothing that waited"]
    beats = "does not answer" if alive is None else f"hears of {', '.join(alive) or 'nobody'}"
    lines += [f"lighthouse    {run.lighthouse} {beats}", "", "replica       state           starts  host, process"]
    return "\n".join([*lines, *(_replica(name, log, run, clock, alive) for name, log in run.logs.items())])


def _replica(name: str, log: Sequence[Mapping[str, Any]], run: Run, clock: float, alive: Sequence[str] | None) -> str:
    starts = [event for event in log if event["event"] == "started"]
    last, start = log[-1] if log else {}, starts[-1] if starts else {}
    if last.get("event") == "ended":
        state = str(last.get("why", "ended"))
    elif alive is None:
        state = "unknown"
    elif name not in alive:
        state = "away"
    elif name in run.members.get("names", []):
        state = "there"
    else:
        state = f"joins, {since(clock - last['time'])}" if last else "joins"
    return f"{name:<13} {state:<15} {len(starts):>6}  {start.get('host', '?')}, {start.get('pid', '?')}"


def since(seconds: float) -> str:
    """Write a time in whole seconds, minutes or hours."""
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
