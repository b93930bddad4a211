"""Which of its tensors a Triton kernel writes to, read off its source: the rest it reads."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

ADDRESSES = frozenset({"programs", "table", "segments", "copy_table", "copy_programs"})
"""Tables that hold places, which no kernel writes to: a store "into" one goes to an address found in it."""


@functools.cache
def written(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters of ``function`` that a store or an atomic operation goes to, here or in what it calls.

    A pointer is what stands leftmost in a sum, or the first argument of a call (``row_of(rows, ...) + element``).
    """
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    reader = _Reader(function.__globals__)
    reader.visit(tree)
    return frozenset(reader.stores & {argument.arg for argument in tree.args.args}) - ADDRESSES


class _Reader(ast.NodeVisitor):
    def __init__(self, names: dict[str, Any]) -> None:
        self.stores: set[str] = set()
        self._names, self._bases = names, dict[str, str]()

    def base(self, node: ast.expr) -> str:
        """Name the parameter, or the local that is none, that the pointer ``node`` is made of."""
        match node:
            case ast.Name(id=name):
                return self._bases.get(name, name)
            case ast.BinOp(left=inner) | ast.Subscript(value=inner) | ast.Attribute(value=inner):
                return self.base(inner)
            case ast.Call(func=ast.Attribute(value=inner)) if not (isinstance(inner, ast.Name) and inner.id == "tl"):
                return self.base(inner)
            case ast.Call(args=[first, *_]):
                return self.base(first)
        return ""

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        [target] = node.targets
        if isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(target.elts)
            pairs = list(zip(target.elts, values, strict=True))
        else:
            pairs = [(target, node.value)]
        found = {name.id: self.base(value) for name, value in pairs if isinstance(name, ast.Name)}
        self._bases |= {name: base for name, base in found.items() if base}

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Name(id="tl"), attr=verb) if verb == "store" or verb.startswith("atomic"):
                self.stores.add(self.base(node.args[0]))
            case ast.Name(id=name):
                called = getattr(self._names.get(name), "function", None)
                if called is not None:
                    names, stores = list(inspect.signature(called).parameters), written(called)
                    self.stores |= {
                        self.base(argument) for name, argument in zip(names, node.args, strict=False) if name in stores
                    }
