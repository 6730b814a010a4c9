"""Draws which package imports which, as the code does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from drawn.svg import BLUE, GRAY, box, svg, text
from shoal.layers import LAYERS, package_of

__all__ = ["imports", "pictures"]

_PACKAGE = Path(__file__).resolve().parent.parent.parent / "shoal"
_ROW, _COLUMN, _TOP = 18, 7.2, 34
_NUMBERS, _NAMES, _ROLES, _DOTS = 18, 26, 146, 390
_LONGEST = 43  # characters of a role


def pictures() -> dict[str, str]:
    """A row for each package, and in it a mark in the column of each package that it imports."""
    found = imports()
    packages = list(found)
    drawn = [text(_column(number), 16, str(number + 1), size=6) for number in range(len(packages))]
    for row, package in enumerate(packages):
        y = _TOP + row * _ROW
        drawn.append(text(_NUMBERS, y, str(row + 1), anchor="end", size=9))
        drawn.append(text(_NAMES, y, package, anchor="start", size=12))
        drawn.append(text(_ROLES, y, _role(package), anchor="start", size=10))
        drawn.append(_mark(row, y, GRAY))
        drawn += [_mark(column, y, BLUE) for column, other in enumerate(packages) if other in found[package]]
    return {"packages.svg": svg("Which package imports which", _TOP + len(packages) * _ROW - 6, drawn)}


def imports() -> dict[str, set[str]]:
    """By package, in the order of the layers, the packages that it imports; single files are left out."""
    present = [name for names in LAYERS for name in names if _folder(name).is_dir()]
    return {name: set(_imported(name)).intersection(present) - {name} for name in present}


def _imported(package: str) -> Iterator[str]:
    for path in _folder(package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shoal"):
                yield package_of(f"{node.module}.{node.names[0].name}")


def _folder(package: str) -> Path:
    return _PACKAGE / package.replace(".", "/")


def _role(package: str) -> str:
    """What the package's own text says first, as far as there is room."""
    told = ast.get_docstring(ast.parse((_folder(package) / "__init__.py").read_text(encoding="utf-8")))
    role = re.split(r"[:.]", (told or "").split("\n")[0])[0]
    return role if len(role) <= _LONGEST else role.split(",")[0]


def _column(number: int) -> float:
    return _DOTS + number * _COLUMN


def _mark(column: int, y: float, color: str) -> str:
    return box(_column(column) - 3.5, y - 7.5, 7, 7, color=color, stroke=None)
