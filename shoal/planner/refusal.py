"""The error if no Plan can be chosen: nothing is legal, or nothing fits the memory."""

from __future__ import annotations

from shoal.cost.memory import smallest_fit
from shoal.errors import PlanError
from shoal.plan import SettledPlan
from shoal.planner.offloaded import unknown_rates
from shoal.planner.search import Search


def refusal(search: Search) -> PlanError:
    """Return the error for a search that found nothing."""
    leanest = search.leanest()
    return _nothing_legal(search) if leanest is None else _nothing_fits(search, *leanest)


def _nothing_legal(search: Search) -> PlanError:
    devices, batch, workload = search.cluster.devices, search.batch, search.workload
    upper = -(-batch // devices) * devices
    return PlanError(
        f"no Plan divides a batch of {batch} of {workload.name} over {devices} devices",
        possible=f"dp that divides the batch, tp that divides {workload.heads} heads, pp up to "
        f"{len(workload.layers)} layers, cp that divides {workload.length} tokens; their product is "
        f"{devices}",
        change=f"choose a batch of {upper}, or another number of devices",
    )


def _nothing_fits(search: Search, plan: SettledPlan, told: str) -> PlanError:
    workload, cluster = search.workload, search.cluster
    smallest = smallest_fit(workload, cluster, search.batch, search.margin)
    if smallest is None:
        possible, change = "no number of these devices", "use devices with more memory, or a smaller model"
    else:
        possible = f"{smallest.devices} of these devices or more, with {smallest.plan}"
        change = f"use {smallest.devices} devices, devices with more memory, or a smaller margin"
    if unknown := unknown_rates(search.cluster):
        possible += f"; Plans with offload were not all tried, as {', '.join(unknown)} is not known"
        change += ", or measure a host and its files with shoal probe --files"
    return PlanError(
        f"{workload.name} does not fit {cluster.devices} devices of {cluster.name}: even with {plan}, {told}",
        possible=possible,
        change=change,
    )
