"""What failures leave of a long run: the share of time that trains, and the days and dollars that follow.

A run saves a checkpoint after every T seconds of training, which stops it for s seconds. The n devices fail
independently, each `failures` times an hour, so the machine fails every M = 3600 / (n failures) seconds on
average. A failure loses what was done since the last checkpoint, and R seconds until training goes on; it may
come while the run saves, or restarts. T seconds of training then take

    M exp(R / M) (exp((T + s) / M) - 1)

seconds (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation
7), and T / that is the goodput. The interval is T = sqrt(2 M s), which is nearly the best (Young, "A first
order approximation to the optimum checkpoint interval", 1974), in whole steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.cluster import Cluster

__all__ = ["Goodput", "goodput"]

_HOUR = 3600.0
_DAY = 24 * _HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Where the time of a long run goes. The four shares sum to 1.

    Attributes:
        step: Seconds.
        between_failures: Seconds from one failure of any device to the next, on average; inf if none fails.
        interval: Steps from one checkpoint to the next; inf if none is needed.
        share: Of the time, what trains: the goodput.
        saving: Of the time, what checkpoints stop it for.
        restarting: Of the time, what passes from a failure to the next step.
        lost: Of the time, what is done again.
        price: Dollars an hour for all devices; 0 if not known.
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
        """Until a model has seen so many tokens, failures and checkpoints included."""
        training = tokens / tokens_per_step * self.step
        return training / self.share / _DAY if self.share else math.inf

    def dollars(self, tokens: float, tokens_per_step: float) -> float:
        """What these days cost at the price of the devices."""
        return self.days(tokens, tokens_per_step) * (_DAY / _HOUR) * self.price


def goodput(cluster: Cluster, step: float, save: float, restart: float) -> Goodput:
    """The share of time that trains, when devices fail.

    Args:
        cluster: All its devices take part, and one that fails stops all.
        step: Seconds of a step.
        save: Seconds that a checkpoint stops training for. One that is written while training goes on stops
            it only while the state is copied.
        restart: Seconds from a failure until the next step begins: to notice it, start again and load.
    """
    price = cluster.price * cluster.devices
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
    interval = max(1, round(math.sqrt(2 * between * save) / step))
    trained = interval * step
    section = trained + save
    undisturbed = math.exp(-(restart + section) / between) / -math.expm1(-section / between) / between
    share, saving = trained * undisturbed, save * undisturbed
    restarting = -math.expm1(-restart / between)  # of the time to the next failure, its first R seconds
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
