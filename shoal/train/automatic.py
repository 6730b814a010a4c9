"""`plan = "auto"`: the Plan that the planner would choose for this model on these ranks."""

from __future__ import annotations

import torch

from shoal.cluster import Cluster
from shoal.errors import ConfigError, UserError
from shoal.models import Transformer, build
from shoal.parallel import require_layout
from shoal.plan import Plan
from shoal.planner import choose
from shoal.train.config import TrainConfig
from shoal.workload import transformer_shape, workload_of

__all__ = ["AUTOMATIC", "choose_plan"]

AUTOMATIC = "auto"
"""What a configuration says in place of a Plan."""

_LOOKED_AT = 20  # degrees, of which the first that the model can be laid out by is taken


def choose_plan(config: TrainConfig, ranks: int) -> Plan:
    """The best Plan for the configuration's model, batch and sequences.

    Raises:
        ConfigError: The model is none of Shoal's transformers.
        ClusterError: The configuration's cluster is unknown, or has no such number of devices.
        PlanError: No Plan for so many ranks is legal, or fits.
    """
    model = build(
        config.model, overrides=config.model_options, device="meta" if ":" not in config.model else "cpu"
    )
    if not isinstance(model, Transformer):
        raise ConfigError(
            f'plan = "{AUTOMATIC}" was given for {config.model}, whose work is not known before it runs',
            possible="Shoal's own transformers",
            change="choose a Plan, such as dp=2,shard=zero1",
        )
    shape = transformer_shape(model.config.model_dump(), config.model).replace(seq=config.sequence)
    cluster = _cluster(config, ranks)
    choice = choose(workload_of(shape), cluster, config.batch, limit=_LOOKED_AT)
    for candidate in choice.candidates:
        try:
            require_layout(model, candidate.plan, config.sequence)
        except UserError:
            continue
        return candidate.plan
    return Plan(dp=ranks).with_microbatch_for(config.batch)


def _cluster(config: TrainConfig, ranks: int) -> Cluster:
    """What the configuration names; else what is known of this host's GPUs, or a laptop."""
    if config.cluster:
        return Cluster.parse(config.cluster).with_devices(ranks)
    if config.device != "cpu" and torch.cuda.is_available():
        node = min(ranks, torch.cuda.device_count())
        return Cluster.assemble(torch.cuda.get_device_name(), ranks, node, None)
    return Cluster.preset("laptop", ranks)
