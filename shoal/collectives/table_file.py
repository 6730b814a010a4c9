"""The table of algorithms as a TOML file, which comes with Shoal or was written by a calibration.

[all_reduce.shared-memory]
one-shot = { alpha = 5e-07, beta = 2.5e-10 }
"""

from __future__ import annotations

import math
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.collectives.table import Table
from shoal.cost import AlphaBeta, find_algorithm
from shoal.errors import ConfigError, nearest


def built_in_table() -> Table:
    """Return values that hold roughly on most machines, to use before this machine is measured."""
    text = resources.files("shoal.collectives").joinpath("table.toml").read_text(encoding="utf-8")
    return _parse(text, "table.toml")


def load_table(file: Path) -> Table:
    """Return the table in a file; built-in values replace what the file leaves out.

    Raises:
        ConfigError: The file cannot be read, or a name or a value in it is wrong.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the table of algorithms {file} cannot be read: {error}",
            possible="a TOML file, such as `shoal bench --calibrate FILE` writes",
            change="correct the path",
        ) from None
    return Table({**built_in_table().entries, **_parse(text, str(file)).entries})


def save_table(table: Table, file: Path, heading: str) -> None:
    """Write a table in the form that `load_table` reads.

    Args:
        table: The table to write.
        file: The path to write to; a file there is replaced.
        heading: A comment for the file, which says what was measured and where.
    """
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    section = None
    for (collective, name, level), cost in sorted(
        table.entries.items(), key=lambda entry: (entry[0][0], entry[0][2], entry[0][1])
    ):
        if section != (collective, level):
            section = (collective, level)
            lines += ["", f"[{collective}.{level}]"]
        lines.append(f"{name} = {{ alpha = {cost.alpha!r}, beta = {cost.beta!r} }}")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parse(text: str, source: str) -> Table:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"the table of algorithms {source} is not TOML: {error}",
            possible="sections as [all_reduce.network], with lines as ring = { alpha = 2e-5, beta = 1e-9 }",
            change="correct that line",
        ) from None
    entries = {}
    for collective, levels in _items(content, source):
        for level, algorithms in _items(levels, f"{source}, {collective}"):
            for name, values in _items(algorithms, f"{source}, {collective}.{level}"):
                find_algorithm(collective, name, level)
                where = f"{source}, {collective}.{level}.{name}"
                entries[collective, name, level] = _cost(dict(_items(values, where)), where)
    return Table(entries)


def _items(value: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{value!r} in {where} is not a section",
            possible="[collective.level] with lines algorithm = { alpha = seconds, beta = seconds per byte }",
            change="put an alpha and a beta there",
        )
    return list(value.items())


def _cost(values: dict[str, Any], where: str) -> AlphaBeta:
    for key in values:
        if key not in AlphaBeta._fields:
            raise ConfigError(
                f"{key!r} in {where} is not a part of a cost{nearest(key, AlphaBeta._fields)}",
                possible="alpha (seconds per step) and beta (seconds per byte)",
                change="use these two names",
            )
    for key in AlphaBeta._fields:
        value = values.get(key, "missing")
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise ConfigError(
                f"{key} is {value!r} in {where}",
                possible="a finite number of seconds, not below 0",
                change=f"give {key} such a number",
            )
    return AlphaBeta(float(values["alpha"]), float(values["beta"]))
