"""How broad the tests are: ``make test`` deals cases out, ``make test-all`` tries each of them everywhere.

A method and an engine, or a topology and a number of ranks, are seldom wrong together where each is right elsewhere.
So in ``make test`` every method is tried somewhere, and everywhere something is tried.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

ALL = os.environ.get("THINWIRE_TESTS") == "all"
ENGINES = ("ddp", "fsdp2", "ddp", "hsdp")
"""The turns that cases take: DDP has two, since a case costs least there."""


def falls_on(number: int, place: Any, places: Sequence[Any] = ENGINES) -> bool:
    """Whether case ``number`` is tried at ``place``: cases go round the ``places``."""
    return ALL or places[number % len(places)] == place


def dealt(cases: Iterable[T], place: Any, places: Sequence[Any] = ENGINES) -> list[T]:
    """Those of ``cases`` that fall on ``place``."""
    return [case for number, case in enumerate(cases) if falls_on(number, place, places)]


def spread(of: int, *axes: Iterable[Any]) -> list[Any]:
    """One in ``of`` of the combinations: neighbours along every axis take turns. With one axis, its values."""
    numbered = itertools.product(*(enumerate(axis) for axis in axes))
    found = [
        tuple(value for _, value in cell) for cell in numbered if ALL or sum(number for number, _ in cell) % of == 0
    ]
    return found if len(axes) > 1 else [value for (value,) in found]


def alternating(turn: int, worlds: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those of ``worlds`` (engine, ranks) on DDP, and every second of the others, which have most of their code in
    common: those at even places with ``turn`` 0, those at odd ones with 1."""
    sharded = [world for world in worlds if world[0] != "ddp"]
    return [world for world in worlds if ALL or world not in sharded or sharded.index(world) % 2 == turn]
