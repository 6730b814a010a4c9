"""The page of schedules: all pipeline schedules side by side, from the tables that the runtime executes."""

from __future__ import annotations

from typing import Any

from shoal.errors import PlanError
from shoal.spec.plan.schedules import FOUND, NAMES, Played, Times, kind_of, make, play, search
from shoal.web.query import Query

_MOST_RANKS = 16
_MOST_MICROBATCHES = 64
_MOST_ACTIONS = 2000
"""Most actions of one schedule."""


def schedules(run: object, query: Query) -> dict[str, Any]:
    """Return every schedule that is possible, played, and why the others are not.

    The query has "pp", "microbatches", and the times "forward", "input", "weight" and "transfer".
    """
    ranks = query.integer("pp", 4, 2, _MOST_RANKS)
    microbatches = query.integer("microbatches", 8, 1, _MOST_MICROBATCHES)
    times = {
        name: query.number(name, default, 0.0, 100.0)
        for name, default in (("forward", 1.0), ("input", 1.0), ("weight", 1.0), ("transfer", 0.0))
    }
    found, refused = [], []
    for name in (*NAMES, FOUND):
        try:
            found.append(_summary(_played(name, ranks, microbatches, times)))
        except PlanError as error:
            refused.append({"name": name, "reason": error.given})
    return {
        "pp": ranks,
        "microbatches": microbatches,
        "times": times,
        "schedules": found,
        "left_out": refused,
    }


def _played(name: str, ranks: int, microbatches: int, times: dict[str, float]) -> Played:
    virtual = kind_of(name).usual_virtual
    actions = 3 * ranks * virtual * microbatches
    if actions > _MOST_ACTIONS:
        raise PlanError(
            f"{name} would have up to {actions} actions, more than this page draws",
            possible="fewer ranks or micro-batches",
            change="choose fewer",
        )
    forward, input, weight = (times[each] / virtual for each in ("forward", "input", "weight"))
    equal = Times.equal(ranks * virtual, forward, input, weight, times["transfer"])
    if name == FOUND:
        return play(search(equal, ranks, virtual, microbatches, None), equal)
    return play(make(name, ranks, virtual, microbatches), equal)


def _summary(played: Played) -> dict[str, Any]:
    schedule = played.schedule
    return {
        "name": schedule.name,
        "virtual": schedule.virtual,
        "makespan": played.makespan,
        "bubble": played.bubble,
        "bubble_over_ideal": played.bubble_over_ideal,
        "peaks": [peak / schedule.virtual for peak in played.peaks],
        "ideal": max(map(played.busy, range(schedule.ranks))),
        "rows": [
            [
                [action.work.value, stages.index(action.stage), action.microbatch, start, stop]
                for action, start, stop in zip(schedule.table[rank], starts, stops, strict=True)
            ]
            for rank, (starts, stops) in enumerate(zip(played.starts, played.stops, strict=True))
            for stages in [list(schedule.stages_of(rank))]
        ],
    }
