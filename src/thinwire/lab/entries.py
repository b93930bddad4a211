"""The words of ``thinwire compare`` and ``doctor``: methods, with flags of their own, and the model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thinwire.base.errors import ThinwireError

PRESET = "net20m"


@dataclass(frozen=True)
class Entry:
    """A method of a comparison, with flags of ``thinwire train`` for it alone."""

    method: str
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Read ``"topk(density=0.1) --lr 1e-3"``: the method, then its flags."""
        method, *flags = re.split(r"\s+(?=--)", text.strip(), maxsplit=1)
        try:
            return cls(method, tuple(shlex.split(flags[0])) if flags else ())
        except ValueError as error:
            raise ThinwireError(f"cannot read the flags of '{text}': {error}") from None

    @property
    def label(self) -> str:
        return " ".join((self.method, *self.flags))

    def own_flags(self, extra: Sequence[str]) -> list[str]:
        """Return the entry's flags, with the optimizer of the method. ``extra``: the flags of all methods."""
        from thinwire.methods import AUTO, resolve

        optimizer = "adamw" if self.method == AUTO else resolve(self.method).OPTIMIZER.__name__.lower()
        chosen = is_among("--optimizer", (*extra, *self.flags))
        return [*([] if chosen or optimizer == "adamw" else ["--optimizer", optimizer]), *self.flags]


def is_among(flag: str, words: Iterable[str]) -> bool:
    """Is ``flag`` among a command line's ``words``?"""
    return any(word.partition("=")[0] == flag for word in words)


def preset_of(preset: str | None, extra: Sequence[str]) -> str | None:
    """Return ``preset``; without one ``PRESET``, or None if a file among the flags ``extra`` says what the model is."""
    return preset or (None if is_among("--config", extra) else PRESET)


def preset_flags(preset: str | None, extra: Sequence[str]) -> list[str]:
    """Return the flags of ``preset_of``."""
    return [] if (name := preset_of(preset, extra)) is None else ["--preset", name]


def method_names(text: str) -> list[str]:
    """Split ``"dense,int8(group=64, feedback='gradients')"`` at the commas outside parentheses."""
    names, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    if not (stripped := [name.strip() for name in names if name.strip()]):
        raise ThinwireError("no methods to compare: write for example --methods dense,bf16,int8")
    return stripped
