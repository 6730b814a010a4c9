"""Shares in proportion to the speed of devices that differ, tried by playing beside equal numbers.

A search gives all data-parallel ranks equally many micro-batches. Where replicas sit on devices that differ,
each is given the number that lets the slowest be done earliest: the replica whose next micro-batch would be
done first gets it. Smaller micro-batches divide a batch more finely, but run less well; so every size up to
the Plan's own is tried. Shares save time only with a sharding that reduces gradients once a step, so those
are tried too.
The Plan gets shares if they make its step quicker by LEAST_GAIN.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

from shoal.cluster import devices_of
from shoal.cost import Kinds
from shoal.plan import SHARDINGS, SettledPlan, Shares, divisors
from shoal.planner.neighbours import changed
from shoal.planner.polish import LEAST_GAIN, polished
from shoal.planner.search import LOOSE, Search
from shoal.planner.sized import Fitted
from shoal.planner.space import Degrees


def with_shares(
    search: Search, number: int, accept: Callable[[Degrees], bool] = lambda degrees: True
) -> list[Fitted]:
    """Return Plans with shares that are quicker than the best ones of their degrees; none on equal devices.

    Args:
        search: The search.
        number: Number of degrees to try: those of the quickest Plans without shares.
        accept: Returns whether degrees are allowed.
    """
    if len(devices_of(search.cluster)) == 1:
        return []

    def may_share(degrees: Degrees) -> bool:
        return degrees.dp > 1 and degrees.pp == degrees.ep == 1 and accept(degrees)

    found = search.best(number, may_share, slack=LOOSE).found
    shared = [_shared(search, polished(search, each)) for each in found]
    return [polished(search, each) for each in shared if each is not None]


def _shared(search: Search, found: Fitted) -> Fitted | None:
    """Return the Plan with shares, if that makes its step quicker by LEAST_GAIN."""
    shared, batch, best = search.shared, search.batch, found
    bounded = sorted(
        (shared.costs.least(each, batch), number, each)
        for number, each in enumerate(_tried(search, found.plan))
    )
    for least, _, plan in bounded:
        if least >= best.seconds:
            break
        memory = shared.fullest(plan)
        if memory.required <= search.room and shared.played(plan) < best.seconds:
            best = Fitted(plan, memory, shared.played(plan))
    return best if best.seconds <= (1 - LEAST_GAIN) * found.seconds else None


def in_proportion(seconds: Sequence[float], total: int) -> list[int] | None:
    """Return numbers of micro-batches, at least one each, whose longest time is the least.

    Args:
        seconds: For each replica, the seconds of a micro-batch.
        total: Micro-batches of all replicas together.

    Returns:
        The numbers by replica; of equally quick ones the first have more. None if there are too few.
    """
    if total < len(seconds):
        return None
    limit = total / sum(1 / each for each in seconds)  # no replica can be done earlier than all at this time
    numbers = [max(1, math.floor(limit / each)) for each in seconds]
    left = total - sum(numbers)
    if left < 0:  # some are too slow for one: start from the least, and give out the rest
        numbers, left = [1] * len(seconds), total - len(seconds)
    heap = [
        ((number + 1) * each, place)
        for place, (number, each) in enumerate(zip(numbers, seconds, strict=True))
    ]
    heapq.heapify(heap)
    for _ in range(left):
        _, place = heap[0]
        numbers[place] += 1
        heapq.heapreplace(heap, ((numbers[place] + 1) * seconds[place], place))
    return numbers


def proportional(search: Search, plan: SettledPlan) -> SettledPlan | None:
    """Return a Plan without pp and ep with shares by the speed of its devices; None if all are equal."""
    kinds = Kinds(search.cluster).of_replicas(plan)
    every = [sum(stage.total for stage in each.stages(plan, 1)) for each in search.shared.costs.all_at()]
    seconds = [max(every[kind] for kind in at) for at in kinds]
    numbers = in_proportion(seconds, search.batch // plan.microbatch)
    if numbers is None or len(set(numbers)) == 1:
        return None
    return changed(plan, search.batch, shares=str(Shares.of(numbers)))


def _tried(search: Search, plan: SettledPlan) -> Iterator[SettledPlan]:
    """Yield the Plan with shares, for each size of micro-batches up to its own, with each sharding."""
    shardings = [each for each in SHARDINGS.values() if not each.communicates_each_micro_batch]
    for microbatch in divisors(search.batch):
        if microbatch > plan.microbatch or math.gcd(microbatch, plan.cp) > 1:
            continue
        for sharding in shardings:
            changes = {} if sharding is plan.sharding else {"shard": sharding.name, "replicate": 1}
            found = proportional(search, plan.replace(microbatch=microbatch, **changes))
            if found is not None:
                yield found
