"""Several parts of a row in one launch on a GPU: which program takes which part."""

from __future__ import annotations

from collections.abc import Iterable


def programs_of(widths: Iterable[int], per_program: int) -> tuple[list[int], list[int]]:
    """The number of the part that each program along a row takes, and the number of each part's first program.

    ``widths``: columns of the parts, of which a program takes up to ``per_program``.
    """
    numbers: list[int] = []
    firsts: list[int] = []
    for number, width in enumerate(widths):
        firsts.append(len(numbers))
        numbers += [number] * -(-width // per_program)
    return numbers, firsts
