"""The choice: Plans of a Workload on a Cluster, best first by time or by money, or the reason for none.

The number of devices on which the quickest Plan is the cheapest: it uses least device time per token.

On a given number of devices the cheapest Plan is the quickest. Fewer devices are slower, and often cheaper,
since they communicate less. So every number of whole nodes that divides the cluster is searched, and within a
node every number that divides it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import ClusterError, ConfigError, ModelError, PlanError
from shoal.predict.cost.memory import smallest_fit
from shoal.predict.planner.candidate import Candidate
from shoal.predict.planner.explain import Explanation, explain
from shoal.predict.planner.heterogeneous import with_shares
from shoal.predict.planner.offloaded import (
    quicker_outside,
    stores_activations,
    unknown_rates,
    with_cheapest_blocks,
)
from shoal.predict.planner.refine import LEAST_GAIN, polished, simplest, with_found_schedule
from shoal.predict.planner.search import Search
from shoal.predict.planner.space import Degrees
from shoal.predict.planner.tree import Fitted
from shoal.spec.cluster import Cluster, devices_of
from shoal.spec.plan import CHOICES, SettledPlan, divisors
from shoal.spec.workload import ModelShape, Workload


def cheapest(
    workload: Workload, cluster: Cluster, batch: int, *, margin: float, precision: str | None = None
) -> Search:
    """Return the search on as many devices as train a token for the least money.

    Args:
        workload: The training.
        cluster: The largest machine that may be used.
        batch: Samples of a step.
        margin: Share of each device's memory that must stay free.
        precision: The precision of all Plans; see `Search`.

    Raises:
        ClusterError: The Cluster has no price.
    """
    if not cluster.price:
        raise ClusterError(
            f"{cluster.name} has no price",
            possible="a Cluster with the price of a device in dollars per hour",
            change="write its price into a file of the Cluster, or choose by time",
        )
    node, best = cluster.devices_per_node, math.inf
    found = Search(workload, cluster, batch, margin=margin, precision=precision)
    for devices in divisors(cluster.devices):
        if devices % node == 0 or node % devices == 0:
            part = cluster.with_devices(devices)
            search = Search(workload, part, batch, margin=margin, precision=precision)
            first = search.best(1).best
            if first is not None and first.dollars_per_step < best:
                found, best = search, first.dollars_per_step
    return found


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


OBJECTIVES = ("time", "money")
"""Objectives of the choice."""

ROWS = 5
"""Rows that get their last touches, whatever number is asked for: the best Plan must not depend on it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Plans, best first.

    Attributes:
        candidates: The best Plan for each set of degrees, best first; at least one.
        legal: Number of legal Plans on the number of devices that the best one has.
        played: Number of legal Plans that were played; bounds excluded the others.
        search: The search that found the best, for questions about it.
        resident: The best Plan without `offload`; None if none fits.
    """

    candidates: Sequence[Candidate]
    legal: int
    played: int
    search: Search
    resident: Candidate | None

    @property
    def best(self) -> Candidate:
        """The best candidate."""
        return self.candidates[0]

    def explain(self) -> Explanation:
        """Explain why it is the best; every Plan that it is compared with is played."""
        return explain(self.search, self.best, self.candidates, self.resident)


def choose(
    workload: Workload,
    cluster: Cluster,
    batch: int,
    *,
    objective: str = "time",
    margin: float = 0.1,
    limit: int = 5,
    precision: str | None = None,
    fork: bool = False,
    may_offload: bool = True,
) -> Choice:
    """Choose among all legal Plans.

    Args:
        workload: The training.
        cluster: The machines; by time all their devices take part, by money only as many as is cheapest.
        batch: Samples of a step.
        objective: One of OBJECTIVES.
        margin: Share of each device's memory that must stay free.
        limit: The most Plans to return.
        precision: The precision of all Plans; None for the type of 16 bits or more in which the device
            computes fastest. fp8 is never chosen without being asked for, as it trains with coarser numbers.
        fork: Whether a second process may be forked to search beside this one, which finds the same.
        may_offload: Whether a Plan may have `offload`; it is taken if it is quicker: see
            `shoal.predict.planner.offloaded`.

    Raises:
        ConfigError: The objective, the margin, the limit or the precision is not possible.
        PlanError: No Plan is legal, or none fits the memory.
        ClusterError: The objective is money, and the Cluster has no price; or its device does not know the
            precision.
    """
    _require(objective in OBJECTIVES, "objective", objective, "one of " + ", ".join(OBJECTIVES))
    _require(0 <= margin < 1, "margin", margin, "a share of the memory, at least 0 and below 1")
    _require(limit >= 1, "limit", limit, "1 or more")
    if precision is not None:
        _require(precision in CHOICES["precision"], "precision", precision, ", ".join(CHOICES["precision"]))
        for device in devices_of(cluster):
            if precision == "fp8" and "fp8" not in device.peak:
                raise ClusterError(
                    f"precision=fp8 was asked for, and {device.name} has no rate in it",
                    possible=f"its types are {', '.join(device.peak)}",
                    change="leave out the precision, or choose devices with fp8",
                )
            device.flops(precision)  # raises
    if batch < 1:
        raise PlanError(
            f"a batch of {batch} has no samples", possible="1 or more", change="give a larger batch"
        )
    if objective == "money":
        search = cheapest(workload, cluster, batch, margin=margin, precision=precision)
    else:
        search = Search(workload, cluster, batch, margin=margin, precision=precision)
    if fork:
        search.fork()
    ranking = search.best(max(limit, ROWS))
    found = touched_up(search, ranking.found) if ranking.found else []
    resident = found[0] if found else None
    if may_offload:
        best = None if resident is None else Fitted(resident.plan, resident.memory, resident.seconds)
        taken = _outside(search, best)
        if taken is not None:
            search, outside = taken
            winner = search.candidate(outside)
            found = [winner, *(each for each in found if each.degrees != winner.degrees)]
    if not found:
        raise refusal(search)
    return Choice(found[:limit], ranking.legal, ranking.played, search, resident)


def _outside(search: Search, best: Fitted | None) -> tuple[Search, Fitted] | None:
    """Return the quickest Plan with `offload`, with its last touches, and the search that found it.

    Args:
        search: The search for Plans without.
        best: The best Plan without; None if none fits.

    Returns:
        None if no such Plan is quicker by LEAST_GAIN, or fits.
    """
    stores = stores_activations(search.cluster)
    taken = quicker_outside(search, best)
    starts = [] if taken is None else [(taken[0], _touched(*taken))]
    if best is not None and stores:
        starts.append((search, best))
    found = [(each, with_cheapest_blocks(each, start, may_store=stores)) for each, start in starts]
    quickest = min(found, key=lambda each: each[1].seconds, default=None)
    if quickest is None or (best is not None and quickest[1].seconds > (1 - LEAST_GAIN) * best.seconds):
        return None
    return quickest


def touched_up(search: Search, found: Sequence[Fitted]) -> list[Candidate]:
    """Return the Plans, best first; the first ROWS of them are polished."""
    rows = found[:ROWS]
    touched = list(search.each(_touched, rows, [search.helps(Degrees.of(each.plan)) for each in rows]))
    touched += with_shares(search, ROWS)
    best = simplest(search, with_cheapest_blocks(search, min(touched, key=_seconds), may_store=False))
    quickest = {Degrees.of(best.plan): best}
    for each in sorted((*touched, *found[ROWS:]), key=_seconds):
        quickest.setdefault(Degrees.of(each.plan), each)
    return [search.candidate(each) for each in quickest.values()]


def _seconds(found: Fitted) -> float:
    return found.seconds


def _touched(search: Search, found: Fitted) -> Fitted:
    return with_found_schedule(search, polished(search, found))


def _require(holds: bool, name: str, value: object, possible: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} is not allowed", possible=possible, change=f"correct {name}")


def configuration(candidate: Candidate, shape: ModelShape) -> str:
    """Return a configuration for `shoal train`, in TOML.

    Args:
        candidate: The Plan, with its batch.
        shape: Shape of the model.

    Raises:
        ModelError: Shoal's transformer cannot have this shape.
    """
    # A published shape is one of Shoal's own shapes with every size changed.
    where = f"{candidate.devices} devices of {candidate.cluster.name}"
    lines = [
        f"# Predicted on {where}: {candidate.seconds:.4g} s a step.",
        f'model = "{shape.name if shape.is_own else "tiny"}"',
        f'plan = "{candidate.plan}"',
        f"batch = {candidate.batch}",
        f"sequence = {candidate.workload.length}",
    ]
    options = [] if shape.is_own else _options(shape)
    return "\n".join([*lines, *options]) + "\n"


def _options(shape: ModelShape) -> list[str]:
    others = {
        "biases": shape.biases,
        "no gate": not shape.gated,
        "no rotary embedding": not shape.rotary,
        "latent attention": shape.latent is not None,
        "heads of a different width": shape.head_dim not in (None, shape.hidden // shape.heads),
        "shared experts": shape.shared_experts > 0,
        "layers without experts": shape.dense_layers > 0,
        "bidirectional attention": not shape.causal,
        "another objective": shape.objective != "next-token",
    }
    found = [name for name, has in others.items() if has]
    if found:
        raise ModelError(
            f"{shape.name} has {', '.join(found)}, which Shoal's transformer does not support",
            possible="models of Llama's and Mixtral's kind",
            change="leave out --write, and give the Plan to shoal train --plan with a model of your own",
        )
    values: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.keys,
        "ffn": shape.ffn,
        "seq": shape.seq,
        "tie_embeddings": str(shape.tied).lower(),
    }
    if shape.experts:
        values |= {
            "experts": shape.experts,
            "experts_per_token": shape.experts_per_token,
            "expert_ffn": shape.expert_ffn or shape.ffn,
            "renormalize": str(shape.renormalize).lower(),
        }
    return ["", "[model_options]", *(f"{name} = {value}" for name, value in values.items())]
