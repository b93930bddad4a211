"""The settings of what a run is protected against."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.base.errors import ThinwireError


@dataclass(frozen=True)
class Safety:
    """Protect a run from values that are not finite, gradients far too large, ranks that differ, flipped bits.

    Args:
        guard: skip a step on all ranks when any gradient on any rank is not finite (one flag of 4 bytes and one host
            sync per step). False: such a gradient goes to the optimizer as it is.
        outlier_clip: the gradient of a parameter on a rank that is more than this many times as large as usual (by its
            running norm) is scaled down to that before a method keeps anything of it (to twice the usual where the
            method keeps steps or momenta, which no clipping meets), so that a spoilt batch does not rule the steps
            after it. What is cut off is lost, counted and shown; where more than 1% of a parameter's gradients are cut,
            a warning names it. Lower => smaller excesses are cut, and more ordinary gradients are. None: nothing is
            cut. Methods that keep nothing have no clip, nor have local steps, whose gradients are clipped before they
            move what is kept.
        max_skipped: steps in a row that the guard may skip before all ranks raise. Lower => a run that has diverged
            ends sooner. None: it never does. (A step that a GradScaler skips does not count. Where ranks step alone,
            each counts its own, and the others lose it at the end of the round.)
        check_every: optimizer steps between two comparisons of what ranks must hold in common: hashes of weights,
            masks, gathered weights; for what no setting shows, such as a scheduler that differs. Lower => noticed
            sooner, dearer. None: never.
        checksum: every row that one rank sends another is followed by 8 bytes of xxh3_64, by which a bit that flipped
            on the way is noticed and named (docs/faults.md has the cost). What the network sums itself has none, and
            GPUs have none, where the host would have to wait for every message. Its bytes are counted as sent, and are
            no part of the plan. Needs the package xxhash.

    Raises:
        ThinwireError: a number is out of its range.
    """

    guard: bool = True
    outlier_clip: float | None = 10.0
    max_skipped: int | None = 20
    check_every: int | None = None
    checksum: bool = False

    def __post_init__(self) -> None:
        times = self.outlier_clip
        if times is not None and (times is True or not isinstance(times, int | float) or not 1 <= times < math.inf):
            raise ThinwireError(f"outlier_clip is a number of usual norms, 1 or more, or None for none, got {times!r}")
        for name in ("max_skipped", "check_every"):
            steps = getattr(self, name)
            if steps is not None and (steps is True or not isinstance(steps, int) or steps < 1):
                raise ThinwireError(f"{name} is a number of optimizer steps, 1 or more, or None, got {steps!r}")
