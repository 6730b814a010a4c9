"""What is known of the exchanges that exchange=auto may follow, and which one to follow or to try next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple, final

import torch

from shoal.parallel import GuidedUpdates, Parallel
from shoal.parallel.exchange.stability import contraction, error_bound
from shoal.predict.planner import DENSE, Conditions, Expected, Tried, candidates, exchange_of, expected
from shoal.spec.plan import Exchange, Plan
from shoal.train.measured_exchange import Link

AFTER = 4
"""Dense steps that end both sides of a trial; held-out values are taken after each."""

REVIEW = 100
"""Least steps between two reviews."""

_GAIN = 0.1  # share of the seconds by which another exchange must be quicker
_CHANGED = 1.3  # factor by which an all-reduce takes longer or shorter on links that have changed
_OVERHEAD = 0.02  # share of the seconds that repeated trials of a followed exchange may take
_STALLED_OVERHEAD = 0.05  # that share when the loss has stalled, since exact steps may gain most then
_STALL, _RISE = 0.01, 0.02  # shares of the loss by which it falls less, or rises, between two reviews
_ERRORS = 3  # standard errors of the loss by which it must have risen beside


@final
class Choices:
    """The exchanges to choose from, their trials, and the one that is followed. It is equal on all ranks.

    Args:
        plan: The Plan, with exchange=auto.
        steps: Steps of the whole training.

    Attributes:
        exchanges: By their texts; those that change gradients least come first.
        followed: The one that the next step follows.
        step: Steps made.
        tried: The newest trials.
        conditions: What was measured; None before.
        since: Seconds of steps since the last trial.
    """

    def __init__(self, plan: Plan, steps: int) -> None:
        self._every = plan.every
        self._steps = steps
        self._link = Link(0.0, 0.0)  # as it was when conditions were measured
        self._measured = -REVIEW  # the step after which they were
        self._untimed = 0.0  # seconds of steps since the link was timed
        self._usual: tuple[str, float] | None = None  # what was followed then, and the seconds of its steps
        self.exchanges: Mapping[str, Exchange] = {
            text: exchange_of(text, plan) for text in candidates(plan.every)
        }
        self.followed = DENSE
        self.step = 0
        self.tried: dict[str, Tried] = {}
        self._least = math.inf  # least mean loss of a review
        self._has_stalled = False
        self.conditions: Conditions | None = None
        self.since = 0.0

    @property
    def is_unmeasured(self) -> bool:
        """Whether dense steps are made, and not measured in the last third of all, nor in the last 100."""
        return self.followed == DENSE and self.step >= max(self._measured + REVIEW, 1.5 * self._measured)

    def restart(self, step: int, tried: Mapping[str, Tried]) -> None:
        """Go on after a step with the trials of a checkpoint, and with whole gradients."""
        self.step, self.tried = step, dict(tried)
        self.followed, self.conditions, self._measured = DENSE, None, -REVIEW
        self._least, self._has_stalled = math.inf, False

    def measured(self, conditions: Conditions, link: Link) -> None:
        """Take over conditions, and the link as it was timed beside them."""
        self.conditions, self._link, self._measured = conditions, link, self.step
        self._untimed = 0.0

    def should_time(self, seconds: float, step: float) -> bool:
        """Return whether to time the link again: it takes little of the time since, or steps have changed.

        Args:
            seconds: Seconds of the steps since the last review.
            step: Usual seconds of one of them.
        """
        assert self.conditions is not None
        self._untimed += seconds
        followed, before = self._usual or (self.followed, step)
        has_changed = not (step <= _CHANGED * before and before <= _CHANGED * step)
        is_due = self._link.price < _OVERHEAD * self._untimed
        if self._usual is None or followed != self.followed or has_changed:
            self._usual = self.followed, step
        return is_due or (has_changed and followed == self.followed)

    def timed(self, link: Link) -> bool:
        """Take over the link as it was timed again; return whether it has changed."""
        assert self.conditions is not None
        self._untimed = 0.0
        nbytes = 4 * self.conditions.elements
        old, new = self._link.all_reduce(nbytes), link.all_reduce(nbytes)
        if old <= new * _CHANGED and new <= old * _CHANGED:
            return False
        per_byte = self.conditions.per_byte * new / old if old > 0 else link.per_byte
        self.conditions = replace(self.conditions, latency=link.latency, per_byte=per_byte)
        self._link = link
        self.tried = {text: tried._replace(seconds=None) for text, tried in self.tried.items()}
        return True

    def judge(self, loss: float, error: float) -> str:
        """Take note of the loss since the last review; return why what is followed fails, or "".

        Args:
            loss: Mean training loss of all workers.
            error: Its standard error.
        """
        least, self._least = self._least, min(self._least, loss)
        self._has_stalled = not loss <= (1 - _STALL) * least
        if self.followed != DENSE and loss > least + _RISE * abs(least) + _ERRORS * error:
            return f"the loss rose slowly from {least:.4g} to {loss:.4g}"
        return ""

    def note(self, text: str, seconds: float, worth: float, failed: str) -> None:
        """Remember a trial that was just made; see `Tried`."""
        self.tried[text] = Tried(self.step, seconds, worth, failed)
        self.since = 0.0

    def fail(self, why: str) -> None:
        """Remember that a guard refused the exchange that is followed."""
        worth = self.tried[self.followed].worth if self.followed in self.tried else 1.0
        self.tried[self.followed] = Tried(self.step, None, worth, why)

    def confirm(self, seconds: float | None = None) -> None:
        """Let the trial of the followed exchange tell on, since no guard has failed.

        Args:
            seconds: Seconds of a step since; None if they are not known. The least ones count while links are
                as they were, since other work only adds to them.
        """
        if (tried := self.tried.get(self.followed)) is not None:
            known = [each for each in (tried.seconds, seconds) if each is not None]
            least = min(known, default=None)
            self.tried[self.followed] = tried._replace(step=self.step, seconds=least)

    def is_verified(self, text: str) -> bool:
        """Whether the newest trial of an exchange passed."""
        tried = self._newest(text)
        return tried is not None and not tried.failed

    def expected(self, text: str) -> Expected:
        """Return what is expected of an exchange."""
        assert self.conditions is not None
        tried = self.tried[text] if text == self.followed and text in self.tried else self._newest(text)
        worths = [self.tried[each].worth for each in self._whole_merges if each in self.tried]
        return expected(text, self.exchanges[text], self.conditions, tried, max(worths, default=1.0))

    def choose(self) -> tuple[str, str]:
        """Return the exchange to follow, or to try if its newest trial did not pass, and why."""
        if self.conditions is None:
            return DENSE, "nothing is known of others"
        allowed = [self.expected(text) for text in self.exchanges if not self._has_failed(text)]
        followed, dense = self.expected(self.followed), self.expected(DENSE)
        if (1 - _GAIN / 2) * dense.cost <= followed.cost and self.followed != DENSE:
            return DENSE, f"nearly as quick, and exact: {dense}; {followed}"
        verified = [each for each in allowed if self.is_verified(each.exchange)]
        safe = min([followed, dense, *verified], key=lambda each: each.cost)
        best, why = _quickest(allowed), ""
        if best.cost <= (1 - _GAIN) * safe.cost:  # only one without a trial is
            # A trial must be worth it: its dense steps count, but not the steps beside them.
            left = self._steps - self.step - self.length(best.exchange) - AFTER
            gain, price = left * (safe.cost - best.cost), self._price(best, safe)
            if gain > price:
                return best.exchange, f"worth a trial: {best}; {safe}"
            why = f"a trial of {best.exchange} takes {price:.3g} s, and would gain {max(0.0, gain):.3g} s; "
        if safe.cost <= (1 - _GAIN) * followed.cost:
            return safe.exchange, f"{why}{safe}; {followed}"
        if best.exchange == self.followed:
            return self.followed, f"the quickest: {followed}"
        return self.followed, f"{why}no other is quicker by more than {_GAIN:.0%}: {followed}"

    def is_due_again(self) -> bool:
        """Whether another trial of the followed exchange takes little of the time since the last one."""
        if self.followed == DENSE or self.conditions is None:
            return False
        now = self.expected(self.followed)
        fits = self._steps - self.step >= 2 * self.length(self.followed)
        overhead = _STALLED_OVERHEAD if self._has_stalled else _OVERHEAD
        return fits and self._price(now, now) < overhead * self.since

    def length(self, text: str) -> int:
        """Return the steps of a trial before the dense ones: a round, or two if elements wait for a merge."""
        exchange = self.exchanges[text]
        return 2 * self._every if exchange.merges and exchange.leaves_out else self._every

    @property
    def _whole_merges(self) -> list[str]:
        """The local updates that leave no element out."""
        return [text for text, each in self.exchanges.items() if each.merges and not each.leaves_out]

    def _newest(self, text: str) -> Tried | None:
        """Return the newest trial of an exchange, if it still tells: training changes what it told."""
        tried = self.tried.get(text)
        return tried if tried and self.step < max(2 * tried.step, tried.step + REVIEW) else None

    def _has_failed(self, text: str) -> bool:
        """Whether the newest trial of an exchange failed, or a guard since.

        Where merges of all elements failed, those that leave some out need no trial.
        """
        exchange = self.exchanges[text]
        alike = [text, *(self._whole_merges if exchange.merges and exchange.leaves_out else [])]
        return any(tried is not None and tried.failed for tried in map(self._newest, alike))

    def _price(self, other: Expected, safe: Expected) -> float:
        """Return the seconds that a trial takes beyond those of the progress that it makes."""
        dense, number = self.expected(DENSE), self.length(other.exchange)
        again = number * other.seconds + AFTER * dense.seconds
        return again + (number + AFTER) * max(0.0, dense.cost - safe.cost)


def _quickest(expected: Sequence[Expected]) -> Expected:
    """Return the first of those that are nearly as quick as the quickest."""
    least = min(each.cost for each in expected)
    return next(each for each in expected if (1 - _GAIN / 2) * each.cost <= least)


_LOSS, _TASK = 0.01, 0.02  # shares by which a trial's loss may be higher, and its tasks lower
_DEVIATIONS = 2  # standard deviations of the values by which they may be so beside
_LEAST_WORTH = 0.05
_SPIKE = 0.25  # share by which the mean loss of a stretch may rise above its least
_AGAINST = 2  # stretches in a row in which workers may not move against each other
_MANY = 1 << 20  # elements of a long vector


class HeldOutValues(NamedTuple):
    """Held-out values after some steps.

    Attributes:
        loss: The mean loss.
        tasks: Means by name, of which more is better.
    """

    loss: float
    tasks: Mapping[str, float]


class Compared(NamedTuple):
    """What a trial showed.

    Attributes:
        worth: Dense steps that one step of the exchange was worth, from 0.05 to 1.
        failed: Why the exchange is refused; "" if it is not.
    """

    worth: float
    failed: str


class Stray(NamedTuple):
    """How far workers and compression stray.

    Attributes:
        likeness: Mean cosine between what two workers changed since the last merge; 1 without local updates.
            It means nothing where compression leaves elements out.
        own: Mean square of what a worker changed since the last merge; 0 without local updates.
        left: Mean square of what a worker's compression left out.
    """

    likeness: float
    own: float
    left: float


def compared(
    first: HeldOutValues, dense: Sequence[HeldOutValues], other: Sequence[HeldOutValues], seconds: float
) -> Compared:
    """Compare a trial with the dense steps beside it, in equal time, and beyond the noise of their values.

    Args:
        first: Values before both.
        dense: Values after each of the last dense steps.
        other: Values after each of the last steps of the trial.
        seconds: Seconds of a step of the exchange that is tried, over those of a dense step.
    """
    loss, aim = (_mean([each.loss for each in side]) for side in (other, dense))
    noise = _noise([each.loss for each in dense], [each.loss for each in other])
    could, came = first.loss - aim, first.loss - loss
    worth = 1.0
    if could + noise > 0:  # otherwise dense steps came to nothing, and there is nothing to compare with
        worth = min(1.0, max(_LEAST_WORTH, (came + noise) / (could + noise)))
    then = first.loss - could * min(1.0, seconds)
    if not loss <= then + _LOSS * abs(then) + _DEVIATIONS * noise:
        return Compared(
            worth, f"the held-out loss is {loss:.4g}, and {then:.4g} after dense steps of equal time"
        )
    for name, before in first.tasks.items():
        mine, theirs = ([each.tasks[name] for each in side] for side in (other, dense))
        # Tasks are compared where the loss is equal.
        value, then = _mean(mine), before + worth * (_mean(theirs) - before)
        if not value >= then - _TASK * abs(then) - _DEVIATIONS * _noise(theirs, mine):
            return Compared(
                worth, f"{name} is {value:.4g}, and {then:.4g} after dense steps to an equal loss"
            )
    return Compared(worth, "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _noise(*sides: Sequence[float]) -> float:
    """Return the standard deviation of values about the mean of their side; 0 if one is not finite."""
    squares = [(value - _mean(side)) ** 2 for side in sides for value in side]
    return math.sqrt(fmean(squares)) if all(map(math.isfinite, squares)) else 0.0


def most_left_out(exchange: Exchange) -> float:
    """Return the most that a codec which contracts leaves out, over the largest square that is sent."""
    if not exchange.compresses:
        return math.inf
    # An exchange in two phases has two memories.
    return 2 * error_bound(contraction(exchange.compression, _MANY), exchange.feedback)


def stray_of(optimizer: GuidedUpdates, parallel: Parallel, loss: float) -> tuple[float, Stray]:
    """Return the workers' mean of a loss, and how far workers and compression stray.

    All ranks call it together, and get equal values.
    """
    workers, local, parts = parallel.axes.workers, optimizer.local, parallel.axes.parts
    told = torch.zeros(4, dtype=torch.float64, device=parallel.device)
    told[2] = optimizer.left_out() * workers.size**2  # what is sent is divided by the workers
    told[3] = loss / parts.size
    if local is not None:
        told[:2] = local.take_moved()
    parts.all_reduce(told, "guard").wait()
    workers.all_reduce(told, "guard").wait()
    own, mean, left, loss = told.div_(workers.size).tolist()
    likeness = (workers.size * mean / own - 1) / (workers.size - 1) if own > 0 else 1.0
    return loss, Stray(likeness, own, left)


class Watch:
    """The guard of an exchange while it is followed.

    Args:
        exchange: The exchange.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._most = most_left_out(exchange)
        # A mean from which elements are left out is short, and would make workers look unlike.
        self._is_whole = not exchange.leaves_out
        self._least, self._largest, self._against = math.inf, 0.0, 0

    def look(self, loss: float, square: float, stray: Stray) -> str:
        """Return why a guard fails after a stretch of steps; "" if none does.

        Args:
            loss: Mean loss of the stretch, over all workers; NaN if no step's was finite.
            square: The largest square of a worker's gradient in it.
            stray: How far workers and compression stray.
        """
        least, self._least = self._least, min(self._least, loss)
        self._largest = max(self._largest, square if stray.own == 0 else stray.own)
        self._against = self._against + 1 if self._is_whole and stray.likeness < 0 else 0
        if not loss <= least + _SPIKE * abs(least):
            return f"the loss rose from {least:.4g} to {loss:.4g}"
        if self._against == _AGAINST:
            return f"workers move against each other: their mean cosine is {stray.likeness:.2g}"
        if stray.left > self._most * self._largest:
            share = stray.left / self._largest if self._largest else math.inf
            return f"compression left out {share:.3g} of the largest square, above {self._most:.3g}"
        return ""
