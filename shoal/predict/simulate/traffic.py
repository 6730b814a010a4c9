"""Communication of one rank in a step, with algorithms, computed without playing the step.

The rank is the one whose forwards and backwards take longest. Its passages say which communications each has
(`stage_program.py`). Any schedule makes each passage equally often: with m micro-batches a stage has one
first forward, one last backward, and m - 1 others of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shoal.predict.cost import Alike, Costs, Layout
from shoal.predict.cost.collectives import algorithm_seconds, joining_level, message_bytes
from shoal.predict.simulate.programs import norm_of, stage_programs
from shoal.predict.simulate.stage_pass import Collective, Exposed, Piece, Start
from shoal.predict.simulate.stage_program import StageProgram
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Boundary, Groups, SettledPlan
from shoal.spec.plan.group import Group
from shoal.spec.plan.schedules import Work
from shoal.spec.timeline import Purpose
from shoal.spec.workload import Workload


@dataclass(frozen=True, slots=True)
class Communication:
    """One kind of communication.

    Attributes:
        purpose: Its purpose, one of `Purpose`.
        name: Name as in spans, without the number of a bucket or micro-batch: "all_reduce:bucket".
        ranks: Global ranks of the participants.
        level: The links that join the two participants farthest apart.
        algorithm: The quickest algorithm over these links; "send" from one rank to another.
        bytes: Mean bytes of the tensor.
        seconds: Mean seconds of one communication, hidden or not.
        times: Number of them in a step.
    """

    purpose: str
    name: str
    ranks: int
    level: str
    algorithm: str
    bytes: float
    seconds: float
    times: int

    @property
    def total(self) -> float:
        """Return the seconds of all of them in a step."""
        return self.seconds * self.times


@dataclass(frozen=True, slots=True)
class Traffic:
    """The communication of one rank.

    Attributes:
        rank: Global rank.
        exchanges: The communications, by seconds in a step, longest first.
    """

    rank: int
    exchanges: tuple[Communication, ...]

    def seconds(self, purpose: str) -> float:
        """Return the seconds in a step of all communications for a purpose."""
        return sum(each.total for each in self.exchanges if each.purpose == purpose)


def traffic_of(workload: Workload, cluster: Cluster, plan: SettledPlan, batch: int) -> Traffic:
    """Return what a rank communicates in a step.

    Args:
        workload: The training.
        cluster: The machines that it runs on.
        plan: The Plan that it runs under, with a fixed micro-batch.
        batch: Samples of a step.
    """
    every = [_busiest(each) for each in Costs(workload, cluster).alike(plan, batch)]
    rank, held, (costs, plan, batch, *_) = max(every, key=lambda each: each[2].batch * _seconds(each[1]))
    found: dict[tuple[str, int, str, str], Communication] = {}
    for each in _all(plan, costs, plan.microbatches_of(batch), held):
        key = each.name, each.ranks, each.level, each.algorithm
        found[key] = _together(found[key], each) if key in found else each
    longest_first = sorted(found.values(), key=lambda each: -each.total)
    return Traffic(rank, tuple(longest_first))


def _busiest(alike: Alike[Costs]) -> tuple[int, list[tuple[int, StageProgram]], Alike[Costs]]:
    """Return the rank whose forwards and backwards take longest, of ranks that are alike, and its stages."""
    costs, plan, batch, index, _ = alike
    by_place: dict[int, list[tuple[int, StageProgram]]] = {}
    placement, first = plan.placement if plan.pp > 1 else (0,), Groups.of(plan).dp.ranks(0)[index]
    for number, stage in enumerate(stage_programs(plan, costs, plan.microbatches_of(batch), first)):
        by_place.setdefault(placement[number], []).append((number, stage))
    place, held = max(by_place.items(), key=lambda each: _seconds(each[1]))
    return Groups.of(plan).pp.ranks(first)[place], held, alike


def _seconds(held: Iterable[tuple[int, StageProgram]]) -> float:
    """Return the seconds of a rank's forwards and backwards of one micro-batch."""
    return sum(stage.passage(work).seconds for _, stage in held for work in (Work.FORWARD, Work.BACKWARD))


def _together(one: Communication, other: Communication) -> Communication:
    times = one.times + other.times
    return replace(
        one,
        bytes=(one.bytes * one.times + other.bytes * other.times) / times,
        seconds=(one.total + other.total) / times,
        times=times,
    )


def _all(
    plan: SettledPlan, costs: Costs, count: int, held: Iterable[tuple[int, StageProgram]]
) -> Iterator[Communication]:
    for number, stage in held:
        for pieces, times in _pieces(plan, stage, count):
            for piece in pieces:
                if isinstance(piece, Exposed | Start) and len(piece.collective.group) > 1:
                    yield _communication(piece.collective, costs.cluster, times)
        yield from _messages(plan, costs, number, count)
    norm = norm_of(plan, costs, 0)
    if norm is not None:
        yield _communication(norm, costs.cluster, 1)


def _pieces(plan: SettledPlan, stage: StageProgram, count: int) -> Iterator[tuple[Iterable[Piece], int]]:
    """Yield the pieces that one stage does together, and how often it does them."""
    yield stage.begin_step(), 1
    yield stage.pieces(Work.FORWARD, is_first=True, is_last=False), 1
    yield stage.pieces(Work.BACKWARD, is_first=False, is_last=True), 1
    if count > 1:
        yield stage.pieces(Work.FORWARD, is_first=False, is_last=False), count - 1
        yield stage.pieces(Work.BACKWARD, is_first=False, is_last=False), count - 1
    if plan.pp > 1 and stage.keeps_sums:
        yield stage.data_parallel.reduce_all(), 1


def _messages(plan: SettledPlan, costs: Costs, number: int, count: int) -> Iterator[Communication]:
    """Yield the messages that one stage sends: hidden states and gradients."""
    for name, other in (("activation", number + 1), ("gradient", number - 1)):
        if not 0 <= other < plan.stages or plan.placement[other] == plan.placement[number]:
            continue
        here, there = plan.placement[number], plan.placement[other]
        level, nbytes = (
            joining_level(Boundary.of(plan, here, there), costs.cluster).name,
            message_bytes(Layout.of(plan), costs.workload),
        )
        seconds = costs.send(plan, here, there)
        yield Communication(Purpose.PIPELINE, name, 2, level, "send", nbytes, seconds, count)


def _communication(collective: Collective, cluster: Cluster, times: int) -> Communication:
    operation = collective.name.partition(":")[0]
    algorithm, seconds = "ring", collective.seconds
    if operation != "shift":  # neighbours of a ring send at once
        by_name = algorithm_seconds(operation, collective.bytes, Group.of(collective.group), cluster)
        algorithm = min(by_name, key=by_name.__getitem__)
        seconds = max(seconds, by_name[algorithm])
    return Communication(
        collective.purpose,
        re.sub(r" \d+$", "", collective.name),
        len(collective.group),
        _level_of(collective.group, cluster),
        algorithm,
        float(collective.bytes),
        seconds,
        times,
    )


def _level_of(ranks: tuple[int, ...], cluster: Cluster) -> str:
    """Return the innermost links that join all these ranks."""
    joins = (each for each in cluster.levels if min(ranks) // each.devices == max(ranks) // each.devices)
    return next(joins, cluster.levels[-1]).name
