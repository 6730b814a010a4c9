"""The pages: their names, what they show, and the function that gives their data.

The page of collectives: each algorithm step by step, and what the cost model says of it.

The cost is linear: seconds are the sum over terms of `alpha * steps + beta * path * bytes`, each with the
alpha and beta of its level. The page gets the terms, so that its sliders for bytes, alpha and beta need no
new answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shoal.predict.cost import Algorithm, find_algorithm
from shoal.predict.cost.collectives import MOVED, Played, motion
from shoal.predict.cost.time import workload_on
from shoal.predict.planner import Candidate, choose, scale
from shoal.spec.cluster import PRESETS, Cluster
from shoal.spec.workload import shape, shape_names
from shoal.web.live import MEASURES, ddp, live
from shoal.web.query import Query
from shoal.web.saves import saves
from shoal.web.schedules import schedules
from shoal.web.timeline import timeline

_MOST_HOSTS = 8
_MOST_RANKS_PER_HOST = 4


def collectives(run: object, query: Query) -> dict[str, Any]:
    """Return the algorithms of a collective, with terms of their cost, and the steps of the chosen one.

    The query has "collective", "algorithm", "hosts" and "per_host".
    """
    collective = query.choice("collective", "all_reduce", tuple(MOVED))
    names = MOVED[collective]
    given = query.values.get("algorithm") or ""
    name = given if given in names else names[0]
    hosts = query.integer("hosts", 4, 2, _MOST_HOSTS)
    per_host = query.integer("per_host", 1, 1, _MOST_RANKS_PER_HOST)
    return {
        "collective": collective,
        "collectives": list(MOVED),
        "algorithm": name,
        "hosts": hosts,
        "per_host": per_host,
        "algorithms": [
            {"name": each, "terms": terms_of(collective, each, hosts, per_host)} for each in names
        ],
        "motion": _moving(motion(collective, name, hosts, per_host)),
    }


def terms_of(collective: str, name: str, hosts: int, per_host: int) -> list[dict[str, Any]]:
    """Return the terms of an algorithm's cost: their level, steps, and bytes on the path over those sent."""
    if (collective, name) == ("all_reduce", "tree"):
        return [term for half in ("reduce", "broadcast") for term in terms_of(half, "tree", hosts, per_host)]
    algorithm = find_algorithm(collective, name, "network")
    inside = [find_algorithm(*each, "shared-memory") for each in algorithm.inside]
    return [
        _term(algorithm, "network", hosts * per_host, per_host),
        *(_term(each, "shared-memory", per_host, 1) for each in inside if per_host > 1),
    ]


def _term(algorithm: Algorithm, level: str, ranks: int, per_host: int) -> dict[str, Any]:
    return {
        "level": level,
        "what": f"{algorithm.collective} {algorithm.name}",
        "steps": algorithm.steps(ranks, per_host),
        "path": algorithm.bytes_on_path(ranks, 1.0, per_host),
        "sent": algorithm.bytes_sent(ranks, 1.0, per_host),
    }


def _moving(played: Played) -> dict[str, Any]:
    return {
        "title": played.title,
        "ranks": played.ranks,
        "slices": played.slices,
        "whole": played.whole,
        "per_host": played.ranks_per_host,
        "aggregator": played.has_aggregator,
        "start": [[sorted(held) for held in slices] for slices in played.start],
        "steps": [
            {"label": step.label, "messages": [[each[0], each[1], list(each[2])] for each in step.messages]}
            for step in played.steps
        ],
    }


_MOST_DEVICES = 4096
_MOST_BATCH = 1 << 16
_MOST_SEQUENCE = 1 << 17
_ROWS = 20
_FEWEST = 8  # devices at which a curve begins

_one_search = threading.Lock()  # a search takes a core: readers wait for one another


def plans(run: object, query: Query) -> dict[str, Any]:
    """Return the Plans of a model on machines, best first, and the sentences that explain the best.

    The query has "model", "cluster", "devices", "batch" and "sequence".

    Raises:
        UserError: No Plan is legal or fits, or a name is not known.
    """
    asked = _asked(query, devices=64)
    with _one_search:
        return {**_choices(), "asked": asked, **_chosen(**asked)}


def wall(run: object, query: Query) -> dict[str, Any]:
    """Return the step and its share of communication against the number of devices.

    The query is that of `plans`; "devices" is the largest number. With "grow=yes" the batch is of
    the largest number, and fewer devices have as much less of it.

    Raises:
        UserError: No number of devices has a Plan that fits, or a name is not known.
    """
    asked = _asked(query, devices=1024)
    grows = query.choice("grow", "no", ("no", "yes")) == "yes"
    with _one_search:
        return {**_choices(), "asked": asked, "grow": grows, **_scaled(**asked, grows=grows)}


def _choices() -> dict[str, Any]:
    return {"models": list(shape_names()), "clusters": list(PRESETS)}


def _asked(query: Query, devices: int) -> dict[str, Any]:
    model = query.choice("model", "llama3-8b", shape_names())
    return {
        "model": model,
        "cluster": query.choice("cluster", "dgx-h100", PRESETS),
        "devices": query.integer("devices", devices, 1, _MOST_DEVICES),
        "batch": query.integer("batch", 512, 1, _MOST_BATCH),
        "sequence": query.integer("sequence", min(shape(model).seq, 8192), 1, _MOST_SEQUENCE),
    }


@lru_cache(maxsize=64)
def _chosen(model: str, cluster: str, devices: int, batch: int, sequence: int) -> dict[str, Any]:
    machines = Cluster.preset(cluster, devices)
    workload = workload_on(machines, shape(model).replace(seq=sequence))
    choice = choose(workload, machines, batch, limit=_ROWS)
    explanation = choice.explain()
    best = choice.best
    return {
        "parameters": workload.parameters,
        "legal": choice.legal,
        "played": choice.played,
        "room": explanation.room,
        "plans": [_row(each) for each in choice.candidates],
        "sentences": list(explanation.sentences()),
        "degrees": [
            {
                "degree": each.degree,
                "from": getattr(best.plan, each.degree),
                "value": each.value,
                "plan": each.best.layout if each.best else None,
                "seconds": each.best.seconds if each.best else None,
            }
            for each in explanation.neighbours
        ],
        "changes": [{"twice": each.name, "seconds": each.best.seconds} for each in explanation.changes],
    }


@lru_cache(maxsize=32)
def _scaled(model: str, cluster: str, devices: int, batch: int, sequence: int, grows: bool) -> dict[str, Any]:
    machines = Cluster.preset(cluster)
    workload = workload_on(machines, shape(model).replace(seq=sequence))
    counts = [min(_FEWEST, devices)]
    while counts[-1] * 2 <= devices:
        counts.append(counts[-1] * 2)
    per_device = max(1, batch // counts[-1]) if grows else None
    scaling = scale(workload, machines, counts, batch=None if grows else batch, per_device=per_device)
    return {
        "points": [
            {
                **_row(point.best),
                "batch": point.batch,
                "efficiency": point.efficiency,
                "amdahl": point.amdahl,
            }
            for point in scaling.points
        ],
        "unfit": list(scaling.unfit),
        "pays_to": scaling.pays_to,
        "wall": scaling.wall,
    }


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        "plan": candidate.layout,
        "degrees": candidate.degrees_text,
        "devices": candidate.devices,
        "seconds": candidate.seconds,
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "memory": candidate.memory.peak,
        "communication": candidate.communication,
        "bubble": candidate.bubble,
        "parts": dict(candidate.parts),
        "dollars": candidate.dollars_per_billion_tokens or None,
    }


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
