"""The least seconds of forwards and backwards along a pipeline; `step.py` explains the terms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from shoal.spec.plan import SettledPlan
from shoal.spec.plan.schedules import Work, kind_of

_ROUNDS = 4  # of as many micro-batches as ranks, after which tables repeat


class Passes(NamedTuple):
    """Least seconds of a stage for one micro-batch, with all that it waits for.

    Attributes:
        forward: Seconds of forward.
        backward: Seconds of backward.
        back: Seconds of the part of backward that the stage before waits for.
    """

    forward: float
    backward: float
    back: float


class Beside(NamedTuple):
    """Communications of a rank that run beside its compute once a step.

    Attributes:
        seconds: Seconds by which they slow compute, if all of them run beside it.
        most: The most by which one second of them slows compute.
        stops: Seconds of communication within blocks, beside which they slow nothing.
    """

    seconds: float
    most: float
    stops: float

    def slowed(self, idle: float) -> float:
        """Return the least seconds by which compute is slowed, if it stands still for so many."""
        return max(0.0, self.seconds - self.most * (idle + self.stops))


def least_end(
    plan: SettledPlan,
    passes: Sequence[Passes],
    sends: Sequence[float],
    count: int,
    before: Sequence[float] = (),
    after: Sequence[float] = (),
    beside: Sequence[Beside] = (),
) -> float:
    """Return the least seconds until the last rank has done its passes and what follows them.

    Args:
        plan: The Plan.
        passes: Seconds of each stage.
        sends: Seconds of a message from each stage to the next; 0 where both are on one rank.
        count: Micro-batches of a step.
        before: By stage, exposed seconds before its first forward; none by default.
        after: By stage, seconds after its last backward; none by default.
        beside: By place along the pipeline, what slows compute; nothing by default.
    """
    before, after = before or (0.0,) * len(passes), after or (0.0,) * len(passes)
    if plan.pp == 1:
        (only,) = passes
        return before[0] + count * (only.forward + only.backward) + after[0]
    begins = _begins(passes, sends, before)
    drains = [0.0, *accumulate(each.back + send for each, send in zip(passes, sends, strict=False))]
    firsts: dict[int, int] = {}
    works = [0.0] * plan.pp
    chained = [0.0] * plan.pp  # without gradients of weights that may wait
    posts = [math.inf] * plan.pp
    placement = plan.placement
    through = 0.0  # all micro-batches of one stage, after the stages before it and before they come back
    for stage, rank in enumerate(placement):
        forward, backward, back = passes[stage]
        passed = begins[stage] + count * (forward + back) + drains[stage]
        if passed > through:
            through = passed
        if rank not in firsts:
            firsts[rank] = stage
        works[rank] += forward + backward
        chained[rank] += forward + back
        if after[stage] < posts[rank]:
            posts[rank] = after[stage]
    last = passes[0].backward - passes[0].back + posts[placement[0]]
    laps = _laps(plan, passes, sends, count, begins, drains)
    end = max(through, laps, _links(placement, sends, count)) + last
    down = begins[-1] + count * (passes[-1].forward + passes[-1].back) + drains[-1]
    posted = [0.0] * plan.pp
    for stage, rank in enumerate(placement):  # the last micro-batch comes back from the last stage
        posted[rank] += after[stage]
        came = down - drains[stage] + posted[rank]
        if came > end:
            end = came
    for rank, first in firsts.items():
        idle = begins[first] + posts[rank]
        own = idle + count * works[rank]
        if beside:
            own += beside[rank].slowed(idle)
        end = max(end, own, begins[first] + count * chained[rank] + drains[first] + last)
        if beside and not plan.has_halves:
            idle = begins[first] + drains[first] + last
            end = max(end, idle + count * works[rank] + beside[rank].slowed(idle))
    return end


def _begins(passes: Sequence[Passes], sends: Sequence[float], before: Sequence[float]) -> list[float]:
    """Return, by stage, the least seconds until its first forward begins, as if all waits were before it."""
    begin = before[0]
    begins = [begin]
    for each, send, least in zip(passes, sends, before[1:], strict=False):
        begin = begin + each.forward + send
        if least > begin:
            begin = least
        begins.append(begin)
    return begins


def _links(placement: Sequence[int], sends: Sequence[float], count: int) -> float:
    """Return the seconds of the busiest link's messages, which travel one after another."""
    return _links_of(tuple(placement), tuple(sends), count)


@lru_cache(maxsize=1 << 12)
def _links_of(placement: tuple[int, ...], sends: tuple[float, ...], count: int) -> float:
    busy: dict[tuple[int, int], float] = {}
    for (one, other), send in zip(pairwise(placement), sends, strict=True):
        for pair in (one, other), (other, one):
            busy[pair] = busy.get(pair, 0.0) + count * send
    return max(busy.values(), default=0.0)


def _laps(
    plan: SettledPlan,
    passes: Sequence[Passes],
    sends: Sequence[float],
    count: int,
    begins: Sequence[float],
    drains: Sequence[float],
) -> float:
    """Return the least seconds where the first rank lets only so many micro-batches go ahead; 0 if all."""
    end = around = 0.0
    ahead = _ahead(
        plan.schedule, plan.pp, plan.stages // plan.pp, min(count, _ROUNDS * plan.pp + count % plan.pp)
    )
    for stage in reversed(range(plan.stages)):
        around += passes[stage].forward + passes[stage].back
        if stage < plan.stages - 1:
            around += 2 * sends[stage]
        most = ahead.get(stage, count)
        if most < count:
            laps = -(-count // most)
            rest = count - 1 - (laps - 1) * most
            end = max(end, begins[stage] + laps * around + rest * passes[stage].back + drains[stage])
    return end


@lru_cache(maxsize=1 << 10)
def _ahead(schedule: str, ranks: int, virtual: int, count: int) -> Mapping[int, int]:
    """Return, for each stage of the first rank, the forwards that may be ahead of its backwards, if limited.

    With k of them, the forward of micro-batch j + k comes after the backward of micro-batch j.
    """
    row = kind_of(schedule).row
    if row is None:
        return {}
    forwards: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in row(0, ranks, virtual, count):
        if action.work is Work.FORWARD:
            forwards[action.stage] = forwards.get(action.stage, 0) + 1
        elif action.work is not Work.WEIGHT:
            ahead = forwards[action.stage] - action.microbatch
            most[action.stage] = max(most.get(action.stage, 0), ahead)
    return {stage: ahead for stage, ahead in most.items() if ahead < count or ranks * _ROUNDS > count}
