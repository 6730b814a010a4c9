"""A long run: how many days, dollars and failures its steps take, and when to save.

A checkpoint holds 12 bytes per parameter: the weight and Adam's two moments in fp32. All nodes write it at
once, each at the rate of its storage, and training stops meanwhile. After a failure they read as much; that
replicas read the same bytes again is not counted.

The default rate of the storage is that of Llama 3: 16,384 devices, 8 to a node, sustained 2 TB/s, which is
1 GB/s per node (arXiv:2407.21783, section 3.3.1). The default five minutes to notice a failure and start
again are a guess.

How often a run fails
---------------------

How often a run fails: what was expected before it, corrected by the failures that were seen in it.

Failures come independently of each other, so their number in a time is a Poisson variable whose rate is not
known. What is expected before the run, one failure in `prior` seconds, counts as if it had been seen: it is
a Gamma distribution of the rate with shape 1 and scale 1 / prior. After `seen` failures in `seconds` the rate
has a Gamma distribution with shape 1 + seen and scale 1 / (prior + seconds), whose mean is

    (1 + seen) / (prior + seconds)

Its inverse is the mean time between failures that this module gives. A run that never fails believes ever
longer times, one that fails often soon believes what it sees, and the first guess is forgotten once some
failures were seen. See Gelman et al., "Bayesian Data Analysis", section 2.6, for the Gamma prior.

Goodput
-------

Goodput of a long run: the share of time that trains despite failures, and its days and dollars.

A run saves a checkpoint after every T seconds of training; each stops training for s seconds. The n devices
fail independently, each `failures` times an hour, so the machine fails every M = 3600 / (n failures) seconds
on average. A failure loses the work since the last checkpoint, and R seconds until training goes on. It may
come while the run saves or restarts. T seconds of training then take

    M exp(R / M) (exp((T + s) / M) - 1)

seconds (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation
7). T divided by that is the goodput. The interval is T = sqrt(2 M s), rounded to whole steps, which is nearly
the best (Young, "A first order approximation to the optimum checkpoint interval", 1974).

Costs of a run
--------------

Where the wall clock of a run went, and what it costs: so far, and up to its last step.

Devices are paid for while ranks run: not while the run waits for its next command. What is to go is taken to
lose as large a share to failures, saves and validations as the run did so far; see
`shoal.spec.run.Account.seconds_left`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError
from shoal.spec.cluster import Cluster, dollars
from shoal.spec.workload import Workload

if TYPE_CHECKING:
    from shoal.spec.run import Account


def seconds_between_failures(prior: float, seen: int, seconds: float) -> float:
    """Return the mean time between failures of a run.

    Args:
        prior: Seconds between failures as expected before the run.
        seen: Failures that were seen.
        seconds: Seconds of the run in which they were seen.
    """
    return (prior + seconds) / (1 + seen)


_HOUR = 3600.0
_DAY = 86_400.0


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


STORAGE = 1e9
"""Bytes/s of a node to and from the storage of checkpoints."""

RESTART = 300.0
"""Seconds from a failure until all ranks have started again."""

_SAVED = 12.0  # bytes per trained parameter; files of frozen ones are not written again


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """The cost of a run of many steps.

    Attributes:
        steps: Number of steps.
        tokens: Number of tokens that the steps see.
        checkpoint: Bytes of one checkpoint.
        save: Seconds to write one checkpoint.
        restart: Seconds from a failure until the next step begins.
        goodput: The shares of the run's time.
    """

    steps: int
    tokens: float
    checkpoint: float
    save: float
    restart: float
    goodput: Goodput

    @property
    def days(self) -> float:
        """Days of the whole run; infinity if failures lose more than is done."""
        return self.goodput.days(self.steps, 1)

    @property
    def dollars(self) -> float:
        """Dollars of the whole run; 0 if the price is not known."""
        return self.goodput.dollars(self.steps, 1) if self.goodput.price else 0.0

    @property
    def failures(self) -> float:
        """Expected failures in the whole run; 0 if their rate is not known."""
        between = self.goodput.between_failures
        return 0.0 if math.isinf(between) else self.days * _DAY / between


def long_run(
    workload: Workload,
    cluster: Cluster,
    step: float,
    tokens_per_step: float,
    *,
    steps: int | None = None,
    tokens: float | None = None,
    storage: float = STORAGE,
    restart: float = RESTART,
) -> LongRun:
    """Return the cost of a run of many steps.

    Args:
        workload: The work of the model that is trained.
        cluster: The machines that it runs on; all devices take part.
        step: Seconds of a step.
        tokens_per_step: Tokens in a batch.
        steps: Number of steps; or give `tokens`.
        tokens: Number of tokens that the steps see together; or give `steps`.
        storage: Bytes/s of a node to and from the storage of checkpoints.
        restart: Seconds from a failure until all ranks have started again, before they load.

    Raises:
        ConfigError: A number is out of its range.
    """
    if steps is None:
        _require((tokens or 0) > 0, "tokens", tokens, "more than 0, such as 15T")
        assert tokens is not None
        steps = math.ceil(tokens / tokens_per_step)
    _require(steps > 0, "steps", steps, "1 or more")
    _require(storage > 0 and math.isfinite(storage), "storage", storage, "bytes a second, more than 0")
    _require(restart >= 0 and math.isfinite(restart), "restart", restart, "seconds, 0 or more")
    checkpoint = _SAVED * workload.trained
    nodes = math.ceil(cluster.devices / cluster.devices_per_node)
    save = checkpoint / (nodes * storage)
    return LongRun(
        steps=steps,
        tokens=steps * tokens_per_step,
        checkpoint=checkpoint,
        save=save,
        restart=restart + save,
        goodput=goodput(cluster, step, save, restart + save),
    )


def _require(holds: bool, name: str, value: object, possible: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} is not allowed", possible=possible, change=f"correct {name}")


def account_summary(
    account: Account | None, description: Mapping[str, Any], cluster: Cluster | None = None
) -> dict[str, Any] | None:
    """Return the account of a run and its cost as an object for JSON; what is not known is None.

    Args:
        account: The account; None for a run without events.
        description: The content of run.json, which says how many steps are to be made.
        cluster: The machines, which may have a price.
    """
    if account is None:
        return None
    config = description.get("config")
    steps = config.get("steps") if isinstance(config, Mapping) else None
    to_make = max(0, steps - account.step) if isinstance(steps, int) else None
    seconds = account.seconds_left(to_make) if to_make else 0.0 if to_make == 0 else math.nan
    left = seconds if math.isfinite(seconds) else None
    return {
        "began": account.began,
        "wall_seconds": account.wall,
        "goodput": account.goodput,
        "step_seconds": account.steps,
        "lost_seconds": dict(account.lost),
        "launches": account.launches,
        "failures": account.failures,
        "device_hours": account.device_seconds / _HOUR,
        "dollars": _dollars(cluster, account.device_seconds),
        "steps_left": to_make,
        "seconds_left": left,
        "device_hours_left": None if left is None else left * account.ranks / _HOUR,
        "dollars_left": None if left is None else _dollars(cluster, left * account.ranks),
    }


def _dollars(cluster: Cluster | None, device_seconds: float) -> float | None:
    if cluster is None or not cluster.price:
        return None
    return dollars(cluster, device_seconds, devices=1)
