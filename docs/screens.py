"""Pictures of every page of a built site, light and dark, on a phone and on a desk; and what is wrong on them.

    python docs/screens.py SITE OUT             # exit status 1, and a line for each fault
    python docs/screens.py SITE OUT start gpu   # these pages alone

It needs ``pip install playwright`` and a Chromium, found on PATH or named by ``CHROMIUM``. It finds what is wider than
the screen or than its cell, words of code that are broken, text with too little contrast, pictures that are not there
and errors of scripts. A person has to look at the rest: OUT has PAGE-light-375.png and its like.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

THEMES = ("light", "dark")
WIDTHS = (375, 1280)
TALLEST = 16000
"""Pixels of a page's height that are drawn: Chromium draws no more than 16384."""
SOURCES = "_modules"
"""Pages of source are found among others by their folder, and one of them stands for all."""
FAULTS = """() => {
  const found = [], seen = innerWidth
  const name = (node) => node.tagName.toLowerCase() + (node.className && node.className.baseVal === undefined
    ? "." + node.className.trim().split(/\\s+/).join(".") : "") + ": " + node.textContent.trim().slice(0, 50)
  const scrolls = (node) => node !== document.documentElement  // whose own overflow furo hides
    && (getComputedStyle(node).overflowX !== "visible" || scrolls(node.parentElement))
  const wide = document.documentElement.scrollWidth
  if (wide > seen) found.push(`the page is ${wide} wide`)
  const colour = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number)
    const scale = text.startsWith("color(") ? 255 : 1
    return [parts[0] * scale, parts[1] * scale, parts[2] * scale, parts.length > 3 ? parts[3] : 1]
  }
  const over = (front, back) =>
    front.slice(0, 3).map((value, i) => value * front[3] + back[i] * (1 - front[3])).concat(1)
  const behind = (node) => {
    if (!node) return [255, 255, 255, 1]
    const own = colour(getComputedStyle(node).backgroundColor)
    return own[3] === 1 ? own : over(own, behind(node.parentElement))
  }
  const light = (rgb) => rgb.slice(0, 3).map((value) => value / 255)
    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0)
  const contrasts = new Map()
  for (const node of document.body.querySelectorAll("*")) {
    const box = node.getBoundingClientRect(), style = getComputedStyle(node)
    if (!box.width || !box.height || style.visibility === "hidden" || style.opacity === "0") continue
    if (box.right > seen + 1 && box.left >= 0 && box.left < seen && !scrolls(node.parentElement))
      found.push("wider than the screen: " + name(node))
    if (node.matches(":is(p, li, td, dd) code span.pre:not(.long), .flag") && node.getClientRects().length > 1)
      found.push("a broken word: " + name(node))
    const cell = node.closest("td")
    if (cell && box.right > cell.getBoundingClientRect().right + 1)
      found.push("over the edge of its cell: " + name(node))
    if (node.tagName === "IMG") {
      if (node.complete && !node.naturalWidth) found.push("no picture: " + node.getAttribute("src"))
      if (!node.alt) found.push("a picture without words: " + node.getAttribute("src"))
    }
    const speaks = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())
    if (!speaks || node.closest("svg")) continue
    const back = behind(node), front = over(colour(style.color), back)
    const [high, low] = [light(front), light(back)].sort((a, b) => b - a)
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700)
    const ratio = (high + 0.05) / (low + 0.05)
    const key = front.map(Math.round) + " on " + back.map(Math.round)
    if (ratio < (large ? 3 : 4.5) && !contrasts.has(key))
      contrasts.set(key, `contrast ${ratio.toFixed(2)} (rgb ${key}): ${name(node)}`)
  }
  return found.slice(0, 8).concat([...contrasts.values()])
}"""


def errors_of(tab: Page) -> list[str]:
    """List the errors of scripts in ``tab``, as they come."""
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    return errors


def look(browser: Browser, page: Path, site: Path, out: Path) -> list[str]:
    """Draw ``page`` in every theme and width; list what is wrong."""
    label = "-".join(page.relative_to(site).with_suffix("").parts)
    found: list[str] = []
    for theme in THEMES:
        for width in WIDTHS:
            how: dict[str, Any] = {"viewport": {"width": width, "height": 900}, "color_scheme": theme}
            tab = browser.new_page(**how)
            errors = errors_of(tab)
            tab.goto(page.as_uri())
            tab.wait_for_load_state("load")
            found += [f"{label} {theme} {width}: {fault}" for fault in [*tab.evaluate(FAULTS), *errors]]
            height = min(tab.evaluate("document.documentElement.scrollHeight"), TALLEST)
            tab.set_viewport_size({"width": width, "height": height})
            tab.screenshot(path=out / f"{label}-{theme}-{width}.png")
            tab.close()
    return found


def pages(site: Path, names: list[str]) -> list[Path]:
    """The pages of ``site`` with one of ``names``; all where there are none, but one of the source."""
    listed = sorted(site.rglob("*.html"))
    if names:
        return [page for page in listed if str(page.relative_to(site).with_suffix("")) in names]
    sources = [page for page in listed if SOURCES in page.parts]
    return [page for page in listed if page not in sources[1:]]


def main() -> int:
    site, out, *names = sys.argv[1:]
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("there is no chromium on PATH: install one, or name it by CHROMIUM")
    Path(out).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        folder = Path(site).resolve()
        found = [line for page in pages(folder, names) for line in look(browser, page, folder, Path(out))]
        browser.close()
    if found:
        print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
