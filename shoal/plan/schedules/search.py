"""Find a schedule for given times under a memory limit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.plan.schedules.action import Action, Work
from shoal.plan.schedules.blocks import blocks
from shoal.plan.schedules.found import FOUND
from shoal.plan.schedules.greedy import RULES, Rule, greedy
from shoal.plan.schedules.improve import improve, peak
from shoal.plan.schedules.in_order import received_makespan
from shoal.plan.schedules.kinds import NAMES, make, require_numbers
from shoal.plan.schedules.play import Times, require_times_of
from shoal.plan.schedules.precedence import Precedence
from shoal.plan.schedules.schedule import Schedule, looped, v_shaped

_GREEDY_ACTIONS = 120_000
"""Actions that all list schedules of a search may have together."""
_BLOCKS = 4
"""Number of building blocks that are tried among those with equal peaks."""
_IMPROVED_ACTIONS = 1_200_000
"""Number of actions that may be played in total to improve the best candidates."""
_IMPROVED = 3
"""Number of the best candidates that are improved."""
_EQUAL = 1e-12
"""Share by which rounding may tell equal makespans apart."""
_RECEIVED_ACTIONS = 20_000
"""Number of actions that may be played in total to tell tables with equal makespans apart."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A table as numbers.

    Attributes:
        precedence: Precedence of its actions.
        durations: Time of each action.
        rows: By rank, the numbers of its actions.
        wholes: The numbers of I that are whole backwards.
        makespan: Time that it takes.
    """

    precedence: Precedence
    durations: list[float]
    rows: list[list[int]]
    wholes: frozenset[int]
    makespan: float

    @property
    def peak(self) -> int:
        return max(peak(self.precedence, row, self.wholes) for row in self.rows)


def search(
    times: Times,
    ranks: int,
    virtual: int,
    microbatches: int,
    limit: int | None = None,
    placement: tuple[int, ...] | None = None,
) -> Schedule:
    """Return a schedule with a short makespan for given times; no rank holds more than `limit` activations.

    The candidates are list schedules of several rules and placements, and the named schedules within the
    limit, as they are and with every backward in two halves. The best are improved by local changes. So the
    result is never worse than a named schedule with an allowed placement. Among equal makespans, the one that
    is shorter as ranks receive counts. Equal arguments give an equal schedule on every machine.

    Args:
        times: Times of all ranks x virtual stages.
        ranks: Pipeline-parallel degree.
        virtual: Stages on a rank.
        microbatches: Micro-batches in a step.
        limit: Activations that a rank may hold, each until its B or W, in micro-batches of one stage; None
            for no limit.
        placement: `looped(ranks, virtual)`, or with two stages on a rank `v_shaped(ranks)`; None for
            whichever gives the shorter schedule.

    Raises:
        PlanError: A number is not positive, the times are for another number of stages, the limit is less
            than one micro-batch holds in all stages of a rank, or the placement is another one.
    """
    require_numbers(FOUND, ranks, virtual, microbatches)
    require_times_of(times, ranks * virtual)
    if limit is not None and limit < virtual:
        raise PlanError(
            f"a schedule with at most {limit} activations on a rank was asked for, and a rank has {virtual} "
            "stages",
            possible=f"{virtual} or more: one micro-batch alone holds {virtual}",
            change=f"give a limit of {virtual} or more",
        )
    most = virtual * microbatches if limit is None else min(limit, virtual * microbatches)
    placements = _placements(ranks, virtual, placement)
    bound = _least_makespan(times, placements, ranks, microbatches)

    def received(candidate: _Candidate) -> float:
        return received_makespan(_schedule(candidate, ranks, virtual, microbatches), times)

    candidates: list[_Candidate] = []
    for candidate in _candidates(times, placements, ranks, virtual, microbatches, most):
        candidates.append(candidate)
        if candidate.makespan <= bound and received(candidate) <= bound * (1 + _EQUAL):
            break
    candidates.sort(key=lambda each: (each.makespan, each.peak))
    if candidates[0].makespan > bound:
        actions = sum(map(len, candidates[0].rows))
        attempts = _IMPROVED_ACTIONS // actions // _IMPROVED
        improved = [_improved(each, most, attempts) for each in candidates[:_IMPROVED]]
        candidates = [*improved, *candidates[_IMPROVED:]]
    least = min(each.makespan for each in candidates)
    equal = [each for each in candidates if each.makespan <= least * (1 + _EQUAL)]
    if len(equal) > 1:
        equal.sort(key=lambda each: each.peak)
        allowed = max(1, _RECEIVED_ACTIONS // sum(map(len, equal[0].rows)))
        equal = sorted(equal[:allowed], key=received)
    return _schedule(equal[0], ranks, virtual, microbatches)


def _placements(ranks: int, virtual: int, asked: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    """Return the placements to try: the one that is asked for, or all known ones."""
    known = [looped(ranks, virtual)] + ([v_shaped(ranks)] if virtual == 2 else [])
    if asked is None:
        return known
    if asked not in known:
        raise PlanError(
            f"a schedule of {ranks} ranks with {virtual} stages each was asked for on the placement {asked}",
            possible=" or ".join(map(str, known)),
            change="give one of these placements, or leave it out",
        )
    return [asked]


def _candidates(
    times: Times,
    placements: Sequence[tuple[int, ...]],
    ranks: int,
    virtual: int,
    microbatches: int,
    limit: int,
) -> Iterator[_Candidate]:
    """Yield the named schedules within the limit, then as many list schedules as there is time for."""
    precedences = {
        placement: Precedence.of(placement, microbatches, times.transfer) for placement in placements
    }
    if virtual == 2 and v_shaped(ranks) in precedences:
        yield from _of_blocks(times, precedences[v_shaped(ranks)], ranks, limit)
    for name in NAMES:
        try:
            schedule = make(name, ranks, virtual, microbatches)
        except PlanError:
            continue
        if schedule.placement not in precedences:
            continue
        for split in (False, True):
            candidate = _of_table(times, precedences[schedule.placement], schedule, split)
            if candidate.peak <= limit:
                yield candidate
    allowed = max(_GREEDY_ACTIONS // (3 * ranks * virtual * microbatches), 4)
    limits = sorted({limit, min(limit, ranks * virtual), min(limit, (ranks + 1) * virtual)}, reverse=True)
    tried = [
        (precedence, rule, most) for most in limits for rule in RULES for precedence in precedences.values()
    ]
    if len(tried) > allowed:  # an even sample of all
        tried = [tried[index * len(tried) // allowed] for index in range(allowed)]
    # Every limit allows one micro-batch in flight.
    for precedence, rule, most in [*tried, (next(iter(precedences.values())), RULES[0], virtual)]:
        yield _by_rule(times, precedence, virtual, most, rule)


def _of_table(times: Times, precedence: Precedence, schedule: Schedule, split: bool) -> _Candidate:
    """Return a named schedule, as it is or with every backward in two: the gradient then leaves earlier."""
    rows: list[list[int]] = []
    wholes = set()
    for actions in schedule.table:
        row: list[int] = []
        for action in actions:
            number = precedence.number(action)
            row.append(number)
            if action.work is Work.BACKWARD and split:
                row.append(number + precedence.size)
            elif action.work is Work.BACKWARD:
                wholes.add(number)
        rows.append(row)
    return _played(times, precedence, rows, frozenset(wholes))


def _of_blocks(times: Times, precedence: Precedence, ranks: int, limit: int) -> Iterator[_Candidate]:
    """Yield the quickest building blocks of each peak within the limit; large pipelines try fewer peaks."""
    found: Counter[int] = Counter()
    allowed = max(_GREEDY_ACTIONS // (3 * precedence.size), _BLOCKS)
    for block in sorted(blocks(ranks), key=lambda block: (-block.least_peak, block.length)):
        if block.least_peak > limit or found[block.least_peak] == _BLOCKS or found.total() == allowed:
            continue
        rows = block.rows(precedence)
        if max(peak(precedence, row, frozenset()) for row in rows) <= limit:
            yield _played(times, precedence, rows, frozenset())
            found[block.least_peak] += 1


def _by_rule(times: Times, precedence: Precedence, virtual: int, limit: int, rule: Rule) -> _Candidate:
    size = precedence.size
    wholes = frozenset() if rule.is_split else frozenset(range(size, 2 * size))
    rows = greedy(precedence, _durations(times, precedence, wholes), virtual, limit, rule)
    return _played(times, precedence, rows, wholes)


def _played(
    times: Times, precedence: Precedence, rows: list[list[int]], wholes: frozenset[int]
) -> _Candidate:
    durations = _durations(times, precedence, wholes)
    _, stops, _ = precedence.play(rows, durations)
    return _Candidate(precedence, durations, rows, wholes, max(stops))


def _durations(times: Times, precedence: Precedence, wholes: frozenset[int]) -> list[float]:
    durations = precedence.durations(times.forward, times.input, times.weight)
    for number in wholes:
        durations[number] += durations[number + precedence.size]
    return durations


def _improved(candidate: _Candidate, limit: int, attempts: int) -> _Candidate:
    precedence, durations, wholes = candidate.precedence, candidate.durations, candidate.wholes
    rows, makespan = improve(precedence, durations, candidate.rows, wholes, limit, attempts)
    return _Candidate(precedence, durations, rows, wholes, makespan)


def _least_makespan(
    times: Times, placements: Sequence[tuple[int, ...]], ranks: int, microbatches: int
) -> float:
    """Return a lower bound on any makespan: a rank's work, after the first micro-batch has come to it."""
    bounds = []
    for placement in placements:
        longest = 0.0
        for rank in range(ranks):
            stages = [stage for stage, holder in enumerate(placement) if holder == rank]
            first = stages[0]
            work = math.fsum(times.forward[s] + times.input[s] + times.weight[s] for s in stages)
            head = math.fsum(times.forward[:first]) + math.fsum(times.transfer[:first])
            longest = max(longest, head + microbatches * work)
        bounds.append(longest)
    return min(bounds)


def _schedule(candidate: _Candidate, ranks: int, virtual: int, microbatches: int) -> Schedule:
    precedence = candidate.precedence

    def action(number: int) -> Action:
        made = precedence.action(number)
        return Action(Work.BACKWARD, made.stage, made.microbatch) if number in candidate.wholes else made

    return Schedule(
        name=FOUND,
        ranks=ranks,
        virtual=virtual,
        microbatches=microbatches,
        placement=precedence.placement,
        table=tuple(tuple(map(action, row)) for row in candidate.rows),
    )
