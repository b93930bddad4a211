"""CONTRIBUTING's sixth method is a method: one file, one line, every law, and it trains."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import thinwire
from engines import build, train
from models import Net
from ranks import run
from thinwire import methods
from thinwire.methods import table
from thinwire.proof.laws import check_laws
from threaded import reduce_on_threads

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def blocks() -> list[str]:
    """The code of the section on methods: the file, the table's line, the laws."""
    section = TEXT.split("\n## Adding a method\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def add(path: Path) -> type[methods.Method]:
    """Make the file ``path`` and add the line to the table, as a reader would."""
    path.write_text(blocks()[0])
    spec = importlib.util.spec_from_file_location("thinwire.methods.signsgd", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    exec(blocks()[1], vars(table))
    importlib.reload(methods)
    return module.SignSGD


@pytest.fixture
def signsgd(tmp_path):
    """The class, known for the length of a test."""
    yield add(tmp_path / "signsgd.py")
    for module in (table, methods):
        del module.SignSGD
    del sys.modules["thinwire.methods.signsgd"]
    importlib.reload(methods)


def test_it_is_short():
    assert len(blocks()) == 3 and len(blocks()[0].splitlines()) <= 45
    assert len(blocks()[1].splitlines()) == 1


def test_one_file_and_one_line_make_it_known(signsgd, capsys):
    assert thinwire.SignSGD is signsgd and methods.TABLE[-1] is signsgd
    assert isinstance(methods.resolve("signsgd(smallest=0)"), signsgd)
    methods.main([])
    assert "signsgd     One bit per value each way" in capsys.readouterr().out


def test_it_obeys_the_laws(signsgd):
    check_laws(signsgd)
    assert "check_laws(SignSGD)" in blocks()[2]


@pytest.mark.parametrize("topology", ["all_reduce", "reduce_scatter"])
def test_the_majority_decides(signsgd, topology):
    def gradients(rank, step, numel):
        return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))

    ranks = reduce_on_threads(
        lambda: signsgd(smallest=0), gradients, topology=topology, size=3, shapes={"w": (12, 7)}, steps=3,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.5),
    )  # fmt: skip
    wanted = torch.zeros(84)
    for step in range(3):
        wanted -= 0.5 * torch.stack([rank[step]["input"] for rank in ranks]).sign().sum(0).sign()
        got = [rank[step]["weights"]["w"] for rank in ranks]
        assert torch.equal(torch.cat(got) if topology == "reduce_scatter" else got[0], wanted)


def losses(rank: int, world: int, kind: str, folder: Path) -> list[float]:
    add(folder / f"signsgd{rank}.py")
    model = build(kind, world, net=lambda: Net(64, 32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    wire = thinwire.compress(model, optimizer, thinwire.SignSGD(smallest=256))
    assert wire.plan.compressed and "the sizes of values never arrive" in str(wire.plan)
    found = train(model, optimizer, rank, range(4), wire)
    wire.close()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_it_trains(kind, tmp_path):
    for found in run(losses, 2, kind, tmp_path):
        assert found[-1] < found[0]


def test_a_long_file_says_why():
    source = Path(thinwire.__file__).parent
    why = TEXT.split("\n## Adding a method\n")[0]
    names = [
        path.relative_to(source).as_posix() for path in source.rglob("*.py") if len(path.read_text().splitlines()) > 400
    ]
    assert [name for name in names if f"`{name}`" not in why] == []
