"""The guide of a training with exchange=auto: it measures, chooses an exchange, tries it, and watches it.

At first workers average whole gradients, as they do again whenever a guard fails. Then, again and again:

    measure    a few steps average gradients after their backward, which tells the seconds of a step and of
               the exchange by themselves, the gradient noise scale, and what codecs keep and take
    choose     the exchange with the least predicted seconds to a loss (`shoal.planner.exchange`), if it is
               quicker by more than a tenth
    try        a number of dense steps are made, and count. The same steps are made again from the same state
               with the other exchange, each of both followed by a few dense steps. Then held-out loss and
               tasks are compared, and training goes on from the dense steps
    watch      while an exchange is followed, guards look at it, and links are measured anew

Whatever is decided rests on numbers that all ranks have exchanged, so that all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, TypeVar, final

from shoal.checkpoint import Coordinator
from shoal.parallel import GuidedUpdates, Parallel
from shoal.plan import Exchange, Plan
from shoal.planner import DENSE, Conditions, Expected, Tried, candidates, exchange_of, expected
from shoal.run import Decision
from shoal.train.guards import HeldOutValues, Watch, compared, stray_of
from shoal.train.measured_exchange import Link, OwnGradient, conditions_of, measure_codecs, measure_link
from shoal.train.snapshot import Snapshot
from shoal.train.stepping import Made, Stepping

__all__ = ["Guide"]

_WARM = 4  # first dense steps whose seconds tell nothing
_TIMED = 4  # dense steps that are timed
_MEASURED = 4  # steps that average gradients after their backward
_AFTER = 4  # dense steps that end both sides of a trial; held-out values are taken after each
_GAIN = 0.1  # share of the seconds by which another exchange must be quicker
_CHANGED = 1.3  # factor by which an all-reduce takes longer or shorter on links that have changed
_REVIEW = 100  # least steps between two reviews
_OVERHEAD = 0.02  # share of the seconds that repeated trials of a followed exchange may take

Value = TypeVar("Value")

Course = Generator[None, Made, None]
"""What the guide does between steps: it yields where a step is to be made, and is sent that step."""


@final
class Guide:
    """Guide the exchange of a training; all ranks make one, and call its methods together.

    Args:
        stepping: Makes steps.
        optimizer: The optimizer, which follows exchanges.
        plan: The Plan, with exchange=auto.
        steps: Steps of the whole training.
        batch: Samples in a step.
        coordinator: All ranks.
        evaluate: Returns held-out values, `loss` among them; its argument is the position of a first sample
            that no step has seen.
        decided: Told of each decision.
    """

    def __init__(
        self,
        stepping: Stepping,
        optimizer: GuidedUpdates,
        plan: Plan,
        *,
        steps: int,
        batch: int,
        coordinator: Coordinator,
        evaluate: Callable[[int], Mapping[str, float]],
        decided: Callable[[Decision], object],
    ) -> None:
        self._stepping = stepping
        self._parallel: Parallel = stepping.parallel
        self._optimizer = optimizer
        self._coordinator = coordinator
        self._evaluate = evaluate
        self._decided = decided
        self._steps, self._batch = steps, batch
        self._dense = plan.dense
        self._every = plan.every
        self._exchanges = {text: exchange_of(text, plan) for text in candidates(plan.every)}
        self._followed = DENSE
        self._tried: dict[str, Tried] = {}
        self._conditions: Conditions | None = None
        self._link = Link(0.0, 0.0)  # as it was when conditions were measured
        self._spread = 1.0  # square of a worker's gradient over that of the workers' mean
        self._measured = -_REVIEW  # the step after which the conditions were measured
        self._since = 0.0  # seconds of steps since the last trial
        self._step = self._position = 0
        self._course: Course = self._guide()
        next(self._course)

    @property
    def followed(self) -> str:
        """The exchange that the next step follows, as settings of a Plan."""
        return self._followed

    def advance(self, made: Made) -> None:
        """Take note of a step, and do what is due after it; all ranks call it after each step."""
        self._step, self._position = made.progress.steps, made.progress.position
        if self._step < self._steps:
            self._course.send(made)

    def kept(self) -> dict[str, Any]:
        """Return what a resumed training takes over, as JSON."""
        self._confirm()
        tried = {text: list(tried) for text, tried in self._tried.items()}
        return {"followed": self._followed, "tried": tried}

    def restart(self, step: int, position: int, kept: Mapping[str, Any]) -> None:
        """Go on after a step with what `kept` returned, and with whole gradients until links are measured."""
        self._step, self._position = step, position
        self._tried = {text: Tried(*tried) for text, tried in kept.get("tried", {}).items()}
        self._followed, self._conditions, self._measured = DENSE, None, -_REVIEW
        self._course = self._guide(kept.get("followed", DENSE))
        next(self._course)

    def _guide(self, before: str = DENSE) -> Course:
        """Guide a training that followed an exchange before it was resumed."""
        while self._step < self._dense:
            yield
        if before != DENSE and self._is_verified(before):
            yield from self._measure()
            self._follow(before, "it was followed before")
        while True:
            if self._is_unmeasured():
                yield from self._measure()
            choice, why = self._choose()
            if choice not in (self._followed, DENSE) and not self._is_verified(choice):
                yield from self._try(choice, why)
                continue
            if choice != self._followed:
                self._follow(choice, why)
            else:
                self._decide(why)
            yield from self._watch()
            if self._followed != DENSE and self._is_due_again(self._followed):
                yield from self._try(self._followed, "another trial takes little of the time since the last")

    def _measure(self) -> Course:
        """Make dense steps, of both kinds, and learn the conditions from them."""
        seconds = []
        for number in range(_WARM + _TIMED):
            made = yield
            if number >= _WARM:
                seconds.append(made.seconds)
        gradients = []
        for _ in range(_MEASURED):
            self._optimizer.average_next()
            made = yield
            averaged = self._optimizer.averaged
            assert averaged is not None
            own, mean = float(averaged.norm) ** 2, float(made.norm.whole) ** 2
            if math.isfinite(own + mean):
                gradients.append(OwnGradient(own, mean, made.seconds, averaged.seconds))
        if not all(self._gather(bool(gradients))):
            self._decide("no measured step had a finite gradient")
            return
        assert averaged is not None
        compressions = {str(each.compression) for each in self._exchanges.values() if each.compresses}
        axes, device = self._parallel.axes, self._parallel.device
        self._link = measure_link(axes.workers, device, self._coordinator)
        self._conditions = conditions_of(
            gradients,
            measure_codecs(averaged.sample, sorted(compressions)),
            seconds,
            self._link,
            workers=axes.workers.size,
            elements=sum(each.local.numel() for each in self._parallel.owned),
            coordinator=self._coordinator,
        )
        own, mean = fmean(each.own for each in gradients), fmean(each.mean for each in gradients)
        self._spread = self._mean(own / mean if mean > 0 else 1.0)
        self._measured = self._step
        self._decide("measured", _numbers_of(self._conditions))

    def _choose(self) -> tuple[str, str]:
        """Return the exchange to try or to follow, and why."""
        if self._conditions is None:
            return DENSE, "nothing is known of others"
        allowed = [text for text in self._exchanges if not self._has_failed(text)]
        best = min((self._expected(text) for text in allowed), key=lambda each: each.cost)
        followed, dense = self._expected(self._followed), self._expected(DENSE)
        if (1 - _GAIN / 2) * dense.cost <= followed.cost and self._followed != DENSE:
            return DENSE, f"nearly as quick, and exact: {dense}; {followed}"
        if best.exchange == self._followed:
            return self._followed, f"the quickest: {best}"
        if best.cost > (1 - _GAIN) * followed.cost:
            return self._followed, f"no other is quicker by more than {_GAIN:.0%}: {best}; {followed}"
        if self._is_verified(best.exchange) or best.exchange == DENSE:
            return best.exchange, f"{best}; {followed}"
        # A trial must be worth it: its dense steps count, but not the steps beside them.
        number = self._length(best.exchange)
        left = self._steps - self._step - number - _AFTER
        gain, price = left * (followed.cost - best.cost), self._price(best, followed)
        if gain > price:
            return best.exchange, f"worth a trial: {best}; {followed}"
        why = f"a trial takes {price:.3g} s, and would gain {max(0.0, gain):.3g} s in the steps that are left"
        return self._followed, f"{why}: {best}"

    def _try(self, text: str, why: str) -> Course:
        """Compare an exchange with dense steps from one state; the dense steps count."""
        if self._followed != DENSE:
            self._follow(DENSE, f"for a trial of {text}: {why}")
        number, tried = self._length(text), self._exchanges[text]
        before, position = Snapshot.take(self._parallel, self._optimizer), self._position
        first = self._step
        fresh = position + (number + _AFTER) * self._batch
        at_first = self._values(fresh)
        dense, other = list[HeldOutValues](), list[HeldOutValues]()
        dense_seconds, seconds = _Seconds(), _Seconds()
        for step in range(number + _AFTER):
            made = yield
            dense_seconds.add(made.seconds, self._optimizer)
            if step >= number:
                dense.append(self._values(fresh))
        after = Snapshot.take(self._parallel, self._optimizer)
        before.restore()
        self._optimizer.follow(tried)
        for step in range(number):
            seconds.add(self._make_again(first, position, step), self._optimizer)
        self._optimizer.follow(self._exchanges[DENSE])
        for step in range(number, number + _AFTER):
            self._make_again(first, position, step)
            other.append(self._values(fresh))
        after.restore()
        longest = max(self._gather(seconds.usual(tried)))
        dense_longest = max(self._gather(dense_seconds.usual(self._exchanges[DENSE])))
        found = compared(at_first, dense, other, longest / dense_longest)
        self._tried[text] = Tried(self._step, longest, found.worth, found.failed)
        self._since = 0.0
        how = f"failed: {found.failed}" if found.failed else "passed"
        numbers = {"seconds": longest, "dense seconds": dense_longest, "worth": found.worth}
        numbers |= _means("dense", dense) | _means("its", other)
        self._decide(f"a trial of {text} over {number} steps {how}", numbers)

    def _watch(self) -> Course:
        """Follow the exchange until a review is due, or a guard fails."""
        text, exchange = self._followed, self._exchanges[self._followed]
        every = exchange.every if exchange.merges else self._every
        watch = Watch(exchange)
        losses: list[float] = []
        seconds = _Seconds()
        largest = 0.0
        for number in range(1, max(_REVIEW, 5 * every) + 1):
            made = yield
            seconds.add(made.seconds, self._optimizer)
            if made.passed.loss.isfinite() and made.norm.whole.isfinite():
                losses.append(float(made.passed.loss))
                largest = max(largest, self._spread * float(made.norm.whole) ** 2)
            is_due = self._optimizer.has_merged if exchange.merges else number % every == 0
            if text == DENSE or not is_due:
                continue
            mean = self._mean(fmean(losses) if losses else math.nan)
            losses.clear()
            stray = stray_of(self._optimizer, self._parallel, self._coordinator)
            if failed := watch.look(mean, largest, stray):
                self._tried[text] = Tried(self._step, None, 1.0, failed)
                self._follow(DENSE, f"{text} failed: {failed}")
                return
        self._since += seconds.total
        self._review(text, seconds.usual(exchange))

    def _review(self, text: str, seconds: float) -> None:
        """Measure the links anew, and take over the seconds of the steps that were watched."""
        if self._conditions is None:
            return
        before, nbytes = self._conditions, 4 * self._conditions.elements
        link = measure_link(self._parallel.axes.workers, self._parallel.device, self._coordinator)
        old, new = self._link.all_reduce(nbytes), link.all_reduce(nbytes)
        if not old <= new * _CHANGED or not new <= old * _CHANGED:
            per_byte = before.per_byte * new / old if old > 0 else link.per_byte
            self._conditions, self._link = replace(before, latency=link.latency, per_byte=per_byte), link
            self._decide("links have changed", _numbers_of(self._conditions))
            self._tried = {name: tried._replace(seconds=None) for name, tried in self._tried.items()}
        self._confirm()
        if text in self._tried:
            self._tried[text] = self._tried[text]._replace(seconds=max(self._gather(seconds)))

    def _expected(self, text: str) -> Expected:
        assert self._conditions is not None
        tried = self._tried[text] if text == self._followed and text in self._tried else self._newest(text)
        return expected(text, self._exchanges[text], self._conditions, tried)

    def _is_unmeasured(self) -> bool:
        """Whether dense steps are made, and were not measured for a while."""
        return self._followed == DENSE and self._step >= self._measured + _REVIEW

    def _newest(self, text: str) -> Tried | None:
        """Return the newest trial of an exchange, if it still tells: training changes what it told."""
        tried = self._tried.get(text)
        return tried if tried and self._step < max(2 * tried.step, tried.step + _REVIEW) else None

    def _confirm(self) -> None:
        """Let the trial of the followed exchange tell on, since no guard has failed."""
        if self._followed in self._tried:
            self._tried[self._followed] = self._tried[self._followed]._replace(step=self._step)

    def _is_verified(self, text: str) -> bool:
        """Whether the newest trial of an exchange passed."""
        tried = self._newest(text)
        return tried is not None and not tried.failed

    def _has_failed(self, text: str) -> bool:
        """Whether the newest trial of an exchange failed, or a guard since."""
        tried = self._newest(text)
        return tried is not None and tried.failed != ""

    def _is_due_again(self, text: str) -> bool:
        """Whether another trial of the followed exchange takes little of the time since the last one."""
        if self._conditions is None or self._steps - self._step < 2 * self._length(text):
            return False
        now = self._expected(text)
        return self._price(now, now) < _OVERHEAD * self._since

    def _length(self, text: str) -> int:
        """Return the steps of a trial before the dense ones: two rounds of local updates."""
        return 2 * self._every if self._exchanges[text].merges else self._every

    def _price(self, other: Expected, followed: Expected) -> float:
        """Return the seconds that a trial takes beyond those of the progress that it makes."""
        dense, number = self._expected(DENSE), self._length(other.exchange)
        again = number * other.seconds + _AFTER * dense.seconds
        return again + (number + _AFTER) * max(0.0, dense.cost - followed.cost)

    def _make_again(self, first: int, position: int, step: int) -> float:
        """Make a step of a trial again, without telling of it; return its seconds."""
        made = self._stepping.make(first + step, position + step * self._batch)
        self._parallel.zero_grad()
        return made.seconds

    def _values(self, position: int) -> HeldOutValues:
        tasks = dict(self._evaluate(position))
        return HeldOutValues(tasks.pop("loss"), tasks)

    def _follow(self, text: str, reason: str) -> None:
        self._optimizer.follow(self._exchanges[text])
        self._followed = text
        self._decide(reason)

    def _decide(self, reason: str, numbers: Mapping[str, float] | None = None) -> None:
        self._decided(Decision(self._step, self._followed, reason, numbers or {}))

    def _mean(self, number: float) -> float:
        return fmean(self._gather(number))

    def _gather(self, value: Value) -> Sequence[Value]:
        found: Sequence[Value] = self._coordinator.all_gather_object(value)
        return found


@final
class _Seconds:
    """Seconds of steps, some of which other work may have disturbed."""

    def __init__(self) -> None:
        self._between: list[float] = []
        self._merging: list[float] = []

    def add(self, seconds: float, optimizer: GuidedUpdates) -> None:
        """Add a step that was just made."""
        is_merging = optimizer.local is not None and optimizer.has_merged
        (self._merging if is_merging else self._between).append(seconds)

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return sum(self._between) + sum(self._merging)

    def usual(self, exchange: Exchange) -> float:
        """Return the usual seconds of a step of the exchange that was followed."""
        between, merging = (median(each) if each else 0.0 for each in (self._between, self._merging))
        return between if not exchange.merges else between + (merging - between) / exchange.every


def _means(side: str, values: Sequence[HeldOutValues]) -> dict[str, float]:
    """Return the means of a side's values, by the names of a Decision."""
    tasks = {f"{side} {name}": fmean(each.tasks[name] for each in values) for name in values[0].tasks}
    return {f"{side} loss": fmean(each.loss for each in values), **tasks}


def _numbers_of(now: Conditions) -> dict[str, float]:
    """Return what was measured, by the names of a Decision."""
    kept = {f"kept by {text}": codec.kept for text, codec in now.codecs.items()}
    return {
        "seconds without exchange": now.compute,
        "dense seconds": now.dense,
        "latency": now.latency,
        "seconds a byte": now.per_byte,
        "noise scale over batch": now.noise,
        **kept,
    }
