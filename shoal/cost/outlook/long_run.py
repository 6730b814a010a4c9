"""A long run: how many days, dollars and failures a number of steps takes, and when to save.

A checkpoint holds 12 bytes of a parameter: the weight and Adam's two moments in fp32. All nodes write it at
once, each at the rate of its storage, and training stands still meanwhile; after a failure they read as
much, what replicas read more than once not counted. `shoal.cost.outlook.goodput` says what failures then
cost, and the best interval between checkpoints.

The storage's rate, if nothing is said, is what Llama 3 had: 2 TB/s that 16,384 devices sustained, 8 to a
node, which is 1 GB/s of a node (arXiv:2407.21783, section 3.3.1). That noticing a failure and starting again
takes five minutes is a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.cluster import Cluster
from shoal.cost.outlook.goodput import Goodput, goodput
from shoal.errors import ConfigError
from shoal.workload import Workload

__all__ = ["RESTART", "STORAGE", "LongRun", "long_run"]

STORAGE = 1e9
"""Bytes/s of a node, to and from where checkpoints are."""

RESTART = 300.0
"""Seconds from a failure until all ranks have started again."""

_SAVED = 12.0  # bytes of a parameter
_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """Many steps.

    Attributes:
        steps: How many.
        tokens: That they see.
        checkpoint: Bytes of one.
        save: Seconds of one.
        restart: Seconds from a failure until the next step begins.
        goodput: What share of the time trains.
    """

    steps: int
    tokens: float
    checkpoint: float
    save: float
    restart: float
    goodput: Goodput

    @property
    def days(self) -> float:
        """In all; infinity if more is lost than done."""
        return self.goodput.days(self.steps, 1)

    @property
    def dollars(self) -> float:
        """In all; 0 if the price is not known."""
        return self.goodput.dollars(self.steps, 1) if self.goodput.price else 0.0

    @property
    def failures(self) -> float:
        """Expected in all; 0 if their rate is not known."""
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
    """What many steps come to.

    Args:
        workload: What is trained.
        cluster: Where, all of whose devices take part.
        step: Seconds of a step.
        tokens_per_step: Of the batch.
        steps: How many; or
        tokens: as many as see so many tokens.
        storage: Bytes/s of a node, to and from where checkpoints are.
        restart: Seconds from a failure until all ranks have started again, before they load.

    Raises:
        ConfigError: A number is none that can be.
    """
    if steps is None:
        _require((tokens or 0) > 0, "tokens", tokens, "more than 0, such as 15T")
        assert tokens is not None
        steps = math.ceil(tokens / tokens_per_step)
    _require(steps > 0, "steps", steps, "1 or more")
    _require(storage > 0 and math.isfinite(storage), "storage", storage, "bytes a second, more than 0")
    _require(restart >= 0 and math.isfinite(restart), "restart", restart, "seconds, 0 or more")
    checkpoint = _SAVED * workload.parameters
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
        raise ConfigError(f"{name}={value} cannot be", possible=possible, change=f"correct {name}")
