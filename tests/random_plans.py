"""Plans and Clusters that are drawn at random, for properties that all of them must have."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

from shoal.errors import PlanError
from shoal.spec.cluster import Cluster, Level
from shoal.spec.plan import CHOICES, Plan, SettledPlan, divisors, parse_settings
from shoal.spec.plan.allowed_values import DEFAULT_ORDER
from shoal.spec.plan.schedules import KINDS, NAMES
from shoal.spec.workload import Workload

__all__ = ["ORDERS", "random_cluster", "random_plan"]

ORDERS = ["-".join(axes) for axes in itertools.permutations(DEFAULT_ORDER.split("-"))]

_BUCKETS = [(1 << 20) << power for power in range(11)]
_DRAWS = 10_000


def random_plan(
    chance: random.Random,
    workload: Workload,
    devices: int,
    batch: int,
    *,
    pipelines: bool = False,
    orders: tuple[str, ...] | list[str] = (DEFAULT_ORDER,),
    exchanges: tuple[str, ...] = ("",),
) -> SettledPlan:
    """Draw a Plan that the model, the batch and the devices allow; with `pipelines` one that has stages.

    `exchanges` are settings of how workers exchange what they learn, in the text form.
    """
    for _ in range(_DRAWS):
        found = _drawn(chance, workload, devices, batch, orders, parse_settings(chance.choice(exchanges)))
        if found is not None and (found.pp > 1 or not pipelines):
            return found
    raise AssertionError(f"no Plan for {devices} devices and a batch of {batch} in {_DRAWS} draws")


def _drawn(
    chance: random.Random, workload: Workload, devices: int, batch: int, orders: Any, exchange: dict[str, Any]
) -> SettledPlan | None:
    tp, cp, pp = (chance.choice([1, 1, *divisors(devices)]) for _ in range(3))
    dp = devices // (tp * cp * pp)
    if devices % (tp * cp * pp) or batch % dp or pp > len(workload.layers):
        return None
    if tp > 1 and (workload.heads % tp or (workload.kv_heads % tp and tp % workload.kv_heads)):
        return None
    changes: dict[str, Any] = {}
    if cp > 1:
        changes["context"] = chance.choice(CHOICES["context"])
        parts = 2 * cp if changes["context"] == "ring" else cp
        if workload.length % parts or (changes["context"] == "ulysses" and workload.heads // tp < cp):
            return None
    if tp > 1:
        changes["tensor"] = chance.choice(CHOICES["tensor"])
        if workload.length // cp % tp and changes["tensor"] != "plain":
            return None
    if pp > 1:
        kind = KINDS[name := chance.choice(NAMES)]
        changes |= {"schedule": name, "split": chance.choice(["cost", "count"])}
        if kind.most_virtual is None:
            changes["virtual"] = chance.choice([2, 3, 4])
    if dp > 1 and (shard := chance.choice(CHOICES["shard"])) != "none":
        changes |= {"shard": shard, "replicate": chance.choice(divisors(dp))}
    if workload.experts:
        changes["ep"] = chance.choice([each for each in divisors(dp * cp) if workload.experts % each == 0])
    try:
        plan = SettledPlan.of(
            Plan(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                precision="bf16",
                microbatch=chance.choice(divisors(batch // dp)),
                recompute=chance.choice(CHOICES["recompute"]),
                bucket=chance.choice(_BUCKETS),
                order=chance.choice(orders),
                **changes,
                **exchange,
            ),
            batch,
        )
        if pp > 1:
            plan.require_micro_batches(plan.microbatches_of(batch))
    except PlanError:
        return None
    return plan if plan.stages <= len(workload.layers) else None


def random_cluster(chance: random.Random, devices: int) -> Cluster:
    """Draw nodes of a known device, with links, latencies and a contention of their own."""
    cluster = Cluster.preset(chance.choice(["dgx-a100", "dgx-h100"]), 8)
    node = chance.choice([each for each in divisors(devices) if each > 1])
    links = replace(cluster.levels[0], devices=node)
    levels = [replace(links, bandwidth=links.bandwidth * 10 ** chance.uniform(-2, 0.5))]
    if node < devices:
        rate, latency = 10 ** chance.uniform(8.5, 11), 10 ** chance.uniform(-6, -3.5)
        levels.append(Level(name="network", devices=devices, bandwidth=rate, latency=latency))
    device = replace(cluster.device, contention=chance.choice([0.0, 0.2, 0.5]))
    jitter, noise = chance.choice([0.0, 0.05]), chance.choice([0.0, 0.01])
    return cluster.replace(device=device, levels=tuple(levels), jitter=jitter, noise=noise)
