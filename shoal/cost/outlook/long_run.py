"""A long run: how many days, dollars and failures its steps take, and when to save.

A checkpoint holds 12 bytes per parameter: the weight and Adam's two moments in fp32. All nodes write it at
once, each at the rate of its storage, and training stops meanwhile. After a failure they read as much; that
replicas read the same bytes again is not counted. `shoal.cost.outlook.goodput` gives the cost of failures and
the best interval between checkpoints.

The default rate of the storage is that of Llama 3: 16,384 devices, 8 to a node, sustained 2 TB/s, which is
1 GB/s per node (arXiv:2407.21783, section 3.3.1). The default five minutes to notice a failure and start
again are a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.cluster import Cluster
from shoal.cost.outlook.goodput import Goodput, goodput
from shoal.errors import ConfigError
from shoal.workload import Workload

STORAGE = 1e9
"""Bytes/s of a node to and from the storage of checkpoints."""

RESTART = 300.0
"""Seconds from a failure until all ranks have started again."""

_SAVED = 12.0  # bytes per trained parameter; files of frozen ones are not written again
_DAY = 86_400.0


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
