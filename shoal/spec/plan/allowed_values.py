"""The settings of a Plan that name one of a few things, and checks of single settings.

Recompute: what a block's backward computes again, and in how many blocks.

The text form is a policy, `none`, `selective` or `full`, for all blocks, or with a number of the model's
blocks, such as `full:8`. A pipeline stage has its share of them, rounded up: `block_choices` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shoal.errors import PlanError, nearest
from shoal.limits import NUMBER
from shoal.spec.plan.exchange import EXCHANGES
from shoal.spec.plan.schedules import FOUND, NAMES
from shoal.spec.plan.sharding import SHARDINGS

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


@dataclass(frozen=True, slots=True)
class Recompute:
    """What is computed again, and where.

    Attributes:
        policy: none, selective or full.
        blocks: Number of the model's blocks; None for all.
    """

    policy: str
    blocks: int | None = None

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Read the text form.

        Raises:
            PlanError: There is no such policy, or the number is not one above 0.
        """
        return _parsed(text)

    def count(self, blocks: int, every: int) -> int:
        """Return how many blocks of a stage have the policy.

        Args:
            blocks: The stage's blocks.
            every: The model's blocks.
        """
        if self.blocks is None:
            return blocks
        return share_of_blocks(self.blocks, blocks, every)


def share_of_blocks(number: int, blocks: int, every: int) -> int:
    """Return a stage's share of a number of the model's blocks, rounded up.

    Args:
        number: The number of the model's blocks.
        blocks: The stage's blocks.
        every: The model's blocks.
    """
    return min(blocks, -(-number * blocks // every)) if every else 0


@lru_cache(maxsize=256)
def _parsed(text: str) -> Recompute:
    policy, colon, number = text.partition(":")
    if not colon or policy not in CHOICES["recompute"]:
        require_choice("recompute", policy)
        return Recompute(policy)
    if policy == "none" or not number.isdecimal() or int(number) == 0:
        raise PlanError(
            f"recompute={text} does not say in how many blocks what is computed again",
            possible="selective or full, alone or with a number of blocks above 0, such as full:8",
            change="write, for example, recompute=full:8",
        )
    return Recompute(policy, int(number))
