"""Measures the source against the limits of its design: size, imports, interfaces, knobs, names, functions.

    python tests/house.py                # each measure, its limit, and what is allowed today
    python tests/house.py --list TOPIC   # what a measure counts: names, docstrings, knobs, functions, imports, members
    python tests/house.py --strict       # fail above a limit, not above what is allowed today

It exits with 1 where a measure is above what is allowed. A measure that has not reached its limit has an entry in
``TODAY``: it may fall but not rise. The source is read by ``ast``; the knobs alone import thinwire.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "thinwire"

LIMITS: dict[str, float] = {
    "lines of source": 41_920,
    "files in the top folder": 3,
    "import circles": 0,
    "imports against the order": 0,
    "knobs not measured": 0,
    "members of Method": 16,
    "members of interfaces": 55,
    "empty names, percent": 1.0,
    "long functions": 0,
    "docstrings that open with a riddle": 0,
}
"""The goals. A measure without one is printed for information.

Lines of source: 30,700 with prediction (4,200: package predict, commands simulate and doctor, trials); and since then
500 for adapters on sharded models, 800 for help, env and selftest, 700 for replicas that come and go, 500 for kernels
that save launches, 900 for evaluation, trackers, Muon and mends; 1,300 for ``thinwire train --elastic`` and ``status``,
400 for replicas of several ranks and spares, 550 for rounds beside the steps, 250 for kernels that read less; 350 for
kernels that are launched as compiled and choose the largest faster, 250 for local steps on replicas that come and go;
300 for what is made once a step, goodput of disturbed gaps, a patience for connecting, and losses of rounds; 800
for replicas that fetch a state while the others go on, 100 for kernels that choose where the engine has put the rows;
150 for the step loop in four modules, 100 for replicas that outlive their keeper and agree on settings, 100 for
weights that one rank alone has written; and 50 less without the old names of knobs.
"""

TODAY: dict[str, float] = {}
"""What is allowed where a limit is not reached yet. Lower an entry when its measure falls; remove it at the limit."""

FLOORS: tuple[tuple[str, ...], ...] = (
    ("__init__", "__main__"),
    ("cli",),
    ("adapters",),
    ("train",),
    ("wire", "lab"),
    ("proof",),
    ("saved",),
    ("predict",),
    ("plan",),
    ("engines",),
    ("methods",),
    ("core",),
    ("codecs",),
    ("network",),
    ("ops", "optim"),
    ("base",),
)
"""The packages of ``thinwire`` from top to bottom. Each imports from itself, its own floor and those below."""

ASSIGNED: dict[str, str] = {}
"""The package that a module is going to, while it is still elsewhere. Remove an entry when its module has moved."""

INTERFACES: dict[str, str] = {
    "Method": "thinwire.core.method",
    "Exchange": "thinwire.core.exchange",
    "State": "thinwire.core.state",
    "Bucket": "thinwire.core.bucket",
    "Codec": "thinwire.codecs.base",
}
"""The classes that the author of a method meets, and the module of each."""

COMMON_KNOBS = frozenset({"dense", "send", "smallest"})
"""Knobs of nearly every method: which parameters are compressed. They are not counted."""

EMPTY_NAMES = frozenset(
    """
    of at by to there here where then now before late once again
    it that them these those this such same other others both each one more most least rest all_ none_ first_
    mine own ours theirs everybody together about how what why
    found due held kept left known said told made given taken gone seen done
    place places part parts
    """.split()  # noqa: SIM905 (one word for each line would be two pages)
)
"""Names that say nothing about what they hold."""

RIDDLES = (
    "Of", "What", "Where", "When", "How", "Who", "Whom", "Whose", "Which", "Why",
    "Those", "That", "These", "It", "They", "Them", "One", "Ones",
)  # fmt: skip
"""First words of a docstring that has neither a subject that the reader knows nor an imperative. An approximation."""

LONGEST = 60
"""Lines of a function, with its signature and its docstring, without its decorators."""


@dataclass(frozen=True)
class Module:
    """One file of the source, parsed."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


class Import(NamedTuple):
    """One module imports another in this line."""

    importer: str
    imported: str
    line: int
    in_function: bool


class Measure(NamedTuple):
    """One figure, and the lines that ``--list TOPIC`` prints of it."""

    name: str
    value: float
    topic: str = ""
    details: Sequence[str] = ()


def read_modules(source: Path, package: str = PACKAGE) -> dict[str, Module]:
    """Parse all files of ``source``, the folder of ``package``, by the name of their module."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        steps = path.relative_to(source).with_suffix("").parts
        name = ".".join([package, *(steps[:-1] if steps[-1] == "__init__" else steps)])
        text = path.read_text()
        modules[name] = Module(name, path, text, ast.parse(text))
    return modules


# Imports


def read_imports(module: Module, modules: Collection[str]) -> list[Import]:
    """List the imports of other ``modules``, those for type checking and those inside functions included."""
    imports = []
    for node, in_function in _walk_scopes(module.tree):
        names: Iterable[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = _from_names(module, node, modules)
        elif isinstance(node, ast.Call):
            names = _imported_by_call(node)
        for name in sorted(set(names)):
            if name in modules and name != module.name:
                imports.append(Import(module.name, name, getattr(node, "lineno", 0), in_function))
    return imports


def _walk_scopes(tree: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for node in ast.iter_child_nodes(tree):
        yield node, in_function
        yield from _walk_scopes(
            node, in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )


def _from_names(module: Module, node: ast.ImportFrom, modules: Collection[str]) -> list[str]:
    """Resolve ``from base import name``: the module ``base.name`` where there is one, else ``base`` itself."""
    base = node.module or ""
    if node.level:
        package = module.name if module.is_package else module.name.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        base = f"{package}.{base}" if base else package
    children = [f"{base}.{alias.name}" for alias in node.names]
    return [child if child in modules else base for child in children]


def _imported_by_call(node: ast.Call) -> list[str]:
    """Read the module of ``importlib.import_module("a.b")``, where it is written out."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    literal = node.args[0] if node.args else None
    if function == "import_module" and isinstance(literal, ast.Constant) and isinstance(literal.value, str):
        return [literal.value]
    return []


def find_circles(imports: Iterable[Import]) -> list[list[str]]:
    """List the groups of modules of which each imports all others, by way of one another."""
    graph: dict[str, set[str]] = {}
    for edge in imports:
        graph.setdefault(edge.importer, set()).add(edge.imported)
    reachable = {name: _reachable(graph, name) for name in graph}
    circles: list[list[str]] = []
    for name in sorted(graph):
        circle = sorted(other for other in reachable[name] if name in reachable.get(other, ()))
        if circle and circle not in circles:
            circles.append(circle)
    return circles


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Collect all modules that ``start`` imports, directly or not; ``start`` itself only by a circle."""
    visited: set[str] = set()
    stack = [start]
    while stack:
        new = graph.get(stack.pop(), set()) - visited
        visited |= new
        stack.extend(new)
    return visited


def package_of(module: str, assigned: Mapping[str, str] | None = None) -> str:
    """Name the package that ``module`` belongs to: by the longest entry of ``assigned``, else its first folder."""
    assigned = ASSIGNED if assigned is None else assigned
    name = module.partition(".")[2] or "__init__"
    prefix = name
    while prefix:
        if prefix in assigned:
            return assigned[prefix]
        prefix = prefix.rpartition(".")[0]
    return name.partition(".")[0]


def find_order_violations(
    modules: Iterable[str],
    imports: Iterable[Import],
    floors: Sequence[Sequence[str]] = FLOORS,
    assigned: Mapping[str, str] | None = None,
) -> list[str]:
    """List imports of a package on a higher floor, and modules of packages that have no floor."""
    floor_of = {package: number for number, packages in enumerate(floors) for package in packages}
    packages = {module: package_of(module, assigned) for module in modules}
    lines = [
        f"{module}: its package '{package}' has no floor in FLOORS"
        for module, package in sorted(packages.items())
        if package not in floor_of
    ]
    for edge in imports:
        importer, imported = packages[edge.importer], packages[edge.imported]
        if floor_of.get(importer, -1) > floor_of.get(imported, len(floors)):
            lines.append(
                f"{edge.importer}:{edge.line} [{importer}] imports {edge.imported} [{imported}], which is above it"
                + (" (inside a function)" if edge.in_function else "")
            )
    return lines


# Functions, docstrings, names


def find_long_functions(modules: Mapping[str, Module], longest: int = LONGEST) -> list[str]:
    """List functions of more than ``longest`` lines, without kernels."""
    lengths = [
        (1 + (node.end_lineno or node.lineno) - node.lineno, f"{name}.{node.name}")
        for name, module in modules.items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(module, node)
    ]
    return [f"{length:4} {function}" for length, function in sorted(lengths, reverse=True) if length > longest]


def _is_kernel(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Kernels are all of ``ops/*/triton.py``, and of ``ops/*/cpu.py`` what numba compiles."""
    if "ops" not in module.path.parts[-3:-2]:
        return False
    compilers = ("njit", "inlined", "intrinsic", "jit")
    decorators = {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list}
    return module.path.name == "triton.py" or (module.path.name == "cpu.py" and not decorators.isdisjoint(compilers))


def find_riddles(modules: Mapping[str, Module]) -> list[str]:
    """List docstrings, those of attributes included, whose first word is one of ``RIDDLES``."""
    lines = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                first_line = node.value.value.strip().partition("\n")[0]
                if first_line.partition(" ")[0].rstrip(",:") in RIDDLES:
                    lines.append(f"{module.name}:{node.lineno}: {first_line}")
    return lines


def assigned_names(tree: ast.AST) -> Iterator[str]:
    """Yield each name that is given to a value: targets of any kind, attributes and arguments included.

    Leading underscores are dropped. ``self``, ``cls`` and ``_`` do not count.
    """
    for node in ast.walk(tree):
        name: str | None = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            name = node.name
        name = (name or "").lstrip("_")
        if name and name not in ("self", "cls"):
            yield name


def count_names(modules: Mapping[str, Module]) -> dict[str, Counter[str]]:
    """Count the assigned names of each module."""
    return {name: Counter(assigned_names(module.tree)) for name, module in modules.items()}


def measure_names(modules: Mapping[str, Module]) -> Measure:
    """Compute the share of assigned names that are in ``EMPTY_NAMES``, by word and by file."""
    by_module = count_names(modules)
    names: Counter[str] = sum(by_module.values(), Counter())
    by_word = Counter({word: names[word] for word in EMPTY_NAMES if names[word]})
    by_file = Counter({module: sum(counts[word] for word in EMPTY_NAMES) for module, counts in by_module.items()})
    share = 100 * by_word.total() / max(names.total(), 1)
    details = [f"{by_word.total()} of {names.total()} assigned names"]
    details += [f"{count:5} {word}" for word, count in by_word.most_common()]
    for module, count in by_file.most_common():
        if count:
            words = [f"{word} {by_module[module][word]}" for word in sorted(EMPTY_NAMES) if by_module[module][word]]
            details.append(f"{count:5} {module}: {', '.join(words)}")
    return Measure("empty names, percent", round(share, 2), "names", details)


# Interfaces


def public_members(modules: Mapping[str, Module], name: str, home: str) -> tuple[list[str], list[str]]:
    """Name the public functions and properties in the body of class ``name`` of module ``home``, and its attributes.

    Raises:
        LookupError: there is no such class there.
    """
    nodes = modules[home].tree.body if home in modules else []
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]
    if not classes:
        raise LookupError(f"no class {name} in {home}: correct INTERFACES in {Path(__file__).name}")
    functions: dict[str, None] = {}  # once each: a property and its setter have one name
    attributes: dict[str, None] = {}
    for node in classes[0].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            functions[node.name] = None
        elif isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            attributes[ast.unparse(node.target)] = None
    return list(functions), list(attributes)


def measure_members(modules: Mapping[str, Module], interfaces: Mapping[str, str] | None = None) -> list[Measure]:
    """Count the public members of ``Method``, and of all interfaces; annotated attributes are listed, not counted."""
    counts: dict[str, int] = {}
    details = []
    for name, home in (INTERFACES if interfaces is None else interfaces).items():
        functions, attributes = public_members(modules, name, home)
        counts[name] = len(functions)
        details.append(f"{len(functions):4} {name} ({home}): {', '.join(functions)}")
        details.append(f"     and {len(attributes)} attributes: {', '.join(attributes) or 'none'}")
    return [
        Measure("members of Method", counts.get("Method", 0)),
        Measure("members of interfaces", sum(counts.values()), "members", details),
    ]


# Knobs


def read_method_rows(data: Path) -> list[str]:
    """Collect the methods that have a row of speed or loss: the column ``method`` of each csv and jsonl file.

    The text files beside them hold tests of correctness, in which a knob is set but not measured.
    """
    methods: set[str] = set()
    for path in sorted(data.glob("*.csv")):
        with path.open(newline="") as file:
            methods.update(row.get("method") or "" for row in csv.DictReader(file))
    for path in sorted(data.glob("*.jsonl")):
        methods.update(json.loads(line).get("method") or "" for line in path.read_text().splitlines() if line.strip())
    return sorted({method.partition(" --")[0].strip() for method in methods} - {""})


def knob_defaults(cls: Any) -> dict[str, Any]:
    """Read the knobs of a method's class and their defaults: its init fields, without those that it refuses."""
    return {
        knob.name: knob.default_factory() if knob.default_factory is not MISSING else knob.default
        for knob in fields(cls)
        if knob.init and knob.name not in getattr(cls, "ABSENT", ())
    }


def value_defaults(cls: Any) -> dict[str, Any]:
    """Read the fields and defaults of a knob's value that has knobs of its own, such as ``Updates``."""
    return {knob.name: knob.default for knob in fields(cls)}


def set_knobs(row: str, classes: Mapping[str, Any], resolve: Callable[[str], Any]) -> set[tuple[str, str]]:
    """Name (method, knob) of each knob that ``row`` sets off its default, and of the method inside it, its ``outer``.

    A row that ``resolve`` refuses, of an older version, is read by its text as far as the knobs still exist.
    """
    try:
        method = resolve(row)
        name, values = method.name, vars(method)
    except Exception:
        name, values = _read_text(row, classes)
    if name not in classes:
        return set()
    knobs = {
        (name, knob)
        for knob, default in knob_defaults(classes[name]).items()
        if knob in values and values[knob] != default
    }
    feedback = values.get("feedback")
    if is_dataclass(feedback):  # a value with knobs of its own, which all methods share
        knobs |= {
            (type(feedback).__name__, knob)
            for knob, default in value_defaults(type(feedback)).items()
            if getattr(feedback, knob) != default
        }
    if isinstance(values.get("outer"), str):
        knobs |= set_knobs(values["outer"], classes, resolve)
    return knobs


def _read_text(row: str, classes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Read ``name:preset(knob=value)`` without making the method: its name, and the knobs that are set."""
    head, bracket, _ = row.partition("(")
    name, _, preset = head.strip().partition(":")
    values = dict(getattr(classes.get(name), "PRESETS", {}).get(preset, {}))
    try:
        call = ast.parse("f" + row[len(head) :] if bracket else "f()", mode="eval").body
        if isinstance(call, ast.Call):
            values.update({str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
    except (SyntaxError, ValueError):
        return "", {}
    return name, values


def measure_knobs(classes: Iterable[Any], rows: Iterable[str], resolve: Callable[[str], Any]) -> list[Measure]:
    """Count the knobs of all methods, and those that no row sets to another value than their default."""
    by_name = {cls.name: cls for cls in classes}
    every = [(name, knob) for name, cls in by_name.items() for knob in knob_defaults(cls)]
    defaults = [knob for cls in by_name.values() for knob in knob_defaults(cls).values()]
    values = dict.fromkeys(type(knob) for knob in defaults if is_dataclass(knob))
    every += [(value.__name__, knob) for value in values for knob in value_defaults(value)]
    counted = [pair for pair in every if pair[1] not in COMMON_KNOBS]
    measured = set().union(*(set_knobs(row, by_name, resolve) for row in rows))
    open_knobs = [pair for pair in counted if pair not in measured]
    details = [f"{len(every)} knobs, {len(counted)} of them counted: without {', '.join(sorted(COMMON_KNOBS))}"]
    for name in dict.fromkeys(name for name, _ in every):
        knobs = [knob for method, knob in open_knobs if method == name]
        if knobs:
            details.append(f"{len(knobs):4} {name}: {', '.join(knobs)}")
    return [
        Measure("knobs", len(counted)),
        Measure("knobs not measured", len(open_knobs), "knobs", details),
    ]


# All measures


def measure_imports(modules: Mapping[str, Module]) -> list[Measure]:
    """Count circles, imports inside functions, and imports against the order of packages."""
    imports = [edge for module in modules.values() for edge in read_imports(module, modules)]
    at_top = [edge for edge in imports if not edge.in_function]
    circles, wider_circles = find_circles(at_top), find_circles(imports)
    violations = find_order_violations(modules, imports)
    in_functions = [edge for edge in imports if edge.in_function]
    return [
        Measure("import circles", len(circles), "imports", [f"circle: {', '.join(circle)}" for circle in circles]),
        Measure(
            "circles with imports inside functions",
            len(wider_circles),
            "imports",
            [f"circle by way of functions: {', '.join(circle)}" for circle in wider_circles if circle not in circles],
        ),
        Measure(
            "imports inside functions",
            len(in_functions),
            "imports",
            [f"inside a function: {edge.importer}:{edge.line} imports {edge.imported}" for edge in in_functions],
        ),
        Measure("imports against the order", len(violations), "imports", violations),
    ]


def measure_source(source: Path) -> list[Measure]:
    """Take all measures that need the source alone."""
    modules = read_modules(source)
    long_functions, riddles = find_long_functions(modules), find_riddles(modules)
    return [
        Measure("lines of source", sum(module.text.count("\n") for module in modules.values())),
        Measure("files in the top folder", len(list(source.glob("*.py")))),
        *measure_imports(modules),
        *measure_members(modules),
        measure_names(modules),
        Measure("long functions", len(long_functions), "functions", long_functions),
        Measure("docstrings that open with a riddle", len(riddles), "docstrings", riddles),
    ]


def measure_all(root: Path = ROOT) -> list[Measure]:
    """Take all measures of the project in ``root``; its thinwire is the one that is imported."""
    sys.path.insert(0, str(root / "src"))
    try:
        from thinwire.methods import TABLE, resolve
    finally:
        sys.path.pop(0)
    rows = read_method_rows(root / "docs" / "data")
    return [*measure_source(root / "src" / PACKAGE), *measure_knobs(TABLE, rows, resolve)]


def allowed(name: str, strict: bool = False) -> float | None:
    """Give the most that measure ``name`` may be: its entry in ``TODAY``, else its limit; None: anything."""
    return LIMITS.get(name) if strict else TODAY.get(name, LIMITS.get(name))


def exceeded(measures: Iterable[Measure], strict: bool = False) -> list[Measure]:
    """Select the measures that are above what is allowed."""
    limits = {measure.name: allowed(measure.name, strict) for measure in measures}
    return [measure for measure in measures if (limit := limits[measure.name]) is not None and measure.value > limit]


def print_table(measures: Sequence[Measure], strict: bool) -> None:
    """Print each measure beside its limit and what is allowed today."""
    failed = {measure.name for measure in exceeded(measures, strict)}
    print(f"{'measure':<40}{'value':>9}{'limit':>9}{'today':>9}")
    for name, value, *_ in measures:
        limit, today = LIMITS.get(name), TODAY.get(name)
        remark = "  EXCEEDED" if name in failed else ""
        if today is not None and value < today:
            remark = "  better: lower its entry in TODAY"
        columns = "".join(f"{'' if number is None else f'{number:,}':>9}" for number in (value, limit, today))
        print(f"{name:<40}{columns}{remark}".rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or with ``--list`` what a measure counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    topics = ("names", "docstrings", "knobs", "functions", "imports", "members")
    parser.add_argument("--list", choices=topics, dest="topic", help="print what this measure counts")
    parser.add_argument("--strict", action="store_true", help="fail above a limit, not above what is allowed today")
    options = parser.parse_args(arguments)
    measures = measure_all()
    if options.topic:
        for measure in measures:
            if measure.topic == options.topic:
                print(f"{measure.name}: {measure.value:,}")
                print("".join(f"  {line}\n" for line in measure.details), end="")
    else:
        print_table(measures, options.strict)
    return 1 if exceeded(measures, options.strict) else 0


if __name__ == "__main__":
    raise SystemExit(main())
