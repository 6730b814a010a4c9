"""A Plan's workers when some are slower than others: its costs, and the rules by which it exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.cost.time import served_times
from shoal.errors import PlanError
from shoal.plan import SettledPlan
from shoal.simulate.simulation import Simulation, simulate
from shoal.simulate.workers import Course, Meeting, course_of

_EXCHANGES = 200
"""Exchanges of each worker that are simulated: enough for rates that no longer depend on the first ones."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """The course of a Plan with slower workers, beside the one without.

    Attributes:
        even: Samples a second if all workers are alike.
        uneven: Samples a second with the slower ones.
        course: What came of each worker.
    """

    even: float
    uneven: float
    course: Course


def uneven_course(simulation: Simulation, slower: Mapping[int, float]) -> Uneven:
    """Return how a simulated Plan trains if some of its workers are slower.

    Args:
        simulation: The Plan's step, with workers that are alike.
        slower: By worker, the factor on the seconds that it computes.

    Raises:
        PlanError: There is no such worker.
    """
    plan = simulation.plan
    workers = plan.replicas
    if plan.shared is not None:
        raise PlanError(
            f"slower workers were given with shares={plan.shares}, and workers that differ already are not "
            "compared",
            possible="--slow with equal shares, or slower devices as [[parts]] of the cluster",
            change="leave out shares, or describe the slow nodes in the cluster",
        )
    if wrong := [worker for worker in slower if not 0 <= worker < workers]:
        raise PlanError(
            f"worker {wrong[0]} was said to be slower, and the Plan {plan} has {workers} workers",
            possible=f"workers from 0 to {workers - 1}: replicas of the model",
            change="name one of these",
        )
    meeting, seconds = meeting_of(simulation)
    shares = _EXCHANGES * workers * meeting.every
    samples = simulation.batch // workers
    even = course_of(meeting, [seconds] * workers, shares)
    course = course_of(meeting, [seconds * slower.get(worker, 1.0) for worker in range(workers)], shares)
    return Uneven(samples * even.rate, samples * course.rate, course)


def meeting_of(simulation: Simulation) -> tuple[Meeting, float]:
    """Return how the workers of a simulated Plan exchange, and the seconds of a share."""
    plan, workload, cluster = simulation.plan, simulation.workload, simulation.cluster
    exchange, workers = plan.exchanged, plan.replicas
    own = SettledPlan.of(plan.of_worker(), simulation.batch // workers)
    alone = simulate(workload, cluster.with_devices(own.ranks), own, simulation.batch // workers)
    seconds = min(alone.seconds, simulation.seconds)
    every = exchange.every if exchange.merges else 1
    if not exchange.is_served:
        return Meeting(every=every, alone=(simulation.seconds - seconds) * every / 2), seconds
    times = served_times(plan, workload.trained / own.ranks, cluster)
    after = times.update + times.copy
    meeting = Meeting(
        every=every,
        staleness=exchange.staleness,
        quorum=exchange.quorum,
        grace=exchange.grace,
        alone=times.alone + (times.turn + times.code) / 2,
        shared=times.shared,
        after=after if exchange.staleness else after + workers * times.add,
    )
    return meeting, seconds
