"""Goodput of a long run: the share of time that trains despite failures, and its days and dollars.

A run saves a checkpoint after every T seconds of training; each stops training for s seconds. The n devices
fail independently, each `failures` times an hour, so the machine fails every M = 3600 / (n failures) seconds
on average. A failure loses the work since the last checkpoint, and R seconds until training goes on. It may
come while the run saves or restarts. T seconds of training then take

    M exp(R / M) (exp((T + s) / M) - 1)

seconds (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation
7). T divided by that is the goodput. The interval is T = sqrt(2 M s), rounded to whole steps, which is nearly
the best (Young, "A first order approximation to the optimum checkpoint interval", 1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.cluster import Cluster, dollars

_HOUR = 3600.0
_DAY = 24 * _HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The shares of a long run's time. The four shares sum to 1.

    Attributes:
        step: Seconds of a step.
        between_failures: Seconds from one failure of any device to the next, on average; inf if none fails.
        interval: Steps from one checkpoint to the next; inf if none is needed.
        share: Share of the time that trains: the goodput.
        saving: Share of the time for which checkpoints stop training.
        restarting: Share of the time between a failure and the next step.
        lost: Share of the time for work that is done again.
        price: Dollars an hour for all devices, spare ones too; 0 if not known.
    """

    step: float
    between_failures: float
    interval: float
    share: float
    saving: float
    restarting: float
    lost: float
    price: float

    def days(self, tokens: float, tokens_per_step: float) -> float:
        """Return the days until a model has seen so many tokens, failures and checkpoints included."""
        training = tokens / tokens_per_step * self.step
        return training / self.share / _DAY if self.share else math.inf

    def dollars(self, tokens: float, tokens_per_step: float) -> float:
        """Return the cost of these days at the price of the devices."""
        return self.days(tokens, tokens_per_step) * (_DAY / _HOUR) * self.price


def best_interval(save: float, between: float) -> float:
    """Return the seconds of training from one save to the next that lose the least time, by Young.

    Args:
        save: Seconds for which a save stops training.
        between: Seconds from one failure to the next, on average.
    """
    return math.sqrt(2 * between * save)


def goodput(cluster: Cluster, step: float, save: float, restart: float) -> Goodput:
    """Return the goodput of a run whose devices fail.

    Args:
        cluster: The machines. All devices take part, and the failure of one stops all.
        step: Seconds of a step.
        save: Seconds for which a checkpoint stops training. A checkpoint that is written while training goes
            on stops it only while the state is copied.
        restart: Seconds from a failure until the next step begins: to notice it, start again and load.
    """
    price = dollars(cluster, _HOUR) if cluster.price else 0.0
    if not cluster.failures:
        return Goodput(
            step=step,
            between_failures=math.inf,
            interval=math.inf,
            share=1.0,
            saving=0.0,
            restarting=0.0,
            lost=0.0,
            price=price,
        )
    between = _HOUR / (cluster.failures * cluster.devices)
    interval = max(1, round(best_interval(save, between) / step))
    trained = interval * step
    section = trained + save
    undisturbed = math.exp(-(restart + section) / between) / -math.expm1(-section / between) / between
    share, saving = trained * undisturbed, save * undisturbed
    restarting = -math.expm1(-restart / between)  # share of time in the first R seconds after a failure
    return Goodput(
        step=step,
        between_failures=between,
        interval=interval,
        share=share,
        saving=saving,
        restarting=restarting,
        lost=1 - share - saving - restarting,
        price=price,
    )
