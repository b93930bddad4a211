"""What a method costs of the loss, told before the run: how far behind dense it ends.

A value that waits moves its weight late. In runs from scratch that shows as a delay: the loss after T steps is the one
that dense has after fewer. For methods that send the largest values of gradients it is nearly constant, so long runs
forget it; for those that leave out a part of every step it is a share of the run. With a dense loss that falls as
T^-s, a run that is D steps behind ends

    (1 - D / T)^-s - 1

above dense. D was read off the runs in docs/training.md, of 800 and 3200 steps, where s is 0.2. In long pre-training
loss falls less steeply (0.05 to 0.1 by published scaling laws), so s goes down to 0.07 between 3200 and 32,000 steps:
what is said of such runs is extrapolation. Going on from a checkpoint at a low learning rate costs none of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHORT, LONG = (3200, 0.2), (32_000, 0.07)
"""Up to so many steps, and from so many on: the slope s of dense's loss."""
MOST = 0.9
"""Of the run: what is further behind has not begun to learn."""


@dataclass(frozen=True)
class Delay:
    """``steps`` and a ``share`` of the run that a run from scratch ends behind dense."""

    steps: float = 0.0
    share: float = 0.0

    @classmethod
    def of_largest(cls, density: float, start: float) -> Delay:
        """Of methods that send the largest values of gradients, after a dense ``start`` if it is a share of the run."""
        return cls(steps=700 * (1 - density) ** 2.4 * (1 - (start if start < 1 else 0)))

    @classmethod
    def of_steps(cls, density: float, start: float, portion: float, *, one: bool = False) -> Delay:
        """Of methods that send the largest of AdamW's steps: the worst that was measured, in the larger of two models.

        Nothing at a low density, where a ``portion`` is delivered, nor after a dense ``start`` of 15%. ``one``: of each
        part of a mask for all ranks one of them has chosen the positions.
        """
        if one:
            return cls(steps=520)
        return cls(steps=0 if density <= 0.02 or portion <= 0.625 or 0.15 <= start < 1 else 385)

    def gap(self, steps: int) -> float:
        """By how much the loss of a run of so many ``steps`` ends above dense's: 0.05 is 5%."""
        behind = min(self.share + self.steps / max(steps, 1), MOST)
        return (1 - behind) ** -slope(steps) - 1

    def __str__(self) -> str:
        short, long = self.gap(800), self.gap(50_000)
        return f"about {short:+.1%} of dense's loss in 800 steps from scratch, {long:+.1%} in 50,000"


def slope(steps: int) -> float:
    """s of a run of so many ``steps``: linear in their logarithm between ``SHORT`` and ``LONG``."""
    (low, steep), (high, flat) = SHORT, LONG
    part = math.log(max(steps, 1) / low) / math.log(high / low)
    return steep + (flat - steep) * min(max(part, 0.0), 1.0)
