"""Lower bounds on the time of gradient and weight communication, before a Plan is cut and timed.

A rank's data-parallel collectives travel one after another, at best beside its compute. Let G be the seconds
to gather the weights of n layers, R the seconds to reduce their gradients, and F and B the seconds of their
forward and backward on a rank. Then a micro-batch takes at least

    zero2        F + max(B, R)                reduced in every backward
    zero3-once   max(F, G) + max(B, G)        gathered in both; without a pipeline the last layer's weights
                                              stay from forward to backward
    zero3        max(F, G) + max(B, R + G)    gathered in both, and reduced in every backward

and some rank has n = ceil(layers / pp). Where gradients are reduced in every backward, B has their copies to
buckets too. Otherwise stages reduce them after all passes.

Where weights are gathered for every pass, each layer is a bucket. Otherwise all layers of a stage count as
one bucket: the larger a bucket is, the less time each byte takes. If layers are unlike, each counts as the
cheapest one, and the ends count as nothing. `shoal.cost.time.data_parallel` gives the time of each
collective.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.time import (
    Bucket,
    Family,
    copy_seconds,
    families_of,
    gather_seconds,
    parameters_on_rank,
    reduce_seconds,
)
from shoal.plan import Plan
from shoal.planner.space import Degrees, HybridSharding
from shoal.workload import Workload

__all__ = ["LeastDataParallel", "Passes"]


class Passes(NamedTuple):
    """Seconds of a micro-batch on a rank."""

    forward: float
    backward: float


_NOTHING = Passes(0.0, 0.0)


class LeastDataParallel:
    """The bounds for a Workload on a Cluster; caches values that Plans share.

    Args:
        workload: The training.
        cluster: The machines that it runs on.
        width: Bytes of a weight in the type that computes.
    """

    def __init__(self, workload: Workload, cluster: Cluster, width: int) -> None:
        self._cluster = cluster
        self._width = width
        self._layers = len(workload.layers)
        self._kinds = list(dict.fromkeys(workload.layers))
        self._families: dict[tuple[Degrees, HybridSharding], list[tuple[Family, int]]] = {}
        self._passes: dict[tuple[Degrees, HybridSharding], Passes] = {}
        self._reduced: dict[tuple[Degrees, HybridSharding, int], float] = {}
        self._copied: dict[tuple[Degrees, HybridSharding], float] = {}
        self._gathered: dict[tuple[Degrees, HybridSharding, int], float] = {}

    def of_micro_batch(self, degrees: Degrees, sharding: HybridSharding, layer: Passes) -> float:
        """Return a lower bound on a micro-batch's seconds, with communication, on the rank with most layers.

        Args:
            degrees: The parallel degrees.
            sharding: The sharding of the state.
            layer: Seconds of the quickest layer.
        """
        passes = self._passes.get((degrees, sharding))
        if passes is None:
            passes = self._passes[degrees, sharding] = self._in_passes(degrees, sharding)
        layers = math.ceil(self._layers / degrees.pp)
        backward = layers * layer.backward + self._copies(degrees, sharding, layers)
        return max(layers * layer.forward, passes.forward) + max(backward, passes.backward)

    def after_passes(self, degrees: Degrees, sharding: HybridSharding, layers: int) -> float:
        """Return the least seconds in which the gradients of a stage's layers are reduced after all passes.

        Args:
            degrees: The parallel degrees.
            sharding: The sharding of the state.
            layers: Number of layers that each stage has at least.
        """
        if degrees.pp == 1 or degrees.dp * degrees.cp == 1 or sharding.kind.reduces_each_micro_batch:
            return 0.0
        return self._reduce(degrees, sharding, layers)

    def _copies(self, degrees: Degrees, sharding: HybridSharding, layers: int) -> float:
        """Return the seconds in which this many layers' gradients are copied to a bucket in each backward."""
        if not sharding.kind.reduces_each_micro_batch or self._cluster.parts:
            return 0.0
        key = degrees, sharding
        found = self._copied.get(key)
        if found is None:
            buckets = self._buckets(degrees, sharding, layers)
            found = sum(copy_seconds(bucket, self._width, self._cluster) for bucket in buckets)
            self._copied[key] = found
        return found

    def _in_passes(self, degrees: Degrees, sharding: HybridSharding) -> Passes:
        """Return the seconds of only the gradients' and weights' communication."""
        layers = math.ceil(self._layers / degrees.pp)
        if not sharding.kind.communicates_each_micro_batch:
            return _NOTHING
        if not sharding.kind.cuts_weights:
            return Passes(0.0, self._reduce(degrees, sharding, layers))
        gather = self._gather(degrees, sharding, 1)
        reduce = self._reduce(degrees, sharding, 1) if sharding.kind.reduces_each_micro_batch else 0.0
        again = layers - 1 if degrees.pp == 1 else layers
        return Passes(layers * gather, again * gather + layers * reduce)

    def _reduce(self, degrees: Degrees, sharding: HybridSharding, layers: int) -> float:
        """Return the seconds of this many layers' gradients in one bucket."""
        key = degrees, sharding, layers
        found = self._reduced.get(key)
        if found is None:
            buckets = self._buckets(degrees, sharding, layers)
            found = self._reduced[key] = sum(reduce_seconds(bucket, self._cluster) for bucket in buckets)
        return found

    def _gather(self, degrees: Degrees, sharding: HybridSharding, layers: int) -> float:
        """Return the seconds of this many layers' weights in one bucket."""
        key = degrees, sharding, layers
        found = self._gathered.get(key)
        if found is None:
            buckets = self._buckets(degrees, sharding, layers)
            found = sum(gather_seconds(bucket, self._width, self._cluster) for bucket in buckets)
            self._gathered[key] = found
        return found

    def _buckets(self, degrees: Degrees, sharding: HybridSharding, layers: int) -> list[Bucket]:
        """Return one bucket for each family of parameters."""
        families = self._families.get((degrees, sharding))
        if families is None:
            dp, tp, pp, cp, ep = degrees
            plan = Plan(
                dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, replicate=sharding.replicate, shard=sharding.kind.name
            )
            held = [parameters_on_rank(block.parameters, tp, ep) for block in self._kinds]
            families = [(family, min(map(family.count, held))) for family in families_of(plan)]
            self._families[degrees, sharding] = families
        return [Bucket(layers * count, 0, 0, family) for family, count in families]
