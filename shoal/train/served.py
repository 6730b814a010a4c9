"""A training through parameter servers: what one worker runs, and by which terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from shoal.checkpoint import Coordinator
from shoal.errors import ConfigError
from shoal.parallel import Parallel, ServedUpdates, outer_settings
from shoal.plan import Plan, SettledPlan
from shoal.record import Recorder
from shoal.run import Decision
from shoal.server import Servers, Terms
from shoal.train.config import OptimizerConfig
from shoal.train.curvature import Curvature
from shoal.train.stale_guard import StaleGuard


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
            possible="runtime=shoal.train.Runtime(servers=shoal.server.Servers(...)) with exchange=server or "
            "exchange=local,servers=1, as `shoal train` gives it",
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
