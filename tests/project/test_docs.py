"""README, CONTRIBUTING and docs say what is so: generated parts are fresh, and what they name exists."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

import thinwire
from breadth import spread
from ranks import run
from thinwire.base.knobs import knobs_of as fields_of
from thinwire.cli.lab import LabRun
from thinwire.cli.program import COMMANDS
from thinwire.cli.simulate import SimulateOptions
from thinwire.lab.compare import Comparison
from thinwire.lab.entries import Entry, method_names
from thinwire.methods import AUTO, TABLE, resolve
from thinwire.train.checkpoint.evaluation import Options as EvalOptions
from thinwire.train.checkpoint.trained_model import ExportOptions, SampleOptions
from thinwire.train.config import Config
from thinwire.train.data.token_files import Options as TokenizeOptions

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks" / "papers"))

from frame import Settings as PaperOptions  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


RECORDS = ("log.md", "runs.md", "speed.md")
"""Pages of what was measured, in the words of its day: a method or knob in them may have left the library."""
PAST = re.compile(
    r"bf16-acc32|fp8|demo|frozen-adam|mask='shared'|:shared|choosers|:recommended|:ls1|:diloco|:sparseloco|factored|payload|clip="
    r"|direction=|update='printed'|estimator='(?:srht|orthonormal|shrunk)'|restart="
)
"""What may be in them without being there today."""
REMOVED = "fp8|bf16-acc32|demo|frozen-adam|local-steps:(?:ls1|sparseloco|diloco)|trickle:shared"
"""Methods and presets that no other page may name."""


def was_known(spec: str) -> None:
    """``spec`` can be given today, or is a form that has left."""
    if spec == "auto":  # it stands for a method until the ranks have chosen
        return
    try:
        resolve(spec)
    except thinwire.ThinwireError:
        assert PAST.search(spec), spec


def text_of(page: Path) -> str:
    return page.read_text()


def code(page: Path, language: str | None = None) -> list[str]:
    """The page's fenced blocks (of one language), and, of any language, its code spans on one line each."""
    text = text_of(page)
    found = [body for tongue, body in FENCE.findall(text) if language in (None, tongue)]
    if language is None:
        found += [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCE.sub("", text))]
    return found


def shell(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page."""
    for block in code(page):
        for line in block.replace("\\\n", " ").splitlines():
            for start in re.finditer(r"(?<![\w/.-])(thinwire|python|make|pytest)(?= )", line):
                try:
                    yield shlex.split(line[start.start() :], comments=True)
                except ValueError:
                    continue


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return of_docs("figures")


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return of_docs("pages")


def of_docs(name: str) -> ModuleType:
    """A program of docs/, which it finds the others beside it from."""
    with mock.patch.object(sys, "path", [*sys.path, str(ROOT / "docs")]):
        return importlib.import_module(name)


def test_generated_parts_are_fresh(figures: ModuleType) -> None:
    """Red? Run ``python docs/figures.py``."""
    stale = [page.name for page in figures.pages() if figures.fresh(page.read_text()) != page.read_text()]
    stale += [name for name in figures.PICTURES if figures.shown(figures.HERE / name) != figures.digest(name)]
    assert stale == [], "run python docs/figures.py"


def test_a_changed_figure_makes_a_page_and_a_picture_stale(figures: ModuleType) -> None:
    read = figures.read

    def other(name: str) -> list[dict[str, str]]:
        return [row | {"speed_percent": "99"} if row.get("method") == "int8" else row for row in read(name)]

    readme = (ROOT / "README.md").read_text()
    with mock.patch.object(figures, "read", other):
        assert figures.fresh(readme) != readme
        assert figures.shown(figures.HERE / "tradeoff.svg") != figures.digest("tradeoff.svg")


def test_every_method_has_its_row_and_every_measurement_its_command(figures: ModuleType) -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    for cls in TABLE:
        assert f"| `{cls.name}` {cls.__name__} |" in page
    known = {row["setting"]: row for row in figures.read("settings")}
    for name in ("speed", "loss"):
        for row in figures.read(name):
            assert known[row["setting"]]["command"] and known[row["setting"]]["commit"], row
            was_known(row["method"])


def knobs_of(spec: str) -> tuple[str, dict[str, object]]:
    """What ``spec`` sets, but for ``smallest``."""
    method = resolve(spec)
    return method.name, {knob.name: getattr(method, knob.name) for knob in fields_of(method) if knob.name != "smallest"}


def test_a_form_means_what_was_recorded(figures: ModuleType) -> None:
    """So that a figure beside a name is of exactly the form that the name means today."""
    for recorded, short in figures.ALIASES.items():
        try:
            found = knobs_of(recorded)
        except thinwire.ThinwireError:
            assert PAST.search(recorded), recorded
            continue
        outer = re.sub(r",?smallest=\d+", "", str(found[1].get("outer", "")))
        assert {**found[1], "outer": outer} == {**knobs_of(short)[1], "outer": str(knobs_of(short)[1].get("outer", ""))}
    assert figures.form("trickle(smallest=16384)") == "trickle"
    assert figures.form("topk(density=0.01, feedback='updates', smallest=1024)") == "topk"
    assert figures.form("int8(smallest=16384,feedback='gradients')") == "int8(feedback='gradients')"


def test_the_figures_of_readme_are_of_the_form_that_a_name_means(figures: ModuleType) -> None:
    """Every name in its table and its picture was measured as it stands there."""
    recorded = {figures.form(row["method"]) for name in ("speed", "loss") for row in figures.read(name)}
    recorded |= {figures.form(row.method) for row in figures.regime_rows()}
    table = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", figures.choices(), re.MULTILINE)
    assert table == [choice[1] for choice in figures.CHOICES]
    shown = [*table, *(point[0] for point in figures.tradeoff()), *(point[0] for point in figures.by_bytes())]
    assert set(shown) <= recorded
    assert all("(" not in name for name in shown), "a name, and never a call with knobs"


@pytest.mark.parametrize("name", ["tradeoff", "by_bytes", "sharded"])
def test_a_picture_has_at_most_eight_marks(figures: ModuleType, name: str) -> None:
    assert 0 < len([row for row in getattr(figures, name)() if row[0] != "dense"]) <= 8


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_a_comparison_is_taken_over_with_its_command(figures: ModuleType, tmp_path: Path) -> None:
    data = shutil.copytree(figures.DATA, tmp_path / "data")
    summary = {"exposed_ms": 20.0, "encode_ms": 3.0, "decode_ms": 2.0}
    times = {"none": 100.0, "dense": 400.0, "int8(group=64)": 125.0}
    runs = [
        {
            "method": method, "directory": "run", "summary": {"step_ms": step, **summary}, "step_to_none": step / 100,
            "link_use": None, "bytes_per_step": {"ledger": 2e6, "kernel": None},
        }
        for method, step in times.items()
    ]  # fmt: skip
    extra = ["--batch-size", "16", "--optimizer", "adams"]
    where = {
        "preset": "net20m",
        "nodes": 2,
        "ranks_per_node": 1,
        "link": "1gbit",
        "mtu": 9000,
        "steps": 8,
        "extra": extra,
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 8, "tokens": 8 * 2 * 1024}) + "\n")
    (tmp_path / "report.json").write_text(json.dumps({**where, "runs": runs}))
    with mock.patch.object(figures, "DATA", data):
        for _ in range(2):  # a second time it replaces the first
            figures.take("new", tmp_path)
        taken, rows = figures.setting("new"), figures.of("speed", "new")
    assert [(row["method"], row["speed_percent"], row["sent_mb"]) for row in rows] == [
        ("none", "100", "2.00"), ("dense", "25", "2.00"), ("int8(group=64)", "80", "2.00"),
    ]  # fmt: skip
    assert (taken["optimizer"], taken["engine"], taken["tokens_per_rank"]) == ("adams", "ddp", "1024")
    words = shlex.split(taken["command"])
    check_flags(words[1:], flags_of(Config))
    assert "dense,int8(group=64)" in words and "9000" in words and words[-1] == "adams"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = text_of(page)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link and not link.startswith("#")]
    links = [link for link in links if not link.startswith("methods/")]  # `make docs` writes and checks those
    missing = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    for name in re.findall(r"(?<![\w/.-])((?:docs|tests|benchmarks|examples|src)/[\w./*-]*[\w*])", text):
        if not list(ROOT.glob(name)):
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_row_of_a_table_stands_below_a_head(page: Path) -> None:
    """A line that is missing, or empty, in a table makes the rows below it text."""
    lines = FENCE.sub("", page.read_text()).splitlines() + [""]
    heads = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].startswith("|")]
    assert [lines[i] for i in heads if not re.fullmatch(r"\|([ :]*-+[ :]*\|)+", lines[i + 1])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    for file, word in re.findall(r"(test_\w+\.py) -k (\w+)", text_of(page)):
        (path,) = ROOT.glob(f"tests/*/{file}")
        assert re.search(rf"def test_\w*{word}", path.read_text()), f"{file} -k {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_public_names_and_their_arguments_exist(page: Path) -> None:
    text = text_of(page)
    for name in set(re.findall(r"(?<![\w./])thinwire\.([A-Za-z]\w*)", text)):
        spec = importlib.util.find_spec(f"thinwire.{name}")
        defined = f"class {name}(" in text
        assert name in thinwire.__all__ or spec is not None or defined, f"{page.name}: thinwire.{name}"
    for call in calls(text):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        known = inspect.signature(getattr(thinwire, name)).parameters
        for keyword in call.keywords:
            assert keyword.arg in known, f"{page.name}: {name}({keyword.arg}=)"


def calls(text: str) -> Iterator[ast.Call]:
    """Calls of ``compress`` and ``thinwire.X`` in a page, as far as they can be read."""
    for start in re.finditer(r"(?<![\w.])(?:thinwire\.[A-Z]\w*|(?:thinwire\.)?compress)\(", text):
        for end in re.finditer(r"\)", text[start.start() :]):
            try:
                found = ast.parse(" ".join(text[start.start() : start.start() + end.end()].split()), mode="eval").body
            except SyntaxError:
                continue
            if isinstance(found, ast.Call):
                yield found
            break


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_methods_are_written_as_they_can_be_given(page: Path) -> None:
    names = "|".join(re.escape(cls.name) for cls in sorted(TABLE, key=lambda cls: -len(cls.name)))
    spec = re.compile(rf"(?<![\w.:-])(?:{names})(?::[\w.-]*\w)?(?:\([^()]*=[^()]*\))?(?![\w(:=.-])")
    for block in code(page):
        for name in spec.findall(block):
            if "=..." not in name and not name.endswith("=)"):
                (was_known if page.name in RECORDS else resolve)(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_but_a_record_names_a_method_that_was_removed(page: Path) -> None:
    if page.name in RECORDS:
        return
    spans = [span for span in code(page) if re.search(rf"(?<![\w-])(?:{REMOVED})(?![\w-])", span)]
    assert spans == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_flags_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    train = flags_of(Config) | {"--config"}
    for words in shell(page):
        program, rest = words[0], words[1:]
        if program == "make":
            for word in rest:
                assert word in targets or "=" in word or not word.isidentifier() or word in ENGLISH, f"make {word}"
        elif program == "python" and rest[:2] == ["-m", "thinwire"]:
            check_flags(rest[2:], train)
        elif program == "python" and rest and rest[0].startswith(("benchmarks/", "docs/")):
            source = (ROOT / rest[0]).read_text()
            for flag in flags_in(rest[1:]):
                assert f'"{flag}"' in source, f"{page.name}: {rest[0]} {flag}"
        elif program == "thinwire":
            check_flags(rest, train)


ENGLISH = {"sure"}
OPTIONS: dict[str, type] = {
    "compare": Comparison, "sample": SampleOptions, "export": ExportOptions, "tokenize": TokenizeOptions,
    "eval": EvalOptions, "simulate": SimulateOptions, "paper": PaperOptions,
}  # fmt: skip


def check_flags(words: list[str], train: set[str]) -> None:
    if not words or not words[0].isidentifier() or words[0] == "COMMAND":
        return
    command, own = words[0], words[1:]
    assert command in COMMANDS, f"thinwire {command}"
    after: list[str] = []
    if "--" in own:
        own, after = own[: own.index("--")], own[own.index("--") + 1 :]
    if command == "lab":
        assert set(flags_in(own)) <= flags_of(LabRun), own
        if after[:1] == ["thinwire"]:
            check_flags(after[1:], train)
        return
    assert set(flags_in(own)) <= (flags_of(OPTIONS[command]) if command in OPTIONS else train), own
    assert set(flags_in(after)) <= train, after
    if "--methods" in own:
        for method in method_names(own[own.index("--methods") + 1]):
            entry = Entry.parse(method)
            if entry.method != AUTO:
                was_known(entry.method)
            assert set(flags_in(list(entry.flags))) <= train, entry


def flags_in(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word) and word != "--help"]


def flags_of(settings: type) -> set[str]:
    """As tyro makes them of a dataclass."""
    names = {knob.name.replace("_", "-") for knob in fields(settings)}
    return {f"--{name}" for name in names} | {f"--no-{name}" for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_compiles(page: Path) -> None:
    for block in code(page, "python"):
        compile(block, page.name, "exec")


def steps_of_the_lines_in_readme(rank: int, world: int) -> int:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    (lines,) = code(ROOT / "README.md", "python")
    net = nn.Sequential(nn.Embedding(256, 512), nn.Linear(512, 256))
    batches = [(torch.randint(0, 256, (64,)), torch.randint(0, 256, (64,))) for _ in range(3)]
    names = {"torch": torch, "thinwire": thinwire, "DDP": DistributedDataParallel, "model": net, "batches": batches,
             "loss_of": nn.functional.cross_entropy}  # fmt: skip
    exec(compile(lines, "README.md", "exec"), names)
    return names["wire"].step - names["wire"].skipped


def test_the_lines_in_readme_run() -> None:
    assert run(steps_of_the_lines_in_readme, 2) == [3, 3]


def test_guarantees_say_what_each_method_promises() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    named = set()
    for kind, items in re.findall(r"^  \* \*\*(\w+)\*\*:(.*?)(?=^ *\*)", page, re.DOTALL | re.MULTILINE):
        for spec in re.findall(r"`([^`]+)`", items):
            assert resolve(spec).card.promise.kind == kind, spec
            named.add(spec)
    assert {cls.name for cls in TABLE} <= named


@pytest.mark.parametrize("name", spread(3, [cls.name for cls in TABLE]))
def test_the_site_has_a_page_of_each_method(pages: ModuleType, name: str) -> None:
    """What it says, its bytes, what was measured, its paper. The site itself, with its links, is ``make docs``."""
    assert f"| `{name}" in pages.at_a_glance(name)
    page = pages.page(next(of for of in pages.listed() if of.name == name))
    assert "## Measured" in page and "autoclass:: thinwire." in page


def test_the_papers_stand_on_the_pages_of_their_methods(pages: ModuleType) -> None:
    for name in ("radius", "scape", "tagc", "separate", "sdp4bit", "lhc", "loco", "powersgd", "topk", "local-steps"):
        assert "20" in pages.cite(name), name
    for name in ("radius", "scape", "tagc", "separate", "sdp4bit", "powersgd"):
        assert "```text\n" in pages.description(next(cls for cls in TABLE if cls.name == name)), "its equations"
    assert pages.cite("trickle") == "" == pages.cite("int8")
    assert pages.description(thinwire.Fp32).startswith("Where dense depends"), "not of the module of all methods"


def test_the_site_keeps_the_flags_of_a_command_whole() -> None:
    """In a block of commands, which is wrapped; in a block of what was printed, nothing is."""
    block = '<div class="highlight-%s no"><pre><i></i>python a-b.py --in-two -n 2<i> </i>--<i> </i>x\n--out</pre></div>'
    flags = ["--in-two", "-n", "--", "--out"]
    for language, found in (("sh", flags), ("bash", flags), ("text", [])):
        given = {"body": block % language}
        of_docs("conf").unbroken(None, "page", "page.html", given, None)
        assert re.findall('<span class="flag">(.*?)</span>', given["body"]) == found


@pytest.mark.parametrize("cls", [thinwire.SDP4Bit, thinwire.SCAPE])
def test_a_signature_on_the_site_names_the_types_of_knobs_without_their_ranges(cls: type) -> None:
    bare = str(inspect.signature(cls, eval_str=True))
    assert "<lambda> at 0x" in bare
    shown, returns = of_docs("conf").of_its_type(None, "class", cls.__name__, cls, None, bare, "None")
    assert "lambda" not in shown and "Annotated" not in shown and returns == "None"
    assert ", smallest: int = 65536)" in shown
    written = """(beta: Annotated[float, Within(lambda beta: 0 <= beta < 1, "is from 0 to below 1, so")] = 0.8)"""
    assert of_docs("conf").of_its_type(None, "class", "LoCo", None, None, written, None)[0] == "(beta: float = 0.8)"
    made = "(waits: ~collections.abc.Mapping[str, float] = <factory>, agree: bool = <function Step.<lambda>>)"
    shown, _ = of_docs("conf").of_its_type(None, "class", "Promise", None, None, made, None)
    assert shown == "(waits: ~collections.abc.Mapping[str, float] = ..., agree: bool = ...)"


def test_the_title_of_a_papers_report_is_not_broken_within_its_number() -> None:
    content = [(ROOT / "docs/data/papers/radius-figure-1.md").read_text()]
    of_docs("conf").apart(None, "data/papers/radius-figure-1", content)
    assert "orphan: true" in content[0] and ", figure\u20111: " in content[0] and " figure-1 " in content[0]


def test_a_cell_on_the_site_tells_how_many_letters_it_has_and_is_as_wide() -> None:
    given = {"body": '<td><p>a <code class="x">b</code></p></td><td class="text-right"><p>1</p></td>'}
    of_docs("conf").unbroken(None, "page", "page.html", given, None)
    assert given["body"].startswith('<td style="--letters: 3"><p>a <code') and given["body"].count("--letters") == 1


def test_a_link_on_the_site_that_shows_a_file_shows_the_title_of_its_page() -> None:
    content = ["([lab.md](lab.md#links)); [gpu.md](gpu.md), [of it](lab.md)"]
    of_docs("conf").apart(None, "speed", content)
    assert content[0] == "([The laboratory](lab.md#links)); [On a GPU](gpu.md), [of it](lab.md)"


def test_the_site_has_every_page_and_what_pages_include() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.DOTALL | re.MULTILINE)
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    named = {re.sub(r"^.* <(.+)>$", r"\1", line) for line in lines}
    assert named == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} | {"methods/index"}
    for page in PAGES:
        for file, options in re.findall(r"^```\{include\} (\S+)\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE):
            included = (page.parent / file).read_text()
            for marker in re.findall(r'^:(?:start-after|end-before): "(.*)"$', options, re.MULTILINE):
                assert included.count(f"{marker}\n") == 1, f"{page.name} includes {file}: {marker}"


def test_the_commands_of_a_page_are_run_and_what_they_print_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    bars = "echo ' 50%|##| 1/2' >&2; printf '\\rsplit: 7 examples [00:00, ? examples/s]\\n' >&2"
    first, second = "```bash\necho 3 > a\n```\n", f"```bash\ncat a; {bars}; echo err >&2\n```\n"
    page.write_text(f"{first}\n```text\nold\n```\n\nwords\n\n{second}\n```text\nold\n```\n")
    commands = of_docs("commands")
    commands.refresh(page)
    assert page.read_text() == f"{first}\nwords\n\n{second}\n```text\n3\nerr\n```\n"
    page.write_text("```bash\nfalse\n```\n")
    with pytest.raises(SystemExit, match="exit status 1"):
        commands.refresh(page)
