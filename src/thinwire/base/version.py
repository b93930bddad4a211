"""The version of Thinwire, written once; and the newest torch that it was tried with."""

from __future__ import annotations

__version__ = "0.2.0.dev0"
NEWEST_TORCH = (2, 15)
"""Major and minor version. Engines hook private names of FSDP2, which may change with each."""


def torch_warning(torch_version: str) -> str | None:
    """Return one line if ``torch_version``, such as "2.13.0+cpu", is newer than what was tried; else None."""
    numbers = torch_version.split(".")[:2]
    if not all(map(str.isdecimal, numbers)) or tuple(map(int, numbers)) <= NEWEST_TORCH:
        return None
    newest = ".".join(map(str, NEWEST_TORCH))
    return (
        f"torch {torch_version} is newer than {newest}, the newest that Thinwire {__version__} was tried with: compare "
        f"a short run with method 'dense' with the same run without Thinwire, or install torch {newest}"
    )
