"""A Cluster as TOML: checks names and types when it reads, and writes a text that reads back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from shoal.errors import ClusterError, nearest

__all__ = ["fields_of", "toml_of"]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "tuple[int, int]": (
        lambda value: _are(_is_whole)(value) and len(cast("list", value)) == 2,
        "two whole numbers",
    ),
    "Mapping[str, float]": (
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "a table of numbers",
    ),
    "Device": (lambda value: isinstance(value, str | dict), "a table, or the name of a known device"),
    **dict.fromkeys(("Host", "Prices", "Power"), (lambda value: isinstance(value, dict), "a table")),
    **dict.fromkeys(
        ("tuple[Level, ...]", "tuple[Part, ...]"),
        (_are(lambda value: isinstance(value, dict)), "a list of tables"),
    ),
}
"""By the annotation of a dataclass's field: the check of a TOML value, and the type's name in messages."""


def fields_of(kind: type, described: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a dataclass from a table, after checks of names, missing keys and types.

    Args:
        kind: The dataclass: Cluster, or a part of its description.
        described: The table.
        where: The object that the table describes, for messages.

    Raises:
        ClusterError: A key is unknown or missing, or its value is of another type.
    """
    known = {each.name: each for each in fields(kind)}
    for key, value in described.items():
        if key not in known:
            raise ClusterError(
                f"{where} has an unknown key {key!r}{nearest(key, known)}",
                possible=", ".join(known),
                change=f"correct or remove {key}",
            )
        is_right, meaning = _KINDS[str(known[key].type)]
        if not is_right(value):
            raise ClusterError(
                f"{where} has {key}={value!r}", possible=meaning, change=f"write {meaning} for {key}"
            )
    for key, each in known.items():
        if key not in described and each.default is MISSING and each.default_factory is MISSING:
            raise ClusterError(
                f"{where} has no {key!r}",
                possible=_KINDS[str(each.type)][1],
                change=f"add {key}",
            )
    return {key: tuple(value) if isinstance(value, list) else value for key, value in described.items()}


def toml_of(described: Mapping[str, Any]) -> str:
    """Return the TOML of a table of values, tables and lists of tables; numbers keep every digit."""
    return "".join(_lines(described, ()))


def _lines(described: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the lines: values first, as TOML needs, then each table under its heading."""
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in described.items() if not _is_table(value)]
    for key, value in described.items():
        heading = ".".join(map(_key, (*path, key)))
        if isinstance(value, Mapping):
            lines += [f"\n[{heading}]\n", *_lines(value, (*path, key))]
        elif _is_table(value):
            for each in value:
                lines += [f"\n[[{heading}]]\n", *_lines(each, (*path, key))]
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)
    )


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
