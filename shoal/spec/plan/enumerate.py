"""Enumerate every Plan for a number of ranks: all degrees, with all choices of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.errors import PlanError, UserError
from shoal.spec.plan.allowed_values import CHOICES
from shoal.spec.plan.plan import Plan
from shoal.spec.plan.sharding import divisors

VARIED: Mapping[str, Sequence[Any]] = {
    "shard": CHOICES["shard"],
    "tensor": CHOICES["tensor"],
    "context": CHOICES["context"],
    "schedule": CHOICES["schedule"],
    "recompute": ("none", "full"),
    "precision": ("fp32",),
}
"""Choices that `legal_plans` varies by default, beside the degrees and `replicate`."""

_MATTERS_WITH: Mapping[str, str] = {"tensor": "tp", "context": "cp", "schedule": "pp"}
"""The degree that each choice belongs to: the choice has no effect if that degree is 1."""


def legal_plans(
    ranks: int,
    *,
    varied: Mapping[str, Sequence[Any]] = VARIED,
    require: Callable[[Plan], object] = lambda plan: None,
) -> list[Plan]:
    """Return all Plans for `ranks` ranks that are consistent in themselves and that `require` accepts.

    Args:
        ranks: The product of the degrees.
        varied: Fields of a Plan, each with the values to try; if a field can make no difference, only its
            first value. Other fields keep their defaults.
        require: Raises a UserError for a Plan to leave out, as `shoal.parallel.require_layout` does.

    Returns:
        Plans, those with more data parallelism first; no two are equal.

    Raises:
        PlanError: `ranks` is not positive.
    """
    if ranks < 1:
        raise PlanError(
            f"there are no Plans for {ranks} ranks", possible="1 or more", change="give more ranks"
        )
    plans = []
    for fields in _degrees(ranks):
        for values in itertools.product(*(_values(name, varied[name], fields) for name in varied)):
            try:
                plan = Plan(**fields, **dict(zip(varied, values, strict=True)))
                require(plan)
            except UserError:
                continue
            plans.append(plan)
    return plans


def _values(name: str, values: Sequence[Any], degrees: Mapping[str, int]) -> Sequence[Any]:
    return values[:1] if degrees.get(_MATTERS_WITH.get(name, ""), 2) == 1 else values


def _degrees(ranks: int) -> Iterator[dict[str, Any]]:
    """Yield all degrees that multiply to `ranks`, with every `replicate` and `ep` that fits them."""
    for dp in reversed(divisors(ranks)):
        for cp in divisors(ranks // dp):
            for tp in divisors(ranks // dp // cp):
                pp = ranks // dp // cp // tp
                for replicate, ep in itertools.product(divisors(dp), divisors(dp * cp)):
                    yield {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "replicate": replicate}
