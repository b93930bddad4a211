"""A count of the kernels that a method's own code launches in a dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from thinwire.predict import launches


class LaunchWatch(launches.LaunchWatch):
    """Counts kernels by step, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._counter: Counter[str] = Counter()
        self._steps: list[tuple[float, Counter[str]]] = []  # share of the steady state, launches

    def launched(self, name: str, nbytes: float) -> None:
        self._counter[name] += 1

    def end_step(self, share: float) -> None:
        super().end_step(share)
        self._steps.append((share, self._counter.copy()))
        self._counter.clear()

    def steady(self) -> Mapping[str, float]:
        """Average over the steady state; where all its steps are alike, the second, which finds memory ready."""
        shares = [share for share, _ in self._steps]
        if 1.0 in shares:
            return self._steps[shares.index(1.0) + 1][1]
        total: Counter[str] = Counter()
        for share, launched in self._steps:
            for name, count in launched.items() if share else ():
                total[name] += share * count  # type: ignore[assignment]
        return total
