"""The page of Plans: the best Plan for each set of degrees, and what each degree buys."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

from shoal.cluster import PRESETS, Cluster
from shoal.cost.time import workload_on
from shoal.planner import Candidate, choose, scale
from shoal.web.query import Query
from shoal.workload import shape, shape_names

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
