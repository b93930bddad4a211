"""The measures of ``house.py``: right on small trees, and on the source not above what is allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import house


def write_tree(folder: Path, files: dict[str, str]) -> dict[str, house.Module]:
    """Write ``files`` below ``folder`` and parse them as the package ``thinwire``."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.read_modules(folder)


def read_all_imports(modules: dict[str, house.Module]) -> list[house.Import]:
    return [edge for module in modules.values() for edge in house.read_imports(module, modules)]


def test_source_is_within_the_limits():
    measures = house.measure_all()
    assert {*house.LIMITS} <= {measure.name for measure in measures}
    excess = [
        f"{measure.name}: {measure.value}, allowed {house.allowed(measure.name)}"
        for measure in house.exceeded(measures)
    ]
    assert not excess, excess


def test_today_has_no_entry_at_or_below_its_limit():
    assert all(value > house.LIMITS[name] for name, value in house.TODAY.items())


def test_circle_for_types_is_found(tmp_path: Path):
    modules = write_tree(
        tmp_path,
        {
            "__init__.py": "",
            "a.py": "from thinwire.b import B\n",
            "b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from thinwire.c import C\n",
            "c.py": "import thinwire.a\n",
            "d.py": "from thinwire import a\n",
        },
    )
    assert house.find_circles(read_all_imports(modules)) == [["thinwire.a", "thinwire.b", "thinwire.c"]]


def test_circle_through_a_function_is_counted_apart(tmp_path: Path):
    modules = write_tree(
        tmp_path,
        {
            "a.py": "from thinwire.b import B\n",
            "b.py": "import importlib\ndef late():\n    return importlib.import_module('thinwire.a')\n",
        },
    )
    values = {measure.name: measure.value for measure in house.measure_imports(modules)}
    assert values["import circles"] == 0
    assert values["circles with imports inside functions"] == values["imports inside functions"] == 1


def test_submodule_is_not_its_package(tmp_path: Path):
    """A package's ``__init__`` is imported where names come from it, and not where its modules do."""
    modules = write_tree(
        tmp_path,
        {
            "ops/__init__.py": "from thinwire.ops.mask import pack\n",
            "ops/mask/__init__.py": "from . import cpu\nfrom .. import sign\n",
            "ops/mask/cpu.py": "from thinwire.ops import sign\nimport thinwire.ops.sign\n",
            "ops/sign.py": "",
            "bits.py": "from thinwire.ops import pack\nfrom thinwire.ops import *\n",
        },
    )
    edges = {(edge.importer, edge.imported) for edge in read_all_imports(modules)}
    assert edges == {
        ("thinwire.ops", "thinwire.ops.mask"),
        ("thinwire.ops.mask", "thinwire.ops.mask.cpu"),
        ("thinwire.ops.mask", "thinwire.ops.sign"),
        ("thinwire.ops.mask.cpu", "thinwire.ops.sign"),
        ("thinwire.bits", "thinwire.ops"),
    }


def test_order_is_violated_by_imports_from_above(tmp_path: Path):
    modules = write_tree(
        tmp_path,
        {
            "top/a.py": "from thinwire.base.b import B\nfrom thinwire.side import S\n",
            "side.py": "from thinwire.top.a import A\n",
            "base/b.py": "def load():\n    from thinwire.top import a\n",
            "base/old.py": "import thinwire.base.b\n",
            "lost.py": "",
        },
    )
    floors, assigned = [("top", "side"), ("base",)], {"base.old": "top"}
    lines = house.find_order_violations(modules, read_all_imports(modules), floors, assigned)
    assert lines == [
        "thinwire.lost: its package 'lost' has no floor in FLOORS",
        "thinwire.base.b:2 [base] imports thinwire.top.a [top], which is above it (inside a function)",
    ]


def test_every_assigned_package_has_a_floor():
    assert {*house.ASSIGNED.values()} <= {package for packages in house.FLOORS for package in packages}


def test_names_of_all_kinds_are_counted(tmp_path: Path):
    text = """
        found, rows = 1, 2
        rows.kept = found
        def gather(self, of, *parts, rank=0, **rest):
            for _at in parts:
                with of as held: pass
            if (there := rank): pass
            try: pass
            except OSError as other: pass
            _ = self
            return [part for part in parts], lambda by: by
    """
    modules = write_tree(tmp_path, {"a.py": "if True:\n" + text})
    (counts,) = house.count_names(modules).values()
    empty = {"found", "kept", "of", "parts", "rest", "at", "held", "there", "other", "part", "by"}
    assert set(counts) == empty | {"rows", "gather", "rank"} - {"gather"}
    measure = house.measure_names(modules)
    assert measure.value == pytest.approx(100 * 11 / 13, abs=0.01) and "    1 held" in measure.details


def test_long_functions_are_found_but_kernels(tmp_path: Path):
    body = '    """Say it."""\n' + "    x = 1\n" * 3
    modules = write_tree(
        tmp_path,
        {
            "a.py": f"def short():\n{body[:-10]}\nclass A:\n    pass\n\n@cache\ndef long():\n{body}",
            "ops/mask/cpu.py": f"@njit\ndef kernel():\n{body}\n@quant.inlined\ndef k():\n{body}\ndef host():\n{body}",
            "ops/mask/triton.py": f"def kernel():\n{body}",
        },
    )
    assert house.find_long_functions(modules, longest=4) == [
        "   5 thinwire.ops.mask.cpu.host",
        "   5 thinwire.a.long",
    ]


def test_riddles_are_found(tmp_path: Path):
    text = '"""Of the loss."""\nx = 1\n"""Whether it fits."""\ndef f(): "Give x."\ndef g():\n    """What: y."""\n'
    assert house.find_riddles(write_tree(tmp_path, {"a.py": text})) == [
        "thinwire.a:1: Of the loss.",
        "thinwire.a:6: What: y.",
    ]


def test_members_are_functions_and_properties(tmp_path: Path):
    text = """
class Method:
    name: str = ""
    _hidden: int = 0
    @property
    def scale(self): ...
    @scale.setter
    def scale(self, value): ...
    def begin(self): ...
    def _private(self): ...
"""
    modules = write_tree(tmp_path, {"a.py": text})
    assert house.public_members(modules, "Method", "thinwire.a") == (["scale", "begin"], ["name"])
    of_method, of_all = house.measure_members(modules, {"Method": "thinwire.a"})
    assert of_method.value == of_all.value == 2
    with pytest.raises(LookupError, match=r"no class Codec in thinwire\.a"):
        house.public_members(modules, "Codec", "thinwire.a")


@dataclass
class Sparse:
    """A method of the tests, with two counted knobs, one that it refuses, and a field that is none."""

    name = "sparse"
    ABSENT = {"beta": "not here"}
    PRESETS = {"paper": {"density": 0.5}}
    density: float = 0.1
    outer: str = "sparse"
    group: int = 8
    beta: float = 0.0
    dense: tuple[str, ...] = field(default_factory=tuple)
    state: Any = field(init=False)


def resolve(row: str) -> Sparse:
    if row != "sparse(group=4)":
        raise ValueError(row)
    return Sparse(group=4)


@pytest.mark.parametrize(
    "rows, unmeasured",
    [
        ([], 3),
        (["sparse", "sparse(density=0.1)", "sparse(dense='x')", "other(group=4)", "sparse(group="], 3),
        (["sparse(group=4)"], 2),
        (["sparse:paper"], 2),
        (["sparse:gone(group=4,density=0.2)"], 1),
        (["sparse(outer='sparse(group=4)')"], 1),
    ],
)
def test_knobs_that_rows_set_are_measured(rows: list[str], unmeasured: int):
    counted, remaining = house.measure_knobs([Sparse], rows, resolve)
    assert (counted.value, remaining.value) == (3, unmeasured)


def test_rows_are_those_of_speed_and_loss(tmp_path: Path):
    (tmp_path / "speed.csv").write_text('setting,method\nlink,"int8(group=64)"\nlink,dense --lr 1\n')
    (tmp_path / "settings.csv").write_text("setting,command\nlink,trickle\n")
    (tmp_path / "runs.jsonl").write_text('{"method": "sign"}\n\n')
    (tmp_path / "exact.txt").write_text("| topk | exact |\n")
    assert house.read_method_rows(tmp_path) == ["dense", "int8(group=64)", "sign"]


def test_exit_status_follows_what_is_allowed(monkeypatch, capsys: pytest.CaptureFixture[str]):
    measures = [house.Measure("long functions", 3, "functions", ["  61 a.b"]), house.Measure("knobs", 9)]
    monkeypatch.setattr(house, "measure_all", lambda: measures)
    monkeypatch.setattr(house, "TODAY", {"long functions": 3})
    assert house.main([]) == 0 and "EXCEEDED" not in capsys.readouterr().out
    assert house.main(["--strict"]) == 1 and "EXCEEDED" in capsys.readouterr().out
    assert house.main(["--list", "functions"]) == 0 and capsys.readouterr().out == "long functions: 3\n    61 a.b\n"
    monkeypatch.setattr(house, "TODAY", {"long functions": 2})
    assert house.main([]) == 1
    monkeypatch.setattr(house, "TODAY", {"long functions": 4})
    assert house.main([]) == 0 and "better" in capsys.readouterr().out


def test_no_two_test_modules_share_a_name():
    """Pytest would collect only one of them, and ranks of the other would look for their program in the wrong one."""
    names = [path.name for path in (house.ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
