"""Is a setting what its annotation says? One check for the knobs of methods and the configuration of a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.base.errors import ThinwireError

_WORDS = {
    int: "a whole number", float: "a finite number", bool: "True or False", str: "a string", Path: "a path",
    NoneType: "None",
}  # fmt: skip


def check_types(settings: Any, label: Callable[[str], str]) -> None:
    """Refuse the first field of the dataclass object ``settings`` whose value does not fit its annotation.

    Numbers are finite, a bool is no number, and a whole number is a float too. ``label``: a field's name, as the
    user knows it.

    Raises:
        ThinwireError: "LABEL is a whole number, got 1.5".
    """
    hints = _hints(settings.__class__)
    for field in (field for field in fields(settings) if field.init):
        value, hint = getattr(settings, field.name), hints[field.name]
        if not _fits(value, hint):
            shown = " ".join(repr(value).split())
            raise ThinwireError(f"{label(field.name)} is {_words(hint)}, got {shown[:60]}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(type(value) is type(argument) and value == argument for argument in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(value) if isinstance(value, tuple) else ()
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint is float:
        return _fits(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, origin or hint) and not (hint is int and isinstance(value, bool))


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return " or ".join(map(str, arguments)) if len(arguments) < 3 else f"one of {', '.join(map(str, arguments))}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"{_words(arguments[0])} or several"
    if origin is tuple:
        return f"{len(arguments)} values, each {_words(arguments[0])}"
    return _WORDS.get(hint) or (f"a {hint.__name__.lower()}" if isinstance(hint, type) else str(hint))
