"""The settings of a Plan that name one of a few things, and checks of single settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import PlanError, nearest
from shoal.limits import NUMBER
from shoal.plan.exchange import EXCHANGES
from shoal.plan.schedules import FOUND, NAMES
from shoal.plan.sharding import SHARDINGS

DEGREES = ("dp", "tp", "pp", "cp", "ep")
"""Names of the degrees, in the order of the text form."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "shard": tuple(SHARDINGS),
    "tensor": ("sequence", "async", "plain"),
    "context": ("ring", "ulysses"),
    "schedule": ("1f1b", *(name for name in NAMES if name != "1f1b"), FOUND),
    "exchange": EXCHANGES,
    "recompute": ("none", "selective", "full"),
    "precision": ("fp32", "tf32", "bf16", "fp8"),
    "reduce": ("fp32", "bf16"),
    "compile": ("auto", "none", "blocks"),
}
"""The values that each named choice of a Plan can take."""

WHOLE: Mapping[str, int] = {
    **dict.fromkeys((*DEGREES, "replicate", "bucket", "every", "fragments", "stretch"), 1),
    **dict.fromkeys(("delay", "dense", "servers", "quorum", "mirror"), 0),
}
"""Settings that are whole numbers, with the least value of each."""


def element_bytes(precision: str) -> int:
    """Return the bytes of one element of the weights that compute in a Plan's precision."""
    return 4 if precision in ("fp32", "tf32") else 2


def require_choice(name: str, value: Any) -> None:
    """Check that a value is one of those that a setting can take.

    Raises:
        PlanError: It is not.
    """
    values = CHOICES[name]
    if value not in values:
        raise PlanError(
            f"{name}={value} does not exist{nearest(str(value), values)}",
            possible=f"{name} is one of {', '.join(values)}",
            change=f"write {name}={values[0]}, or another of these",
        )


def require_whole(name: str, value: Any, least: int = 1, most: int = NUMBER) -> None:
    """Check that a value is a whole number from `least` to `most`.

    Raises:
        PlanError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(
            f"{name}={value!r} is not a whole number of at least {least}",
            possible=f"{name} is {least} or more",
            change=f"write {name}={max(least, 1)}, or leave it out",
        )
    if value > most:
        raise PlanError(
            f"{name} is {value}" if value < 10 * most else f"{name} is more than {10 * most}",
            possible=f"{name} is at most {most}",
            change=f"write a smaller {name}",
        )
