"""Assign the programs of one launch on a GPU to the segments of a row."""

from __future__ import annotations

from collections.abc import Iterable


def programs_of(widths: Iterable[int], per_program: int) -> tuple[list[int], list[int]]:
    """Return the number of each program's segment, along a row, and the number of each segment's first program.

    ``widths``: columns of the segments, of which a program takes up to ``per_program``.
    """
    numbers: list[int] = []
    first_programs: list[int] = []
    for number, width in enumerate(widths):
        first_programs.append(len(numbers))
        numbers += [number] * -(-width // per_program)
    return numbers, first_programs
