"""Pictures: text is text, colours follow dark mode and stand out in both, and a picture is the same file each time."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from thinwire.lab import plots

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAINT = re.compile(r"(?:fill|stroke): ?(#[0-9a-f]{6})")
FAINT = {plots.GRID, plots.SHADE, plots.PAPER, "#FFFFFF", plots.ON_BAR}
"""What need not stand out against the paper: grids and shades, and text on bars."""


def luminance(colour: str) -> float:
    """As WCAG 2 has it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", sorted({*plots.COLOURS.values(), plots.OTHER, plots.INK, plots.GREY, plots.EXPOSED}))
def test_a_colour_stands_out_in_light_and_in_dark(colour: str) -> None:
    assert contrast(colour, plots.PAPER) > (2.2 if colour in ("#A0A0A0", "#E69F00") else 2.6)
    assert contrast(plots.DARK.get(colour, colour), plots.DARK[plots.PAPER]) > 4


def test_text_on_bars_can_be_read_in_both_modes() -> None:
    assert contrast(plots.ON_BAR, plots.COMPUTE) > 4.5 and contrast("#FFFFFF", plots.EXPOSED) > 3
    assert not {plots.ON_BAR, plots.COMPUTE, plots.EXPOSED, "#FFFFFF"} & set(plots.DARK)


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_of_the_pages_has_no_colour_that_is_lost_in_the_dark(path: Path) -> None:
    drawn = path.read_text().partition("</style>")[2]
    used = {colour.upper() for colour in PAINT.findall(drawn)}
    lost = [
        colour for colour in used - FAINT
        if contrast(plots.DARK.get(colour, colour), plots.DARK[plots.PAPER]) < 3
    ]  # fmt: skip
    assert used and lost == []
    assert "<text " in drawn and "prefers-color-scheme: dark" in path.read_text()


def test_the_names_of_the_curves_lie_below_the_panels_and_their_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    figures, pictures = importlib.import_module("figures"), importlib.import_module("pictures")
    with plt.rc_context(plots.STYLE):
        figure = pictures.clock(figures.by_clock())
        figure.canvas.draw()
        (legend,) = figure.legends
        assert len(legend.get_texts()) == len(figures.CLOCKED)
        for axes in figure.axes:
            assert len(axes.lines) == len(figures.CLOCKED) and not axes.texts
            assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
    plt.close(figure)


def test_no_page_has_a_picture_that_stays_white() -> None:
    assert list(DOCS.glob("*.png")) == []


def test_a_picture_is_the_same_file_each_time(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        with plt.rc_context(plots.STYLE):
            figure, axes = plt.subplots()
            axes.plot([0, 1], [0, 1], "o-", color=plots.colour("int8"), label="int8")
            axes.set_title("a title")
            plots.label_curves(axes)
            plots.save(figure, tmp_path / name, "a note: 1 < 2")
    first = (tmp_path / "first.svg").read_bytes()
    assert first == (tmp_path / "second.svg").read_bytes()
    assert b"a note: 1 &lt; 2" in first and b">a title</text>" in first and len(first) < 30_000
