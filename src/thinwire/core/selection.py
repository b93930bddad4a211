"""The choice of the parameters that a method compresses."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from thinwire.core.method import Method
from thinwire.core.run import Parameter


def keep_dense(method: Method, parameter: Parameter) -> str | None:
    """Say why ``method`` does not compress ``parameter``; None if it does. The user's patterns count first."""
    if parameter.numel == 0:
        return "empty"
    if any(fnmatchcase(parameter.name, pattern) for pattern in method.dense):
        return "named in dense="
    if any(fnmatchcase(parameter.name, pattern) for pattern in method.send):
        return None
    return method.policy(parameter)


def dense_among(method: Method, parameters: Iterable[Parameter]) -> frozenset[str]:
    """Return the names of those ``parameters`` that ``method.reduce`` does not get."""
    if method.card.takes_dense:
        return frozenset()
    return frozenset(parameter.name for parameter in parameters if keep_dense(method, parameter) is not None)


def unmatched(method: Method, names: Iterable[str]) -> str | None:
    """Name the user's first pattern that matches none of the parameters ``names``; None if all match.

    Patterns of a preset are for any model and may match nothing (``dense=("*bias",)`` without biases).
    """
    names = list(names)
    for knob in ("dense", "send"):
        preset = {pattern for values in method.PRESETS.values() for pattern in values.get(knob, ())}
        for pattern in getattr(method, knob):
            if pattern not in preset and not any(fnmatchcase(name, pattern) for name in names):
                return f"{method.name}: {knob}='{pattern}' matches no trained parameter of this rank's model"
    return None
