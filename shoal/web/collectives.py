"""The page of collectives: each algorithm step by step, and what the cost model says of it.

The cost is linear: seconds are the sum over terms of `alpha * steps + beta * path * bytes`, each with the
alpha and beta of its level. The page gets the terms, so that its sliders for bytes, alpha and beta need no
new answer.
"""

from __future__ import annotations

from typing import Any

from shoal.cost import Algorithm, find_algorithm
from shoal.cost.collectives import MOVED, Played, motion
from shoal.web.query import Query

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
