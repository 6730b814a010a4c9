"""Splits the pieces of a Workload into pipeline stages by a Plan's `split`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from shoal.spec.plan import SettledPlan, block_choices
from shoal.spec.plan.stages import Cost, parse_split, ranges_of, split_by_cost, split_by_count
from shoal.spec.workload import Block, Workload


def pieces_by_stage(
    workload: Workload,
    plan: SettledPlan,
    microbatches: int,
    costs: Callable[[], Sequence[Cost]],
    paces: Callable[[], Sequence[float]] = tuple,
) -> tuple[range, ...]:
    """Return the pieces of each stage.

    Args:
        workload: The Workload that is split.
        plan: The Plan, which says the stages and the split.
        microbatches: Number of micro-batches in a step.
        costs: Function that gives each piece's cost; called only if the split is by cost.
        paces: Function that gives, by place along the pipeline, how many times these costs a piece has there;
            an empty sequence if all are equal.

    Raises:
        PlanError: The model has fewer blocks than there are stages, or the split does not fit this model.
    """
    layers = len(workload.layers)
    if plan.pp == 1:
        return (range(layers + 2),)
    if plan.split == "count":
        return ranges_of(split_by_count(layers, plan.stages))
    if plan.split != "cost":
        return ranges_of(parse_split(plan.split, layers))
    by_place = paces()
    factors = [by_place[place] for place in plan.placement] if by_place else None
    split = split_by_cost(costs(), plan.stages, plan.placement, microbatches=microbatches, factors=factors)
    return ranges_of(split)


def kept_pieces(workload: Workload, plan: SettledPlan, stages: Sequence[range]) -> frozenset[int]:
    """Return the pieces in whose backward nothing is computed again, though the Plan has a recompute policy.

    Args:
        workload: The Workload.
        plan: The Plan, which says how many blocks are recomputed.
        stages: The pieces of each stage.
    """
    if plan.recomputed.blocks is None:
        return frozenset()
    number, kept = len(workload.layers), set[int]()
    for layers in _layers_of(workload, stages):
        again = block_choices(plan, len(layers), number).recomputed
        kept.update(piece for place, piece in enumerate(layers) if place not in again)
    return frozenset(kept)


def stored_pieces(workload: Workload, plan: SettledPlan, stages: Sequence[range]) -> frozenset[int]:
    """Return the pieces whose activations are in files from forward to backward.

    The arguments are those of `kept_pieces`.
    """
    if plan.tiers.activations == "device":
        return frozenset()
    number, stored = len(workload.layers), set[int]()
    for layers in _layers_of(workload, stages):
        stored.update(layers[place] for place in block_choices(plan, len(layers), number).stored)
    return frozenset(stored)


def _layers_of(workload: Workload, stages: Sequence[range]) -> list[range]:
    """Return the pieces of each stage that are layers, and not the embedding or the end."""
    last = len(workload.layers) + 1
    return [range(max(stage.start, 1), min(stage.stop, last)) for stage in stages]


@lru_cache(maxsize=256)
def as_kept(block: Block) -> Block:
    """Return the block with nothing recomputed; equal blocks get one object."""
    return replace(block, is_kept=True)


def flop_costs(workload: Workload) -> list[Cost]:
    """Return the FLOP of each piece as its cost, to split a model of equal blocks without a Cluster."""
    return [Cost(piece.flop, 2 * piece.flop) for piece in workload.pieces]
