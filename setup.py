"""The project's description for package indexes: README, with links that lead to the repository.

pyproject.toml has everything else. An index shows README without the files beside it, so a link to ``docs/start.md``
would be dead there, and the picture missing.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def described(readme: str, repository: str, version: str) -> str:
    """Return ``readme`` with absolute links: to the version's tag, or to main where the version is a development's."""
    at = "main" if "dev" in version else f"v{version}"

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository}/{kind}/{at}/{link['path']})"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)\s]+)\)", absolute, readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/thinwire/base/version.py").read_text())
    assert version is not None
    setup(
        long_description=described((ROOT / "README.md").read_text(), project["urls"]["Repository"], version[1]),
        long_description_content_type="text/markdown",
    )
