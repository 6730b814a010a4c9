"""docs/guides/install.md says what pyproject.toml does."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "guides" / "install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_table_has_every_extra_with_its_packages():
    rows = re.findall(r"^\| `(\w+)` \| .+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
    told = {extra: {each.strip() for each in packages.split(",")} for extra, packages in rows}
    extras = PROJECT["optional-dependencies"]
    assert told == {extra: {Requirement(each).name for each in extras[extra]} for extra in extras}


def test_python_and_torch_are_those_that_the_project_requires():
    (torch,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in PAGE
    assert f"PyTorch {torch.removeprefix('torch>=')} or newer" in PAGE


def test_the_version_is_printed_as_the_page_shows():
    command = [sys.executable, "-m", "shoal", "--version"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    version, core = printed.splitlines()
    assert f"\n{version}\n" in PAGE
    assert core.partition(", ")[0].partition(";")[0] in PAGE
