"""The table of planted faults fits the code as it is; `make test-faults` plants them."""

import ast
import tomllib
from pathlib import Path

import pytest
from fault_table import read_table, sources_of

from shoal.layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sources_of(ROOT)
FAULTS = read_table()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_old_text_of_a_fault_stands_once_and_the_new_one_can_be_read(fault):
    path = fault.find(SOURCES)
    changed = fault.change(SOURCES[path])
    assert changed != SOURCES[path]
    if path.suffix == ".py":
        ast.parse(changed)
    elif path.suffix == ".toml":
        tomllib.loads(changed)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_tests_of_a_fault_are_there(fault):
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert not name or f"def {name}(" in (ROOT / file).read_text()


def test_every_package_has_a_fault():
    folders = [ROOT / "shoal" / name.replace(".", "/") for line in LAYERS for name in line]
    packages = {folder for folder in folders if folder.is_dir()}
    planted = {parent for fault in FAULTS for parent in (ROOT / fault.find(SOURCES)).parents}
    assert packages <= planted
    assert len(FAULTS) >= 64
