"""Replicas of two ranks that die, join and lose messages: what one rank sees fail has failed for both."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import thinwire.wire
from breadth import ALL
from shardmates import Manager, World
from thinwire.adapters import torchft as adapter
from thinwire.engines import replicas

METHODS = (
    "trickle(density=0.2, smallest=0)", "dense", "int8(smallest=0)", "trickle:merged(smallest=0)",
    "powersgd(rank=1, smallest=0)", "local-steps(every=3)", "trickle(density=0.2, smallest=0, start=3)",
    "sign(smallest=0)",
)  # fmt: skip
SEEDS = 16


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinwire.wire, "compile_kernels", lambda *arguments: None)


def play(seed: int) -> Counter[str]:
    method, stalls = METHODS[seed % len(METHODS)], (0.0, 0.005, 0.03)[seed % 3]
    world = World(seed, method, replicas=2 + seed // 8 % 2, kills=1 + seed // 16 % 4, stalls=stalls)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}, {method}: {error}") from error
    return world.seen


@pytest.mark.parametrize("first", range(0, 800, 50) if ALL else [0])
def test_schedules(first: int) -> None:
    """``THINWIRE_TESTS=all pytest tests/saved/test_shardmates.py -n 2`` plays 800."""
    seeds = range(50) if ALL else (*range(SEEDS), 325)  # which has found a fault that the first have not
    seen = sum((play(first + seed) for seed in seeds), Counter())
    for what in ("counted", "failed", "healed", "killed", "stopped", "timed out", "ended for its mate"):
        assert seen[what] > 5, f"{what}: {seen[what]} times in all schedules, which show nothing about it"


def nobody_tells_its_mate(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(inside: Sequence[Any], flag: bool) -> bool:
        for comm in inside:
            comm.meet("flags", thinwire.wire.torch.zeros(1))
        return flag

    for module in (adapter, replicas):
        monkeypatch.setattr(module, "any_of", own)


def each_rank_votes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def vote(self: Manager, timeout: Any) -> bool:
        counts = self.errored() is None
        self._step += counts
        return counts

    monkeypatch.setattr(Manager, "should_commit", vote)


def a_failed_rank_leaves_the_exchange_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    agree = replicas.Replicas.agree

    def hasty(self: Any, *arguments: Any) -> tuple[bool, bool]:
        return (False, False) if self.failed is not None else agree(self, *arguments)

    monkeypatch.setattr(replicas.Replicas, "agree", hasty)


@pytest.mark.parametrize(
    "plant", [nobody_tells_its_mate, each_rank_votes_alone, a_failed_rank_leaves_the_exchange_alone]
)
def test_planted_fault_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(SEEDS):
            play(seed)
