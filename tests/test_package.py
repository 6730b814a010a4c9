"""What is built from the sources: one wheel for every Python 3, with the core where it can be compiled."""

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from shoal.collectives import ctypes_core as core_module
from shoal.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
CORE = "shoal/collectives/_core.so"
COMPILER = """#!/bin/sh
# Stands in for a compiler: writes what it is asked for, at once.
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && echo compiled > "$2"
  shift
done
"""


@pytest.fixture
def sources(tmp_path):
    """A copy of what a package is built from, with no core in it."""
    folder = tmp_path / "sources"
    for name in ("shoal", "csrc"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "build", "__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def stand_in(tmp_path):
    program = tmp_path / "compiler"
    program.write_text(COMPILER)
    program.chmod(0o755)
    return str(program)


def run(words, folder, **environment):
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )


def wheel(folder, **environment):
    """Builds a wheel as `pip install .` does, with the tools that are there."""
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "."]
    run(words, folder, **environment)
    (found,) = folder.glob("*.whl")
    return found


def installed(package, folder):
    run(
        ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", f"--target={folder}", package],
        folder.parent,
    )
    return folder


def train_two_ranks(package, folder, options):
    words = ["-m", "shoal", "train", "--nproc=2", "--run=run", "--set=steps=2", *options]
    return run(words, folder, PYTHONPATH=str(package)).stderr


def test_a_wheel_fits_every_python_3_of_its_platform(sources, stand_in):
    package = wheel(sources, CXX=stand_in)
    _, _, *tags = package.stem.split("-")
    assert tags[:2] == ["py3", "none"]
    assert tags[2].startswith("linux_")
    assert [name for name in zipfile.ZipFile(package).namelist() if name.endswith(".so")] == [CORE]


def test_without_a_compiler_the_package_installs_without_the_core_and_says_so(sources, tmp_path):
    package = wheel(sources, CXX="/nonexistent/c++")
    assert package.name.endswith("-py3-none-any.whl")
    folder = installed(package, tmp_path / "installed")
    told = run(["-m", "shoal", "--version"], tmp_path, PYTHONPATH=str(folder)).stdout
    assert told.splitlines() == [
        f"shoal {version('shoal')}",
        "native core: not built; ranks on CPUs communicate through gloo",
    ]


@pytest.mark.long
def test_without_a_compiler_ranks_train_over_gloo(sources, tmp_path, tiny_run):
    folder = installed(wheel(sources, CXX="/nonexistent/c++"), tmp_path / "installed")
    told = train_two_ranks(folder, tmp_path, tiny_run)
    assert "the native core of shoal is not built, so ranks communicate through gloo" in told


@pytest.mark.long
def test_a_wheel_that_was_compiled_trains_over_its_core(sources, tmp_path, tiny_run):
    folder = installed(wheel(sources), tmp_path / "installed")
    assert (folder / CORE).exists()
    assert "native core: built" in run(["-m", "shoal", "--version"], tmp_path, PYTHONPATH=str(folder)).stdout
    assert "gloo" not in train_two_ranks(folder, tmp_path, tiny_run)


def test_a_core_that_no_longer_compiles_leaves_none_behind(sources, stand_in):
    build = ["setup.py", "-q", "build_ext", "--inplace"]
    run(build, sources, CXX=stand_in)
    assert (sources / CORE).exists()
    os.utime(sources / "csrc" / "group.cc", (2e9, 2e9))  # changed since
    told = run(build, sources, CXX="/nonexistent/c++").stderr
    assert "Shoal is built without its native core" in told
    assert not list(sources.rglob("_core*"))


def test_the_source_archive_holds_all_of_the_core(sources):
    run(["setup.py", "-q", "sdist"], sources)
    (archive,) = (sources / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    code = {
        str(path.relative_to(sources))
        for path in sources.glob("csrc/**/*.[hc]*")
        if "tests" not in path.parts
    }
    assert code <= held


@pytest.mark.skipif(core_module.load_core() is None, reason="the core was not built")
def test_the_core_depends_on_no_python():
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    command = ["readelf", "--dynamic", str(Path(core_module.__file__).with_name("_core.so"))]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = [line.partition("[")[2].rstrip("]") for line in told.splitlines() if "(NEEDED)" in line]
    assert needed
    assert not [name for name in needed if "python" in name]


def test_a_core_from_another_system_is_named(tmp_path, monkeypatch):
    core = tmp_path / "collectives" / "_core.so"
    core.parent.mkdir()
    core.write_text("not a library")
    monkeypatch.setattr(core_module, "__file__", str(core.with_name("ctypes_core.py")))
    main = importlib.import_module("shoal.cli.main")
    monkeypatch.setattr(main, "__file__", str(tmp_path / "cli" / "main.py"))
    with pytest.raises(ConfigError, match="the native core does not load: "):
        core_module.load_core.__wrapped__()
    assert main._core().startswith("native core: does not load: ")
