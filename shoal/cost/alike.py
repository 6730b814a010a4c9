"""The data-parallel ranks of a Plan as groups that are alike: equal numbers of micro-batches, equal devices.

With `shares` ranks along dp make different numbers of micro-batches. If they meet once a step, when gradients
are summed, the step takes as long as the slowest group would take if all ranks were like it. Each group is
therefore priced, bounded and played as a Plan without `shares` on uniform devices: the kind that a replica
waits for. If they meet in each micro-batch, they are padded, and all work like the one with most.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from shoal.cost.kinds import ByKind
from shoal.cost.layout import Layout
from shoal.plan import EQUAL, SettledPlan

T = TypeVar("T")


class Alike(NamedTuple, Generic[T]):
    """Ranks with equal numbers of micro-batches on equal devices.

    Attributes:
        costs: The costs on their devices.
        plan: The Plan if all ranks were like them.
        batch: Samples of a step if all ranks were like them.
        first: Index along dp of the first of them.
        replicas: How many indices along dp they have.
    """

    costs: T
    plan: SettledPlan
    batch: int
    first: int
    replicas: int


def alike_of(costs: T, by_kind: ByKind[T] | None, plan: SettledPlan, batch: int) -> list[Alike[T]]:
    """Return the groups of ranks that are alike, in the order of their first ranks; all without `shares`.

    Args:
        costs: The costs on the Cluster.
        by_kind: The costs on each kind of its devices; None if it has one.
        plan: The Plan.
        batch: Samples of a step.
    """
    shares = plan.shared
    if shares is None:
        return [Alike(costs, plan, batch, 0, plan.dp)]
    equal = plan.replace(shares=EQUAL)
    if plan.is_padded:
        return [Alike(costs, equal, shares.most * plan.microbatch * plan.dp, 0, plan.dp)]
    layout = Layout.of(plan)
    kinds = ((),) * plan.dp if by_kind is None else by_kind.kinds.of_replicas(plan)
    numbers = [made for made, ranks in shares.runs for _ in range(ranks)]
    found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    for index, key in enumerate(zip(numbers, kinds, strict=True)):
        first, number = found.get(key, (index, 0))
        found[key] = first, number + 1
    return [
        Alike(
            costs if by_kind is None else by_kind.longest(layout, at),
            equal,
            made * plan.microbatch * plan.dp,
            first,
            replicas,
        )
        for (made, at), (first, replicas) in found.items()
    ]
