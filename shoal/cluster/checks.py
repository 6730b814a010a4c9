"""Checks of figures, which name a wrong one: negative rates, shares above 1, gigabytes instead of bytes."""

from __future__ import annotations

from shoal.errors import ClusterError

_LEAST_BYTES = 1e6  # no memory, link or peak is below this; a smaller figure was meant in giga-units


def require(holds: bool, where: str, name: str, value: object, possible: str) -> None:
    """Raise ClusterError unless a condition on a figure holds.

    Args:
        holds: The condition.
        where: The object that has the figure, such as "the device x".
        name: Name of the figure.
        value: Value of the figure.
        possible: The values that are allowed, in words.
    """
    if not holds:
        raise ClusterError(f"{where} has {name}={value}", possible=possible, change=f"correct {name}")


def require_bytes(where: str, **figures: float) -> None:
    """Raise ClusterError for figures in bytes, bytes/s or FLOP/s that must be in another unit."""
    for name, value in figures.items():
        require(value > 0, where, name, value, "a positive number")
        require(
            value >= _LEAST_BYTES,
            where,
            name,
            value,
            f"bytes, bytes/s or FLOP/s, at least {_LEAST_BYTES:g}; {value} looks like giga- or tera-units: "
            f"write {value} GB as {value}e9",
        )


def require_share(where: str, name: str, value: float) -> None:
    """Raise ClusterError unless a share of a data sheet's figure is above 0 and at most 1."""
    require(
        0 < value <= 1,
        where,
        name,
        value,
        "a share of the data sheet's value, above 0 and at most 1 (if it is more, the data sheet is wrong)",
    )
