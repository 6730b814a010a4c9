"""The work of a model as the devices of a Cluster do it."""

from __future__ import annotations

from shoal.cluster import Cluster
from shoal.workload import ModelShape, Workload, workload_of

__all__ = ["workload_on"]


def workload_on(cluster: Cluster, shape: ModelShape) -> Workload:
    """The Workload of a shape; on cores torch does a norm by several operators, which keep more.

    Args:
        cluster: Where it is trained.
        shape: Of the model.
    """
    return workload_of(shape.replace(fused_passes=shape.fused_passes and not cluster.cores))
