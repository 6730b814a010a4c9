"""The costs and the split of a Shoal transformer, when nothing but the model and its device is known."""

from __future__ import annotations

import math

import torch
from torch import nn

from shoal.cluster import Cluster
from shoal.cost import Costs, Layout, settle_split
from shoal.cost.time import workload_on
from shoal.errors import ClusterError
from shoal.models import Transformer
from shoal.parallel.pipeline.piece_memory import Batch
from shoal.plan import Plan, SettledPlan
from shoal.plan.stages import Cost
from shoal.workload import ModelShape, transformer_shape

CORES = "cores"
"""The name of a CPU in place of a GPU's."""


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; `CORES` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CORES


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
    found = _on_device(model, plan, device)
    if found is None or (batch is None and plan.shared is not None):
        return plan
    cluster, shape = found
    if batch is None:
        batch = Batch(plan.dp * (plan.microbatch or 1) * 4 * plan.stages, shape.seq)
    workload = workload_on(cluster, shape.replace(seq=batch.sequence))
    settled = SettledPlan.of(plan, batch.samples)
    room = math.inf if limit is None else limit + cluster.reserved
    return plan.replace(split=settle_split(settled, workload, cluster, batch.samples, room).split)


def costs_on_device(model: nn.Module, plan: Plan, batch: Batch, device: str) -> list[Cost] | None:
    """Return the seconds of each piece, by which `settled_on_device` splits; None if they are not known.

    The arguments are those of `settled_on_device`.
    """
    found = _on_device(model, plan, device)
    if found is None:
        return None
    cluster, shape = found
    costs = Costs(workload_on(cluster, shape.replace(seq=batch.sequence)), cluster)
    return costs.piece_costs(costs.settled(Layout.of(SettledPlan.of(plan, batch.samples))))


def _on_device(model: nn.Module, plan: Plan, device: str) -> tuple[Cluster, ModelShape] | None:
    """Return devices of this kind, and the shape of the model; None if either is not known."""
    if not isinstance(model, Transformer) or not all(each.requires_grad for each in model.parameters()):
        return None
    try:
        return _cluster_of(device, plan.ranks), transformer_shape(model.config.model_dump())
    except ClusterError:
        return None


def _cluster_of(device: str, ranks: int) -> Cluster:
    if device == CORES:
        return Cluster.preset("laptop").with_devices(ranks)
    return Cluster.assemble(device, ranks, None, None)
