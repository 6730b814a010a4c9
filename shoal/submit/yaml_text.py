"""Plain values as YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9._/:-]*")
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))


def yaml_text(value: Mapping[str, Any]) -> str:
    """Return a mapping as a document of YAML 1.1 or 1.2, which differ in what a plain word means.

    Args:
        value: Strings, numbers, booleans, lists and mappings within each other.
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for name, each in value.items() for line in _entry(f"{_scalar(name)}:", each)]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for each in value for line in _item(each)]
    return [_scalar(value)]


def _entry(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [name, *(f"  {line}" for line in _lines(value))]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [name, *_lines(value)]
    return [f"{name} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Any) -> str:
    """Return a value on one line; JSON is YAML, and quotes what could be read as something else."""
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not value.endswith(":"):
        return value
    return '"' + "".join(map(_character, value)) + '"'


def _character(character: str) -> str:
    if ord(character) > 0xFFFF:  # for which JSON has a pair, and YAML one escape
        return f"\\U{ord(character):08X}"
    return json.dumps(character)[1:-1]
