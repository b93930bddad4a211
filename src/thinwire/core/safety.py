"""The settings that protect a run."""

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
        outlier_clip: scale a parameter's gradient on a rank that is more than this many times as large as usual (by its
            running norm) down to that, before a method keeps anything of it, so that a spoilt batch does not rule the
            steps after it. If the method keeps steps or momenta, which are never clipped later, scale it down to twice
            the usual. What is cut off is lost, counted and shown; if more than 1% of a parameter's gradients are cut, a
            warning names it. Lower => smaller outliers are cut, and more ordinary gradients, too. None: nothing is cut.
            Methods that keep nothing have no clip, nor has local-steps, whose gradients are clipped before it keeps
            anything.
        max_skipped: steps in a row that the guard may skip before all ranks raise. Lower => a run that has diverged
            ends sooner. None: never raise. (Steps that a GradScaler skips do not count. A rank that steps alone counts
            its own and raises alone; the others lose it at the end of the round.)
        check_every: optimizer steps between two comparisons of hashes of what ranks must hold in common: weights,
            masks, gathered weights. They show what no setting does, such as a scheduler that differs. Lower =>
            differences are noticed sooner, at a higher cost. None: weights alone, once, after the first step. 0: never.
        checksum: send 8 bytes of xxh3_64 after every row that goes from rank to rank, so that a bit that flipped on the
            way is noticed and named (docs/faults.md has the cost). Messages that the network sums have none; GPUs have
            none, since the host would wait for every message. These bytes count as sent, but are no part of the plan.
            Needs the package xxhash.

    Raises:
        ThinwireError: a number is out of its range.
    """

    guard: bool = True
    outlier_clip: float | None = 10.0
    max_skipped: int | None = 20
    check_every: int | None = None
    checksum: bool = False

    def __post_init__(self) -> None:
        for name in ("guard", "checksum"):
            if not isinstance(getattr(self, name), bool):
                raise ThinwireError(f"{name} is True or False, got {getattr(self, name)!r}")
        times = self.outlier_clip
        if times is not None and (times is True or not isinstance(times, int | float) or not 1 <= times < math.inf):
            raise ThinwireError(
                "outlier_clip must be 1 or more (how many times its usual norm a gradient may have), or None; "
                f"got {times!r}"
            )
        for name in ("max_skipped", "check_every"):
            steps = getattr(self, name)
            least = int(name == "max_skipped")
            if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < least):
                raise ThinwireError(
                    f"{name} must be a number of optimizer steps, {least} or more, or None; got {steps!r}"
                )
