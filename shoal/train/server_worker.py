"""A training through parameter servers: what one worker runs, and by which terms.

The guard of a training with stale gradients, as a worker takes part in it.

The servers' board decides (`shoal.parallel.exchange.server.coordinator`): it hears the losses of all workers.
Where servers make steps of plain gradient descent, the worker that leads tells it, too, whether the step is
too large. A gradient that is s updates late is applied with the learning rate over 1 + s; on a quadratic with
curvature L that is stable exactly below (1 + s) `most_stable_step(L, s)`. So it compares

    the learning rate in force, times the share that clipping leaves of a gradient
    with (1 + s) `most_stable_step(L, s)`: s the mean staleness of its last contributions, and L the curvature
    along its last movement

every 50 steps. If the rate is above, it compares again after each of the next steps, and tells the board when
three in a row were above. With momentum or an adaptive optimizer no bound is known, and only losses are
watched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any, cast, final

import torch

from shoal.checkpoint import Coordinator
from shoal.data import Loader, all_targets_count
from shoal.errors import ConfigError
from shoal.parallel import Parallel, ServedUpdates, outer_settings
from shoal.parallel.exchange.server import Servers, Terms
from shoal.parallel.exchange.stability import most_stable_step
from shoal.record import Recorder
from shoal.spec.plan import Exchange, Plan, SettledPlan
from shoal.spec.run import Decision
from shoal.train.config import OptimizerConfig
from shoal.train.micro_batch import Inputs, Reader
from shoal.train.step import Made


@final
class Curvature:
    """Measure the curvature along a movement d of the values from x; all ranks of a worker call it together.

        L = <g(x + d) - g(x), d> / |d|^2

    Both gradients are of the same samples, with dropout off, so that their noise is the same and cancels. It
    takes two forwards and backwards of a micro-batch, and two copies of a rank's part of the parameters.

    It assumes that the loss is nearly quadratic between x and x + d, and that these samples had no part in d:
    then the mean of L over samples is the curvature of the whole loss. L is a Rayleigh quotient of the
    Hessian, so its mean is at most the largest curvature, and usually far below it. Where steps are too
    large, movement turns into the direction that grows, as in a power iteration, and L becomes its curvature.

    Args:
        parallel: The model.
        loader: Distributes the samples.
        reader: Makes micro-batches of them.
        microbatch: Samples of one forward of one rank.
    """

    def __init__(self, parallel: Parallel, loader: Loader[Any], reader: Reader, microbatch: int) -> None:
        self._parallel = parallel
        self._loader = loader
        self._reader = reader
        self._microbatch = microbatch
        self._before: list[torch.Tensor] = []

    @property
    def is_held(self) -> bool:
        """Whether the beginning of a movement is held."""
        return bool(self._before)

    def hold(self) -> None:
        """Take the present values for the beginning of a movement."""
        self._before = [each.local.detach().clone() for each in self._parallel.owned]

    def let_go(self) -> None:
        """Forget the beginning of a movement."""
        self._before = []

    @torch.no_grad()
    def measure(self, position: int) -> float:
        """Return the curvature along the movement to the present values; 0 if nothing has moved.

        Args:
            position: Position in all data of the first of samples that no gradient in the movement is of.
        """
        owned = self._parallel.owned
        now = [each.local.detach().clone() for each in owned]
        gradients = self._gradients(position)
        for each, values in zip(owned, self._before, strict=True):
            each.local.copy_(values)
        self._parallel.changed()
        changes = torch._foreach_sub(gradients, self._gradients(position))
        for each, values in zip(owned, now, strict=True):
            each.local.copy_(values)
        self._parallel.changed()
        movement = torch._foreach_sub(now, self._before)
        self.let_go()
        told = torch.zeros(2, dtype=torch.float64, device=self._parallel.device)
        for each, moved, changed in zip(owned, movement, changes, strict=True):
            products = torch.stack([(changed * moved).double().sum(), moved.double().square().sum()])
            told += products / each.family.copies
        self._parallel.axes.parts.all_reduce(told, "curvature").wait()
        product, square = told.tolist()
        return product / square if square > 0 else 0.0

    def _gradients(self, position: int) -> list[torch.Tensor]:
        """Return the gradients of a micro-batch at the present values."""
        parallel, dp = self._parallel, self._parallel.axes.dp
        start = self._loader.start(position, 0, dp.index, dp.size, self._microbatch)
        batch = self._loader.fetch(start, self._microbatch)
        all_count = all_targets_count(self._loader.samples)
        read = Inputs(parallel.device).move(
            self._reader.read(batch, parallel, self._microbatch, all_count=all_count)
        )
        was_training = parallel.module.training
        parallel.module.eval()
        with torch.enable_grad():
            read.mean_loss(parallel(*read.arguments, **read.named)).backward()
        parallel.module.train(was_training)
        found = [
            torch.zeros_like(each.local) if each.gradient is None else each.gradient.detach().clone()
            for each in parallel.owned
        ]
        parallel.zero_grad()
        return found


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


def plan_of_ranks(plan: SettledPlan, batch: int, servers: Servers | None) -> tuple[SettledPlan, int]:
    """Return the Plan that the ranks of this process group run, and the samples of their step.

    Args:
        plan: The whole Plan.
        batch: Samples in a step of all workers.
        servers: The parameter servers that the Trainer was given.

    Raises:
        ConfigError: The Plan has servers and none were given, or the other way round.
    """
    exchange = plan.exchanged
    if exchange.is_served != (servers is not None):
        raise ConfigError(
            f"the Plan {plan} was given {'no' if servers is None else 'parameter'} servers",
            possible="runtime=shoal.train.Runtime(servers=shoal.parallel.exchange.server.Servers(...)) with "
            "exchange=server or exchange=local,servers=1, as `shoal train` gives it",
            change="give the Trainer servers" if servers is None else "leave out servers",
        )
    if servers is None:
        return plan, batch
    batch //= plan.replicas
    return SettledPlan.of(plan.of_worker(), batch), batch


def terms_of(plan: Plan, steps: int, patience: float, *, guard: bool) -> Terms:
    """Return what the workers of a training go by.

    Args:
        plan: The whole Plan.
        steps: Steps of the training.
        patience: Seconds after which a worker that others wait for is taken for lost.
        guard: Whether stale gradients give way to rounds when they do harm.
    """
    exchange = plan.exchanged
    return Terms(
        workers=plan.replicas,
        shares=steps * plan.replicas,
        staleness=exchange.staleness,
        quorum=exchange.quorum,
        grace=exchange.grace,
        every=exchange.every if exchange.merges else 1,
        patience=patience,
        guard=guard,
    )


def serve_optimizer(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    config: OptimizerConfig,
    plan: Plan,
    steps: int,
    servers: Servers,
    ranks: Coordinator,
    recorder: Recorder,
) -> ServedUpdates:
    """Return the optimizer of a worker's rank, which steps on servers.

    Args:
        parallel: The model.
        optimizer: The optimizer that the servers step; with exchange=local, the worker's own.
        config: The configuration, which has the outer optimizer's settings.
        plan: The whole Plan.
        steps: Steps of the training.
        servers: The servers.
        ranks: The ranks of this worker.
        recorder: Recorder of spans.
    """
    outer = None
    if plan.exchanged.merges:
        outer = outer_settings(plan.exchanged, **config.outer)
    terms = terms_of(plan, steps, servers.timeout, guard=config.guard)
    return ServedUpdates(
        parallel,
        optimizer,
        servers,
        terms,
        ranks,
        outer=outer,
        clip=config.clip,
        compression=plan.exchanged.compression,
        feedback=plan.exchanged.feedback,
        recorder=recorder,
    )


def stale_guard_of(
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    config: OptimizerConfig,
    curvature: Curvature,
    batch: int,
    decided: Callable[[Decision], object],
) -> StaleGuard | None:
    """Return the guard of a training with stale gradients; None for another training, or without a guard.

    Args:
        optimizer: The optimizer.
        plan: The whole Plan.
        config: The configuration.
        curvature: Measures the curvature.
        batch: Samples of a share.
        decided: Told of each decision.
    """
    exchange = plan.exchanged
    if not exchange.staleness or not config.guard:
        return None
    return StaleGuard(
        cast(ServedUpdates, optimizer), exchange, curvature, clip=config.clip, batch=batch, decided=decided
    )
