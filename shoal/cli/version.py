"""`shoal --version`: which Shoal this is, and what its native core computes with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.release import release


class PrintVersion(argparse.Action):
    """Print the version, and whether the native core is built, and exit. Imports no torch."""

    def __init__(self, option_strings: Sequence[str], dest: str, **others: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and the core's")

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        """Print and exit, as argparse calls it."""
        print(f"shoal {release()}\n{_core()}")
        parser.exit()


def _core() -> str:
    import ctypes

    path = Path(__file__).parent.parent / "collectives" / "_core.so"
    if not path.exists():
        return "native core: not built; ranks on CPUs communicate through gloo"
    try:
        unit = ctypes.CDLL(str(path)).shoal_vector_unit
    except (OSError, AttributeError) as error:
        return f"native core: does not load: {error}"
    unit.restype = ctypes.c_char_p
    return f"native core: built, computes with {unit().decode()}"
