"""What packages export: sorted, complete, and there."""

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import shoal
from shoal.layers import LAYERS

PACKAGE = Path(shoal.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path.name != "__main__.py"
)
PROGRAMS = [
    path
    for folder in ("shoal", "benchmarks", "docs", "examples")
    for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
]
PACKAGES = sorted(
    f"shoal.{name}" for line in LAYERS for name in line if (PACKAGE / name.replace(".", "/")).is_dir()
)


def in_order(name):
    """CONSTANTS, then Classes, then functions, as ruff sorts `__all__`."""
    return (not name.isupper(), not name[0].isupper(), name)


def names_imported_in(module):
    tree = ast.parse(inspect.getsource(module))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    return {alias.asname or alias.name for node in imports for alias in node.names}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_exports_all_that_it_imports_from_its_files(name):
    package = importlib.import_module(name)
    assert set(getattr(package, "__all__", ())) == names_imported_in(package)


def test_every_module_can_be_imported_and_exported_names_are_sorted_and_there():
    for name in MODULES:
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", [])
        assert exported == sorted(set(exported), key=in_order)
        assert [each for each in exported if not hasattr(module, each)] == []


def is_there(module, name):
    found = importlib.import_module(module)
    return hasattr(found, name) or (
        hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    )


def test_programs_import_what_is_there():
    """Also where an import stands in a function, or in a benchmark that only a GPU runs."""
    missing = [
        f"{path.relative_to(PACKAGE.parent)}: {node.module}.{alias.name}"
        for path in PROGRAMS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shoal"
        for alias in node.names
        if not is_there(node.module, alias.name)
    ]
    assert not missing


def test_a_list_of_exported_names_stands_where_users_import_from():
    """A module of a package marks what is its own by an underscore, and lists nothing."""
    listed = {path for path in PACKAGE.rglob("*.py") if "\n__all__ = " in path.read_text()}
    assert {path for path in listed if path.name != "__init__.py" and path.parent != PACKAGE} == set()


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_opens_with_what_lives_there_in_at_most_ten_lines(name):
    opening = inspect.getdoc(importlib.import_module(name))
    assert opening
    assert len(opening.splitlines()) <= 10


def test_shoal_exports_its_names_from_their_homes():
    assert shoal.__all__ == [
        "Cluster",
        "Plan",
        "Trainer",
        "account",
        "choose",
        "load",
        "parallelize",
        "save",
        "verdict",
    ]
    assert shoal.Cluster is importlib.import_module("shoal.spec.cluster").Cluster
    assert shoal.choose is importlib.import_module("shoal.predict.planner").choose
    assert shoal.Plan is importlib.import_module("shoal.spec.plan").Plan
    assert shoal.Trainer is importlib.import_module("shoal.train").Trainer
    assert shoal.parallelize is importlib.import_module("shoal.parallel").parallelize
    assert shoal.save is importlib.import_module("shoal.train").save
    assert shoal.load is importlib.import_module("shoal.train").load
    assert shoal.verdict is importlib.import_module("shoal.analyze.diagnosis").verdict
    assert set(shoal.__all__) <= set(dir(shoal))


def test_the_version_is_that_of_the_package_and_needs_no_torch():
    program = "import sys, shoal; print(shoal.__version__); sys.exit('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == shoal.__version__ == version("shoal")
    assert "__version__" in dir(shoal)


def test_a_name_that_shoal_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        shoal.paralelize  # noqa: B018
