"""The last touches to the best Plans: settings that the search does not vary, tried by playing.

A search tries few sizes of buckets, splits layers by their mean cost, and puts ranks in the default order.
Here the Plan gets all sizes, a split by the cost of every block, all orders of its axes over the network, and
schedule=search, which is made for times that are known and takes a second. That one is tried with one and
with two stages on a rank, with half and twice the micro-batch, and with as many activations as fit, if stages
x micro-batches are at most MOST_SEARCHED; it is taken if it makes the step quicker by LEAST_GAIN.

Among Plans that are as quick as the best within SIMPLER, the simplest is preferred: no model is that exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from shoal.errors import PlanError
from shoal.predict.cost import Layout
from shoal.predict.planner.search import Search
from shoal.predict.planner.space import ALL_SIZES, RECOMPUTES, Degrees, HybridSharding, Space, Variant
from shoal.predict.planner.tree import Fitted
from shoal.spec.plan import CHOICES, EQUAL, SettledPlan, divisors
from shoal.spec.plan.allowed_values import DEFAULT_ORDER
from shoal.spec.plan.schedules import FOUND, KINDS, NAMES, kind_of

_DEGREES = ("dp", "tp", "pp", "cp")
_KEEPING_SHARES = {"bucket", "recompute", "context", "tensor"}


def neighbours(space: Space, plan: SettledPlan) -> Iterator[SettledPlan]:
    """Yield the neighbours of a Plan, each once, without regard to memory."""
    seen = {plan}
    for each in (*_in_settings(space, plan), *moved(space, plan)):
        if each not in seen:
            seen.add(each)
            yield each


def moved(space: Space, plan: SettledPlan, only: str | None = None) -> Iterator[SettledPlan]:
    """Yield the Plans with a factor of two moved from one degree to another, and the nearest micro-batch.

    Args:
        space: The space of Plans.
        plan: The Plan.
        only: A degree that must change; None for any.
    """
    legal = space.is_legal
    for less in _DEGREES:
        for more in _DEGREES:
            if less == more or getattr(plan, less) % 2 or (only is not None and only not in (less, more)):
                continue
            degrees = {less: getattr(plan, less) // 2, more: 2 * getattr(plan, more)}
            for microbatch in dict.fromkeys(
                (plan.microbatch, max(1, plan.microbatch // 2), 2 * plan.microbatch)
            ):
                found = changed(plan, space.batch, **_fitting(plan, degrees), microbatch=microbatch)
                if found is not None and legal(found):
                    yield found
    if plan.ep > 1 or space.workload.experts:
        for ep in half_and_twice(plan.ep):
            found = changed(plan, space.batch, ep=ep)
            if only in (None, "ep") and found is not None and legal(found):
                yield found


def _in_settings(space: Space, plan: SettledPlan) -> Iterator[SettledPlan]:
    changes: list[dict[str, Any]] = [{"microbatch": each} for each in half_and_twice(plan.microbatch)]
    changes += [{"recompute": each} for each in RECOMPUTES]
    if plan.dp * plan.cp > 1:
        changes += [{"bucket": each} for each in ALL_SIZES]
        changes += [
            {"shard": shard, "replicate": replicate}
            for shard in CHOICES["shard"]
            for replicate in (divisors(plan.dp) if shard != "none" else [1])
        ]
    if plan.tp > 1:
        changes += [{"tensor": each} for each in CHOICES["tensor"]]
    changes += [{"order": order} for order in orders(plan)]
    if plan.cp > 1:
        changes += [{"context": each} for each in CHOICES["context"]]
    if plan.pp > 1:
        layers = len(space.workload.layers)
        for name in NAMES:
            kind = KINDS[name]
            most = layers // plan.pp if kind.most_virtual is None else kind.least_virtual
            for virtual in range(kind.least_virtual, most + 1):
                given = None if virtual == kind.least_virtual else virtual
                for split in ("cost", "count"):
                    changes.append({"schedule": name, "virtual": given, "split": split})
    for change in changes:
        found = changed(plan, space.batch, **change)
        if found is not None and space.is_legal(found):
            yield found


def changed(plan: SettledPlan, batch: int, **changes: Any) -> SettledPlan | None:
    """Return the Plan with some settings changed; None if it is not legal for a batch of so many samples.

    Shares suit a micro-batch and a mesh: where these change, all ranks get equally many micro-batches.
    """
    if plan.shared is not None and "shares" not in changes and not _KEEPING_SHARES.issuperset(changes):
        changes["shares"] = EQUAL
    try:
        found = SettledPlan.of(plan.replace(**changes), batch)
        if found.pp > 1:
            found.require_micro_batches(found.microbatches_of(batch))
    except PlanError:
        return None
    return found


def orders(plan: SettledPlan) -> list[str]:
    """Return the orders of a Plan's axes over the ranks; none if it has one axis alone."""
    if sum(getattr(plan, name) > 1 for name in _DEGREES) <= 1:
        return []
    return ["-".join(each) for each in itertools.permutations(DEFAULT_ORDER.split("-"))]


def half_and_twice(value: int) -> list[int]:
    """Return a degree or size, halved if that is whole, and doubled."""
    return [*([value // 2] if value % 2 == 0 else []), 2 * value]


def _fitting(plan: SettledPlan, degrees: dict[str, int]) -> dict[str, Any]:
    """Return degrees with what depends on them: replicas of the state, stages and their split."""
    found: dict[str, Any] = dict(degrees)
    dp, pp = degrees.get("dp", plan.dp), degrees.get("pp", plan.pp)
    if dp % plan.replicate:
        found["replicate"] = plan.replicate // 2 if plan.replicate % 2 == 0 else 1
    if "pp" in degrees:
        found["split"] = "cost"
        if pp == 1:
            found |= {"schedule": "1f1b", "virtual": None}
        elif kind_of(plan.schedule).most_virtual is None:
            found["virtual"] = None
    return found


MOST_SEARCHED = 512
MOST_SPLIT = 32  # stages that are split by the cost of every block, which takes a tenth of a second
LEAST_GAIN = 0.01
SIMPLER = 0.005

_PLAINNESS = {
    name: order for order, name in enumerate(("1f1b", "interleaved", "zb-h1", "gpipe", "looped-bfs"))
}


def polished(search: Search, found: Fitted) -> Fitted:
    """Return the Plan with the best size of buckets and the best split of its layers."""
    plan, batch = found.plan, search.batch
    tried = []
    if plan.dp * plan.cp > 1 and not plan.sharding.cuts_weights:
        tried += [changed(plan, batch, bucket=bucket) for bucket in ALL_SIZES]
    if plan.pp > 1:
        tried.append(changed(plan, batch, split="count"))
        if plan.stages <= MOST_SPLIT:
            tried.append(changed(plan, batch, split="cost"))
    tried += [changed(plan, batch, order=order) for order in orders(plan)]
    best = found
    costs, bound = search.shared.costs, search.shared.costs.least(best.plan, batch)
    for each in tried:
        if each is None or (least := costs.least(each, batch)) >= best.seconds:
            continue
        if plan.pp > 1 and each.split == plan.split and least >= bound:
            continue  # a pipeline takes long to play, and its bound tells which way is quicker
        better = _better(search, best, each)
        if better is not best:
            best, bound = better, least
    return best


def simplest(search: Search, best: Fitted, within: float = SIMPLER) -> Fitted:
    """Return the simplest of the played Plans that fit and are as quick as this one within that share."""
    limit = best.seconds * (1 + within)
    near = [plan for plan, seconds in search.shared.known.items() if seconds <= limit]
    for plan in sorted(near, key=_complexity):
        if _complexity(plan) >= _complexity(best.plan):
            break
        memory = search.shared.fullest(plan)
        if memory.required <= search.room:
            return Fitted(plan, memory, search.shared.played(plan))
    return best


def with_found_schedule(search: Search, best: Fitted) -> Fitted:
    """Return the Plan with schedule=search, if that makes its step quicker by LEAST_GAIN; else the Plan.

    Half and twice the micro-batch are tried too: one that other schedules make slow may be the best for a
    found one.
    """
    if best.plan.pp == 1:
        return best
    costs, batch, limit, quickest = search.shared.costs, search.batch, (1 - LEAST_GAIN) * best.seconds, best
    bounded = [(costs.least(plan, batch), str(plan), plan) for plan in _searchable(search, best.plan)]
    for least, _, plan in sorted(bounded):
        if least >= limit:
            break
        found = _roomiest(search, plan)
        if found is not None and found.seconds <= limit:
            quickest, limit = found, found.seconds
    return quickest


def _better(search: Search, best: Fitted, plan: SettledPlan) -> Fitted:
    seconds = search.shared.played(plan)
    if seconds >= best.seconds:
        return best
    memory = search.shared.fullest(plan)
    return Fitted(plan, memory, seconds) if memory.required <= search.room else best


def _complexity(plan: SettledPlan) -> tuple[int, ...]:
    """Return an order of Plans by what a reader of one must know."""
    degrees = sum(getattr(plan, name) > 1 for name in ("tp", "pp", "cp", "ep"))
    schedule = _PLAINNESS.get(plan.schedule, len(_PLAINNESS) + (plan.schedule not in NAMES))
    plain = plan.tensor == "async", plan.replicate > 1, plan.recompute != "none", plan.context == "ulysses"
    return degrees, schedule, sum(plain) + (plan.shared is not None)


def _searchable(search: Search, plan: SettledPlan) -> Iterator[SettledPlan]:
    """Yield the Plan with schedule=search, for each micro-batch and each number of stages on a rank."""
    degrees, sharding = Degrees.of(plan), HybridSharding(plan.sharding, plan.replicate)
    for microbatch, count in search.shared.space.microbatches(degrees):
        if microbatch not in (plan.microbatch, *half_and_twice(plan.microbatch)):
            continue
        layout = Layout.of(plan)._replace(microbatch=microbatch)
        for virtual in (1, 2):
            stages = plan.pp * virtual
            if stages <= len(search.workload.layers) and stages * count <= MOST_SEARCHED:
                variant = Variant(degrees, layout, count, FOUND, virtual)
                split = search.shared.split(variant)
                found = search.shared.plan(variant, sharding, split)
                yield found.replace(bucket=plan.bucket, order=plan.order)


def _roomiest(search: Search, plan: SettledPlan) -> Fitted | None:
    """Return the Plan with the most activations that fit; None if one micro-batch's do not fit."""
    shared, virtual = search.shared, plan.stages // plan.pp

    def peak(activations: int) -> float:
        return shared.fullest(plan.replace(activations=activations)).required

    low, high = virtual - 1, virtual * plan.microbatches_of(search.batch)
    while low < high:
        middle = (low + high + 1) // 2
        if peak(middle) <= search.room:
            low = middle
        else:
            high = middle - 1
    if low < virtual:
        return None
    plan = plan.replace(activations=low)
    return Fitted(plan, shared.fullest(plan), shared.played(plan))
