"""Small faults put into the code on purpose: does a test fail for each of them?

    pip install mutmut
    python benchmarks/proofs/mutants.py measure             # which tests run which lines: once, and again for new tests
    python benchmarks/proofs/mutants.py run                 # 30 mutants of each module, into docs/data/mutants.txt
    python benchmarks/proofs/mutants.py run guard --number 60
    python benchmarks/proofs/mutants.py run --survivors --long 200    # those again that survived, against more tests

The faults are those of mutmut, and two more: a negated condition, and a statement left out. Left alone are annotations,
docstrings and the words of errors. Those that put None somewhere, or leave out an argument, mostly end in a TypeError:
they are a third at most. A mutant goes into a private copy of the project; a process that has torch is forked, and runs
those tests that run the mutated lines, cheap ones and those that killed before first: ``FAST`` seconds of
them, and then, with ``--long SECONDS``, as many seconds of others.

docs/data/mutants.txt names each survivor; one behind which it says why is equivalent: it changes nothing that holds.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_assignment, operator_string

ROOT = Path(__file__).parents[2]
MODULES = {
    "road": "src/thinwire/core/road.py",
    "step": "src/thinwire/core/step.py",
    "guard": "src/thinwire/network/guard.py",
    "outliers": "src/thinwire/core/outliers.py",
    "state": "src/thinwire/core/state.py",
    "format": "src/thinwire/saved/format.py",
    "updates": "src/thinwire/methods/parts/updates.py",
    "trickle": "src/thinwire/methods/ours/trickle.py",
    "exchange": "src/thinwire/core/exchange.py",
    "weights": "src/thinwire/core/weights.py",
}
NAMES = (
    "laws laws_table saved weights bound edges edges_finite edges_optimizers edges_passes edges_turns engines "
    "engines_linear update checkpoints resize levels layers compose dry_run knobs memory agreement scheduler "
    "strict streamorder sdp4bit scape tagc atmask localsteps radius separate powersgd dgc adversarial linear onebit "
    "guard state road collectives trickle form turn strangers"
)
TESTS = NAMES.split()
FAST, LIMIT = 8.0, 40
KEEP = ROOT / "build" / "mutants"
REPORT = ROOT / "docs" / "data" / "mutants.txt"
Lines = dict[str, dict[str, list[int]]]


@dataclass(frozen=True)
class Mutant:
    """One fault. ``first``, ``last``: its lines; ``imported``: they are run by an import, not by a test. ``before``,
    ``after``: what differs. ``scope``: the lines of the function or class around it."""

    module: str
    operator: str
    first: int
    last: int
    imported: bool
    before: str
    after: str
    scope: tuple[int, int]
    source: str

    @property
    def name(self) -> str:
        return f"{self.module}: {self.before}  ->  {self.after}"


def negated(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What mutmut leaves as it is: a condition without a comparison."""
    if isinstance(node, cst.If | cst.While | cst.IfExp | cst.CompIf) and isinstance(
        node.test, cst.Name | cst.Attribute | cst.Call | cst.Subscript
    ):
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), node.test))


def deleted(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A statement that is a call."""
    if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
        yield cst.Pass()


OPERATORS: list[tuple[type, Callable[[Any], Iterable[cst.CSTNode]]]] = [
    *(pair for pair in mutation_operators if pair[1] is not operator_string),
    (cst.CSTNode, negated), (cst.Expr, deleted),
]  # fmt: skip
CRUDE = (operator_arg_removal.__name__, operator_assignment.__name__)


class Faults(cst.CSTVisitor):
    """All places of a module with what could stand there: (first line, the operator's name, node, the other node)."""

    def __init__(self, wrapper: MetadataWrapper) -> None:
        super().__init__()
        self.places, self.parents = wrapper.resolve(PositionProvider), wrapper.resolve(ParentNodeProvider)
        self.found: list[tuple[int, str, cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Raise | cst.Assert | cst.FormattedString | cst.Decorator):
            return False
        if isinstance(node, cst.Call) and cst.Module([]).code_for_node(node.func) in ("len", "isinstance", "TypeVar"):
            return False
        if isinstance(node, cst.Assign) and isinstance(node.value, cst.Subscript) and not self.scopes(node):
            return False  # an alias of a type
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                line = self.places[node].start.line
                self.found += [(line, operator.__name__, node, changed) for changed in operator(node)]
        return True

    def scopes(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The functions and classes around ``node``, the innermost first."""
        around = []
        while node in self.parents:
            node = self.parents[node]
            around += [node] * isinstance(node, cst.FunctionDef | cst.ClassDef)
        return around


def chosen(module: str, number: int, seed: int) -> list[Mutant]:
    """So many of a module's mutants: of the crude ones a third at most, and one of each line and operator."""
    source, draw = (ROOT / MODULES[module]).read_text(), random.Random(f"{seed} {module}")
    wrapper = MetadataWrapper(cst.parse_module(source))
    faults = Faults(wrapper)
    wrapper.visit(faults)
    of_line: dict[tuple[int, str], list[tuple[cst.CSTNode, cst.CSTNode]]] = defaultdict(list)
    for line, operator, node, changed in faults.found:
        of_line[line, operator].append((node, changed))
    every = [(*where, *draw.choice(several)) for where, several in sorted(of_line.items(), key=lambda item: item[0])]
    draw.shuffle(every)
    fine = [fault for fault in every if fault[1] not in CRUDE][: number - number // 3]
    few = fine + [fault for fault in every if fault[1] in CRUDE][: number - len(fine)]
    return [
        _mutant(module, operator, source, wrapper.module.deep_replace(node, changed).code, faults, node)
        for _, operator, node, changed in sorted(few, key=lambda fault: fault[:2])
    ]


def _mutant(module: str, operator: str, source: str, mutated: str, faults: Faults, node: cst.CSTNode) -> Mutant:
    old, new = source.splitlines(), mutated.splitlines()
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    _, a, b, c, d = next(code for code in codes if code[0] != "equal")
    inside = faults.scopes(node)[:1]
    scope = [faults.places[around] for around in inside]
    imported = not inside or isinstance(inside[0], cst.ClassDef)
    if inside and isinstance(inside[0], cst.FunctionDef) and isinstance(inside[0].body, cst.IndentedBlock):
        imported = faults.places[node].start.line < faults.places[inside[0].body.body[0]].start.line
    return Mutant(
        module, operator, a + 1, max(b, a + 1), imported,
        " ".join(map(str.strip, old[a:b])), " ".join(map(str.strip, new[c:d])),
        (scope[0].start.line, scope[0].end.line) if scope else (1, len(old)), mutated,
    )  # fmt: skip


class Lined:
    """A plugin of pytest: which lines of the modules each test runs, on ranks that are threads or forked ones too."""

    def __init__(self, root: Path) -> None:
        self.files = {str(root / path): module for module, path in MODULES.items()}
        self.lines: set[tuple[str, int]] = set()
        self.of: dict[str, dict[str, Any]] = {}
        self.folder = Path(tempfile.mkdtemp(dir=root))

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        module = self.files.get(frame.f_code.co_filename)
        if module is None:
            return None
        lines = self.lines

        def local(frame: Any, event: str, arg: Any) -> Any:
            lines.add((module, frame.f_lineno))
            return local

        return local

    def wrap(self, function: Callable) -> Callable:
        def ranked(*args: Any) -> None:
            try:
                function(*args)
            finally:
                (self.folder / str(os.getpid())).write_text(json.dumps(sorted(self.lines)))

        return ranked

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.lines.clear()
        self.began = time.monotonic()
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        entry = self.of.setdefault(report.nodeid, {"passed": True, "seconds": 0.0})
        entry["passed"] &= report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        lines = set(self.lines)
        for file in self.folder.iterdir():
            lines |= {(module, line) for module, line in json.loads(file.read_text())}
            file.unlink()
        by_module: dict[str, list[int]] = defaultdict(list)
        for module, line in sorted(lines):
            by_module[module].append(line)
        self.of[nodeid] |= {"seconds": time.monotonic() - self.began, "lines": by_module}


def copied(folder: Path) -> None:
    """The project, with the kernels that numba has on disk."""
    for name in ("src", "tests", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("build", "*.pyc"))
    for file in ROOT.iterdir():
        if file.is_file() and file.suffix in (".toml", ".md", ""):
            shutil.copy2(file, folder)


def warm_up(root: Path) -> None:
    """What no mutant is part of, so that a child need not import it."""
    os.chdir(root)
    os.environ |= {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'tests' / 'support'}",
        "THINWIRE_PATIENCE": "0.2", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TORCH_CPP_LOG_LEVEL": "FATAL",
    }  # fmt: skip
    sys.path[:0] = [str(root / "src"), str(root / "tests" / "support")]
    import hypothesis  # noqa: F401
    import numpy.ma  # noqa: F401
    import pytest  # noqa: F401
    import pytest_timeout  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)
    import thinwire.ops.backends  # noqa: F401

    for family in sorted((root / "src" / "thinwire" / "ops").iterdir()):
        for half in ("reference", "cpu"):
            if (family / f"{half}.py").exists():
                __import__(f"thinwire.ops.{family.name}.{half}")
    mutated = {path.removeprefix("src/").removesuffix(".py").replace("/", ".") for path in MODULES.values()}
    assert not mutated & sys.modules.keys(), f"what is to be mutated is imported: {mutated & sys.modules.keys()}"


def tested(words: Sequence[str], log: Path, seconds: float, plugin: Lined | None = None) -> int | None:
    """Run pytest in a forked child, which is given so many seconds. Its status; None: time was over."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 99
        with contextlib.suppress(BaseException):
            os.setsid()
            file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.dont_write_bytecode = plugin is None
            import pytest

            status = pytest.main(["-q", "-p", "no:cacheprovider", *words], plugins=[Forked(plugin)])
            if plugin is not None:
                Path(f"{log}.json").write_text(json.dumps(plugin.of))
        os._exit(int(status))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.02)
    else:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has left
    return 0 if (Path(log).read_text(errors="replace").count(" passed") and not _failed(log)) else 1


def _failed(log: Path) -> str:
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].split(" - ")[0]
    return ""


class Forked:
    """A plugin of pytest: ranks are forked from the test's own process, which has imported the mutant."""

    def __init__(self, plugin: Lined | None) -> None:
        self.lined = plugin

    def pytest_configure(self, config: Any) -> None:
        import ranks

        ranks._context = multiprocessing.get_context("fork")
        ranks._fork_server = lambda warm: SimpleNamespace(connect_to_new_process=None)
        if self.lined is not None:
            config.pluginmanager.register(self.lined)
            for name in ("_rank", "_alone"):
                setattr(ranks, name, self.lined.wrap(getattr(ranks, name)))


PLUGINS = ("-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin")


def measure(names: Sequence[str]) -> None:
    """Run the tests once, and keep what they run."""
    KEEP.mkdir(parents=True, exist_ok=True)
    file = KEEP / "lines.json"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copied(root)
        warm_up(root)
        for name in names:
            path = next((file.relative_to(root) for file in root.glob(f"tests/*/test_{name}.py")), None)
            if path is None:
                continue
            log = KEEP / f"measure-{name}.log"
            words = [*PLUGINS, str(path), "--timeout", "2000", "-m", "not lab and not gpu"]
            began, plugin = time.monotonic(), Lined(root)
            tested(words, log, 1200, plugin)
            kept = json.loads(file.read_text()) if file.exists() else {}  # read late: another may measure, too
            kept = {test: entry for test, entry in kept.items() if not test.startswith(f"{path}::")}
            found = json.loads(Path(f"{log}.json").read_text())
            kept |= {test: entry for test, entry in found.items() if entry["passed"] and entry.get("lines")}
            file.write_text(json.dumps(kept))
            failed = sum(not entry["passed"] for entry in found.values())
            print(f"{name}: {len(found)} tests, {failed} not passed, {time.monotonic() - began:.0f} s", flush=True)


def tests_of(mutant: Mutant, lines: dict[str, Any], kills: Counter[str]) -> list[str]:
    """Those that run the mutant's lines; where none does (it is run by an import), its function's or class's."""
    here, around = range(mutant.first, mutant.last + 1), range(mutant.scope[0], mutant.scope[1] + 1)
    tests: list[str] = []
    for place in [around] if mutant.imported else [here, around]:
        wanted = set(place)
        tests = [test for test, entry in lines.items() if wanted & set(entry["lines"].get(mutant.module, ()))]
        if tests:
            break
    # Of the many cases of one test a few first: the tests that differ see more than one test with other numbers.
    earlier, cost = Counter[str](), {}
    for test in sorted(tests, key=lambda test: (-kills[test], lines[test]["seconds"])):
        cost[test] = (lines[test]["seconds"] + 0.1) * (1 + earlier[test.partition("[")[0]]) / (1 + 3 * kills[test])
        earlier[test.partition("[")[0]] += 1
    return sorted(tests, key=cost.__getitem__)


def judged(mutant: Mutant, root: Path, lines: dict[str, Any], kills: Counter[str], long: float) -> dict[str, Any]:
    """Killed (by which test), lived on, or: no test runs it."""
    target = root / MODULES[mutant.module]
    began, tests, log = time.monotonic(), tests_of(mutant, lines, kills), root / "log.txt"
    stages: list[list[str]] = [[], []]
    spent = 0.0
    for test in tests:
        spent += lines[test]["seconds"]
        if spent < FAST + long or not any(stages):
            stages[spent > FAST].append(test)
    if not tests:
        return {"end": "no test", "test": "", "seconds": 0.0}
    target.write_text(mutant.source)
    try:
        for stage in stages:
            if not stage:
                continue
            expected = sum(lines[test]["seconds"] for test in stage)
            status = tested([*PLUGINS, "-x", "--timeout", "300", *stage], log, LIMIT + 3 * expected)
            if status != 0:
                test = "" if status is None else _failed(log)
                kills[test] += 1
                end = "time" if status is None or "Failed: Timeout" in log.read_text(errors="replace") else "killed"
                return {"end": end, "test": test, "seconds": time.monotonic() - began}
    finally:
        shutil.copy2(ROOT / MODULES[mutant.module], target)
    return {"end": "survived", "test": f"{len(tests)} tests", "seconds": time.monotonic() - began}


def run(names: Sequence[str], number: int, seed: int, survivors: bool, long: float) -> None:
    """Judge the mutants one by one; what was judged before, of the same line, is kept."""
    lines, kills, known = json.loads((KEEP / "lines.json").read_text()), Counter[str](), reasons()
    file = KEEP / "ends.json"
    ends: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copied(root)
        warm_up(root)
        for name in names:
            for mutant in chosen(name, number, seed):
                end = ends.get(mutant.name)
                if end is not None and mutant.name in known:
                    continue
                if end is not None and not (survivors and end["end"] in ("survived", "no test")):
                    continue
                ends[mutant.name] = judged(mutant, root, lines, kills, long)
                file.write_text(json.dumps(ends, indent=1))
                said = ends[mutant.name]
                where = f"{mutant.first:4} {mutant.name}  [{said['test']}]"
                print(f"{said['end']:8} {said['seconds']:5.1f} s {where}", flush=True)
    report(number, seed, ends)


def reasons() -> dict[str, str]:
    """Why a mutant changes nothing, by its name, as the report has it."""
    lines = REPORT.read_text().splitlines() if REPORT.exists() else []
    return {line: after for line, after in itertools.pairwise(lines) if after.startswith("    = ")}


def report(number: int, seed: int, ends: dict[str, dict[str, Any]]) -> None:
    """Write the table, with the reasons that the old one has."""
    why = reasons()
    rows, rest, total = [], [], Counter[str]()
    for name in MODULES:
        there = [mutant for mutant in chosen(name, number, seed) if mutant.name in ends]
        counts = Counter[str](mutants=len(there))
        for mutant in there:
            end = ends[mutant.name]["end"]
            if end in ("killed", "time"):
                counts["killed"] += 1
                counts["by time"] += end == "time"
                continue
            counts["equivalent" if mutant.name in why else "survivors"] += 1
            rest += [mutant.name, *filter(None, [why.get(mutant.name)])]
        rows.append(f"{name:12}" + "".join(f"{counts[key]:12}" for key in COLUMNS))
        total += counts
    head = f"{'module':12}" + "".join(f"{key:>12}" for key in COLUMNS)
    rows.append(f"{'all':12}" + "".join(f"{total[key]:12}" for key in COLUMNS))
    words = f"python benchmarks/proofs/mutants.py run --number {number} --seed {seed}"
    rest = ["Those that lived on; = why one changes nothing:", "", *rest]
    REPORT.write_text("\n".join([words, "", head, *rows, "", *rest, ""]))
    print("\n".join([head, *rows]))


COLUMNS = ("mutants", "killed", "by time", "equivalent", "survivors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "list", "run", "report"])
    parser.add_argument("names", nargs="*", help="modules, or with measure: tests, as saved for test_saved.py")
    parser.add_argument("--number", type=int, default=30, help="of mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--survivors", action="store_true", help="judge again what survived")
    parser.add_argument("--long", type=float, default=0.0, metavar="SECONDS", help="of more tests for what survives")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.names or TESTS)
        return
    names = given.names or list(MODULES)
    if given.what == "list":
        for name in names:
            for mutant in chosen(name, given.number, given.seed):
                print(f"  {mutant.first} {mutant.operator}: {mutant.before}  ->  {mutant.after}")
    elif given.what == "report":
        report(given.number, given.seed, json.loads((KEEP / "ends.json").read_text()))
    else:
        run(names, given.number, given.seed, given.survivors, given.long)


if __name__ == "__main__":
    main()
