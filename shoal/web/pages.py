"""The pages: their names, what they show, and the function that gives their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.web.collectives import collectives
from shoal.web.ddp import ddp
from shoal.web.live import MEASURES, live
from shoal.web.plans import plans, wall
from shoal.web.query import Query
from shoal.web.saves import saves
from shoal.web.schedules import schedules
from shoal.web.timeline import timeline

Values = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page.

    Attributes:
        name: Its name in addresses; also that of its script.
        title: Its heading.
        label: Its name in the navigation.
        lead: One sentence below the heading.
        data: Returns what it shows, from a run (None for a page without one) and a query.
        needs_run: Whether it shows a run.
        exported: The queries that a static export holds.
    """

    name: str
    title: str
    label: str
    lead: str
    data: Callable[[Any, Query], dict[str, Any]]
    needs_run: bool = False
    exported: Sequence[Values] = ({},)


def _grid(**values: Sequence[object]) -> list[dict[str, str]]:
    """Return every combination of values as a query."""
    queries: list[dict[str, str]] = [{}]
    for name, each in values.items():
        queries = [{**query, name: str(value)} for query in queries for value in each]
    return queries


PAGES: Mapping[str, Page] = {
    page.name: page
    for page in (
        Page(
            name="live",
            title="Run",
            label="Run",
            lead="Loss, speed, and where the time of a step goes, while the run is written.",
            data=live,
            needs_run=True,
            exported=({}, *_grid(measure=MEASURES)),
        ),
        Page(
            name="timeline",
            title="Timeline",
            label="Timeline",
            lead="What each rank did in a step, and what was predicted.",
            data=timeline,
            needs_run=True,
        ),
        Page(
            name="ddp",
            title="Life of a step",
            label="Life of a step",
            lead="A data-parallel step bucket by bucket: ready, complete, summed, hidden or waited for.",
            data=ddp,
            needs_run=True,
        ),
        Page(
            name="saves",
            title="Checkpoints and failures",
            label="Saves",
            lead="What was saved, what a save cost, when ranks began anew, and what the logs say.",
            data=saves,
            needs_run=True,
        ),
        Page(
            name="schedules",
            title="Schedules",
            label="Schedules",
            lead="All pipeline schedules side by side, from the tables that the runtime executes.",
            data=schedules,
            exported=({}, *_grid(pp=(2, 4, 8), microbatches=(4, 8, 16))),
        ),
        Page(
            name="collectives",
            title="Collectives",
            label="Collectives",
            lead="Each algorithm step by step, and what the alpha-beta model says of it.",
            data=collectives,
            exported=(
                {},
                *_grid(
                    collective=("all_reduce",),
                    algorithm=(
                        *("ring", "tree", "double-tree", "halving-doubling", "two-shot"),
                        *("hierarchical", "in-network"),
                    ),
                    hosts=(2, 4, 6, 8),
                    per_host=(1, 2),
                ),
            ),
        ),
        Page(
            name="plans",
            title="Plans",
            label="Plans",
            lead="The best Plan for each set of degrees, and what each degree buys.",
            data=plans,
        ),
        Page(
            name="wall",
            title="Communication wall",
            label="Wall",
            lead="The step, and its share of communication, against the number of devices.",
            data=wall,
        ),
    )
}
"""In the order of the navigation."""
