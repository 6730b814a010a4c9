"""Make one schedule by list scheduling: whenever a rank is free, a rule chooses its next action.

Micro-batches go through each stage in order, so a rank with v stages has at most 3v choices. A rank holds at
most `limit` activations. Its stage number c of v (from 0) starts a forward only while fewer than limit - (v -
1 - c) are held: the remaining places belong to later stages. So no limit of v or more ever stops the ranks
for good. Backwards and weight gradients can always go on. Among the micro-batches that wait to go forward,
the one farthest along finds only earlier stages' activations on its rank, and these leave it a place.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.plan.schedules.precedence import Precedence


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
