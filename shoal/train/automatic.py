"""`plan = "auto"`: the Plan that the planner would choose for this model on these ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from shoal.cluster import Cluster
from shoal.cost.suited import workload_on
from shoal.errors import ConfigError, UserError
from shoal.models import Transformer
from shoal.parallel import require_layout
from shoal.plan import Plan
from shoal.planner import choose
from shoal.train.config import TrainConfig
from shoal.train.located import build_model
from shoal.workload import transformer_shape

__all__ = ["AUTOMATIC", "PassedOver", "Resolved", "choose_plan"]

AUTOMATIC = "auto"
"""What a configuration says in place of a Plan."""

_LOOKED_AT = 20  # degrees, of which the first that the model can be laid out by is taken


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A Plan that was predicted to be quicker than the one that is taken, and why it is not taken."""

    plan: Plan
    reason: str

    def __str__(self) -> str:
        return f"{self.plan}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """How a configuration is trained.

    Attributes:
        plan: With all its degrees and the micro-batch settled.
        cluster: The machines, with as many devices as the Plan has ranks; None if nothing names them.
        passed_over: Where the Plan was chosen, those before it in the ranking.
    """

    plan: Plan
    cluster: Cluster | None = None
    passed_over: tuple[PassedOver, ...] = ()


def choose_plan(config: TrainConfig, ranks: int, cluster: Cluster | None) -> Resolved:
    """The best Plan for the configuration's model, batch and sequences.

    Args:
        config: The configuration.
        ranks: How many there are.
        cluster: The machines; None for what is known of this host's GPUs, or a laptop.

    Raises:
        ConfigError: The model is none of Shoal's transformers.
        ClusterError: The host's GPUs are unknown.
        PlanError: No Plan for so many ranks is legal, or fits.
    """
    model = build_model(config, "meta" if ":" not in config.model else "cpu")
    if not isinstance(model, Transformer):
        raise ConfigError(
            f'plan = "{AUTOMATIC}" was given for {config.model}, whose work is not known before it runs',
            possible="Shoal's own transformers",
            change="choose a Plan, such as dp=2,shard=zero1",
        )
    found = _this_host(config, ranks) if cluster is None else cluster
    shape = transformer_shape(model.config.model_dump(), config.model).replace(seq=config.sequence)
    choice = choose(workload_on(found, shape), found, config.batch, limit=_LOOKED_AT)
    passed_over = []
    for candidate in choice.candidates:
        try:
            require_layout(model, candidate.plan, config.sequence)
        except UserError as error:
            passed_over.append(PassedOver(candidate.plan, error.given))
        else:
            return Resolved(candidate.plan, found, tuple(passed_over))
    plain = Plan(dp=ranks).with_microbatch_for(config.batch)
    return Resolved(plain, found, tuple(passed_over))


def _this_host(config: TrainConfig, ranks: int) -> Cluster:
    if config.device != "cpu" and torch.cuda.is_available():
        node = min(ranks, torch.cuda.device_count())
        return Cluster.assemble(torch.cuda.get_device_name(), ranks, node, None)
    cores = len(os.sched_getaffinity(0))
    return Cluster.preset("laptop").with_cores(cores).with_devices(ranks)
