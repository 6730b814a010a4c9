"""Which pieces of a Workload each pipeline stage has, as a Plan's `split` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.plan import SettledPlan
from shoal.plan.stages import Cost, parse_split, ranges_of, split_by_cost, split_by_count
from shoal.workload import Workload

__all__ = ["flop_costs", "pieces_by_stage"]


def pieces_by_stage(
    workload: Workload, plan: SettledPlan, microbatches: int, costs: Callable[[], Sequence[Cost]]
) -> tuple[range, ...]:
    """The pieces of each stage.

    Args:
        workload: What is cut.
        plan: How.
        microbatches: In a step.
        costs: Of each piece, asked for if the split is by cost.

    Raises:
        PlanError: The model has fewer blocks than there are stages, or the split is not one of this model.
    """
    layers = len(workload.layers)
    if plan.pp == 1:
        return (range(layers + 2),)
    if plan.split == "count":
        return ranges_of(split_by_count(layers, plan.stages))
    if plan.split != "cost":
        return ranges_of(parse_split(plan.split, layers))
    return ranges_of(split_by_cost(costs(), plan.stages, plan.placement, microbatches=microbatches))


def flop_costs(workload: Workload) -> list[Cost]:
    """FLOP of each piece: enough to cut a model of like blocks where no Cluster is known."""
    return [Cost(piece.flop, 2 * piece.flop) for piece in workload.pieces]
