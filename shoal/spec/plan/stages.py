"""Cut a model into pipeline stages: a number of pieces for each stage, in order.

The pieces of a model with L blocks are its embedding (piece 0), its blocks (pieces 1 to L) and its end (piece
L + 1), which is the last norm and the head. Every stage has at least one piece, so the first stage always has
the embedding, and the last one the end.

A step of m micro-batches over p ranks takes about `m R + (p - 1) S`. R is the work of the rank that has most,
which sets the pace; S is the work of the largest stage, which sets the time to fill and drain the pipeline
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). So `R + S (p - 1) / m` is minimised.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.spec.plan.schedules import Times
from shoal.spec.plan.stage_search import Amounts, Load, search_split
from shoal.units import format_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one piece of a model.

    Attributes:
        forward: Seconds or FLOP of a micro-batch's forward.
        backward: Seconds or FLOP of its whole backward, including recompute.
        memory: Bytes that the piece holds on its rank all the time; 0 if nothing limits them.
        activations: Bytes that it also keeps of each micro-batch from forward to backward.
    """

    forward: float
    backward: float
    memory: float = 0.0
    activations: float = 0.0


def split_by_cost(
    costs: Sequence[Cost],
    stages: int,
    placement: Sequence[int] | None = None,
    limit: float | None = None,
    microbatches: int | None = None,
    held: Sequence[float] | None = None,
    factors: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Split a model so that a step takes as little time as possible.

    With one stage on each rank this is the split with the least largest stage, and among these the most even
    one, by dynamic programming. With several stages on a rank it is the best split, if the search can look at
    all. Otherwise no move of a piece from any stage to any other makes it better; with more than 40 stages,
    no move from the rank that has most or from the largest stage.

    Args:
        costs: Costs of each piece: the embedding, the blocks, the end.
        stages: Number of stages.
        placement: The rank of each stage; by default stage s is on rank s.
        limit: Bytes that the pieces of a rank may hold together; None for no limit.
        microbatches: Micro-batches of a step; None for four per rank. Matters only with several stages on a
            rank.
        held: By stage, the number of micro-batches whose activations it holds, as in
            `Schedule.held_by_stage`; None for 0.
        factors: By stage, how many times its pieces' costs it takes, where devices differ; None for 1.

    Returns:
        The number of pieces of each stage.

    Raises:
        PlanError: There are more stages than blocks, the placement is for another number of stages, a cost is
            not a number of at least 0, or no split that was found keeps within the limit.
    """
    _require_stages(len(costs) - 2, stages)
    for cost in costs:
        _require_cost(cost)
    ranks = tuple(range(stages)) if placement is None else tuple(placement)
    if len(ranks) != stages:
        raise PlanError(
            f"the placement {ranks} is for {len(ranks)} stages, and there are {stages}",
            possible="one rank for each stage",
            change="give the placement of the schedule that runs",
        )
    times = Amounts([cost.forward + cost.backward for cost in costs], factors=factors)
    memory = Amounts([cost.memory for cost in costs], [cost.activations for cost in costs], held)
    bound = math.inf if limit is None else limit
    size = len(set(ranks))
    weight = (size - 1) / (4 * size if microbatches is None else microbatches)
    found = search_split(Load(times, memory, ranks, bound, weight))
    if found is not None:
        return found
    lightest = Load(memory, memory, ranks, math.inf, 0.0)
    least = search_split(lightest)
    assert least is not None
    lowest = format_bytes(math.ceil(lightest.score(least)[1]))
    raise PlanError(
        f"no split over {stages} stages was found that keeps every rank within {format_bytes(int(bound))}",
        possible=f"a limit of {lowest} or more for {stages} stages",
        change="raise the limit, or use more stages, tensor parallelism or sharding",
    )


def split_by_count(layers: int, stages: int) -> tuple[int, ...]:
    """Split a model into equal numbers of blocks; if they do not divide, the first stages have one more.

    The embedding and the end are added to these: use it if costs are unknown.

    Args:
        layers: Number of blocks.
        stages: Number of stages.

    Returns:
        The number of pieces of each stage.

    Raises:
        PlanError: There are more stages than blocks.
    """
    _require_stages(layers, stages)
    even, more = divmod(layers, stages)
    return _with_ends([even + (stage < more) for stage in range(stages)])


def parse_split(text: str, layers: int) -> tuple[int, ...]:
    """Read a split made by hand, such as `6-7-7-4`: the number of blocks of each stage.

    The embedding belongs to the first stage and the end to the last; these two stages may have no block.

    Args:
        text: Numbers joined by -.
        layers: Number of the model's blocks.

    Returns:
        The number of pieces of each stage, which counts the embedding and the end too.

    Raises:
        PlanError: The text is not a split of this number of blocks.
    """
    stages = max(min(text.count("-") + 1, layers), 1)
    even = split_text(split_by_count(layers, stages)) if layers else "0"
    try:
        blocks = [int(number) for number in text.split("-")]
    except ValueError:
        raise PlanError(
            f"the split {text!r} cannot be read",
            possible="the number of blocks of each stage, joined by -",
            change=f"write, for example, {even}",
        ) from None
    if min(blocks) < 0 or any(count == 0 for count in blocks[1:-1]):
        raise PlanError(
            f"the split {text!r} has a stage without any block",
            possible="1 or more blocks in each stage; the first and the last stage, with the embedding and "
            "the end, may have 0",
            change=f"write, for example, {even}",
        )
    if sum(blocks) != layers:
        raise PlanError(
            f"the split {text!r} has {sum(blocks)} blocks, and the model has {layers}",
            possible=f"numbers that add up to {layers}",
            change=f"write, for example, {even}",
        )
    return _with_ends(blocks)


def split_text(split: Sequence[int]) -> str:
    """Return a split as a Plan writes it: the number of blocks of each stage, without embedding and end."""
    blocks = list(split)
    blocks[0] -= 1
    blocks[-1] -= 1
    return "-".join(map(str, blocks))


def ranges_of(split: Sequence[int]) -> tuple[range, ...]:
    """Return the pieces of each stage of a split."""
    ends = list(itertools.accumulate(split))
    return tuple(range(end - count, end) for count, end in zip(split, ends, strict=True))


def times_of(costs: Sequence[Cost], split: Sequence[int], transfer: float = 0.0) -> Times:
    """Return the times of a split's stages. I and W are taken to be half of the backward each.

    Args:
        costs: Costs of each piece.
        split: The number of pieces of each stage.
        transfer: Time from stage to stage, in the unit of the costs.
    """
    stages = [costs[pieces.start : pieces.stop] for pieces in ranges_of(split)]
    half = tuple(sum(cost.backward for cost in stage) / 2 for stage in stages)
    forward = tuple(sum(cost.forward for cost in stage) for stage in stages)
    return Times(forward, half, half, (transfer,) * (len(stages) - 1))


def _with_ends(blocks: Sequence[int]) -> tuple[int, ...]:
    pieces = list(blocks)
    pieces[0] += 1
    pieces[-1] += 1
    return tuple(pieces)


def _require_stages(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise PlanError(
            f"a model of {layers} blocks cannot be cut into {stages} stages",
            possible=f"1 to {layers} stages, which is pp times the stages on a rank",
            change="use fewer stages, or a model with more blocks",
        )


def _require_cost(cost: Cost) -> None:
    # Written this way round, it refuses NaN too.
    if not all(0 <= value < math.inf for value in dataclasses.astuple(cost)):
        raise PlanError(
            f"the cost of a piece is {cost}",
            possible="numbers of at least 0",
            change="measure or compute the costs again",
        )
