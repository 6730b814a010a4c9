"""The last touches to the best Plans: settings that the search does not vary, tried by playing.

A search tries few sizes of buckets, splits layers by their mean cost, and puts ranks in the default order.
Here the Plan gets all sizes, a split by the cost of every block, all orders of its axes over the network, and
schedule=search, which is made for times that are known and takes a second. That one is tried with one and
with two stages on a rank, with half and twice the micro-batch, and with as many activations as fit, if stages
x micro-batches are at most MOST_SEARCHED; it is taken if it makes the step quicker by LEAST_GAIN.

Among Plans that are as quick as the best within SIMPLER, the simplest is preferred: no model is that exact.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cost import Layout
from shoal.plan import SettledPlan
from shoal.plan.schedules import FOUND, NAMES
from shoal.planner.bucket import ALL_SIZES
from shoal.planner.neighbours import changed, half_and_twice, orders
from shoal.planner.search import Search
from shoal.planner.sized import Fitted
from shoal.planner.space import Degrees, HybridSharding, Variant

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
