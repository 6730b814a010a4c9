"""The order of a Plan's axes over the ranks: which axis joins neighbours, and which one crosses nodes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from shoal.errors import PlanError

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""Axes of the mesh, outermost first in the default order."""

DEFAULT_ORDER = "pp-dp-cp-tp"
"""Ranks that are neighbours along tp are neighbours in the node; pp crosses nodes first."""


@lru_cache(maxsize=1 << 6)
def axes_of(order: str) -> tuple[str, ...]:
    """Return the axes of the mesh, outermost first; `dp` names the pair `replicate, shard`."""
    return tuple(
        axis for name in order.split("-") for axis in (("replicate", "shard") if name == "dp" else (name,))
    )


def strides_of(order: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the distance between two neighbours along each axis, in ranks.

    Args:
        order: The order, such as DEFAULT_ORDER.
        sizes: Number of ranks along each axis.
    """
    strides, stride = {}, 1
    for axis in reversed(axes_of(order)):
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def require_order(order: str) -> None:
    """Check that an order names each axis once.

    Raises:
        PlanError: It does not.
    """
    if not isinstance(order, str) or sorted(order.split("-")) != sorted(DEFAULT_ORDER.split("-")):
        raise PlanError(
            f"order={order} does not name each of pp, dp, cp and tp once",
            possible="pp, dp, cp and tp, joined by -, in any order: the outermost axis first",
            change=f"leave it out for {DEFAULT_ORDER}, or write, for example, order=dp-pp-cp-tp",
        )
