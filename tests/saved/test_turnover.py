"""Replicas that die, join and lose messages: nothing but what is counted as lost is lost, and all hold the same weights."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

import thinwire.saved.turnover as turnover
import thinwire.wire
from thinwire.core.method import Method
from thinwire.methods import resolve
from turnover import Run

SGD = partial(torch.optim.SGD, lr=1.0)
ADAM = partial(torch.optim.AdamW, lr=1e-2)
CONSERVING = (
    "fp32", "int8(feedback='gradients', smallest=0)", "topk(density=0.2, smallest=0, feedback='gradients')",
    "sign(smallest=0, feedback='gradients')", "powersgd:paper(rank=1)", "loco(smallest=0)",
    "trickle(mask='merged', density=0.2, smallest=0, feedback='gradients')",
    "trickle(density=0.2, smallest=0, feedback='gradients')",
)  # fmt: skip
STEPPING = ("trickle(density=0.2, smallest=0)", "trickle:merged(smallest=0)", "powersgd(rank=1, smallest=0)", "dense")
SEEDS = 200


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(thinwire.wire, "compile_kernels", lambda *arguments: None)
    yield


def maker(text: str) -> Callable[[], Method]:
    return lambda: resolve(text)


def play(seed: int, attempts: int = 7) -> Counter[str]:
    conserves = seed % 3 < 2
    texts = CONSERVING if conserves else STEPPING
    run = Run(maker(texts[seed // 3 % len(texts)]), seed, SGD if conserves else ADAM, conserves)
    run.play(attempts)
    return run.seen


def test_two_hundred_schedules() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            seen += play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    for what in ("died", "joined", "behind", "counted", "failed", "counted by some alone"):
        assert seen[what] > 20, f"{what}: {seen[what]} times in all schedules, which show nothing about it"
