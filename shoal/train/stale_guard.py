"""The guard of a training with stale gradients, as a worker takes part in it.

The servers' board decides (`shoal.server.guard`): it hears the losses of all workers. Where servers make
steps of plain gradient descent, the worker that leads tells it, too, whether the step is too large. A
gradient that is s updates late is applied with the learning rate over 1 + s; on a quadratic with curvature L
that is stable exactly below (1 + s) `most_stable_step(L, s)`. So it compares

    the learning rate in force, times the share that clipping leaves of a gradient
    with (1 + s) `most_stable_step(L, s)`: s the mean staleness of its last contributions, and L the curvature
    along its last movement (`curvature.py`)

every 50 steps. If the rate is above, it compares again after each of the next steps, and tells the board when
three in a row were above. With momentum or an adaptive optimizer no bound is known, and only losses are
watched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import final

from shoal.parallel import ServedUpdates
from shoal.parallel.exchange.stability import most_stable_step
from shoal.plan import Exchange
from shoal.run import Decision
from shoal.train.curvature import Curvature
from shoal.train.stepping import Made

_EVERY = 50  # steps of the worker between two measurements
_IN_A_ROW = 3  # measurements above the bound


@final
class StaleGuard:
    """Watch the steps of a worker, and tell of the decisions; all ranks of the worker make one.

    Args:
        served: The optimizer.
        exchange: The Plan's exchange.
        curvature: Measures the curvature.
        clip: Norm to which gradients are scaled down; None for none.
        batch: Samples of a share.
        decided: Told of each decision, on the ranks of the worker that leads.
    """

    def __init__(
        self,
        served: ServedUpdates,
        exchange: Exchange,
        curvature: Curvature,
        *,
        clip: float | None,
        batch: int,
        decided: Callable[[Decision], object],
    ) -> None:
        self._served = served
        self._exchange = exchange
        self._curvature = curvature
        self._clip = clip
        self._batch = batch
        self._decided = decided
        self._stale: deque[int] = deque(maxlen=_EVERY)
        self._steps = self._above = self._told = 0

    def advance(self, made: Made) -> None:
        """Take note of a step; all ranks of the worker call it after each."""
        self._tell(made.progress.steps)
        served, curvature = self._served, self._curvature
        if not (served.steps_along_gradients and served.leads) or served.mode.in_rounds or served.is_over:
            curvature.let_go()
            self._steps = self._above = 0
            return
        self._steps += 1
        self._stale.append(served.staleness)
        if curvature.is_held:
            self._look(made.norm.whole.item())
        if self._steps % _EVERY == 0 or self._above:
            curvature.hold()

    def _look(self, norm: float) -> None:
        """Compare the learning rate with the largest stable one."""
        share = self._served.share()
        assert share is not None, "the worker goes on"
        curvature = self._curvature.measure(share * self._batch)
        rate = max(group["lr"] for group in self._served.param_groups)
        left = 1.0 if self._clip is None or not norm > self._clip else self._clip / norm
        stale = fmean(self._stale)
        most = (1 + stale) * most_stable_step(curvature, stale) if curvature > 0 else float("inf")
        self._above = self._above + 1 if left * rate > most else 0
        if self._above == _IN_A_ROW:
            self._above = 0
            self._served.failed = (
                f"the learning rate of {left * rate:.3g} is above {most:.3g}, the largest stable one with "
                f"staleness {stale:.3g} and a curvature of {curvature:.3g} along the movement"
            )

    def _tell(self, step: int) -> None:
        """Tell of a change, once."""
        mode = self._served.mode
        if mode.changes > self._told and self._served.leads:
            staleness = 0 if mode.in_rounds else self._exchange.staleness
            text = f"exchange=server,servers={self._exchange.processes},staleness={staleness:g}"
            self._decided(Decision(step, text, mode.reason))
        self._told = mode.changes
