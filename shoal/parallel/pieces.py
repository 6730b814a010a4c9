"""Which pieces of a model each pipeline stage has, as a Plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import PlanError
from shoal.parallel.stage_costs import computed_costs
from shoal.parallel.stage_layout import StageLayout, named_part, parts_by_piece, stages_of, tied_names
from shoal.plan import Plan
from shoal.plan.schedules import Work
from shoal.plan.stages import parse_split, ranges_of, split_by_cost, split_by_count

__all__ = ["Pieces", "cut_pieces"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model cut into stages.

    Attributes:
        layout: Names the pieces.
        blocks: The model's blocks, which are pieces 1 to their number.
        ranges: The pieces of each stage.
        placement: By stage, where along the axis `pp` the rank is that holds it.
        tied: Names of what the first and the last stage share, if these are on different ranks.
        has_halves: Whether the schedule makes a backward in two halves.
    """

    layout: StageLayout
    blocks: Sequence[nn.Module]
    ranges: tuple[range, ...]
    placement: tuple[int, ...]
    tied: frozenset[str]
    has_halves: bool

    def of(self, index: int) -> dict[int, range]:
        """The stages of one rank of the axis `pp`, with their pieces."""
        return {stage: self.ranges[stage] for stage, holder in enumerate(self.placement) if holder == index}

    def holder_of(self, model: nn.Module, name: str) -> int:
        """Where along the axis `pp` the rank is that has a buffer of the model; the first, if all do."""
        parts = parts_by_piece(model, self.layout)
        for stage, pieces in enumerate(self.ranges):
            if any(name.startswith(f"{part}.") for piece in pieces for part in parts[piece]):
                return self.placement[stage]
        return self.placement[0]

    def blocks_of(self, stage: int) -> list[nn.Module]:
        """The blocks of a stage, in order."""
        return [self.blocks[piece - 1] for piece in self.ranges[stage] if 1 <= piece <= len(self.blocks)]


def cut_pieces(model: nn.Module, plan: Plan, layout: StageLayout | None = None) -> Pieces:
    """Cuts a model as the Plan's `split` says; the model is not changed.

    Args:
        model: The whole model; the meta device will do.
        plan: With pp > 1.
        layout: Names the pieces; by default as Shoal knows them.

    Raises:
        ModelError: Nothing says how the model is cut, or the layout does not fit it.
        PlanError: The split does not fit the model.
    """
    layout = stages_of(model) if layout is None else layout
    blocks = list(named_part(model, layout.blocks)._modules.values())
    placement = plan.placement
    if plan.split == "count":
        split = split_by_count(len(blocks), plan.stages)
    elif plan.split == "cost":
        split = split_by_cost(computed_costs(model, layout), plan.stages, placement)
    else:
        split = parse_split(plan.split, len(blocks))
    shared = tied_names(model, layout)
    are_ends_apart = placement[0] != placement[-1]
    if shared and not are_ends_apart and plan.shard == "zero3":
        raise PlanError(
            f"schedule={plan.schedule} puts the first and the last stage on one rank, and they share "
            f"{min(shared)}, which shard=zero3 would have there for one of them at a time",
            possible="shard=none, zero1 or zero2, another schedule, or embeddings that are not tied",
            change="use shard=zero2, or model_options.tie_embeddings=false",
        )
    table = plan.schedule_for(2 * plan.pp).table
    return Pieces(
        layout=layout,
        blocks=blocks,
        ranges=ranges_of(_with_modules(split, layout)),
        placement=placement,
        tied=shared if are_ends_apart else frozenset(),
        has_halves=any(action.work is Work.INPUT for row in table for action in row),
    )


def _with_modules(split: Sequence[int], layout: StageLayout) -> list[int]:
    """The split with a block in the first and the last stage where embedding or end have no modules."""
    counts = list(split)
    if not layout.embed:
        _lend(counts)
    if not layout.end:
        counts.reverse()
        _lend(counts)
        counts.reverse()
    return counts


def _lend(counts: list[int]) -> None:
    """Gives the first stage a second piece if it has one, from the first stage behind it that has two."""
    if counts[0] == 1:
        lender = next(stage for stage, count in enumerate(counts) if count > 1)
        counts[0] += 1
        counts[lender] -= 1
