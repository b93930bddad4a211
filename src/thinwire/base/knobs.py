"""Checks of settings against their annotations (a method's knobs, a run's configuration), and lists of knobs."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Union, get_args, get_origin, get_type_hints

from thinwire.base.errors import ThinwireError

_WORDS = {
    int: "a whole number", float: "a finite number", bool: "True or False", str: "a string", Path: "a path",
    NoneType: "None",
}  # fmt: skip


class HasKnobs(Protocol):
    """A dataclass whose fields are knobs: a method."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    ABSENT: ClassVar[Mapping[str, str]]


class Within(NamedTuple):
    """A range of values in a knob's annotation: ``Annotated[int, Within(lambda k: k >= 1, "is 1 or more")]``."""

    holds: Callable[[Any], bool]
    words: str


Steps = Annotated[int, Within(lambda steps: steps >= 1, "is a number of steps, 1 or more")]
StepsOrNever = Annotated[int, Within(lambda steps: steps >= 0, "is a number of steps, or 0 for never")]
Momentum = Annotated[float, Within(lambda share: 0 <= share < 1, "is at least 0 and below 1")]
Share = Annotated[float, Within(lambda share: 0 < share <= 1, "is a share, above 0 and up to 1")]


def check_types(settings: Any, label: Callable[[str], str]) -> None:
    """Refuse the first field of the dataclass object ``settings`` whose value does not fit its annotation or range.

    Numbers are finite, a bool is no number, and a whole number is also a float. ``label``: field name -> the user's
    name for it.

    Raises:
        ThinwireError: "LABEL is a whole number, got 1.5".
    """
    hints = _hints(settings.__class__)
    for field in (field for field in fields(settings) if field.init):
        value, hint = getattr(settings, field.name), hints[field.name]
        if not _fits(value, hint):
            shown = " ".join(repr(value).split())
            raise ThinwireError(f"{label(field.name)} is {_words(hint)}, got {shown[:60]}")
        for bounds in _ranges(hint):
            if value is not None and not bounds.holds(value):
                raise ThinwireError(f"{label(field.name)} {bounds.words}, got {value}")


def read_arguments(brackets: str) -> dict[str, Any]:
    """Read ``"(knob=value, ...)"``, whose values are Python literals, or "" for none.

    Raises:
        ValueError, SyntaxError: ``brackets`` has another form, or names a knob twice.
    """
    call = ast.parse(f"f{brackets or '()'}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise ValueError
    values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    if len(values) < len(call.keywords):
        raise ValueError
    return values


def knobs_of(method: HasKnobs | type[HasKnobs]) -> list[Field[Any]]:
    """Return the fields of ``method`` that a user can set."""
    return [knob for knob in fields(method) if knob.init and knob.name not in method.ABSENT]


def own_knobs_of(method: HasKnobs | type[HasKnobs]) -> list[str]:
    """Return the names of ``method``'s knobs, except those that choose parameters."""
    return [knob.name for knob in knobs_of(method) if knob.name not in ("dense", "send", "smallest")]


def knob_docs(method: type[HasKnobs]) -> dict[str, str]:
    """Return what each knob of ``method`` does: the entries under ``Args:`` in the docstrings of its classes."""
    texts: dict[str, str] = {}
    for cls in reversed(method.__mro__):
        arguments = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"\n(?=    \w)", "\n" + arguments):
            name, colon, text = entry.strip().partition(": ")
            if colon:
                texts[name] = " ".join(text.replace("``", "").split())
    return {knob.name: texts.get(knob.name, "") for knob in knobs_of(method)}


def unknown_knob(cls: type[HasKnobs], knob: str) -> ThinwireError:
    """Make the error for setting a ``knob`` that methods of class ``cls`` do not have."""
    reason = f" ({cls.ABSENT[knob]})" if knob in cls.ABSENT else ""
    names = ", ".join(field.name for field in knobs_of(cls)) or "none"
    return ThinwireError(f"{cls.name} has no knob '{knob}'{reason}; it has: {names}")


def refuse_idle(method: HasKnobs, when: str, *knobs: str) -> None:
    """Refuse those of ``method``'s ``knobs`` that are set but do nothing with the setting ``when``."""
    for knob in knobs:
        if getattr(method, knob) != getattr(type(method), knob):
            raise ThinwireError(f"{method.name}: {knob} does nothing with {when}: leave it out")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _ranges(hint: Any) -> list[Within]:
    """List the ranges in ``hint`` and its arguments."""
    bounds_here = [bounds for bounds in getattr(hint, "__metadata__", ()) if isinstance(bounds, Within)]
    return bounds_here + [bounds for argument in get_args(hint) for bounds in _ranges(argument)]


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, arguments[0])
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
    if origin is Annotated:
        return _words(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return " or ".join(map(str, arguments)) if len(arguments) < 3 else f"one of {', '.join(map(str, arguments))}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"{_words(arguments[0])} or several"
    if origin is tuple:
        return f"{len(arguments)} values, each {_words(arguments[0])}"
    return _WORDS.get(hint) or (f"{hint.__name__}(...)" if isinstance(hint, type) else str(hint))
