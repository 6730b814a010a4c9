"""The releases that CI runs are the oldest and the newest that the project says it works with."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
CHECKERS = {"mypy", "ruff"}  # run on the newest alone


def required(*extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["dependencies"] + [
        text for extra in extras for text in project["optional-dependencies"][extra]
    ]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, texts)}


def pinned(file):
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {name: Version(version) for name, version in (line.split("==") for line in lines)}


def test_the_oldest_constraints_are_the_oldest_that_the_project_allows():
    pins = pinned("constraints-oldest.txt")
    for name, specifier in required("hf", "lora", "dev").items():
        floor = next(Version(each.version) for each in specifier if each.operator == ">=")
        if name not in CHECKERS:
            assert pins[name].release[: len(floor.release)] == floor.release, name
            assert not any(pins[name].release[len(floor.release) :]), name


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_constraints_are_within_what_the_project_allows(file):
    pins = pinned(file)
    for name, specifier in required("hf", "lora", "dev").items():
        assert pins[name] in specifier, name
