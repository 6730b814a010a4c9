"""A frugal Plan with part of its state outside of the devices, for a model that does not fit otherwise."""

from __future__ import annotations

from shoal.errors import ClusterError
from shoal.plan import SettledPlan
from shoal.planner.search import Search
from shoal.planner.sized import Fitted

__all__ = ["with_offload"]

_PLACES = (
    "optimizer:host",
    "optimizer:file",
    "optimizer:file+gradients:file",
    "optimizer:file+gradients:file+parameters:file",
)
"""Values of `offload`, those that move least first."""


def with_offload(search: Search, plan: SettledPlan) -> Fitted | None:
    """Return a Plan with the least state outside of the devices with which it fits; None if none does.

    Gradients and parameters are kept in files on CPUs alone.

    Args:
        search: A search that found nothing.
        plan: A frugal Plan.
    """
    cluster, shared = search.cluster, search.shared
    room = cluster.device.memory * (1 - search.margin)
    places = _PLACES[1:] if cluster.cores else _PLACES[:2]
    for offload in places:
        moved = plan.replace(offload=offload)
        memory = shared.fullest(moved)
        if memory.required <= room:
            try:
                return Fitted(moved, memory, shared.seconds(moved))
            except ClusterError:  # a rate of the host is not known, or its memory is too small
                continue
    return None
