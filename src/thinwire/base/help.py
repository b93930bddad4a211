"""The help of a command whose options are the fields of a dataclass: in groups, at most as wide as the terminal.

tyro, which reads the options, groups them by nested dataclasses alone, and those change the options' names. So the page
is made here: of fields, annotations, and the docstrings beneath the fields.
"""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from inspect import getdoc, getsource
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console

from thinwire.base.terminal import fold, fold_command

WIDEST = 100
"""Columns of the page at most."""
MARGIN = 26
"""Columns before what an option does."""
OTHERS = "Options"
"""The title of options without a group."""
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "{True,False}"}


class Option(NamedTuple):
    """An entry of the page. ``typed``: flags, and what follows them. ``text``: what it does, and its default."""

    typed: str
    text: str
    required: bool = False


def print_help(kind: type, program: str, after: str = "", extra: Sequence[Option] = ()) -> None:
    """Print usage, description and options of ``program``, a dataclass ``kind``. Arguments as for ``read_options``."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    groups = list_options(kind)
    required = [option.typed for options in groups.values() for option in options if option.required]
    console.print(fold(" ".join(filter(None, ["usage:", program, *required, "[options]", after])), width, " " * 7))
    console.print(f"\n{_description(kind, width)}")
    groups.setdefault(OTHERS if len(groups) < 2 else "Other", []).extend([*extra, Option("-h, --help", "Print this.")])
    for title, options in groups.items():
        console.print(f"\n{title}", style="bold")
        for option in options:
            console.print(_entry(option, width))


def list_options(kind: type) -> dict[str, list[Option]]:
    """List the options of ``kind`` by group. ``kind.GROUPS``: the first field of each group -> the group's title."""
    starts: Mapping[str, str] = getattr(kind, "GROUPS", {})
    hints, texts = get_type_hints(kind, include_extras=True), field_docs(kind)
    title, groups = OTHERS, {title: list[Option]() for title in starts.values()}
    for field in fields(kind):
        title = starts.get(field.name, title)
        markers = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Suppress not in markers:
            positional = tyro.conf.Positional in markers
            option = _option(field, hints[field.name], texts.get(field.name, ""), positional)
            groups.setdefault(title, []).append(option)
    return {title: options for title, options in groups.items() if options}


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings beneath the fields of ``kind`` and its bases, each on one line."""
    texts: dict[str, str] = {}
    for cls in reversed([cls for cls in kind.__mro__ if cls is not object]):
        (tree,) = ast.parse(textwrap.dedent(getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, below in zip(tree.body, tree.body[1:], strict=False):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def _option(field: Field[Any], hint: Any, text: str, positional: bool) -> Option:
    flag = "--" + field.name.replace("_", "-")
    value = _metavar(hint)
    if positional:
        typed = field.name.upper() + (" ..." if value.endswith("...") else "")
        return Option(typed, text, required=True)
    if _stripped(hint) is bool and field.default is not None:
        typed = f"{flag}, --no-{flag[2:]}" if field.default else flag
        return Option(typed, text + " (default: on)" * bool(field.default))
    required = field.default is MISSING and field.default_factory is MISSING
    shown = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
    has_default = not required and field.default not in (None, ()) and shown.strip()
    return Option(f"{flag} {value}", text + f" (default: {shown})" * bool(has_default), required)


def _stripped(hint: Any) -> Any:
    """Return ``hint`` without annotations and None."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return _stripped(kinds[0]) if len(kinds) == 1 else hint
    return hint


def _metavar(hint: Any) -> str:
    """Write what follows a flag: ``INT``, ``{ddp,fsdp2}``, ``PATH ...``."""
    hint = _stripped(hint)
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        return f"{_metavar(kinds[0])} ..." if kinds[-1] is Ellipsis else " ".join(map(_metavar, kinds))
    return _METAVARS[hint]


def _entry(option: Option, width: int) -> str:
    """Lay out ``option``: what is typed, and beside or beneath it what it does."""
    lines = textwrap.wrap(option.text, width - MARGIN, break_on_hyphens=False) or [""]
    head = f"  {option.typed}"
    first = [f"{head:<{MARGIN}}{lines.pop(0)}".rstrip()] if len(head) < MARGIN - 1 else [head]
    return "\n".join([*first, *(" " * MARGIN + line for line in lines)])


def _description(kind: type, width: int) -> str:
    """Return the docstring of ``kind``: paragraphs filled to ``width``, and examples ("$ ...") one to a line."""
    blocks = []
    for block in (getdoc(kind) or "").split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("$ "):
            blocks.append("\n".join(fold_command(f"  {line}", width, "      ") for line in lines))
        else:
            blocks.append(textwrap.fill(" ".join(lines), width, break_on_hyphens=False))
    return "\n\n".join(blocks)
