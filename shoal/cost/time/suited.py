"""The Workload of a model on the devices of a Cluster."""

from __future__ import annotations

from shoal.cluster import Cluster
from shoal.workload import ModelShape, Workload, compilable_workload_of, workload_of


def workload_on(cluster: Cluster, shape: ModelShape) -> Workload:
    """Return the Workload of a shape as Shoal trains it.

    On GPUs torch's kernels are compiled or run one by one, as the Plan says. On cores, torch's norm is
    several operators, which keep more.

    Args:
        cluster: The machines that it is trained on.
        shape: Shape of the model.
    """
    if cluster.cores or not shape.fused_passes:
        return workload_of(shape.replace(fused_passes=False))
    return compilable_workload_of(shape)
