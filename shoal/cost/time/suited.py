"""The Workload of a model on the devices of a Cluster."""

from __future__ import annotations

from shoal.cluster import Cluster
from shoal.workload import ModelShape, Workload, workload_of

__all__ = ["workload_on"]


def workload_on(cluster: Cluster, shape: ModelShape) -> Workload:
    """Return the Workload of a shape; on cores, torch's norm is several operators, which keep more.

    Args:
        cluster: The machines that it is trained on.
        shape: Shape of the model.
    """
    return workload_of(shape.replace(fused_passes=shape.fused_passes and not cluster.cores))
