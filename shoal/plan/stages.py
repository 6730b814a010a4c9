"""Where a model is cut into pipeline stages: so many pieces for each stage, in order.

The pieces of a model with L blocks are its embedding (piece 0), its blocks (pieces 1 to L) and its end
(piece L + 1), which is the last norm and the head. Every stage has at least one piece; so the first stage
always has the embedding, and the last one the end.

A step of m micro-batches over p ranks takes about `m R + (p - 1) S`: R is the work of the rank that has the
most, which sets the pace, and S that of the largest stage, which the pipeline is filled and drained at
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). So what is minimised is `R + S (p - 1) / m`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.plan.schedules import Times
from shoal.plan.stage_load import Amounts, Load
from shoal.plan.stage_search import search_split
from shoal.units import format_bytes

__all__ = ["Cost", "parse_split", "ranges_of", "split_by_cost", "split_by_count", "times_of"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one piece of a model costs.

    Attributes:
        forward: Seconds or FLOP of one micro-batch.
        backward: The same of its whole backward; recomputed work counts.
        memory: Bytes that the piece holds on its rank all the time; 0 if nothing limits them.
        activations: Bytes that it keeps besides of each micro-batch from forward to backward.
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
    held: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Splits a model so that a step takes as little time as possible.

    With one stage on each rank that is the split with the least largest stage, and among such the most even
    one, by dynamic programming. With several it is the best where the search can look at all, else one that
    moving a piece from any stage to any other does not make better; of more than 40 stages, from the rank
    that has most, or the largest stage.

    Args:
        costs: Of each piece: the embedding, the blocks, the end.
        stages: How many there are.
        placement: The rank of each stage; by default stage s is on rank s.
        limit: Bytes that the pieces of a rank may hold together; None: any number.
        microbatches: In a step; None: four for each rank. It matters with several stages on a rank only.
        held: By stage, of how many micro-batches it holds activations, as `Schedule.held_by_stage` says;
            None: of none.

    Returns:
        The number of pieces of each stage.

    Raises:
        PlanError: There are more stages than blocks, the placement is not one of these stages, a cost is not
            a number of at least 0, or no split that was found keeps within the limit.
    """
    _require_stages(len(costs) - 2, stages)
    for cost in costs:
        _require_cost(cost)
    ranks = tuple(range(stages)) if placement is None else tuple(placement)
    if len(ranks) != stages:
        raise PlanError(
            f"the placement {ranks} is one of {len(ranks)} stages, and there are {stages}",
            possible="one rank for each stage",
            change="give the placement of the schedule that will run",
        )
    times = Amounts([cost.forward + cost.backward for cost in costs])
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
    raise PlanError(
        f"no split over {stages} stages was found whose ranks keep within {format_bytes(int(bound))}",
        possible=f"a limit of {format_bytes(math.ceil(lightest.score(least)[1]))} or more for so many stages",
        change="raise the limit, or use more stages, tensor parallelism or sharding",
    )


def split_by_count(layers: int, stages: int) -> tuple[int, ...]:
    """Splits a model into equal numbers of blocks, the first stages with one more where they do not divide.

    The embedding and the end come on top: this is what one does without knowing costs.

    Args:
        layers: Number of blocks.
        stages: How many there are.

    Returns:
        The number of pieces of each stage.

    Raises:
        PlanError: There are more stages than blocks.
    """
    _require_stages(layers, stages)
    even, more = divmod(layers, stages)
    return _with_ends([even + (stage < more) for stage in range(stages)])


def parse_split(text: str, layers: int) -> tuple[int, ...]:
    """Reads a split made by hand, such as `6-7-7-4`: the number of blocks of each stage.

    The embedding counts with the first stage and the end with the last, either of which may have no block.

    Args:
        text: Numbers joined by -.
        layers: Number of the model's blocks.

    Returns:
        The number of pieces of each stage, which counts the embedding and the end too.

    Raises:
        PlanError: The text does not say such a split.
    """
    stages = max(min(text.count("-") + 1, layers), 1)
    even = "-".join(map(str, _blocks_of(split_by_count(layers, stages)))) if layers else "0"
    try:
        blocks = [int(number) for number in text.split("-")]
    except ValueError:
        raise PlanError(
            f"the split {text!r} cannot be read",
            possible="the number of blocks of each stage, joined by -",
            change=f"write {even}, say",
        ) from None
    if min(blocks) < 0 or any(count == 0 for count in blocks[1:-1]):
        raise PlanError(
            f"the split {text!r} has a stage without any block",
            possible="1 or more, or 0 for the first or the last stage, which have the embedding and the end",
            change=f"write {even}, say",
        )
    if sum(blocks) != layers:
        raise PlanError(
            f"the split {text!r} is of {sum(blocks)} blocks, and the model has {layers}",
            possible=f"numbers that add up to {layers}",
            change=f"write {even}, say",
        )
    return _with_ends(blocks)


def ranges_of(split: Sequence[int]) -> tuple[range, ...]:
    """The pieces of each stage of a split."""
    ends = list(itertools.accumulate(split))
    return tuple(range(end - count, end) for count, end in zip(split, ends, strict=True))


def times_of(costs: Sequence[Cost], split: Sequence[int], transfer: float = 0.0) -> Times:
    """How long the stages of a split take. A backward is taken to be as much I as W.

    Args:
        costs: Of each piece.
        split: The number of pieces of each stage.
        transfer: From stage to stage, in the unit of the costs.
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


def _blocks_of(split: Sequence[int]) -> list[int]:
    blocks = list(split)
    blocks[0] -= 1
    blocks[-1] -= 1
    return blocks


def _require_stages(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise PlanError(
            f"a model of {layers} blocks cannot be cut into {stages} stages",
            possible=f"1 to {layers} stages: pp times the stages of a rank",
            change="use fewer stages, or a model with more blocks",
        )


def _require_cost(cost: Cost) -> None:
    # Written this way round, it refuses NaN too.
    if not all(0 <= value < math.inf for value in dataclasses.astuple(cost)):
        raise PlanError(
            f"{cost} is not what a piece can cost",
            possible="numbers of at least 0",
            change="measure or compute the costs anew",
        )
