"""An Explanation of the best Plan: figures of Plans that were played, and sentences about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal.cost.outlook import Band
from shoal.plan import SettledPlan
from shoal.planner.candidate import Candidate
from shoal.planner.sizes import Size
from shoal.planner.unequal import Unequal
from shoal.simulate import Traffic
from shoal.units import format_bytes, format_seconds

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
        compute: What its compute is made of: see `shoal.cost.time.losses`; and "imbalance", by which the rank
            that waits least computes longer than the mean one.
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
        yield _compute(self)
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
        yield from _changes(self)


def _bounds(told: Explanation) -> str:
    winner = told.winner
    named = {_PART_NAMES[name]: seconds / winner.seconds for name, seconds in winner.parts.items()}
    (first, most), *rest = sorted(named.items(), key=lambda item: -item[1])
    others = [f"{name} {share:.1%}" for name, share in rest if share >= _LEAST]
    after = f"; next are {_joined(others)}" if others else ""
    return f"{first[0].upper()}{first[1:]} takes the largest share of the step, {most:.1%}{after}."


def _compute(told: Explanation) -> str:
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


def _changes(told: Explanation) -> Iterator[str]:
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
