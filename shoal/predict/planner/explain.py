"""Explain the best Plan: what bounds it, the effect of each degree, what loses, and what to change.

Every figure is one of a Plan that was played. With one degree at half or twice its value, the best Plan is
searched among those in which a factor of two moves between that degree and one other. On a machine with one
property doubled the best Plan is looked for among the Plans that were played before and their neighbours: so
what it gains is gained at least. No figure is a rule of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.predict.cost import Layout
from shoal.predict.cost.outlook import Band, band_between
from shoal.predict.cost.time import compute_parts
from shoal.predict.planner.candidate import Candidate
from shoal.predict.planner.heterogeneous import Unequal, proportional, unequal, with_shares
from shoal.predict.planner.offloaded import unknown_rates
from shoal.predict.planner.refine import changed, half_and_twice, moved, neighbours, simplest
from shoal.predict.planner.search import LOOSE, Search
from shoal.predict.planner.space import Degrees
from shoal.predict.planner.tree import Fitted
from shoal.predict.simulate import Traffic, traffic_of
from shoal.spec.cluster import Cluster, devices_of
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import Block
from shoal.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Size:
    """A Plan with one size changed.

    Attributes:
        setting: "microbatch" or "bucket".
        plan: The Plan.
        slower: Its played step's time relative to the chosen one's, minus 1.
        memory: Bytes of the rank that holds most.
        room: Bytes of its device that a Plan may fill.
        fits: Whether this memory fits.
    """

    setting: str
    plan: SettledPlan
    slower: float
    memory: float
    room: float
    fits: bool


def sizes_of(search: Search, winner: Candidate) -> Iterator[Size]:
    """Yield half and twice each size, if that is a legal Plan.

    Args:
        search: The search that found the winner.
        winner: The Plan whose sizes change.
    """
    exchanges = winner.plan.dp * winner.plan.cp > 1 and not winner.plan.sharding.cuts_weights
    for setting in ("microbatch", *(["bucket"] if exchanges else [])):
        value = getattr(winner.plan, setting)
        for other in half_and_twice(value):
            plan = changed(winner.plan, winner.batch, **{setting: other})
            if plan is not None and winner.plan.shared is not None and plan.shared is None:
                plan = proportional(search, plan) or plan
            if plan is not None:
                memory = search.shared.fullest(plan)
                slower = search.shared.played(plan) / winner.seconds - 1
                room = search.room / memory.tightness
                yield Size(setting, plan, slower, memory.peak, room, memory.required <= search.room)


_PART_NAMES = {
    "compute": "compute",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "expert-parallel communication",
    "bubble": "the pipeline's bubble",
    "pipeline": "messages between stages",
    "data": "data-parallel communication",
    "optimizer": "the optimizer",
    "control": "waiting for the slowest rank",
}
_COMPUTE_NAMES = {
    "ideal": "FLOP at the device's peak",
    "products": "products below the peak",
    "attention": "attention below the peak",
    "passes": "passes over memory",
    "recompute": "recompute",
    "host": "waits for the host",
    "imbalance": "stages longer than the mean",
}
_LEAST = 0.005
"""The least share of a step that a sentence names."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The best Plan with one degree at another value.

    Attributes:
        degree: Name of the degree.
        value: The other value.
        best: The best such Plan; None if none fits the memory.
    """

    degree: str
    value: int
    best: Candidate | None


@dataclass(frozen=True, slots=True)
class Change:
    """The best Plan that is known on a changed machine.

    Attributes:
        name: The doubled property.
        best: The Plan, with its seconds there.
    """

    name: str
    best: Candidate


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons why the best Plan is the best.

    Attributes:
        winner: The best Plan.
        room: Bytes of a device's memory that Plans may fill.
        unlimited: The best Plan if memory had no limit.
        neighbours: For each degree, the best Plans with half and with twice its value.
        other: The best of the shown Plans of another kind: with other degrees above 1; None if there is none.
        shown: Number of Plans that were shown.
        changes: Changes of the machine, the one that gains most first.
        sizes: The Plan with half and twice the micro-batch, and with half and twice the buckets.
        between: The band of one step beside another on these machines; None if none were compared.
        simple: The simplest of the played Plans that are as quick within that band; the best Plan, if none of
            them is simpler.
        alike: Number of other shown Plans that are as quick within that band.
        coarser: The best known Plan with products in fp8; None where it is not quicker, or is asked for.
        compute: What its compute is made of: see `shoal.predict.cost.time.step`; and "imbalance", by which
            the rank that waits least computes longer than the mean one.
        traffic: The communication of one rank.
        unequal: What slower devices cost; None where all are equal.
        resident: The best Plan without `offload`; None if none fits.
        unknown: Rates of the machine that are not known, so that some `offload` was not tried.
    """

    winner: Candidate
    room: float
    unlimited: Candidate
    neighbours: tuple[Neighbour, ...]
    other: Candidate | None
    shown: int
    changes: tuple[Change, ...]
    sizes: tuple[Size, ...]
    between: Band | None
    simple: Candidate
    alike: int
    coarser: Candidate | None
    compute: Mapping[str, float]
    traffic: Traffic
    unequal: Unequal | None = None
    resident: Candidate | None = None
    unknown: tuple[str, ...] = ()

    def sentences(self) -> Iterator[str]:
        """Yield the explanation, in sentences."""
        yield _bounds(self)
        yield _compute_of(self)
        yield _memory(self)
        if self.winner.plan.tiers.moved:
            yield _offload(self)
        if self.unequal is not None:
            yield from self.unequal.sentences(self.winner)
        yield from _degrees(self)
        yield from _sizes(self)
        yield _other_kind(self)
        if self.between is not None:
            yield _alike(self, self.between)
        if self.coarser is not None:
            gain = _faster(self.winner, self.coarser)
            yield f"With products in 8 bits (precision=fp8), {self.coarser.layout} is {gain} faster."
        yield from _tried_changes(self)


def _bounds(told: Explanation) -> str:
    winner = told.winner
    named = {_PART_NAMES[name]: seconds / winner.seconds for name, seconds in winner.parts.items()}
    (first, most), *rest = sorted(named.items(), key=lambda item: -item[1])
    others = [f"{name} {share:.1%}" for name, share in rest if share >= _LEAST]
    after = f"; next are {_joined(others)}" if others else ""
    return f"{first[0].upper()}{first[1:]} takes the largest share of the step, {most:.1%}{after}."


def _compute_of(told: Explanation) -> str:
    shares = {_COMPUTE_NAMES[name]: part / told.winner.seconds for name, part in told.compute.items()}
    listed = sorted(((name, share) for name, share in shares.items() if share >= _LEAST), key=lambda x: -x[1])
    return f"Compute is {_joined([f'{name} {share:.1%}' for name, share in listed])} of the step."


def _memory(told: Explanation) -> str:
    winner, free = told.winner, told.unlimited
    of_device = told.room / winner.memory.tightness
    held, room = (format_bytes(round(each)) for each in (winner.memory.peak, of_device))
    held = f"A device holds at most {held} of {room}"
    if free.plan == winner.plan or free.seconds > (1 - _LEAST) * winner.seconds:
        return f"{held}; more memory would gain nothing."
    untried = (
        f" Not every offload was tried: {_joined([*told.unknown])} is not known." if told.unknown else ""
    )
    return f"{held}. Without a limit, {free.layout} would be {_faster(winner, free)} faster.{untried}"


def _offload(told: Explanation) -> str:
    moved = f"State that is not on the device: {told.winner.plan.offload}."
    if told.resident is None:
        return f"{moved} Without offload no Plan fits in memory."
    slower = _faster(told.resident, told.winner)
    return f"{moved} The best Plan without offload is {told.resident.layout}: it is {slower} slower."


def _degrees(told: Explanation) -> Iterator[str]:
    for name in dict.fromkeys(each.degree for each in told.neighbours):
        said = []
        for each in told.neighbours:
            if each.degree != name:
                continue
            if each.best is None:
                said.append(f"with {each.value} no Plan fits in memory")
                continue
            pace = _pace(each.best.seconds / told.winner.seconds - 1)
            said.append(f"with {each.value} the best Plan is {pace} ({each.best.degrees_text})")
        yield f"{name}={getattr(told.winner.degrees, name)}: {', '.join(said)}."


def _sizes(told: Explanation) -> Iterator[str]:
    for name in dict.fromkeys(each.setting for each in told.sizes):
        said = [_size(each) for each in told.sizes if each.setting == name]
        yield f"{name}={_size_text(name, told.winner.plan)}: {', '.join(said)}."


def _size(size: Size) -> str:
    value = _size_text(size.setting, size.plan)
    if not size.fits:
        over = format_bytes(round(size.memory - size.room))
        return f"with {value} the same Plan needs {over} too much memory"
    if abs(size.slower) < 0.0005:
        return f"with {value} the same Plan takes as long"
    pace = "slower" if size.slower > 0 else "faster"
    return f"with {value} the same Plan is {abs(size.slower):.1%} {pace}"


def _other_kind(told: Explanation) -> str:
    other, winner = told.other, told.winner
    if other is None:
        return f"The {told.shown} best Plans are all of one kind: they use the same kinds of parallelism."
    name, more = _most_added(winner, other)
    pace = _pace(other.seconds / winner.seconds - 1)
    why = f", because {_PART_NAMES[name]} takes {format_seconds(more)} more" if more > 0 else ""
    return f"The best Plan of another kind is {other.layout}: it is {pace}{why}."


def _alike(told: Explanation, between: Band) -> str:
    """Say which Plans the model does not tell from the best one."""
    said = (
        f"The model may mistake the order of Plans that are less than {1 / between.low - 1:.0%} apart: "
        f"9 in 10 of {between.rows} measured steps erred less beside each other."
    )
    if told.shown > 1:
        verb = "is" if told.alike == 1 else "are"
        said += f" {told.alike} of {told.shown - 1} other shown Plans {verb} that close."
    if told.simple.plan == told.winner.plan:
        return f"{said} No simpler Plan that was played is."
    pace = _pace(told.simple.seconds / told.winner.seconds - 1)
    return f"{said} The simplest that is so close is {told.simple.layout}: it is {pace}."


def _tried_changes(told: Explanation) -> Iterator[str]:
    idle = [each.name for each in told.changes if each.best.seconds > (1 - _LEAST) * told.winner.seconds]
    for change in told.changes:
        if change.name in idle:
            continue
        gain = _faster(told.winner, change.best)
        again = "under the same Plan"
        if change.best.plan != told.winner.plan:
            again = f"with {change.best.degrees_text},shard={change.best.plan.shard}"
        yield f"Twice {change.name}: at least {gain} faster, {again}."
    if idle:
        yield f"Twice {_joined(idle)} gains nothing with the Plans that were played."


def _most_added(winner: Candidate, other: Candidate) -> tuple[str, float]:
    """Return the part of a step to which another Plan adds most time, and how much."""
    mine, theirs = winner.parts, other.parts
    name = max(theirs, key=lambda part: theirs[part] - mine.get(part, 0.0))
    return name, theirs[name] - mine.get(name, 0.0)


def _faster(winner: Candidate, other: Candidate) -> str:
    return f"{winner.seconds / other.seconds - 1:.1%}"


def _size_text(setting: str, plan: SettledPlan) -> str:
    """Return a size as a Plan writes it."""
    return format_bytes(plan.bucket) if setting == "bucket" else str(plan.microbatch)


def _pace(slower: float) -> str:
    return f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


_MOST_PLAYED = 6
"""Plans that are played on a changed machine, those of the least bounds."""


def explain(
    search: Search, winner: Candidate, shown: Sequence[Candidate], resident: Candidate | None
) -> Explanation:
    """Explain the best Plan of a search, by comparison with others.

    Args:
        search: The search that found it.
        winner: The best Plan.
        shown: All Plans that are shown, best first.
        resident: The best Plan without `offload`; None if none fits.
    """
    unlimited = _roomier(search, winner, math.inf)
    kind = _kind(winner.degrees)
    between = band_between(winner.cluster)
    within = 1 / between.low - 1 if between is not None else 0.0
    return Explanation(
        winner,
        search.room,
        unlimited,
        tuple(_neighbours(search, winner)),
        next((each for each in shown if _kind(each.degrees) != kind), None),
        len(shown),
        tuple(_changes(search, winner)),
        tuple(sizes_of(search, winner)),
        between,
        search.candidate(simplest(search, Fitted(winner.plan, winner.memory, winner.seconds), within)),
        sum(each.seconds < (1 + within) * winner.seconds for each in shown) - 1,
        _coarser(search, winner),
        _compute(search, winner),
        traffic_of(winner.workload, winner.cluster, winner.plan, winner.batch),
        unequal(search, winner),
        resident,
        unknown_rates(search.cluster),
    )


def _compute(search: Search, winner: Candidate) -> Mapping[str, float]:
    """Return what the compute of the rank that waits least is made of, in seconds of a step."""
    alike = search.shared.costs.alike(winner.plan, winner.batch)
    costs, plan, batch, *_ = max(alike, key=lambda each: each.costs.least(each.plan, each.batch))
    count = plan.microbatches_of(batch)
    held: list[list[Block]] = [[] for _ in range(plan.pp)]
    placement = plan.placement if plan.pp > 1 else (0,)
    for place, blocks in zip(placement, costs.blocks_of(plan, count), strict=True):
        held[place] += blocks
    each = [
        compute_parts(costs.at(plan, place), blocks, Layout.of(plan)) for place, blocks in enumerate(held)
    ]
    totals = [sum(parts.values()) for parts in each]
    busiest, mean = max(range(len(each)), key=totals.__getitem__), sum(totals) / len(totals)
    parts = {name: count * seconds for name, seconds in each[busiest].items()}
    excess = totals[busiest] - mean
    if excess > 0:
        share = 1 - excess / totals[busiest]
        parts = {name: seconds * share for name, seconds in parts.items()} | {"imbalance": count * excess}
    return parts


def _coarser(search: Search, winner: Candidate) -> Candidate | None:
    """Return the best of the Plans that were played with precision=fp8, which splits no products."""
    if search.precision is not None or any("fp8" not in device.peak for device in devices_of(search.cluster)):
        return None
    shared, batch = search.shared, search.batch
    pool = (winner.plan, *shared.known, *moved(shared.space, winner.plan, "tp"))
    plans = {plan.replace(precision="fp8", split=plan.split) for plan in pool if plan.tp == 1}
    bounded = sorted((shared.costs.least(plan, batch), str(plan), plan) for plan in plans)
    fitting = [
        plan for _, _, plan in bounded[: 4 * _MOST_PLAYED] if shared.fullest(plan).required <= search.room
    ]
    best = min(fitting[:_MOST_PLAYED], key=shared.played, default=None)
    if best is None or shared.played(best) >= winner.seconds:
        return None
    return search.candidate(Fitted(best, shared.fullest(best), shared.played(best)))


def _neighbours(search: Search, winner: Candidate) -> Iterator[Neighbour]:
    space = search.shared.space
    for name in Degrees._fields:
        value = getattr(winner.degrees, name)
        near = {Degrees.of(plan) for plan in moved(space, winner.plan, name)}
        for other in half_and_twice(value):
            wanted = {degrees for degrees in near if getattr(degrees, name) == other}
            if wanted:
                ranking = search.best(1, wanted.__contains__, slack=LOOSE)
                found = [*ranking.found, *with_shares(search, 1, wanted.__contains__)]
                if ranking.legal:
                    best = min(found, key=lambda each: each.seconds, default=None)
                    yield Neighbour(name, other, None if best is None else search.candidate(best))


def _changes(search: Search, winner: Candidate) -> list[Change]:
    """Return what each doubled property gains, most first."""
    space, shared = search.shared.space, search.shared
    # A split by the cost of every block is slow to find, and hardly better than one by their mean.
    near = (plan for plan in neighbours(space, winner.plan) if plan.pp == 1 or plan.split != "cost")
    pool = dict.fromkeys((winner.plan, *shared.known, *near))
    fitting = [plan for plan in pool if shared.fullest(plan).required <= search.room]
    machines = dict(_doubled(search.cluster))
    asked = [(cluster, fitting) for cluster in machines.values()]
    found = search.each(_best_on, asked, [bool(number % 2) for number in range(len(asked))])
    changes = [
        Change(name, search.on(cluster).candidate(best))
        for (name, cluster), best in zip(machines.items(), found, strict=True)
    ]
    changes.append(Change("the memory", _roomier(search, winner, 2 * search.room)))
    return sorted(changes, key=lambda change: change.best.seconds)


def _roomier(search: Search, winner: Candidate, room: float) -> Candidate:
    """Return the best Plan with more memory, of those with degrees of half to twice the winner's."""

    def accept(degrees: Degrees) -> bool:
        pairs = zip(degrees, winner.degrees, strict=True)
        return all(each <= 2 * other and other <= 2 * each for each, other in pairs)

    best = search.resident.best(1, accept, room, LOOSE).best
    return winner if best is None or best.seconds >= winner.seconds else best


def _best_on(search: Search, asked: tuple[Cluster, Sequence[SettledPlan]]) -> Fitted:
    """Return the best on another machine with equal memory: of the first Plan and those of least bounds."""
    cluster, plans = asked
    other = search.on(cluster).shared
    bounded = sorted((other.costs.least(plan, search.batch), str(plan), plan) for plan in plans[1:])
    best, seconds = plans[0], other.played(plans[0])
    for least, _, plan in bounded[:_MOST_PLAYED]:
        if least < (1 - LOOSE) * seconds and other.played(plan) < seconds:
            best, seconds = plan, other.played(plan)
    return Fitted(best, search.shared.fullest(best), seconds)


def _doubled(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield the machine with one property doubled, except memory, which a search takes directly."""
    inner, *outer = cluster.levels
    twice = [replace(level, bandwidth=2 * level.bandwidth) for level in outer]
    if outer:
        yield "the network's rate", cluster.replace(levels=(inner, *twice))
    if inner.devices > 1:
        faster = replace(inner, bandwidth=2 * inner.bandwidth)
        yield "the rate of the links in a node", cluster.replace(levels=(faster, *outer))
    is_whole = all(level.devices % (2 * inner.devices) == 0 for level in outer)
    if outer and is_whole and not (cluster.failed or cluster.spare):
        wider = replace(inner, devices=2 * inner.devices)
        yield "the devices in a node", cluster.replace(levels=(wider, *outer))
    yield (
        "the FLOP/s",
        cluster.with_each_device(
            lambda device: replace(device, peak={name: 2 * rate for name, rate in device.peak.items()})
        ),
    )
    yield (
        "the memory's rate",
        cluster.with_each_device(lambda device: replace(device, bandwidth=2 * device.bandwidth)),
    )


def _kind(degrees: Degrees) -> frozenset[str]:
    """Return the techniques that a layout uses beside data parallelism."""
    return frozenset(name for name in Degrees._fields if name != "dp" and getattr(degrees, name) > 1)
