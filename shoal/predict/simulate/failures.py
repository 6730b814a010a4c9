"""A long run whose nodes fail by chance, played event by event.

Nodes that train fail independently, at a constant rate: the time to the next failure is exponential. Some
failures take their node away for a repair, the others do not. A failure is noticed after some seconds, and
some seconds later steps are made again, from the last checkpoint, or from copies in the memory of peers. A
node that is away is replaced by a spare one. Without a spare one the run waits for the first repair, or it
goes on with fewer replicas of the model, which is slower in proportion, until nodes come back.

Times of repair and of restarts may have a heavy tail: a Pareto distribution of shape 1.5, whose variance is
infinite, as some repairs take days. Failures come while the run saves and restarts, too; not while it waits.

Where nothing is repaired and restarts take equally long, the goodput is that of
`shoal.predict.cost.outlook.long_run` (Daly, 2006), and how often spares are used up follows the M/G/infinity
queue, whatever the tail of repairs; tests hold this module to both.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal, final

from shoal.errors import ConfigError
from shoal.predict.cost.outlook import best_interval

Tail = Literal["fixed", "exponential", "heavy"]
"""How a random time is distributed about its mean."""

LOSSES = ("saving", "detection", "recovery", "repeated", "waiting", "slower")
"""What time is lost by. `slower` is what fewer replicas of the model make less than all would."""

_SHAPE = 1.5  # of the Pareto distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """A run and the failures of its nodes. Times are in seconds.

    Attributes:
        nodes: Nodes that train.
        replicas: Replicas of the model, each on equally many nodes.
        between: Mean time between failures while all nodes train.
        step: Duration of a step.
        save: Time for which a checkpoint stops training.
        interval: Steps between checkpoints; 0 for the best by Young's formula.
        detection: Time until a failure is noticed.
        restart: Mean time from then to the next step.
        restart_tail: How this time is distributed.
        hardware: Share of failures that take their node away.
        repair: Mean time for which it is away.
        repair_tail: How this time is distributed.
        spares: Nodes that are ready to replace others.
        copies: Steps between copies of the state in the memory of peers; 0 for none.
        copy: Time for which a copy stops training.
        shrinks: Whether the run goes on with fewer replicas while nodes are missing.
        grow: Time for which training stops when nodes come back to a run with fewer replicas.

    Raises:
        ConfigError: A value is out of its range.
    """

    nodes: int
    replicas: int
    between: float
    step: float
    save: float
    interval: int = 0
    detection: float = 0.0
    restart: float = 300.0
    restart_tail: Tail = "fixed"
    hardware: float = 0.0
    repair: float = 86_400.0
    repair_tail: Tail = "exponential"
    spares: int = 0
    copies: int = 0
    copy: float = 0.0
    shrinks: bool = False
    grow: float = 60.0

    def __post_init__(self) -> None:
        least = {"nodes": 1, "replicas": 1, "interval": 0, "spares": 0, "copies": 0}
        for name in ("save", "detection", "restart", "hardware", "repair", "copy", "grow", *least):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least.get(name, 0)):
                raise _out_of_range(name, value, f"{least.get(name, 0)} or more")
        for name in ("between", "step"):
            if not getattr(self, name) > 0:
                raise _out_of_range(name, getattr(self, name), "more than 0")
        if self.hardware > 1:
            raise _out_of_range("hardware", self.hardware, "a share from 0 to 1")
        if self.nodes % self.replicas:
            raise _out_of_range("replicas", self.replicas, f"a divisor of {self.nodes} nodes")

    @property
    def steps_between_saves(self) -> int:
        """Return the steps between two checkpoints."""
        return self.interval or max(1, round(best_interval(self.save, self.between) / self.step))


def _out_of_range(name: str, value: object, possible: str) -> ConfigError:
    return ConfigError(f"{name}={value} is not allowed", possible=possible, change=f"correct {name}")


@dataclass(slots=True)
class FailureCourse:
    """What became of a run.

    Attributes:
        trained: Seconds of steps that count, at the speed of all replicas.
        lost: Seconds lost by each of `LOSSES`. With `trained` they sum to the seconds of the run.
        failures: Number of failures.
        without_spare: Failures after which no spare node was left.
    """

    trained: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))
    failures: int = 0
    without_spare: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the run."""
        return self.trained + sum(self.lost.values())

    @property
    def goodput(self) -> float:
        """Share of the time that trains."""
        return self.trained / self.seconds


@dataclass(frozen=True, slots=True)
class Courses:
    """What became of several runs that differ by chance.

    Attributes:
        goodput: Mean share of the time that trains.
        error: Standard error of this mean.
        low: Goodput that 5 % of the runs did not reach.
        high: Goodput that 5 % of the runs exceeded.
        lost: Mean share of the time that is lost by each of `LOSSES`.
        failures: Mean number of failures.
        without_spare: Share of the failures after which no spare node was left.
    """

    goodput: float
    error: float
    low: float
    high: float
    lost: dict[str, float]
    failures: float
    without_spare: float

    @classmethod
    def of(cls, courses: Iterable[FailureCourse]) -> Courses:
        """Return the summary of some runs."""
        found = list(courses)
        shares = sorted(each.goodput for each in found)
        failures = sum(each.failures for each in found)
        return cls(
            goodput=fmean(shares),
            error=stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.inf,
            low=shares[int(0.05 * len(shares))],
            high=shares[math.ceil(0.95 * len(shares)) - 1],
            lost={name: fmean(each.lost[name] / each.seconds for each in found) for name in LOSSES},
            failures=failures / len(found),
            without_spare=sum(each.without_spare for each in found) / max(1, failures),
        )


def failure_courses(model: FailureModel, seconds: float, *, runs: int = 100, seed: int = 0) -> Courses:
    """Play some runs of so many seconds, and return what became of them."""
    return Courses.of(failure_course(model, seconds, random.Random(f"{seed} {run}")) for run in range(runs))


def failure_course(model: FailureModel, seconds: float, generator: random.Random) -> FailureCourse:
    """Play a run of so many seconds.

    Args:
        model: The run and its failures.
        seconds: Seconds of the run.
        generator: Source of chance.
    """
    return _Player(model, seconds, generator).play()


@final
class _Player:
    """A run at a moment."""

    def __init__(self, model: FailureModel, seconds: float, generator: random.Random) -> None:
        self._model = model
        self._end = seconds
        self._generator = generator
        self._now = 0.0
        self._course = FailureCourse()
        self._repairs: list[float] = []  # when nodes that are away come back
        self._section = model.steps_between_saves * model.step  # work from one checkpoint to the next
        # A copy beside the steps stretches them.
        self._stretch = 1 + model.copy / (model.copies * model.step) if model.copies else 1.0
        self._unsaved = 0.0  # work since the last checkpoint

    def play(self) -> FailureCourse:
        replicas = self._usable()
        while self._now < self._end:
            replicas = self._train(replicas)
        return self._course

    def _train(self, replicas: int) -> int:
        """Train until a checkpoint, a failure, a change of nodes or the end; return the replicas after it."""
        model = self._model
        speed = replicas / model.replicas
        failure = self._now + self._to_failure(speed)
        # A node may have come back while the run saved or recovered.
        back = max(self._now, self._repairs[0]) if self._repairs and replicas < model.replicas else math.inf
        full = self._now + (self._section - self._unsaved) * self._stretch / speed
        until = min(failure, back, full, self._end)
        passed = until - self._now
        work = passed * speed / self._stretch
        self._course.trained += work
        self._course.lost["saving"] += passed * speed - work
        self._course.lost["slower"] += passed * (1 - speed)
        self._unsaved += work
        self._now = until
        if until == self._end:
            return replicas
        if until == back:
            if (usable := self._usable()) > replicas and not self._spend("recovery", model.grow, speed):
                return self._fail(usable)
            return usable
        if until == full:
            if not self._spend("saving", model.save, speed):
                return self._fail(replicas)
            self._unsaved = 0.0
            return replicas
        return self._fail(replicas)

    def _fail(self, replicas: int) -> int:
        """Lose a rank, and go on; return the replicas with which it does."""
        model, course = self._model, self._course
        unit = model.copies * model.step
        again = math.fmod(self._unsaved, unit) if model.copies else self._unsaved
        course.trained -= again
        course.lost["repeated"] += again
        self._unsaved -= again
        while True:
            course.failures += 1
            if self._generator.random() < model.hardware:
                away = self._draw(model.repair, model.repair_tail)
                heapq.heappush(self._repairs, self._now + away)
            self._usable()
            course.without_spare += len(self._repairs) > model.spares
            speed = replicas / model.replicas
            if not self._spend("detection", model.detection, speed):
                continue
            if not self._spend("recovery", self._draw(model.restart, model.restart_tail), speed):
                continue
            while (replicas := self._usable()) == 0 or (replicas < model.replicas and not model.shrinks):
                back = min(self._repairs[0], self._end)
                course.lost["waiting"] += back - self._now
                self._now = back
                if back == self._end:
                    return model.replicas
            return replicas

    def _spend(self, cause: str, seconds: float, speed: float) -> bool:
        """Let time pass; return whether it passed without a failure. After the end nothing fails."""
        failure = self._to_failure(speed)
        passed = min(seconds, failure, self._end - self._now)
        self._course.lost[cause] += passed
        self._now += passed
        return failure >= seconds or self._now >= self._end

    def _usable(self) -> int:
        """Return how many replicas there are nodes for."""
        while self._repairs and self._repairs[0] <= self._now:
            heapq.heappop(self._repairs)
        model = self._model
        nodes = model.nodes + model.spares - len(self._repairs)
        return max(0, min(model.replicas, nodes * model.replicas // model.nodes))

    def _to_failure(self, speed: float) -> float:
        """Draw the time to the next failure of a share of the nodes."""
        return self._generator.expovariate(speed / self._model.between)

    def _draw(self, mean: float, tail: Tail) -> float:
        if tail == "fixed" or mean == 0:
            return mean
        if tail == "exponential":
            return self._generator.expovariate(1 / mean)
        return self._generator.paretovariate(_SHAPE) * mean * (_SHAPE - 1) / _SHAPE
