"""What a public host reads: the issue forms, CI, the citation and the Dockerfile are valid, and say what is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from thinwire.cli.program import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / ".github"
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WRITTEN = [*sorted(HOST.rglob("*.yml")), ROOT / "CITATION.cff"]


class Strict(yaml.SafeLoader):
    """YAML without keys that stand twice, of which the last would win untold."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice: {keys}"
        return super().construct_mapping(node, deep=deep)


def read(path: Path) -> Any:
    return yaml.load(path.read_text(), Strict)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_it_is_yaml_and_names_the_projects_own_address(path: Path) -> None:
    assert read(path)
    for url in re.findall(r"https://example\.org[\w/.-]*|https://github\.com[\w/.-]*", path.read_text()):
        assert url.startswith(URLS["Repository"]), url


def test_security_names_the_projects_own_address() -> None:
    assert f"<{URLS['Repository']}/security>" in (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize("name", ("bug", "gpu", "method"))
def test_an_issue_form_is_one(name: str) -> None:
    """As GitHub's schema has it: a name, a description, and elements with a type, an id and a label."""
    form = read(HOST / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert form["name"] and form["description"] and isinstance(form["labels"], list)
    asked = [element for element in form["body"] if element["type"] != "markdown"]
    assert all(element["type"] in ("input", "textarea", "dropdown", "checkboxes") for element in asked)
    assert len({element["id"] for element in asked}) == len(asked)
    assert all(element["attributes"]["label"] for element in asked)
    for element in asked:
        options = element["attributes"].get("options", [])
        assert bool(options) == (element["type"] in ("dropdown", "checkboxes"))
        assert all(isinstance(of, str if element["type"] == "dropdown" else dict) for of in options)
    assert any(element.get("validations", {}).get("required") for element in asked)


def test_forms_name_commands_that_exist() -> None:
    for path in HOST.rglob("*.yml"):
        for command in re.findall(r"thinwire ([a-z]+)\b(?!/)", path.read_text()):
            assert command in COMMANDS, f"{path.name}: thinwire {command}"
        for target in re.findall(r"make ([\w-]+)", path.read_text()):
            assert target in TARGETS, f"{path.name}: make {target}"


def test_ci_tries_what_is_promised() -> None:
    """The oldest, the pinned and the newest torch, on the oldest and the newest Python; all the gates."""
    workflow = read(HOST / "workflows" / "ci.yml")
    assert set(workflow[True]) == {"push", "pull_request"}, "YAML reads `on` as true"
    jobs = workflow["jobs"]
    assert set(jobs) == {"check", "test", "triton", "wheel", "docs"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = next(of for of in project["dependencies"] if of.startswith("torch")).partition(">=")[2]
    pinned = re.search(r"^TORCH +\?= torch==(\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix["torch"] == [f"torch=={oldest}.*", f"torch=={pinned[1]}.*", "torch"]
    assert matrix["python"][0] == project["requires-python"].removeprefix(">=") and len(matrix["python"]) == 2
    for name, job in jobs.items():
        assert job["timeout-minutes"] <= 90 and all("uses" in step or "run" in step for step in job["steps"]), name
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {run.split()[1] for run in runs} == {"check", "test", "test-triton", "test-wheel", "docs"}


def test_the_citation_has_what_the_format_requires() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"] and citation["message"] and citation["authors"]
    assert citation["repository-code"] == URLS["Repository"] and citation["license"] == "MIT"


def test_the_dockerfile_copies_and_runs_what_exists() -> None:
    lines = (ROOT / "Dockerfile").read_text()
    joined = re.sub(r"\\\n", " ", lines)
    words = [line.split()[0] for line in joined.splitlines() if line and not line.startswith("#")]
    assert words[0] == "FROM" and set(words) <= {"FROM", "RUN", "ARG", "ENV", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}
    for command in re.findall(
        r"\bthinwire ([a-z]+) ?", "\n".join(re.findall(r"^#.*docker run.*$", lines, re.MULTILINE))
    ):
        assert command in COMMANDS, command
    pinned = re.search(r"^TORCH +\?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None and f"ARG TORCH={pinned[1]}" in lines
    extra = re.search(r'"/source\[(\w+)\]"', lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra is not None and extra[1] in project["optional-dependencies"]


def test_the_sites_of_a_change_are_named() -> None:
    """CONTRIBUTING's section on a release names every file that repeats the address."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## A release\n")[2].partition("\n## ")[0]
    for path in [*WRITTEN, ROOT / "SECURITY.md"]:
        if URLS["Repository"] in path.read_text():
            assert path.relative_to(ROOT).as_posix() in section, path
