"""The code keeps to the layers of shoal/layers.py, strategies to themselves, and files to a size."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.layers import LAYERS, TORCH_FREE, package_of

PACKAGE = Path(shoal.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
LINE_OF = {name: number for number, line in enumerate(LAYERS) for name in line}
STRATEGIES = {
    *(f"shoal.parallel.data.{name}" for name in ("naive", "replicated", "zero3")),
    *(f"shoal.parallel.{name}.{name}" for name in ("tensor", "context", "expert")),
}
MOST_LINES = 600
MOST_ROOMS = 17


def module_of(path):
    """The dotted name of a file: `shoal.spec.run.writer`; `shoal.spec.run` for its `__init__`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(source):
    """The dotted names of `shoal` that a source imports, wherever in it; `shoal.x.name` for names of x."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that they can be read and checked"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "shoal"}


def breaches(package, source):
    """The imports of a source in `shoal.<package>` that do not go up."""
    reached = {package_of(name) for name in imported_by(source)}
    return {name for name in reached - {package} if name not in LINE_OF or LINE_OF[name] >= LINE_OF[package]}


def is_room(path):
    """Whether a file stands between packages: a room says what its packages are, and imports nothing."""
    return path.name == "__init__.py" and package_of(module_of(path)) not in LINE_OF


PRESENT = {package_of(module_of(path)) for path in FILES if not is_room(path)}


def test_every_package_has_a_line():
    assert set(LINE_OF) == PRESENT
    assert len(LINE_OF) == sum(map(len, LAYERS)), "a package stands on two lines"


def test_there_are_few_rooms_and_they_import_nothing():
    rooms = [path for path in FILES if is_room(path)]
    assert not [path for path in rooms if imported_by(path.read_text())]
    assert len(list(PACKAGE.glob("*/__init__.py"))) <= MOST_ROOMS


@pytest.mark.parametrize("path", [path for path in FILES if not is_room(path)], ids=module_of)
def test_imports_go_up_only(path):
    assert not breaches(package_of(module_of(path)), path.read_text())


def test_an_import_that_does_not_go_up_is_found_wherever_it_stands():
    assert breaches("spec.plan", "def f():\n    from shoal.parallel.apply import parallelize") == {"parallel"}
    assert breaches("spec.plan", "import shoal.spec.timeline") == {"spec.timeline"}  # on one line
    assert breaches("spec.plan", "from shoal import train, units") == {"train"}
    assert not breaches("parallel", "from shoal.spec.plan import Plan\nfrom shoal.parallel.axes import Axes")


def test_strategies_never_import_one_another_and_only_apply_imports_them():
    for path in FILES:
        imported = {name.rpartition(".")[0] for name in imported_by(path.read_text())}
        if path == PACKAGE / "parallel" / "apply.py":
            assert imported >= STRATEGIES
        else:
            assert not imported & STRATEGIES, path


def test_costs_are_imported_by_their_faces():
    """`shoal.predict.cost`, and those of its folders: which file has a cost is their affair."""
    costs = PACKAGE / "predict" / "cost"
    folders = [path.name for path in costs.iterdir() if path.is_dir()]
    faces = {"shoal.predict.cost", *(f"shoal.predict.cost.{name}" for name in folders)}
    for path in FILES:
        if costs not in path.parents:
            found = {name.rpartition(".")[0] for name in imported_by(path.read_text())}
            assert {name for name in found if name.startswith("shoal.predict.cost")} <= faces, path


def test_no_file_imports_one_that_imports_it():
    """By any path, and for types alone as well: whoever reads a file needs not read those that use it."""
    files = {module_of(path): path for path in FILES}
    imports = {}
    for module, path in files.items():
        names = imported_by(path.read_text())
        found = {name if name in files else name.rpartition(".")[0] for name in names}
        imports[module] = (found & set(files)) - {module}
    while leaves := {module for module, found in imports.items() if not found & imports.keys()}:
        for module in leaves:
            del imports[module]
    assert not imports, "these are on circles, or use files that are"


WITHOUT_TORCH = """
import importlib, pkgutil, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not to be imported here")

sys.meta_path.insert(0, NoTorch())
module = importlib.import_module(sys.argv[1])
for inner in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    importlib.import_module(inner.name)
"""


@pytest.mark.parametrize("name", sorted(TORCH_FREE))
def test_a_torch_free_package_imports_no_torch_at_any_depth(name):
    command = [sys.executable, "-c", WITHOUT_TORCH, f"shoal.{name}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_shoal_itself_and_its_command_line_load_torch_only_when_it_is_used():
    every = "from shoal.cli.main import main; main(['completion', 'bash'])"  # it imports all commands
    program = f"import sys, shoal; {every}; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_file_is_long(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES
