"""The loss on held-out text, window by window, so that two runs can be compared on the same windows."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.train.data.windows import IGNORED, Windows, batches

LONGEST = 1 << 21
"""Most tokens of the evaluation at the end of a run."""
FILE = "valid_losses.csv"
"""In a run's folder: the evaluation at its end, a row per window."""
COLUMNS = ("window", "targets", "loss")


class WindowLoss(NamedTuple):
    """The mean loss, in nats, of a window's ``targets``, the tokens of it that are learnt."""

    window: int
    targets: int
    loss: float


def count_at_end(held_out: Windows, along: int, trained: int) -> int:
    """Return how many windows the evaluation at the end takes: all, up to ``LONGEST`` tokens.

    A run of ``trained`` tokens takes half as many at most (a sixth of its own computation), but ``along`` windows, as
    the evaluations before it, if there are so many.
    """
    tokens = min(LONGEST, trained // 2)
    return min(held_out.count, max(along, round(tokens / held_out.targets_per_window)))


def shared_by(ranks: int, rank: int, held_out: Windows, number: int) -> list[int]:
    """Return the indices of those of ``number`` windows that ``rank`` evaluates: as many on each of the ``ranks``, as
    they may have to gather weights for each batch together. Where they do not come out even, some evaluate the same."""
    chosen = held_out.positions(min(number, held_out.count))
    each = -(-len(chosen) // ranks)
    return [chosen[index % len(chosen)] for index in range(rank, each * ranks, ranks)]


@torch.no_grad()
def window_losses(
    model: Callable[..., Tensor],
    held_out: Windows,
    indices: Sequence[int],
    size: int,
    device: torch.device,
    cast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[WindowLoss]:
    """Compute the losses of the windows ``indices`` in batches of ``size``; ``model`` returns logits."""
    losses: list[WindowLoss] = []
    for inputs, targets in batches([held_out.window(index) for index in indices], size):
        with cast():
            logits = model(inputs.to(device))
        targets = targets.to(device)
        nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
        counts = (targets != IGNORED).sum(1)
        means = (nats.double().sum(1) / counts.clamp(min=1)).tolist()
        rows = zip(indices[len(losses) :], counts.tolist(), means, strict=False)
        losses += [WindowLoss(*row) for row in rows]
    return losses


def mean_loss(losses: Sequence[WindowLoss]) -> float:
    """Return the mean over all targets."""
    return sum(row.targets * row.loss for row in losses) / sum(row.targets for row in losses)


def to_csv(losses: Iterable[WindowLoss]) -> str:
    """Write ``losses`` as CSV, in the order of the text."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows((row.window, row.targets, f"{row.loss:.6f}") for row in sorted(losses))
    return out.getvalue()
