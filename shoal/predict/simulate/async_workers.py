"""Workers that are not equally fast, or are lost for a while, simulated event by event.

    worker     computes its shares, pushes what it made of them, waits until it may go on, pulls values
    servers    take one push after the other, and one pull after the other, over links that they share

The rules are those of `shoal.parallel.exchange.server`: rounds, rounds with a quorum, or a bound on how far
ahead a worker may be. Without servers, workers that average in each step, or merge, are rounds that nobody
can leave.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import final

from shoal.errors import PlanError
from shoal.predict.cost.time import served_times
from shoal.predict.simulate.simulation import Simulation, simulate
from shoal.spec.plan import SettledPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """How workers exchange what they learn, and the seconds that it takes.

    Attributes:
        every: Shares that a worker computes between two exchanges.
        staleness: Exchanges that a worker may be ahead of the slowest; 0 for rounds.
        quorum: Workers that close a round; 0 for all.
        grace: Seconds that a round with a quorum waits for others.
        alone: Seconds of a push, and of a pull, while nobody else does.
        shared: Those of them in which the servers' link is busy, so that others wait.
        after: Seconds of the update that follows a round, or a contribution.
    """

    every: int = 1
    staleness: float = 0
    quorum: int = 0
    grace: float = 0.0
    alone: float = 0.0
    shared: float = 0.0
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Course:
    """What came of a simulated training.

    Attributes:
        seconds: Its duration.
        shares: Shares that each worker computed and that were applied.
        staleness: For each contribution, the updates that its worker had not heard of.
        computing: For each worker, the share of the time in which it computed.
    """

    seconds: float
    shares: tuple[int, ...]
    staleness: tuple[int, ...]
    computing: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Shares a second, of all workers."""
        return sum(self.shares) / self.seconds

    @property
    def mean_staleness(self) -> float:
        """Mean of the staleness of the contributions."""
        return fmean(self.staleness) if self.staleness else 0.0


def course_of(
    meeting: Meeting,
    seconds: Sequence[float],
    shares: int,
    absent: Mapping[int, tuple[float, float]] | None = None,
) -> Course:
    """Return the course of a training.

    Args:
        meeting: How workers exchange.
        seconds: For each worker, the seconds that it computes a share.
        shares: Shares of the whole training.
        absent: From when until when workers are absent; what they compute then is lost. Workers without
            servers cannot be.
    """
    return _Simulation(meeting, seconds, shares, absent or {}).run()


@dataclass(slots=True)
class _Worker:
    """A worker in the simulation.

    Attributes:
        seconds: Seconds of a share.
        clock: Exchanges that it has made.
        base: Version of its values.
        held: Shares that it computes, or has computed and not exchanged.
        is_here: Whether it is present.
        life: Counts its losses, so that events from before one are ignored.
        made: Shares of it that were applied.
        busy: Seconds that it has computed.
    """

    seconds: float
    clock: int = 0
    base: int = 0
    held: int = 0
    is_here: bool = True
    life: int = 0
    made: int = 0
    busy: float = 0.0


@final
@dataclass(slots=True)
class _Simulation:
    meeting: Meeting
    speeds: Sequence[float]
    left: int
    absent: Mapping[int, tuple[float, float]]
    now: float = 0.0
    version: int = 0
    inward: float = 0.0  # until when the servers' link is busy with pushes
    outward: float = 0.0
    updating: float = 0.0
    workers: list[_Worker] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    events: list[tuple[float, int, str, int, int]] = field(default_factory=list)
    number: int = 0

    def run(self) -> Course:
        self.workers = [_Worker(seconds) for seconds in self.speeds]
        for worker, (first, last) in self.absent.items():
            self._at(first, "lost", worker)
            if math.isfinite(last):
                self._at(last, "back", worker)
        for worker in range(len(self.workers)):
            self._hand_out(worker)
            self._pulled(worker)
        end = 0.0
        while self.events and (self.left or any(each.held for each in self.workers)):
            self.now, _, kind, worker, life = heapq.heappop(self.events)
            if kind in ("lost", "back", "grace") or life == self.workers[worker].life:
                getattr(self, f"_{kind}")(worker)
                end = self.now
        return Course(
            end,
            tuple(each.made for each in self.workers),
            tuple(self.staleness),
            tuple(each.busy / end if end else 0.0 for each in self.workers),
        )

    def _at(self, time: float, kind: str, worker: int) -> None:
        self.number += 1
        life = self.workers[worker].life if kind != "grace" else 0
        heapq.heappush(self.events, (time, self.number, kind, worker, life))

    def _hand_out(self, number: int) -> None:
        """Give a worker its next shares; it is idle if none is left."""
        worker = self.workers[number]
        worker.held = min(self.meeting.every, self.left)
        self.left -= worker.held

    def _computed(self, number: int) -> None:
        worker, meeting = self.workers[number], self.meeting
        worker.busy += worker.held * worker.seconds
        start = max(self.now, self.inward)
        self.inward = start + meeting.shared
        self._at(start + max(meeting.alone, meeting.shared), "pushed", number)

    def _pushed(self, number: int) -> None:
        if self.meeting.staleness:
            start = max(self.now, self.updating)
            self.updating = start + self.meeting.after
            self._at(self.updating, "applied", number)
            return
        self.arrived.append(number)
        if self.meeting.quorum and len(self.arrived) == self.meeting.quorum:
            self._at(self.now + self.meeting.grace, "grace", self.version)
        self._let_go_on()

    def _applied(self, number: int) -> None:
        worker = self.workers[number]
        self._count(worker)
        self.version += 1
        worker.clock += 1
        self.arrived.append(number)
        self._let_go_on()

    def _grace(self, round: int) -> None:
        if round == self.version and len(self.arrived) >= self.meeting.quorum:
            self._close()

    def _let_go_on(self) -> None:
        """Let those go on that may."""
        active = [each for each in self.workers if each.is_here and each.held]
        if not self.meeting.staleness:
            if self.arrived and len(self.arrived) >= len(active):
                self._close()
            return
        slowest = min((each.clock for each in active), default=math.inf)
        going = [
            number
            for number in self.arrived
            if self.workers[number].clock <= slowest + self.meeting.staleness
        ]
        for number in going:
            self.arrived.remove(number)
            self._pull(number)
        if going:
            self._let_go_on()  # some may have no share left, for whom others waited

    def _close(self) -> None:
        members, self.arrived = self.arrived, []
        for number in members:
            self._count(self.workers[number])
        self.version += 1
        self.now += self.meeting.after
        for number in members:
            self._pull(number)
        self._let_go_on()

    def _count(self, worker: _Worker) -> None:
        self.staleness.append(self.version - worker.base)
        worker.made += worker.held
        worker.held = 0

    def _pull(self, number: int) -> None:
        """Let a worker take the values and its next shares."""
        meeting = self.meeting
        self._hand_out(number)
        if not self.workers[number].held:
            return
        start = max(self.now, self.outward)
        self.outward = start + meeting.shared
        self.workers[number].base = self.version
        self._at(start + max(meeting.alone, meeting.shared), "pulled", number)

    def _pulled(self, number: int) -> None:
        worker = self.workers[number]
        if worker.held:
            self._at(self.now + worker.held * worker.seconds, "computed", number)

    def _lost(self, number: int) -> None:
        worker = self.workers[number]
        self.left += worker.held
        worker.held, worker.is_here, worker.life = 0, False, worker.life + 1
        if number in self.arrived:
            self.arrived.remove(number)
        for other, idle in enumerate(self.workers):
            if idle.is_here and not idle.held and other not in self.arrived:
                self._pull(other)
        self._let_go_on()

    def _back(self, number: int) -> None:
        worker = self.workers[number]
        worker.is_here, worker.base = True, self.version
        worker.clock = min((each.clock for each in self.workers if each.is_here and each.held), default=0)
        self._pull(number)


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
