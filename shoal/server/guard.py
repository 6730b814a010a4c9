"""The guard of stale gradients: rounds take their place when they do harm.

It listens to the losses of all contributions that are applied one by one, in windows.

    a window's mean is above the least one by a quarter,    rounds, from the servers' snapshot
    and by six standard errors
    as many losses in a row as there are workers, two at    rounds, from the servers' snapshot
    least, are not finite
    a worker says that its step is too large                rounds

In rounds nothing is stale: they are the steps of `staleness=0`. Rounds last for a tenth of the training, and
a hundred steps at least; twice as long after each failure. A single loss that is not finite may be that of a
sample, and its step is left out anyway; that all workers have such losses is a matter of the values. Servers
take a snapshot whenever a window has passed, and return to the one before: losses are late, so that the
newest may be of values that are bad already, and a window has passed since the one before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, variance
from typing import final

from shoal.server.terms import Mode, Terms

_WINDOW = 32  # contributions
_RISE = 0.25  # share by which the mean loss of a window may be above the least
_ERRORS = 6  # standard errors by which it may be above it: the least of many means is low by chance
_LEAST = 100  # steps in rounds


@final
class Guard:
    """Decide whether contributions are applied one by one, or in rounds.

    Losses that it has heard are not part of its state: a copy of the board begins to listen anew.

    Args:
        terms: What workers go by.

    Attributes:
        mode: How contributions are applied.
        until: The number of finished shares after which rounds end; 0 without an end.
        failures: Number of times that rounds took the place of stale gradients.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._is_asked = terms.guard and not terms.has_rounds
        self.mode = Mode(in_rounds=terms.has_rounds, snapshots=int(self._is_asked))
        self.until = 0
        self.failures = 0
        self._losses: list[float] = []
        self._least = math.inf, 0.0  # mean of a window, and the square of its standard error
        self._not_finite = 0

    def hear(self, loss: float, failed: str, workers: int, finished: int) -> None:
        """Take note of a contribution that was applied by itself.

        Args:
            loss: Its loss; not finite if its step was left out.
            failed: Why its worker finds stale gradients harmful; "" if it does not.
            workers: Workers that are present.
            finished: Shares that are finished.
        """
        if not self._is_asked or self.mode.in_rounds:
            return
        if failed:
            self._fall_back(failed, finished)
        elif math.isfinite(loss):
            self._not_finite = 0
            self._losses.append(loss)
            if len(self._losses) == _WINDOW:
                self._look(finished)
        else:
            self._not_finite += 1
            if self._not_finite >= max(2, workers):
                reason = f"{self._not_finite} losses in a row are not finite"
                self._return(reason, finished)

    def close(self, finished: int) -> None:
        """Take note that a round was closed; end rounds that took the place of stale gradients in time."""
        if self.until and finished >= self.until:
            self.until = 0
            self._listen_anew()
            self._change(f"{self._terms.staleness:g} steps ahead are allowed again")
            self.mode = replace(self.mode, in_rounds=False, snapshots=self.mode.snapshots + 1)

    def _look(self, finished: int) -> None:
        """Judge a window."""
        mean, square = fmean(self._losses), variance(self._losses) / len(self._losses)
        self._losses.clear()
        least, square_of_least = self._least
        # The error of the difference. Losses that grow vary too, and that is no noise.
        error = math.sqrt(2 * square_of_least)
        if mean > least + max(_RISE * abs(least), _ERRORS * error):
            reason = f"the loss rose from {least:.4g} to {mean:.4g} with gradients that were late"
            self._return(reason, finished)
            return
        self.mode = replace(self.mode, snapshots=self.mode.snapshots + 1)
        self._least = min(self._least, (mean, square))

    def _return(self, reason: str, finished: int) -> None:
        self.mode = replace(self.mode, returns=self.mode.returns + 1)
        self._fall_back(f"{reason}; values are those of the snapshot before", finished)

    def _fall_back(self, reason: str, finished: int) -> None:
        terms = self._terms
        self.failures += 1
        steps = max(_LEAST, terms.shares // terms.workers // 10) * 2 ** (self.failures - 1)
        self.until = finished + steps * terms.workers
        self._change(reason)
        self.mode = replace(self.mode, in_rounds=True)

    def _change(self, reason: str) -> None:
        self.mode = replace(self.mode, changes=self.mode.changes + 1, reason=reason)

    def _listen_anew(self) -> None:
        self._losses.clear()
        self._least = math.inf, 0.0
        self._not_finite = 0
