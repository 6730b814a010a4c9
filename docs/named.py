"""What the docstrings of public names say, as rows of tables."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Sequence
from typing import get_type_hints

from shoal.spec.cluster.tables import keys_of

__all__ = ["attributes", "field_rows", "name_rows"]

_WRITTEN = {
    "float": "number",
    "int": "whole number",
    "str": "text",
    "bool": "true or false",
    "Device": "table, or a name",
}
"""What a value is called in a file of TOML, by its type in the code."""

_NAMED = {"levels": "tables", "parts": "tables", "tile": "two whole numbers"}


def name_rows(names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Each name, such as shoal.parallel.Parallel, with the first sentence of its docstring."""
    return ["name", "what it is"], [[f"`{name}`", _summary(name)] for name in names]


def field_rows(described: type) -> tuple[list[str], list[list[str]]]:
    """The fields of a dataclass that files describe, with unit, default and example."""
    meanings, types = attributes(described), get_type_hints(described)
    rows = []
    for field in dataclasses.fields(described):
        kind = _WRITTEN.get(getattr(types[field.name], "__name__", ""), "table")
        if field.name in _NAMED:
            kind = _NAMED[field.name]
        default = "needed" if field.default is dataclasses.MISSING else _toml(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = "defaults"
        unit, example = keys_of(described)[field.name]
        example = "" if example.startswith("[") and field.name != "tile" else f"`{example}`"
        unit = "" if unit in kind or kind in unit else unit
        rows.append([f"`{field.name}`", kind, unit, default, example, meanings[field.name]])
    return ["key", "value", "unit", "default", "example", "what it is"], rows


def attributes(documented: type) -> dict[str, str]:
    """The "Attributes:" of a docstring, by name."""
    section = inspect.getdoc(documented).partition("Attributes:\n")[2]  # type: ignore[union-attr]
    items = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in items}


def _summary(name: str) -> str:
    module, _, last = name.rpartition(".")
    said = inspect.getdoc(getattr(importlib.import_module(module), last)) or ""
    return " ".join(said.partition("\n\n")[0].split())


def _toml(value: object) -> str:
    if value == "":
        return ""
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
