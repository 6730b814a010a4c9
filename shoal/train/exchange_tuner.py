"""The guide of a training with exchange=auto: it measures, chooses an exchange, tries it, and watches it.

At first workers average whole gradients, as they do again whenever a guard fails. Then, again and again:

    measure    a few steps average gradients after their backward, which tells the seconds of a step and of
               the exchange by themselves, the gradient noise scale, and what codecs keep and take
    choose     the exchange with the least predicted seconds to a loss (`shoal.predict.planner.exchange`), if
               it is quicker by more than a tenth
    try        a number of dense steps are made, and count. The same steps are made again from the same state
               with the other exchange, each of both followed by a few dense steps. Then held-out loss and
               tasks are compared, and training goes on from the dense steps
    watch      while an exchange is followed, guards look at it, and links are measured anew

Whatever is decided rests on numbers that all ranks have exchanged, so that all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any, TypeVar, cast, final

from torch.optim import Optimizer

from shoal.checkpoint import Coordinator
from shoal.parallel import GuidedUpdates, Parallel
from shoal.predict.planner import DENSE, Conditions, Tried
from shoal.spec.plan import Exchange, Plan
from shoal.spec.run import Decision
from shoal.train.exchange_choice import AFTER, REVIEW, Choices, HeldOutValues, Watch, compared, stray_of
from shoal.train.measured_exchange import Link, OwnGradient, conditions_of, measure_codecs, measure_link
from shoal.train.snapshot import Snapshot
from shoal.train.step import Made, Stepping

_WARM = 4  # first dense steps whose seconds tell nothing
_TIMED = 4  # dense steps that are timed
_MEASURED = 4  # steps that average gradients after their backward

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
        self._choices = Choices(plan, steps)
        self._spread = 1.0  # square of a worker's gradient over that of the workers' mean
        self._position = 0
        self._course: Course = self._guide()
        next(self._course)

    @property
    def followed(self) -> str:
        """The exchange that the next step follows, as settings of a Plan."""
        return self._choices.followed

    def advance(self, made: Made) -> None:
        """Take note of a step, and do what is due after it; all ranks call it after each step."""
        self._choices.step, self._position = made.progress.steps, made.progress.position
        if self._choices.step < self._steps:
            self._course.send(made)

    def kept(self) -> dict[str, Any]:
        """Return what a resumed training takes over, as JSON."""
        self._choices.confirm()
        tried = {text: list(tried) for text, tried in self._choices.tried.items()}
        return {"followed": self.followed, "tried": tried}

    def restart(self, step: int, position: int, kept: Mapping[str, Any]) -> None:
        """Go on after a step with what `kept` returned, and with whole gradients until links are measured."""
        tried = {text: Tried(*tried) for text, tried in kept.get("tried", {}).items()}
        self._choices.restart(step, tried)
        self._position = position
        self._course = self._guide(kept.get("followed", DENSE))
        next(self._course)

    def _guide(self, before: str = DENSE) -> Course:
        """Guide a training that followed an exchange before it was resumed."""
        choices = self._choices
        while choices.step < self._dense:
            yield
        if before != DENSE and choices.is_verified(before):
            yield from self._measure()
            self._follow(before, "it was followed before")
        while True:
            if choices.is_unmeasured:
                yield from self._measure()
            choice, why = choices.choose()
            if choice not in (self.followed, DENSE) and not choices.is_verified(choice):
                yield from self._try(choice, why)
                continue
            if choice != self.followed:
                self._follow(choice, why)
            else:
                self._decide(why)
            yield from self._watch()
            if choices.is_due_again():
                yield from self._try(self.followed, "another trial takes little of the time since the last")

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
        compressions = {str(each.compression) for each in self._choices.exchanges.values() if each.compresses}
        link = self._measure_link()
        conditions = conditions_of(
            gradients,
            measure_codecs(averaged.sample, sorted(compressions)),
            seconds,
            link,
            workers=self._parallel.axes.workers.size,
            elements=self._elements,
            coordinator=self._coordinator,
        )
        own, mean = fmean(each.own for each in gradients), fmean(each.mean for each in gradients)
        self._spread = self._mean(own / mean if mean > 0 else 1.0)
        self._choices.measured(conditions, link)
        self._decide("measured", _numbers_of(conditions))

    def _try(self, text: str, why: str) -> Course:
        """Compare an exchange with dense steps from one state; the dense steps count."""
        if self.followed != DENSE:
            self._follow(DENSE, f"for a trial of {text}: {why}")
        number, tried = self._choices.length(text), self._choices.exchanges[text]
        before, position = Snapshot.take(self._parallel, self._optimizer), self._position
        first = self._choices.step
        fresh = position + (number + AFTER) * self._batch
        at_first = self._values(fresh)
        dense, other = list[HeldOutValues](), list[HeldOutValues]()
        dense_seconds, seconds = _Seconds(), _Seconds()
        for step in range(number + AFTER):
            made = yield
            dense_seconds.add(made.seconds, self._optimizer)
            if step >= number:
                dense.append(self._values(fresh))
        after = Snapshot.take(self._parallel, self._optimizer)
        before.restore()
        self._optimizer.follow(tried)
        for step in range(number):
            seconds.add(self._make_again(first, position, step), self._optimizer)
        self._optimizer.follow(self._choices.exchanges[DENSE])
        for step in range(number, number + AFTER):
            self._make_again(first, position, step)
            other.append(self._values(fresh))
        after.restore()
        longest = max(self._gather(seconds.usual(tried)))
        dense_longest = max(self._gather(dense_seconds.usual(self._choices.exchanges[DENSE])))
        found = compared(at_first, dense, other, longest / dense_longest)
        self._choices.note(text, longest, found.worth, found.failed)
        how = f"failed: {found.failed}" if found.failed else "passed"
        numbers = {"seconds": longest, "dense seconds": dense_longest, "worth": found.worth}
        numbers |= _means("dense", dense) | _means("its", other)
        self._decide(f"a trial of {text} over {number} steps {how}", numbers)

    def _watch(self) -> Course:
        """Follow the exchange until a review is due, or a guard fails."""
        text, exchange = self.followed, self._choices.exchanges[self.followed]
        every = exchange.every if exchange.merges else self._every
        watch = Watch(exchange)
        losses: list[float] = []
        seconds, looked = _Seconds(), 0
        largest = 0.0
        for number in range(1, max(REVIEW, 5 * every) + 1):
            made = yield
            seconds.add(made.seconds, self._optimizer)
            if made.passed.loss.isfinite() and made.norm.whole.isfinite():
                losses.append(float(made.passed.loss))
                largest = max(largest, self._spread * float(made.norm.whole) ** 2)
            is_due = self._optimizer.has_merged if exchange.merges else number % every == 0
            if text == DENSE or not is_due:
                continue
            own = fmean(losses[looked:]) if losses[looked:] else math.nan
            looked = len(losses)
            mean, stray = stray_of(self._optimizer, self._parallel, own)
            if failed := watch.look(mean, largest, stray):
                self._choices.fail(failed)
                self._follow(DENSE, f"{text} failed: {failed}")
                return
        self._choices.since += seconds.total
        self._review(seconds, losses)

    def _review(self, seconds: _Seconds, losses: Sequence[float]) -> None:
        """Judge the losses of the steps that were watched, and take over their seconds; time the link."""
        choices, text = self._choices, self.followed
        own = seconds.usual(choices.exchanges[text]), seconds.total
        ranks = self._gather((*own, fmean(losses) if losses else math.nan, _error_of(losses)))
        usual, total, _, error = map(max, zip(*ranks, strict=True))
        loss = fmean(each[2] for each in ranks)
        if failed := choices.judge(loss, error):
            choices.fail(failed)
            self._follow(DENSE, f"{text} failed: {failed}")
        if failed or choices.conditions is None:
            return
        if choices.should_time(total, usual) and choices.timed(self._measure_link()):
            self._decide("links have changed", _numbers_of(choices.conditions))
        choices.confirm(usual)

    @property
    def _elements(self) -> int:
        """Elements of which this rank exchanges gradients."""
        return sum(each.local.numel() for each in self._parallel.owned)

    def _measure_link(self) -> Link:
        workers, device = self._parallel.axes.workers, self._parallel.device
        return measure_link(workers, device, self._coordinator, self._elements)

    def _make_again(self, first: int, position: int, step: int) -> float:
        """Make a step of a trial again, without telling of it; return its seconds."""
        made = self._stepping.make(first + step, position + step * self._batch)
        self._parallel.zero_grad()
        return made.seconds

    def _values(self, position: int) -> HeldOutValues:
        tasks = dict(self._evaluate(position))
        return HeldOutValues(tasks.pop("loss"), tasks)

    def _follow(self, text: str, reason: str) -> None:
        self._optimizer.follow(self._choices.exchanges[text])
        self._choices.followed = text
        self._decide(reason)

    def _decide(self, reason: str, numbers: Mapping[str, float] | None = None) -> None:
        self._decided(Decision(self._choices.step, self.followed, reason, numbers or {}))

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


def _error_of(losses: Sequence[float]) -> float:
    """Return the standard error of the mean of losses."""
    return stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


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


def guide_of(optimizer: Optimizer, stepping: Stepping, plan: Plan, **settings: Any) -> Guide | None:
    """Return the guide of a training with exchange=auto; None for another training.

    Args:
        optimizer: The optimizer.
        stepping: Makes steps.
        plan: The Plan.
        settings: The other arguments of `Guide`.
    """
    if not plan.exchanged.is_chosen or plan.replicas == 1:
        return None
    return Guide(stepping, cast(GuidedUpdates, optimizer), plan, **settings)
