"""The methods by name. Adding one is a new file and a line in ``table.py``."""

from __future__ import annotations

import ast
import json
from inspect import getdoc
from typing import Any, NamedTuple

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import knob_docs, knobs_of, read_arguments, unknown_knob
from thinwire.base.terminal import say
from thinwire.core.method import Method as Method
from thinwire.core.method import Parameter as Parameter
from thinwire.core.method import Promise as Promise
from thinwire.methods import table
from thinwire.methods.parts.feedback import Gradients as Gradients
from thinwire.methods.parts.feedback import Lossy as Lossy
from thinwire.methods.parts.feedback import Updates as Updates
from thinwire.methods.table import *  # noqa: F403

AUTO = "auto"
"""``thinwire train --method auto`` and ``thinwire.Auto`` choose a method: no method has this name."""
TABLE: tuple[type[Method], ...] = tuple(
    cls for cls in vars(table).values() if isinstance(cls, type) and issubclass(cls, Method)
)


def names() -> list[str]:
    """List the names of methods on the command line."""
    return [method.name for method in TABLE]


def resolve(method: Method | str) -> Method:
    """Make a method from text: ``"int8"``, ``"int8(group=64, feedback='gradients')"``, ``"radius:paper(density=0.4)"``.

    ``"int8:group:64:feedback:gradients"`` and ``"radius:paper:density:0.4"`` are the same without ``=`` and brackets.

    Raises:
        ThinwireError: the name, a knob or its value is not known.
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise ThinwireError(f"method must be a thinwire method or its name, got {type(method).__name__}")
    name, bracket, knobs = method.strip().partition("(")
    name, *colons = name.split(":")
    by_name = {cls.name: cls for cls in TABLE}
    cls = by_name.get(name.strip().lower().replace("_", "-"))
    if cls is None:
        if name.strip() == AUTO:
            raise ThinwireError(
                "'auto' has to try steps of your program: pass thinwire.Auto(step) to compress(), or name a method here"
            )
        raise ThinwireError(f"unknown method '{name.strip()}'; there are: {', '.join(by_name)}")
    preset = colons.pop(0).strip() if len(colons) % 2 else None
    pairs = list(zip(map(str.strip, colons[::2]), map(_value, colons[1::2]), strict=True))
    try:
        pairs += read_arguments(bracket + knobs).items()
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError
    except (SyntaxError, ValueError):
        raise ThinwireError(
            f"cannot read '{method}'; write {cls.name}(knob=value, ...) or {cls.name}:knob:value:..."
        ) from None
    knob_names = [knob.name for knob in knobs_of(cls)]
    if preset is not None:
        if preset in knob_names:
            raise ThinwireError(f"cannot read '{method}': a knob needs a value, {cls.name}:{preset}:VALUE")
        if preset not in cls.PRESETS:
            known_presets = ", ".join(f"{cls.name}:{name}" for name in cls.PRESETS) or "none"
            raise ThinwireError(f"{cls.name} has no preset '{preset}'; there are: {known_presets}")
        values = {**cls.PRESETS[preset], **values}
    for knob in values:
        if knob not in knob_names:
            raise unknown_knob(cls, knob)
    try:
        return cls(**values)
    except (TypeError, ThinwireError) as error:  # a codec does not know whose knobs it was given
        named = isinstance(error, ThinwireError) and cls.name in str(error)
        raise error if named else ThinwireError(f"{cls.name}: {error}") from None


def _value(text: str) -> Any:
    """Read a knob's value; strings need no quotes."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError):
        return text.strip()


class Listed(NamedTuple):
    """A method in a list of them: what it does, from its docstring, and what it promises with its default knobs."""

    name: str
    cls: type[Method]
    does: str
    promise: Promise


def listed() -> list[Listed]:
    """List all of ``TABLE``, in its order, for ``thinwire methods`` and docs/methods.md."""
    return [Listed(cls.name, cls, (getdoc(cls) or "").partition("\n")[0], cls().card.promise) for cls in TABLE]


HELP = """usage: thinwire methods [NAME] [--json]

List the methods. With NAME: what that method does, and each of its knobs.
--json: the same for programs."""


def main(argv: list[str]) -> int:
    """Print all methods, or one with what its knobs do: ``thinwire methods [NAME] [--json]``."""
    arguments = [word for word in argv if word != "--json"]
    if len(arguments) > 1 or any(word.startswith("-") for word in arguments):
        raise ThinwireError(f"'thinwire methods' takes the name of one method, or none, got '{' '.join(arguments)}'")
    asked = resolve(arguments[0]) if arguments else None
    cls = type(asked) if asked else None
    entries = [entry for entry in listed() if cls in (None, entry.cls)]
    if "--json" in argv:
        print(json.dumps([_described(entry) for entry in entries], indent=2, default=str))
    elif cls is not None:
        name = entries[0].name  # and not, perhaps, a preset's
        say(f"{arguments[0]} is {asked}\n\n" * (arguments[0] != name) + _page(entries[0]), indent="")
    else:
        for entry in entries:
            say(f"{entry.name:<12}{entry.does.replace('``', '')}\n{'':<12}{entry.promise}", indent=" " * 12)
        say("\nBelow each method: what is kept of the gradients. thinwire methods NAME: what each of its knobs does.")
    return 0


def _described(entry: Listed) -> dict[str, Any]:
    name, cls, does, promise = entry
    return {
        "name": name,
        "does": does,
        "promise": {"kind": promise.kind, "of": promise.of, "text": str(promise)},
        "engines": list(cls.engines),
        "knobs": {knob.name: knob.default for knob in knobs_of(cls)},
        "presets": {f"{name}:{preset}": dict(values) for preset, values in cls.PRESETS.items()},
    }


def _depth(cls: type[Method], knob: str) -> int:
    """Return the place of the class that has ``knob``, from ``cls`` to what it is made of."""
    return next(depth for depth, base in enumerate(cls.__mro__) if knob in vars(base).get("__annotations__", ()))


def _page(entry: Listed) -> str:
    """Write a page on one method: what it does, promises, and takes."""
    name, cls, does, promise = entry
    lines = [f"{name}: {does.replace('``', '')}", "", f"promise: {promise}", f"engines: {', '.join(cls.engines)}"]
    texts = knob_docs(cls)
    knobs = sorted(knobs_of(cls), key=lambda knob: _depth(cls, knob.name))
    if knobs:
        lines += [f'written: {name}, or with knobs: "{name}({knobs[0].name}={knobs[0].default!r})"', ""]
    lines += ["Knobs, each with its default"] if knobs else ["", "It has no knobs."]
    for knob in knobs:
        lines += [f"  {knob.name}={knob.default!r}", f"      {texts[knob.name]}"]
    lines += ["", "Presets"] if cls.PRESETS else []
    for preset, values in cls.PRESETS.items():
        settings = ", ".join(f"{knob}={value!r}" for knob, value in values.items()) or "the defaults"
        lines.append(f"  {name}:{preset}: {settings}")
        preset_promise = cls(**values).card.promise
        if str(preset_promise) != str(promise):
            lines.append(f"    promise: {preset_promise}")
    return "\n".join(lines)
