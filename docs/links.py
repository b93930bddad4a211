"""Does every link within a built site lead somewhere?

    python docs/links.py FOLDER         # exit status 1, and a line for each that does not
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """A file's links (``href``, ``src``) and the places in it that links can name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            if name in ("id", "name") and value:
                self.places.add(value)


def broken(folder: Path) -> list[str]:
    """"page: link" for each link to a file or place that is not in ``folder``. Links to elsewhere are not followed.

    Pages of source (``_modules``) are held to files alone: Sphinx names a class there as it met it first, which may be
    another name than the one that its page has.
    """
    pages = {path: Page(path.read_text()) for path in sorted(folder.resolve().rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            lost = place and target in pages and place not in pages[target].places
            if not target.exists() or (lost and "_modules" not in path.parts):
                found.append(f"{path.relative_to(folder.resolve())}: {link}")
    return found


def main() -> int:
    found = broken(Path(sys.argv[1]))
    for line in found:
        print(f"leads nowhere: {line}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
