"""Find a schedule for given times under a memory limit.

Make one schedule by list scheduling: whenever a rank is free, a rule chooses its next action.

Micro-batches go through each stage in order, so a rank with v stages has at most 3v choices. A rank holds at
most `limit` activations. Its stage number c of v (from 0) starts a forward only while fewer than limit - (v -
1 - c) are held: the remaining places belong to later stages. So no limit of v or more ever stops the ranks
for good. Backwards and weight gradients can always go on. Among the micro-batches that wait to go forward,
the one farthest along finds only earlier stages' activations on its rank, and these leave it a place.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.spec.plan.schedules.blocks import blocks
from shoal.spec.plan.schedules.common_order import received_makespan
from shoal.spec.plan.schedules.kinds import FOUND, NAMES, make, require_numbers
from shoal.spec.plan.schedules.play import Precedence, Times, require_times_of
from shoal.spec.plan.schedules.schedule import Action, Schedule, Work, looped, v_shaped


@dataclass(frozen=True, slots=True)
class Rule:
    """The preferences of a free rank among the actions that it could begin.

    Attributes:
        order: Kinds of work, the preferred one first: F, G (I or B), W.
        in_rounds: Whether stages take turns in rounds of as many micro-batches as there are ranks; if not,
            the micro-batch nearest to its end goes first.
        patience: Share of the time of a W. A W that is not preferred begins only if no other action is known
            to become ready within this time.
        is_split: Whether the backward is in two halves, I and W.
    """

    order: str
    in_rounds: bool
    patience: float
    is_split: bool


RULES: tuple[Rule, ...] = (
    *(
        Rule(order, in_rounds, patience, True)
        for patience in (0.0, 1.0)
        for order in ("GFW", "GWF", "FGW")
        for in_rounds in (False, True)
    ),
    *(Rule(order, in_rounds, 0.0, False) for order in ("GF", "FG") for in_rounds in (False, True)),
)
"""The rules that `search` tries."""


def greedy(
    precedence: Precedence, durations: Sequence[float], virtual: int, limit: int, rule: Rule
) -> list[list[int]]:
    """Return, by rank, the numbers of its actions in the order that the rule gives.

    Args:
        precedence: Precedence of the actions.
        durations: Time of each action; if the rule does not split, the time of I is that of the whole
            backward.
        virtual: Stages on a rank.
        limit: Activations, in micro-batches of one stage, that a rank may hold; `virtual` or more.
        rule: Preferences of a rank.
    """
    microbatches, size = precedence.microbatches, precedence.size
    awaited, delay, placement = precedence.awaited, precedence.delay, precedence.placement
    ranks = max(placement) + 1
    local: list[list[int]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(placement):
        local[rank].append(stage)
    preference = {kind: place for place, kind in enumerate(rule.order)}
    forward, gradient = preference["F"], preference["G"]
    weight = preference.get("W", 2)
    stops: list[float] = [-1] * (3 * size)
    done = [[0] * len(placement) for _ in range(3)]  # by kind and stage
    pending: list[list[int]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    free: list[float] = [0] * ranks
    rows: list[list[int]] = [[] for _ in range(ranks)]
    events: list[tuple[float, int]] = [(0, rank) for rank in range(ranks)]

    def choose(rank: int, now: float) -> int | None:
        """Return the action to begin now, if any."""
        best: tuple[int, int, int, int] | None = None
        next_arrival = math.inf
        for turn, stage in enumerate(local[rank]):
            for kind in (0, 1):
                microbatch = done[kind][stage]
                if microbatch == microbatches or (kind == 1 and microbatch == done[0][stage]):
                    continue
                if kind == 0 and held[rank] >= limit - (virtual - 1 - turn):
                    continue
                number = kind * size + stage * microbatches + microbatch
                before = awaited[number]
                if before >= 0:
                    if stops[before] < 0:
                        continue
                    arrival = stops[before] + delay[number]
                    if arrival > now:
                        next_arrival = min(next_arrival, arrival)
                        continue
                toward_end = stage if kind else -stage
                if rule.in_rounds:
                    key = (microbatch // ranks, -toward_end, microbatch, number)
                else:
                    key = (toward_end, microbatch, 0, number)
                # Between kinds the rule decides first, then the key.
                entry = ((gradient if kind else forward), *key[:2], number)
                if best is None or entry < best:
                    best = entry
        if pending[rank] and (best is None or weight < best[0]):
            number = pending[rank][0]
            if best is not None or weight < 2 or next_arrival - now >= rule.patience * durations[number]:
                return number
        return None if best is None else best[3]

    while events:
        now, rank = heapq.heappop(events)
        if now < free[rank]:
            continue
        number = choose(rank, now)
        if number is None:
            continue
        kind, rest = divmod(number, size)
        stage = rest // microbatches
        stops[number] = free[rank] = now + durations[number]
        done[kind][stage] += 1
        rows[rank].append(number)
        heapq.heappush(events, (free[rank], rank))
        if kind == 0:
            held[rank] += 1
        elif kind == 1 and rule.is_split:
            pending[rank].append(number + size)
        else:
            held[rank] -= 1
            if kind == 2:
                pending[rank].remove(number)
        following = stage + (1 if kind == 0 else -1)
        if kind < 2 and 0 <= following < len(placement):
            arrival = free[rank] + delay[number + (following - stage) * microbatches]
            heapq.heappush(events, (arrival, placement[following]))
    return rows


def improve(
    precedence: Precedence,
    durations: Sequence[float],
    rows: list[list[int]],
    wholes: frozenset[int],
    limit: int,
    attempts: int,
) -> tuple[list[list[int]], float]:
    """Try changes on the critical path, and keep each that shortens the makespan.

    The critical path leads back from the last stop. It goes from each action to the one whose end it started
    after: the previous action on its rank, or the one that it waited for. Only a change on it can shorten the
    whole. The changes are: swap two neighbours, or move a W behind later work of its rank.

    Args:
        precedence: Precedence of the actions.
        durations: Time of each action.
        rows: By rank, the numbers of its actions.
        wholes: The numbers of I that are whole backwards.
        limit: Number of activations that a rank may hold.
        attempts: Number of changes to try.

    Returns:
        The rows and their makespan.
    """
    starts, stops, _ = precedence.play(rows, durations)
    makespan = max(stops)
    shorter = True
    while shorter and attempts > 0:
        shorter = False
        for rank, row in _changes(precedence, rows, starts, stops):
            if attempts == 0:
                break
            if peak(precedence, row, wholes) > limit:
                continue
            attempts -= 1
            changed = [*rows[:rank], row, *rows[rank + 1 :]]
            new_starts, new_stops, positions = precedence.play(changed, durations)
            if any(position < len(each) for position, each in zip(positions, changed, strict=True)):
                continue
            if (new_makespan := max(new_stops)) < makespan:
                rows, starts, stops, makespan = changed, new_starts, new_stops, new_makespan
                shorter = True
                break
    return rows, makespan


def peak(precedence: Precedence, row: Sequence[int], wholes: frozenset[int]) -> int:
    """Return the most activations that a rank holds at once, each until its B or W."""
    size = precedence.size
    held = most = 0
    for number in row:
        if number < size:
            held += 1
            most = max(most, held)
        elif number >= 2 * size or number in wholes:
            held -= 1
    return most


def _changes(
    precedence: Precedence, rows: list[list[int]], starts: Sequence[float], stops: Sequence[float]
) -> Iterator[tuple[int, list[int]]]:
    """Yield ranks with a changed row each, from the end of the critical path to its start."""
    places = {number: (rank, place) for rank, row in enumerate(rows) for place, number in enumerate(row)}
    number = max((row[-1] for row in rows), key=lambda each: stops[each])
    while True:
        rank, place = places[number]
        row = rows[rank]
        before = precedence.awaited[number]
        if place and stops[row[place - 1]] == starts[number]:
            previous = row[place - 1]
            if previous != before:
                yield rank, [*row[: place - 1], number, previous, *row[place + 1 :]]
            if previous >= 2 * precedence.size:
                for later in (place + 2, place + 4, place + 8, len(row)):
                    if place < later <= len(row):
                        yield rank, [*row[: place - 1], *row[place:later], previous, *row[later:]]
            number = previous
        elif before >= 0:
            number = before
        else:
            return


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
