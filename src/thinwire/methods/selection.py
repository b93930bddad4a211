"""Which parameters a method compresses."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from thinwire.methods.run import Parameter

if TYPE_CHECKING:
    from thinwire.methods.base import Method


def keep_dense(method: Method, parameter: Parameter) -> str | None:
    """Why ``method`` does not compress ``parameter``, or None if it does. Patterns first, then the method's policy."""
    if parameter.numel == 0:
        return "empty"
    if any(fnmatchcase(parameter.name, pattern) for pattern in method.dense):
        return "named in dense="
    if any(fnmatchcase(parameter.name, pattern) for pattern in method.send):
        return None
    return method.policy(parameter)


def dense_among(method: Method, parameters: Iterable[Parameter]) -> frozenset[str]:
    """The names of those of ``parameters`` that ``method.reduce`` does not get."""
    if method.card.takes_dense:
        return frozenset()
    return frozenset(parameter.name for parameter in parameters if keep_dense(method, parameter) is not None)


def unmatched(method: Method, names: Iterable[str]) -> str | None:
    """A line about the first pattern of the user's that matches none of the parameters ``names``, or None.

    A preset's patterns are for any model: with ``dense=("*bias",)`` one without biases is fine.
    """
    names = list(names)
    for knob in ("dense", "send"):
        preset = {pattern for values in method.PRESETS.values() for pattern in values.get(knob, ())}
        for pattern in getattr(method, knob):
            if pattern not in preset and not any(fnmatchcase(name, pattern) for name in names):
                return f"{method.name}: {knob}='{pattern}' matches no trained parameter of this rank's model"
    return None
