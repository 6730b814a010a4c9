"""The split of a Shoal transformer by cost, when nothing but the model and its device is known."""

from __future__ import annotations

import math

from torch import nn

from shoal.cluster import Cluster
from shoal.cost import settle_split
from shoal.cost.time import workload_on
from shoal.errors import ClusterError
from shoal.models import Transformer
from shoal.parallel.pipeline.piece_memory import Batch
from shoal.plan import Plan, SettledPlan
from shoal.workload import transformer_shape

__all__ = ["CORES", "settled_on_device"]

CORES = "cores"
"""The name of a CPU in place of a GPU's."""


def settled_on_device(
    model: nn.Module, plan: Plan, batch: Batch | None, device: str, limit: float | None
) -> Plan:
    """Return the Plan with the numbers of blocks that `split=cost` means on devices of this kind.

    Args:
        model: The whole model.
        plan: The Plan.
        batch: Samples and tokens of a step; None if unknown. Then micro-batches as the Plan says, four for
            each stage, fill the model's context.
        device: Name of a GPU, or `CORES`, whose costs are those of a laptop.
        limit: Bytes that a rank may hold; None if they are not known.

    Returns:
        The same Plan if the costs of the model, or of the device, are not known.

    Raises:
        PlanError: The model has fewer blocks than there are stages, or its states and activations do not fit.
    """
    if not isinstance(model, Transformer) or not all(each.requires_grad for each in model.parameters()):
        return plan
    if batch is None and plan.shared is not None:
        return plan
    try:
        cluster = _cluster_of(device, plan.ranks)
    except ClusterError:
        return plan
    if batch is None:
        samples = plan.dp * (plan.microbatch or 1) * 4 * plan.stages
        batch = Batch(samples, model.config.seq)
    workload = workload_on(cluster, transformer_shape(model.config.model_dump()).replace(seq=batch.sequence))
    settled = SettledPlan.of(plan, batch.samples)
    room = math.inf if limit is None else limit + cluster.reserved
    return plan.replace(split=settle_split(settled, workload, cluster, batch.samples, room).split)


def _cluster_of(device: str, ranks: int) -> Cluster:
    if device == CORES:
        return Cluster.preset("laptop").with_devices(ranks)
    return Cluster.assemble(device, ranks, None, None)
