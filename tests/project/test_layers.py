"""Who may know what, as CONTRIBUTING's table says: read off the imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import house
import thinwire

ROOT = Path(thinwire.__file__).parent
MODULES = {
    ".".join(("thinwire", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imports(path: Path, *, inner: bool = False) -> Iterator[str]:
    """The modules that ``path`` imports when it is loaded; with ``inner`` also in functions. Not for types alone."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inner:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES or node.module == "torch" else node.module
        pending.extend(ast.iter_child_nodes(node))


def test_there_is_no_import_circle():
    graph = {name: {used for used in imports(path) if used in MODULES} - {name} for name, path in MODULES.items()}
    # A package's __init__ is loaded before its modules, which do not need it.
    graph = {name: {used for used in uses if not name.startswith(f"{used}.")} for name, uses in graph.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, with the circle
    assert len(order) >= len(MODULES) > 60


def test_every_package_has_a_room_and_the_table_has_their_order():
    """CONTRIBUTING's table has each package once, those that know least first, as ``house.FLOORS``."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    table = text.partition("| part | knows | does not know |")[2].partition("\n\n")[0]
    rooms = [[name.strip() for name in row.split("|")[1].split(",")] for row in table.splitlines()[2:]]
    modules = {name.split(".")[1] for name in MODULES if "." in name} - {"__main__"}
    assert {name for row in rooms for name in row} == modules
    floor = {name: number for number, names in enumerate(reversed(house.FLOORS)) for name in names}
    order = [max(floor[name] for name in row) for row in rooms]
    assert order == sorted(order)


def test_the_rooms_of_the_trainer_have_an_order():
    """Each imports from those before it alone; what trains, and what starts who trains, stand at the top."""
    order = ["model", "data", "config", "job", "checkpoint", "loop", "replica", "cli", "supervisor"]
    modules = {name: path for name, path in MODULES.items() if name.startswith("thinwire.train.")}
    assert {name.split(".")[2] for name in modules} == {*order}
    for name, path in modules.items():
        uses = {used.split(".")[2] for used in imports(path, inner=True) if used in modules}
        assert uses <= {*order[: order.index(name.split(".")[2]) + 1]}, name


def test_methods_and_codecs_do_not_know_the_network_or_an_engine():
    for name, path in MODULES.items():
        if not name.startswith(("thinwire.methods", "thinwire.codecs", "thinwire.ops")):
            continue
        used = set(imports(path, inner=True))
        engines = ("torch.distributed", "thinwire.engines", "thinwire.adapters", "thinwire.core.road")
        assert not {module for module in used if module.startswith(engines)}, name


def test_collectives_are_named_behind_the_one_door():
    verbs = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "isend", "irecv", "broadcast")
    for name, path in MODULES.items():
        if name == "thinwire.network.comm":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "torch.distributed"):
                assert not node.attr.startswith(verbs), f"{name}: {ast.unparse(node)}"


def test_integrations_hold_no_mathematics_of_methods():
    """They translate: of methods they know the interface alone."""
    for name, path in MODULES.items():
        if name.startswith(("thinwire.engines", "thinwire.adapters")):
            used = {of for of in imports(path, inner=True) if of.startswith(("thinwire.methods.", "thinwire.ops"))}
            assert used <= {"thinwire.core.method"}, f"{name}: {used}"


def test_an_error_shows_no_brace_that_nothing_fills():
    """Text that was cut out of an f-string keeps its braces: "no optimizer holds {0}"."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                filled = {id(part) for of in ast.walk(node) if isinstance(of, ast.JoinedStr) for part in of.values}
                texts = [of for of in ast.walk(node) if isinstance(of, ast.Constant) and isinstance(of.value, str)]
                unfilled = [of.value for of in texts if id(of) not in filled and re.search(r"\{\w*\}", of.value)]
                assert not unfilled, (name, node.lineno)
