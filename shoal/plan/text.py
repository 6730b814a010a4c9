"""The text form of a Plan: settings joined by commas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.errors import PlanError, nearest
from shoal.limits import PLAN
from shoal.units import parse_bytes

_SIZES = ("bucket",)
_SHARES = ("feedback",)
_REAL = ("staleness", "grace")


def settings_of(text: str, names: Sequence[str], read: Callable[[str, str], Any]) -> dict[str, Any]:
    """Return the settings that a text such as `dp=4,shard=zero1` gives.

    Args:
        text: The text.
        names: The settings that there are.
        read: Returns the value of a setting from its name and its text.

    Raises:
        PlanError: A key is unknown or given twice, or a value cannot be read.
    """
    if len(text) > PLAN:
        raise PlanError(
            f"the Plan has {len(text)} characters: {text[:40]!r} and so on",
            possible=f"at most {PLAN}",
            change="shorten it",
        )
    settings: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in names or not equals:
            raise PlanError(
                f"the Plan {text!r} holds {item!r}, which is not one of its settings{nearest(name, names)}",
                possible=f"name=value, separated by commas; the names are {', '.join(names)}",
                change="correct or leave out that setting",
            )
        if name in settings:
            raise PlanError(
                f"the Plan {text!r} gives {name} twice",
                possible="each setting once",
                change=f"leave out one {name}",
            )
        settings[name] = read(name, value)
    return settings


def read_number(name: str, value: str) -> int | float:
    """Return a number: bytes of a size, a share, or a whole number.

    Raises:
        PlanError: It cannot be read.
    """
    try:
        if name in _SIZES:
            return parse_bytes(value)
        if name in _REAL and not value.isdecimal():
            return float(value)
        return float(value) if name in _SHARES else int(value)
    except ValueError:
        kind, example = "a whole number", "2"
        if name in _SIZES:
            kind, example = "a size such as 25MiB, at least 1", "1MiB"
        elif name in _REAL:
            kind, example = "a number, or inf", "4"
        elif name in _SHARES:
            kind, example = "a number from 0 to 1", "0.95"
        raise PlanError(
            f"{name}={value} cannot be read", possible=f"{name} is {kind}", change=f"write {name}={example}"
        ) from None
