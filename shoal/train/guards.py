"""The guards of exchange=auto: whether an exchange trains as dense steps do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from shoal.parallel import GuidedUpdates, Parallel
from shoal.parallel.exchange.stability import contraction, error_bound
from shoal.plan import Exchange

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
