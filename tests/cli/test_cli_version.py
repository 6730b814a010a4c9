"""`shoal --version`, and the program as a module."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

from shoal.collectives.ctypes_core import load_core


def test_the_version_says_whether_the_core_is_built_and_for_which_unit():
    command = [sys.executable, "-m", "shoal", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    core = load_core()
    unit = "gloo" if core is None else core.vector_unit().decode()
    first, second = done.stdout.splitlines()
    assert first == f"shoal {version('shoal')}"
    assert second.startswith("native core: ")
    assert second.endswith(unit)
