"""A Cluster as TOML: checks names and types when it reads, and writes a text that reads back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from decimal import Decimal
from functools import cache
from typing import Any, Protocol, cast, get_args, get_origin, get_type_hints

from shoal.cluster.keys import keys_of
from shoal.errors import ClusterError, nearest


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


_KINDS: dict[Any, tuple[Callable[[object], bool], str]] = {
    str: (lambda value: isinstance(value, str), "text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_whole, "a whole number"),
    float: (_is_number, "a number"),
    tuple[int, int]: (
        lambda value: _are(_is_whole)(value) and len(cast("list", value)) == 2,
        "two whole numbers",
    ),
    Mapping[str, float]: (
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "a table of numbers",
    ),
}
"""By the type of a field: the check of a TOML value, and the type's name in messages."""

_types_of = cache(get_type_hints)


def _kind_of(annotated: Any) -> tuple[Callable[[object], bool], str]:
    """Return the check of a value for a field of this type, which may be another dataclass, and its name."""
    if annotated in _KINDS:
        return _KINDS[annotated]
    if get_origin(annotated) is tuple:
        return _are(lambda value: isinstance(value, dict)), "a list of tables"
    if hasattr(annotated, "preset"):
        return lambda value: isinstance(value, str | dict), "a table, or the name of a known device"
    return lambda value: isinstance(value, dict), "a table"


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
                possible=", ".join(known)
                + (", nodes (instead of devices)" if kind.__name__ == "Part" else ""),
                change=f"correct or remove {key}",
            )
        if not _kind_of(_types_of(kind)[key])[0](value):
            raise ClusterError(
                f"{where} has {key}={value!r}",
                possible=_meaning(kind, key),
                change=f"correct {key}{_such_as(kind, key)}",
            )
    for key, each in known.items():
        if key not in described and each.default is MISSING and each.default_factory is MISSING:
            raise ClusterError(
                f"{where} has no {key!r}",
                possible=_meaning(kind, key),
                change=f"add {key}{_such_as(kind, key)}",
            )
    return {key: tuple(value) if isinstance(value, list) else value for key, value in described.items()}


def _meaning(kind: type, key: str) -> str:
    """Return the type that a field's value has, and its unit."""
    unit, meaning = keys_of(kind)[key].unit, _kind_of(_types_of(kind)[key])[1]
    return meaning if unit in meaning else f"{meaning}: {unit}"


def _such_as(kind: type, key: str) -> str:
    """Return an example of a key: a line of TOML, or the heading of a table."""
    example = keys_of(kind)[key].example
    is_heading = example in (f"[{key}]", f"[[{key}]]")
    return f", such as {example if is_heading else f'{key} = {example}'}"


def toml_of(described: Mapping[str, Any]) -> str:
    """Return the TOML of a table of values, tables and lists of tables; numbers keep every digit."""
    return "".join(_lines(described, ()))


class _Described(Protocol):
    def described(self) -> dict[str, Any]: ...


def commented_toml(cluster: _Described) -> str:
    """Return a Cluster as TOML to be edited: with units, and large numbers as 450e9."""
    kind: Any = type(cluster)
    lines: list[str] = []
    for line in toml_of(cluster.described()).rstrip("\n").split("\n"):
        if line.startswith("["):
            kind = _class_at(type(cluster), line.strip("[]").split("."))
        key, _, value = line.partition(" = ")
        if not (value[:1].isdecimal() or value[:1] == "["):
            lines.append(line)
            continue
        unit = keys_of(kind)[key].unit if isinstance(kind, type) else "FLOP/s"
        lines.append(f"{f'{key} = {_in_thousands(value)}':<34}  # {unit}")
    return "\n".join(lines) + "\n"


def _class_at(kind: Any, headings: Sequence[str]) -> Any:
    """Return the class whose fields stand under these headings; for device.peak, a type of mappings."""
    for heading in headings:
        kind = _types_of(kind)[heading]
        kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return kind


def _in_thousands(number: str) -> str:
    """Return a large fraction with an exponent that is a multiple of three, without loss: 450e9."""
    if not re.fullmatch(r"\d{5,}\.\d+|\d\.?\d*e\+\d+", number):
        return number
    exact = Decimal(number)
    exponent = exact.adjusted() // 3 * 3
    return f"{exact.scaleb(-exponent).normalize():f}e{exponent}"


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
