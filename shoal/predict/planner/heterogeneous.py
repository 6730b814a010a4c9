"""What devices that differ cost: the best Plans if the slower ones were as quick, and without them.

Each figure is one of a Plan that a search found for the changed machine, and played.

Shares in proportion to the speed of devices that differ, tried by playing beside equal numbers.

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
from dataclasses import dataclass, replace
from itertools import groupby

from shoal.errors import ClusterError
from shoal.predict.cost import Costs, Kinds
from shoal.predict.planner.candidate import Candidate
from shoal.predict.planner.refine import LEAST_GAIN, changed, polished
from shoal.predict.planner.search import LOOSE, Search
from shoal.predict.planner.space import Degrees
from shoal.predict.planner.tree import Fitted
from shoal.spec.cluster import Cluster, Device, counts_of, devices_of
from shoal.spec.plan import SHARDINGS, SettledPlan, Shares, divisors


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


@dataclass(frozen=True, slots=True)
class Slower:
    """Devices of one kind that are slower than others.

    Attributes:
        name: Name of the device, with its pace.
        devices: Number of these devices.
        replaced: The best Plan if they were the quickest kind; None if it does not fit these.
        without: The best Plan on the other devices alone; None if no Plan is legal and fits there.
    """

    name: str
    devices: int
    replaced: Candidate | None
    without: Candidate | None


@dataclass(frozen=True, slots=True)
class Unequal:
    """Devices that differ, and how a Plan uses them.

    Attributes:
        counts: Number of devices of each kind, by name, in the order of ranks.
        quickest: Name of the kind that is quickest under the Plan.
        slower: The other kinds, in the order of ranks.
        layers: By place along the pipeline, the kinds that are there and the number of layers.
        waits: The kinds that others at their place wait for: all get equal work.
        even: The best Plan without shares, if the Plan has some; otherwise None.
    """

    counts: dict[str, int]
    quickest: str
    slower: tuple[Slower, ...]
    layers: tuple[tuple[tuple[str, ...], int], ...]
    waits: tuple[str, ...]
    even: Candidate | None = None

    def sentences(self, winner: Candidate) -> Iterator[str]:
        """Yield what is to be said about devices that differ, under the best Plan."""
        yield f"Devices differ: {_listed([f'{number:,} x {name}' for name, number in self.counts.items()])}."
        for each in self.slower:
            yield _cost(each, self.quickest, winner)
        if winner.plan.pp > 1:
            yield f"Stages have layers by the devices that they sit on: {_listed(list(self._places()))}."
        if self.even is not None:
            slower = self.even.seconds / winner.seconds - 1
            yield (
                f"Ranks along dp make micro-batches by the speed of their devices: without shares "
                f"the best Plan is {slower:.1%} slower ({self.even.degrees_text})."
            )
        elif self.waits:
            yield (
                f"Ranks of one stage get equal work, also along dp: where they differ, "
                f"{_listed(list(self.waits))} bounds the step, and quicker devices wait."
            )

    def _places(self) -> Iterator[str]:
        """Yield the layers of places in a row that are on the same kinds."""
        for kinds, alike in groupby(self.layers, key=lambda each: each[0]):
            numbers = [number for _, number in alike]
            least, most = min(numbers), max(numbers)
            layers = str(most) if least == most else f"{least} to {most}"
            yield f"{len(numbers)} x {layers} on {_listed(list(kinds))}"


def unequal(search: Search, winner: Candidate) -> Unequal | None:
    """Return what the slower devices of a Cluster cost; None if all are equal.

    Args:
        search: The search that found the best Plan.
        winner: The best Plan.
    """
    cluster, costs, plan = winner.cluster, winner.costs, winner.plan
    kinds, counts = devices_of(cluster), counts_of(cluster)
    if len(kinds) == 1:
        return None
    names = list(counts)
    seconds = [_seconds(each, plan) for each in costs.all_at()]
    quickest = min(range(len(kinds)), key=seconds.__getitem__)
    slower = tuple(
        Slower(
            names[kind],
            counts[names[kind]],
            _best(search, _replaced(cluster, kinds[kind], kinds[quickest]), (plan,)),
            _best(search, _without(cluster, kinds[kind])),
        )
        for kind in range(len(kinds))
        if seconds[kind] > seconds[quickest]
    )
    places = Kinds(cluster).by_place(plan)
    layers = [0] * plan.pp
    placement = plan.placement if plan.pp > 1 else (0,)
    ends = (winner.workload.embedding, winner.workload.end)
    blocks = costs.blocks_of(plan, plan.microbatches_of(winner.batch))
    for place, held in zip(placement, blocks, strict=True):
        layers[place] += sum(block not in ends for block in held)
    waited = {max(kinds, key=seconds.__getitem__) for kinds in places if len(kinds) > 1}
    return Unequal(
        counts,
        names[quickest],
        slower,
        tuple((tuple(names[kind] for kind in at), number) for at, number in zip(places, layers, strict=True)),
        tuple(names[kind] for kind in sorted(waited)),
        None if plan.shared is None else _even(search, plan.precision),
    )


def _seconds(costs: Costs, plan: SettledPlan) -> float:
    """Return the seconds of a micro-batch of the whole model, as if all devices were of these costs."""
    return sum(stage.total for stage in costs.stages(plan, 1))


def _even(search: Search, precision: str) -> Candidate | None:
    """Return the quickest Plan without shares that fits, of those that were played."""
    shared = search.shared
    for plan, seconds in sorted(shared.known.items(), key=lambda each: each[1]):
        if plan.shared is None and plan.precision == precision:
            memory = shared.fullest(plan)
            if memory.required <= search.room:
                return search.candidate(Fitted(plan, memory, seconds))
    return None


def _best(search: Search, cluster: Cluster | None, known: Sequence[SettledPlan] = ()) -> Candidate | None:
    """Return the best Plan on another Cluster, of those that a search finds and those that are known."""
    if cluster is None:
        return None
    other = Search(
        search.workload,
        cluster,
        search.batch,
        margin=search.margin,
        precision=search.shared.space.precision,
        offload=search.offload,
    )
    found = [polished(other, each) for each in other.best(1).found] + with_shares(other, 1)
    memories = ((plan, other.shared.fullest(plan)) for plan in known)
    found += [
        Fitted(plan, memory, other.shared.played(plan))
        for plan, memory in memories
        if memory.required <= other.room
    ]
    return other.candidate(min(found, key=lambda each: each.seconds)) if found else None


def _replaced(cluster: Cluster, old: Device, new: Device) -> Cluster:
    """Return the Cluster with another kind in the place of one, at its own pace."""
    parts = (replace(part, device=new, pace=1.0) if part.at_pace == old else part for part in cluster.parts)
    return cluster.replace(parts=tuple(parts))


def _without(cluster: Cluster, kind: Device) -> Cluster | None:
    """Return the Cluster without a kind of devices; None if the others are not whole nodes."""
    parts = tuple(part for part in cluster.parts if part.at_pace != kind)
    try:
        fewer = cluster.replace(parts=()).with_devices(sum(part.devices for part in parts))
        return fewer.replace(parts=parts)
    except ClusterError:
        return None


def _cost(slower: Slower, quickest: str, winner: Candidate) -> str:
    """Say what slower devices cost, and whether they are worth having."""
    said = f"The {slower.devices:,} x {slower.name}"
    if slower.replaced is None:
        said += f" cannot be compared with {quickest}, on which no Plan fits"
    else:
        cost = max(0.0, winner.seconds / slower.replaced.seconds - 1)
        best = slower.replaced.degrees_text
        said += f" cost at least {cost:.1%}: if they were {quickest}, {best} would be that much faster"
    if slower.without is None:
        return f"{said}. Without them no Plan is legal and fits."
    pace = slower.without.seconds / winner.seconds - 1
    told = f"{abs(pace):.1%} {'slower' if pace >= 0 else 'faster'} ({slower.without.degrees_text})"
    return f"{said}. Without them, on {slower.without.devices:,} devices, it would be {told}."


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
