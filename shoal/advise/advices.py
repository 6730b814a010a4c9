"""All advice on a run, the largest gain first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.advise.advice import Advice
from shoal.advise.played import played_advice
from shoal.advise.shares import shares_advice
from shoal.advise.split import split_advice
from shoal.advise.waits import data_advice, launch_advice
from shoal.cluster import Cluster
from shoal.plan import SettledPlan
from shoal.simulate import stage_times
from shoal.timeline import Timeline, explain
from shoal.workload import Workload


@dataclass(frozen=True, slots=True)
class Known:
    """The work and the machines of a run, which playing other Plans needs.

    Attributes:
        workload: The work of the model.
        cluster: The machines, with as many devices as the run has ranks.
    """

    workload: Workload
    cluster: Cluster


def advices(
    timeline: Timeline,
    plan: SettledPlan,
    batch: int,
    known: Known | None = None,
    data: Mapping[str, Any] | None = None,
) -> list[Advice]:
    """Return the advice on a run, the largest gain first; sure gains come before bounds.

    Args:
        timeline: The measured Timeline of its steps under its present Plan.
        plan: The Plan, with the stages that the model was cut into.
        batch: Samples of a step.
        known: Its work and machines; None if they are not known: then no Plan is played.
        data: The configuration of its data; None if it is not known.

    Raises:
        ShoalError: No rank finished a step.
    """
    breakdown = explain(timeline)
    found = [
        shares_advice(timeline, breakdown, plan, batch),
        split_advice(stage_times(timeline), breakdown, plan, batch),
        data_advice(breakdown, data),
        launch_advice(breakdown, plan, batch),
    ]
    told = [each for each in found if each is not None]
    if known is not None:
        told += played_advice(timeline, breakdown, plan, batch, known.workload, known.cluster)
    return sorted(told, key=lambda each: (each.is_bound, -each.gain))
