"""``thinwire inspect``: show what a checkpoint holds and whether it is whole, or how two checkpoints differ."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from math import inf, isnan
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table

from thinwire.base.errors import ThinwireError
from thinwire.base.terminal import columns, say
from thinwire.plan.plan import human
from thinwire.train.checkpoint.format import Checkpoint, Damaged, NoCheckpoint, read_newest, read_tensors
from thinwire.train.checkpoint.run_settings import TABLE

HELP = """usage: thinwire inspect CHECKPOINT [OTHER]

Show a checkpoint: the settings of its run, whether the checksums fit, and, for
each parameter and rank, the norm of what was not sent yet. With OTHER: how the
two differ. Each is the folder of a checkpoint or of a run. Of a run, the newest
good checkpoint is taken; if a newer one is damaged, a line says so.

Exit status: 0; 1: a file is damaged, or the two differ; 2: no checkpoint."""
MOST_RANKS = 8  # ranks with a column each in a table; for more, it shows the least, the median and the largest norm
MOST_TENSORS = 20
_KEPT = re.compile(r"wire/(?:rank-\d+-of-\d+/)?+(?!bound/)=*([^/]*)/(.+)", re.DOTALL)
"""Key of a method's state for a parameter. Groups: the kind of state, the parameter's name."""


def main(argv: list[str]) -> int:
    if not argv:
        print(HELP)
        return 2
    if len(argv) > 2:
        raise ThinwireError(f"'thinwire inspect' takes one checkpoint or two, got {len(argv)}")
    console = Console(highlight=False, markup=False, width=columns() or 200)
    try:
        results = [read_newest(Path(word), lambda checkpoint: checkpoint) for word in argv]
    except Damaged as error:
        error.status = 2 if isinstance(error, NoCheckpoint) else 1
        raise
    first, *later = [checkpoint for checkpoint, _ in results]
    status = show_differences(first, later[0], console) if later else show(first, console)
    return status or int(any(passed_over for _, passed_over in results))


def show(checkpoint: Checkpoint, console: Console) -> int:
    """Print the run's settings, the files, and norms by parameter and rank; return 1 if a file is damaged, else 0."""
    meta = checkpoint.meta
    word = "" if meta["good"] else ", NOT GOOD (taken while steps were skipped, or the loss was not finite)"
    say(f"{checkpoint.path}: step {checkpoint.step} of run {meta['run'][:12]}{word}")
    settings = _table("setting", "value")
    for name in TABLE:
        if meta["about"].get(name) is not None:
            settings.add_row(name, str(meta["about"][name]))
    console.print(settings)

    files = _table("file", "size", "tensors", "checksums")
    norms: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    damaged: list[str] = []
    for name, size in meta["files"].items():
        number, word = 0, "fit"
        if not (checkpoint.path / name).exists():
            word = "not here: another host may have it"
        else:
            try:
                for key, tensor in read_tensors(checkpoint.path / name):
                    number += 1
                    match = _KEPT.fullmatch(key)
                    if match and tensor.is_floating_point() and tensor.dim():
                        rank = int(name.removeprefix("rank-").partition(".")[0])
                        norms[match[1]][match[2]][rank] = float(torch.linalg.vector_norm(tensor.float()))
            except Damaged as error:
                word = "DAMAGED"
                damaged.append(str(error))
        files.add_row(name, human(size), str(number), word)
    console.print(files)
    for line in damaged:
        say(line)
    for kind in sorted(norms):
        console.print(_by_rank(kind, norms[kind]))
    return int(bool(damaged))


def _by_rank(kind: str, norms: dict[str, dict[int, float]]) -> Table:
    ranks = sorted({rank for by_rank in norms.values() for rank in by_rank})
    many = len(ranks) > MOST_RANKS
    columns = ["least", "median", "largest"] if many else [f"rank {rank}" for rank in ranks]
    table = _table(f"norm of {kind}", *columns)
    for name, by_rank in norms.items():
        values = torch.tensor([by_rank.get(rank, 0.0) for rank in ranks], dtype=torch.float64, device="cpu")
        shown = [values.min(), values.median(), values.max()] if many else list(values)
        table.add_row(name, *(f"{float(value):.4g}" for value in shown))
    return table


def show_differences(first: Checkpoint, second: Checkpoint, console: Console) -> int:
    """Print how two checkpoints differ; return 1 if they do or one is damaged, else 0."""
    say(f"{first.path} and {second.path}")
    settings = _table("setting", "one", "the other")
    first_facts, second_facts = (checkpoint.meta | checkpoint.meta["about"] for checkpoint in (first, second))
    changed = [name for name in (*TABLE, "step", "good", "run") if first_facts.get(name) != second_facts.get(name)]
    for name in changed:
        settings.add_row(name, str(first_facts.get(name)), str(second_facts.get(name)))
    if changed:
        console.print(settings)

    table = _table("tensor", "difference", "relative")
    equal, differ = 0, []
    for name in sorted({*first.meta["files"], *second.meta["files"]}):
        rank_label = "" if name.startswith("model") else f"{name.partition('.')[0]}: "
        try:
            for key, distance, relative in _distances(first.path / name, second.path / name):
                if distance is None:
                    equal += 1
                else:
                    differ.append((relative, rank_label + key, distance))
        except Damaged as error:
            differ.append((float("inf"), str(error), float("nan")))
    for relative, key, distance in sorted(differ, key=lambda row: -inf if isnan(row[0]) else -row[0])[:MOST_TENSORS]:
        table.add_row(key, f"{distance:.4g}", f"{relative:.4g}")
    if differ:
        console.print(table)
    shown = f", of which {MOST_TENSORS} are shown" if len(differ) > MOST_TENSORS else ""
    say(f"{equal} tensors are equal bit for bit, {len(differ)} are not{shown}")
    return int(bool(differ or changed))


def _distances(first: Path, second: Path) -> Iterator[tuple[str, float | None, float]]:
    """Yield (name, largest difference, norm of the difference / norm of the first) per tensor; inf: no counterpart,
    None: equal bit for bit (0: but for the signs of zeros)."""
    tensors = dict(read_tensors(first))
    for key, other_tensor in read_tensors(second):
        tensor = tensors.pop(key, None)
        if tensor is None or (tensor.shape, tensor.dtype) != (other_tensor.shape, other_tensor.dtype):
            yield key, float("inf"), float("inf")
        elif torch.equal(tensor.reshape(-1).view(torch.uint8), other_tensor.reshape(-1).view(torch.uint8)):
            yield key, None, 0.0
        else:
            difference = (tensor.double() - other_tensor.double()).abs()
            yield key, float(difference.max()), float(difference.norm() / tensor.double().norm())
    for key in tensors:
        yield key, float("inf"), float("inf")


def _table(*columns: str) -> Table:
    first, *later = columns
    numbers = ("rank", "size", "least", "med", "larg", "diff", "rel")
    right = (Column(name, overflow="fold", justify="right" if name.startswith(numbers) else "left") for name in later)
    return Table(Column(first, overflow="fold"), *right, box=box.SIMPLE, pad_edge=False)
