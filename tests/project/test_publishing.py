"""What a package index gets: a wheel and an sdist that are whole, and a description without dead links."""

from __future__ import annotations

import email
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import warnings
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import thinwire
from ranks import run
from thinwire.base.extras import EXTRAS
from thinwire.base.version import NEWEST_TORCH, torch_warning

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
UNPUBLISHED = (".ci/", ".gitattributes", ".gitignore", ".pre-commit")
"""What the sdist leaves out of what git holds."""
LINK = re.compile(r"\]\(([^)\s]+)\)")


def tracked() -> list[str]:
    """The files that git holds or would take; skips where there is no git."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a checkout of git")
    words = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel), the wheel made from the sdist alone."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    sdist = out / build("sdist", source, out)
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    return sdist, out / build("wheel", out / sdist.name.removesuffix(".tar.gz"), out)


def build(kind: str, source: Path, out: Path) -> str:
    """Build as pip does, but in this environment; return the file's name."""
    program = f"import setuptools.build_meta as b; print(b.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def described(built: tuple[Path, Path]) -> Message:
    """The wheel's metadata."""
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(wheel.read(name).decode())


def test_the_sdist_holds_what_git_holds(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in tracked() if name not in held and not name.startswith(UNPUBLISHED)] == []
    assert {"docs/start.md", "examples/ddp.py", "CHANGELOG.md", "tests/conftest.py"} <= held


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == {name.removeprefix("src/") for name in tracked() if name.startswith("src/")}


def test_the_version_is_written_once(described: Message) -> None:
    assert described["Version"] == thinwire.__version__
    program = [sys.executable, "-c", "from thinwire.cli.program import main; main(['--version'])"]
    assert subprocess.run(program, capture_output=True, text=True).stdout.strip() == thinwire.__version__


def test_the_description_has_no_link_that_is_dead_elsewhere(described: Message) -> None:
    text = str(described.get_payload())
    assert described["Description-Content-Type"] == "text/markdown" and text.startswith("# Thinwire")
    links = LINK.findall(text)
    assert [link for link in links if not re.match("https?://", link)] == []
    there = {link.removeprefix(f"{REPOSITORY}/") for link in links if link.startswith(REPOSITORY)}
    assert len(there) > 20 and {"raw", "blob"} == {path.partition("/")[0] for path in there}
    assert [path for path in there if not (ROOT / path.split("/", 2)[2].partition("#")[0]).exists()] == []


def test_a_release_links_to_its_tag() -> None:
    spec = importlib.util.spec_from_file_location("project_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.described("![a](docs/a.png) [b](docs/b.md#c) [d](#d) [e](https://e.org)", "https://h.org/p", "1.2.0")
    assert found == (
        "![a](https://h.org/p/raw/v1.2.0/docs/a.png) [b](https://h.org/p/blob/v1.2.0/docs/b.md#c) [d](#d) [e](https://e.org)"
    )


def test_what_an_index_shows_beside_the_description(described: Message) -> None:
    labels = dict(url.split(", ") for url in described.get_all("Project-URL") or [])
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= set(labels)
    assert all(url.startswith(REPOSITORY) for url in labels.values())
    assert described["License-Expression"] == "MIT"
    assert any(of.startswith("Programming Language :: Python :: 3.") for of in described.get_all("Classifier") or [])


def test_requirements_are_torch_and_numpy_and_every_extra_brings_what_it_says(described: Message) -> None:
    needed = described.get_all("Requires-Dist") or []
    assert {line.partition(">")[0] for line in needed if "extra ==" not in line} == {"torch", "numpy"}
    names = {"yaml": "pyyaml", "markdown_it": "markdown-it-py"}
    for package, extra in EXTRAS.items():
        brought = [line for line in needed if line.startswith(names.get(package, package))]
        assert any(f'extra == "{extra}"' in line for line in brought), f"{package} in [{extra}]"


def test_what_adapters_and_programs_need_has_a_lower_bound() -> None:
    """The version that was tried. Not for packages that no test here imports."""
    untried = {"triton", "wandb", "trackio", "mlflow", "datasets", "lm_eval"}
    names = {"yaml": "pyyaml", "markdown_it": "markdown-it-py"}
    for package, extra in EXTRAS.items():
        needed = [
            line for line in PROJECT["optional-dependencies"][extra] if line.startswith(names.get(package, package))
        ]
        assert needed and (package in untried or all(">=" in line for line in needed)), package


def test_the_changelog_names_versions_newest_first() -> None:
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased" or "dev" not in thinwire.__version__
    dated = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) - \d{4}-\d\d-\d\d", head) for head in heads if head != "Unreleased"]
    versions = [tuple(map(int, of.groups())) for of in dated if of]
    assert len(versions) == len(dated) > 0 and versions == sorted(versions, reverse=True)
    ours = tuple(map(int, thinwire.__version__.split(".")[:3]))
    assert ours > versions[0] if "dev" in thinwire.__version__ else ours == versions[0]


@pytest.mark.parametrize("torch_version", ("2.11.0", "2.13.0+cpu", "{}.{}.1+cu130", "nightly"))
def test_a_torch_that_was_tried_is_no_news(torch_version: str) -> None:
    assert torch_warning(torch_version.format(*NEWEST_TORCH)) is None


@pytest.mark.parametrize("torch_version", ("2.16.0", "2.100.0.dev20270101+cpu", "3.0.0"))
def test_a_torch_beyond_what_was_tried_is_said(torch_version: str) -> None:
    line = torch_warning(torch_version)
    assert line is not None and torch_version in line and "newer than 2.15" in line and "\n" not in line


def warned(rank: int, world: int) -> list[str]:
    import torch
    from torch import nn

    torch.__version__ = "2.99.0"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
            thinwire.compress(model, torch.optim.SGD(model.parameters(), 0.1), "dense").close()
    return [str(of.message) for of in seen if "newer than" in str(of.message)]


def test_it_is_said_once_by_one_rank() -> None:
    (line,), others = run(warned, 2)
    assert line.startswith("torch 2.99.0 is newer than 2.15") and others == []
