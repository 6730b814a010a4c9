"""What is known of the exchanges that exchange=auto may follow, and which one to follow or to try next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from shoal.plan import Exchange, Plan
from shoal.planner import DENSE, Conditions, Expected, Tried, candidates, exchange_of, expected
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
