"""The pieces of a model that each pipeline stage has, as a Plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.parallel.layout import Cut
from shoal.parallel.pipeline.piece_memory import Batch, with_memory
from shoal.parallel.pipeline.stage_costs import computed_costs
from shoal.parallel.pipeline.stage_layout import (
    StageLayout,
    named_part,
    parts_by_piece,
    stages_of,
    tied_names,
)
from shoal.plan import Plan
from shoal.plan.schedules import Times
from shoal.plan.stages import (
    Cost,
    parse_split,
    ranges_of,
    split_by_cost,
    split_by_count,
    split_text,
    times_of,
)


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that the stages of a rank must fit into.

    Attributes:
        limit: Bytes that a rank may hold.
        batch: Samples and tokens of a step; None if unknown. Then only states must fit.
        cuts: A rank's block of each parameter that tensor parallelism splits, by name.
    """

    limit: float
    batch: Batch | None
    cuts: Mapping[str, Cut]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model cut into stages.

    Attributes:
        layout: The layout that names the pieces.
        blocks: The model's blocks, which are pieces 1 to their number.
        ranges: The pieces of each stage.
        placement: By stage, the index along the axis `pp` of the rank that holds it.
        tied: Names of the parameters that the first and the last stage share, if these are on different
            ranks.
        times: Times of each stage, from its computed costs.
    """

    layout: StageLayout
    blocks: Sequence[nn.Module]
    ranges: tuple[range, ...]
    placement: tuple[int, ...]
    tied: frozenset[str]
    times: Times

    @property
    def split(self) -> str:
        """Return the number of blocks of each stage, as the Plan's `split` writes them."""
        return split_text([len(pieces) for pieces in self.ranges])

    def of(self, index: int) -> dict[int, range]:
        """Return the stages of one rank of the axis `pp`, with their pieces."""
        return {stage: self.ranges[stage] for stage, holder in enumerate(self.placement) if holder == index}

    def holder_of(self, model: nn.Module, name: str) -> int:
        """Return the index along `pp` of the rank that has a buffer of the model; 0 if all have it."""
        parts = parts_by_piece(model, self.layout)
        for stage, pieces in enumerate(self.ranges):
            if any(name.startswith(f"{part}.") for piece in pieces for part in parts[piece]):
                return self.placement[stage]
        return self.placement[0]

    def blocks_of(self, stage: int) -> list[nn.Module]:
        """Return the blocks of a stage, in order."""
        return [self.blocks[piece - 1] for piece in self.ranges[stage] if 1 <= piece <= len(self.blocks)]


def cut_pieces(
    model: nn.Module, plan: Plan, layout: StageLayout | None = None, room: Room | None = None
) -> Pieces:
    """Cut a model as the Plan's `split` says; the model is not changed.

    Args:
        model: The whole model; the meta device will do.
        plan: A Plan with pp > 1.
        layout: The layout that names the pieces; by default the one that Shoal knows.
        room: Memory that a split by cost must fit into; None for no limit.

    Raises:
        ModelError: No layout is known for the model, or the layout does not fit it.
        PlanError: The split does not fit the model, or the stages do not fit the room.
    """
    layout = stages_of(model) if layout is None else layout
    blocks = list(named_part(model, layout.blocks)._modules.values())
    placement = plan.placement
    costs = computed_costs(model, layout)
    if plan.split == "count":
        split = split_by_count(len(blocks), plan.stages)
    elif plan.split == "cost":
        if room is not None:
            costs = with_memory(costs, model, layout, plan, room.batch, room.cuts)
        split = _split_by_cost(costs, plan, room)
    else:
        split = parse_split(plan.split, len(blocks))
    shared = tied_names(model, layout)
    are_ends_apart = placement[0] != placement[-1]
    split = _with_modules(split, layout)
    return Pieces(
        layout=layout,
        blocks=blocks,
        ranges=ranges_of(split),
        placement=placement,
        tied=shared if are_ends_apart else frozenset(),
        times=times_of(costs, split),
    )


def _split_by_cost(costs: Sequence[Cost], plan: Plan, room: Room | None) -> tuple[int, ...]:
    if room is None:
        return split_by_cost(costs, plan.stages, plan.placement)
    held = None
    if room.batch is not None:
        # A schedule that is found for the stages' times needs the split; one for equal times holds about as
        # much.
        held = plan.schedule_for(room.batch.micro_batches(plan)).held_by_stage
    return split_by_cost(costs, plan.stages, plan.placement, room.limit, held=held)


def _with_modules(split: Sequence[int], layout: StageLayout) -> tuple[int, ...]:
    """Return the split with a block in the first and the last stage, if embedding or end have no modules."""
    counts = list(split)
    if not layout.embed:
        _lend(counts)
    if not layout.end:
        counts.reverse()
        _lend(counts)
        counts.reverse()
    return tuple(counts)


def _lend(counts: list[int]) -> None:
    """Give the first stage a second piece if it has one: from the next stage that has two."""
    if counts[0] == 1:
        lender = next(stage for stage, count in enumerate(counts) if count > 1)
        counts[0] += 1
        counts[lender] -= 1
