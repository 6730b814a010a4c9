"""The Plans that a search chooses from: all legal ones for a Workload, a number of devices and a batch.

Plans that cannot win in the cost model are left out:

- cp and the micro-batch have no common factor g > 1: with cp / g, g times dp and micro-batches of 1 / g each
  rank has the same tokens, as many micro-batches and the same group for its gradients, and communicates less
  within blocks.
- schedule=search is made for times that are known: the best Plan is tried with it
  (`shoal.predict.planner.refine`).
- Without `offload`, state stays on the devices: `shoal.predict.planner.offloaded` searches a space with each.

Nothing else is left out by rule: tp may leave the node, and bounds decide.

The size of the buckets in which gradients are communicated beside backward.

Small buckets start early, but pay the collective's latency often. The last bucket, which is full only when
backward ends, is never hidden. `usual_bucket` looks only at the links; a search plays the sizes that may be
quickest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal.predict.cost import Layout
from shoal.predict.cost.time import Bucket, families_of, gather_seconds, reduce_seconds
from shoal.spec.cluster import Cluster, devices_of
from shoal.spec.plan import (
    FULLY_SHARDED,
    OFFLOADED,
    SHARDINGS,
    UNSHARDED,
    Plan,
    SettledPlan,
    Sharding,
    Tiers,
    divisors,
)
from shoal.spec.plan.schedules import KINDS, NAMES, kind_of
from shoal.spec.workload import Workload

_BUCKET = Plan().bucket
_ANY_SCHEDULE = Plan().schedule

RECOMPUTES = ("none", "selective", "full")
"""The recompute policies."""


class Degrees(NamedTuple):
    """The parallel degrees: the share of each axis in the devices."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int

    @classmethod
    def of(cls, plan: Plan) -> Degrees:
        """Return the degrees of a Plan."""
        return cls(plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)


class HybridSharding(NamedTuple):
    """A sharding, and the number of replicas of the sharded state."""

    kind: Sharding
    replicate: int


class Variant(NamedTuple):
    """A Plan without its sharding, which changes nothing within blocks and stages.

    Attributes:
        degrees: The parallel degrees.
        layout: The layout of a block's micro-batch over ranks.
        microbatches: Micro-batches of a step.
        schedule: Name of the schedule; 1f1b without a pipeline.
        virtual: Stages on a rank.
    """

    degrees: Degrees
    layout: Layout
    microbatches: int
    schedule: str
    virtual: int

    def plan(
        self,
        sharding: HybridSharding,
        split: str = "cost",
        bucket: int = _BUCKET,
        offload: str = OFFLOADED,
    ) -> SettledPlan:
        """Return the Plan with this sharding."""
        degrees, layout = self.degrees, self.layout
        return SettledPlan(
            dp=degrees.dp,
            tp=degrees.tp,
            pp=degrees.pp,
            cp=degrees.cp,
            ep=degrees.ep,
            replicate=sharding.replicate,
            shard=sharding.kind.name,
            tensor=layout.tensor,
            context=layout.context,
            schedule=self.schedule,
            virtual=None if self.virtual == kind_of(self.schedule).least_virtual else self.virtual,
            split=split,
            microbatch=layout.microbatch,
            bucket=bucket,
            recompute=layout.recompute,
            precision=layout.precision,
            offload=offload,
        )


@dataclass(frozen=True)
class Space:
    """The legal Plans of a Workload on all devices of a Cluster, for one batch.

    Attributes:
        workload: The training.
        cluster: The machines that it runs on; every device takes part.
        batch: Samples of a step.
        accept: Returns whether degrees are allowed.
        asked: The precision of all Plans; None for the type, of 16 bits or more, that the device computes
            fastest in.
        offload: What all Plans keep outside of the devices.
    """

    workload: Workload
    cluster: Cluster
    batch: int
    accept: Callable[[Degrees], bool] = lambda degrees: True
    asked: str | None = None
    offload: str = OFFLOADED

    def degrees(self) -> Iterator[Degrees]:
        """Yield all degrees that the model, the sequence and the batch allow."""
        devices, layers = self.cluster.devices, len(self.workload.layers)
        for tp in divisors(devices):
            if not self._splits_heads(tp):
                continue
            for cp in divisors(devices // tp):
                if not self._contexts(tp, cp):
                    continue
                for pp in divisors(devices // tp // cp):
                    dp = devices // tp // cp // pp
                    if pp > layers or self.batch % dp:
                        continue
                    for ep in self._expert_degrees(dp * cp):
                        degrees = Degrees(dp, tp, pp, cp, ep)
                        if self.accept(degrees):
                            yield degrees

    def variants(self, degrees: Degrees) -> Iterator[Variant]:
        """Yield every Plan of these degrees, without its sharding."""
        for microbatch, count in self.microbatches(degrees):
            schedules = list(self.schedules(degrees.pp, count))
            for recompute in RECOMPUTES:
                for layout in self.layouts(degrees, microbatch, recompute):
                    for schedule, virtual in schedules:
                        yield Variant(degrees, layout, count, schedule, virtual)

    def count(self, degrees: Degrees) -> int:
        """Return the number of Plans of these degrees, without making them."""
        layouts = len(RECOMPUTES) * sum(1 for _ in self.layouts(degrees, 1, "none"))  # for any micro-batch
        schedules = sum(
            len(list(self.schedules(degrees.pp, count))) for _, count in self.microbatches(degrees)
        )
        return layouts * schedules * len(self.shardings(degrees))

    def microbatches(self, degrees: Degrees) -> Iterator[tuple[int, int]]:
        """Yield the samples of a micro-batch, and the number of micro-batches of a step."""
        local = self.batch // degrees.dp
        for microbatch in divisors(local):
            if math.gcd(microbatch, degrees.cp) == 1:
                yield microbatch, local // microbatch

    def schedules(self, pp: int, count: int) -> Iterator[tuple[str, int]]:
        """Yield name and stages on a rank of the schedules for this many micro-batches."""
        if pp == 1:
            yield _ANY_SCHEDULE, 1
            return
        blocks = len(self.workload.layers) // pp
        for name in NAMES:
            kind = KINDS[name]
            for virtual in divisors(blocks) if kind.most_virtual is None else [kind.least_virtual]:
                if virtual <= blocks and kind.takes(pp, virtual, count):
                    yield name, virtual

    def shardings(self, degrees: Degrees) -> list[HybridSharding]:
        """Return the shardings, each with every number of replicas."""
        tiers = self.tiers
        if degrees.dp * degrees.cp == 1:
            return [HybridSharding(UNSHARDED if tiers.takes(UNSHARDED) else FULLY_SHARDED, 1)]
        found = [HybridSharding(UNSHARDED, 1)]
        for replicate in divisors(degrees.dp):
            if degrees.dp // replicate * degrees.cp == 1:
                continue  # no state is cut
            if degrees.dp // replicate * degrees.cp % degrees.ep == 0:
                found += [
                    HybridSharding(each, replicate) for each in SHARDINGS.values() if each.cuts_optimizer
                ]
        return [each for each in found if tiers.takes(each.kind)]

    def is_legal(self, plan: SettledPlan) -> bool:
        """Return whether model, sequence, batch and devices allow a Plan, whatever memory it needs."""
        layers, experts = len(self.workload.layers), self.workload.experts
        return (
            plan.ranks == self.cluster.devices
            and (plan.shared is not None or self.batch % (plan.dp * plan.microbatch) == 0)
            and plan.stages <= layers
            and self._splits_heads(plan.tp)
            and plan.context in self._contexts(plan.tp, plan.cp)
            and plan.tensor in self._tensors(plan.tp, plan.cp)
            and (plan.ep == 1 or (experts > 0 and experts % plan.ep == 0))
        )

    @property
    def tiers(self) -> Tiers:
        """Where all Plans keep their state."""
        return Tiers.parse(self.offload)

    def offload_under(self, sharding: Sharding) -> str:
        """Return what a Plan keeps outside of the devices under a sharding that the space may lack."""
        tiers = self.tiers
        if tiers.takes(sharding):
            return self.offload
        return str(Tiers(activations=tiers.activations, blocks=tiers.blocks))

    @property
    def precision(self) -> str:
        """The type in which Plans compute."""
        if self.asked is not None:
            return self.asked
        peaks = [device.peak for device in devices_of(self.cluster)]
        return max(("fp32", "bf16"), key=lambda name: min(peak.get(name, 0.0) for peak in peaks))

    def layout(self, degrees: Degrees, microbatch: int, recompute: str) -> Layout:
        """Return the layout that keeps least and computes least, among those with this recompute."""
        _, tp, _, cp, ep = degrees
        return Layout(microbatch, tp, cp, ep, "sequence", "ring", recompute, self.precision)

    def layouts(self, degrees: Degrees, microbatch: int, recompute: str) -> Iterator[Layout]:
        """Yield the layouts of a block's micro-batch over ranks, with this recompute."""
        _, tp, _, cp, ep = degrees
        for tensor in self._tensors(tp, cp):
            for context in self._contexts(tp, cp):
                yield Layout(microbatch, tp, cp, ep, tensor, context, recompute, self.precision)

    def _splits_heads(self, tp: int) -> bool:
        workload = self.workload
        if tp == 1:
            return True
        if self.precision == "fp8":  # a Plan with fp8 splits no products
            return False
        if not workload.heads or workload.heads % tp:
            return False
        return workload.kv_heads % tp == 0 or tp % workload.kv_heads == 0

    def _tensors(self, tp: int, cp: int) -> tuple[str, ...]:
        if tp == 1:
            return ("sequence",)
        return ("plain",) if self.workload.length // cp % tp else ("sequence", "async", "plain")

    def _contexts(self, tp: int, cp: int) -> tuple[str, ...]:
        """Return the ways in which attention may reach over cp ranks; empty if it cannot."""
        if cp == 1:
            return ("ring",)
        heads, length = self.workload.heads, self.workload.length
        if not heads:
            return ()
        ring = ("ring",) if length % (2 * cp) == 0 else ()
        ulysses = ("ulysses",) if length % cp == 0 and heads // tp >= cp else ()
        return ring + ulysses

    def _expert_degrees(self, ranks: int) -> list[int]:
        experts = self.workload.experts
        return divisors(math.gcd(ranks, experts)) if experts else [1]


def leanest_sharding(degrees: Degrees) -> HybridSharding:
    """Return the sharding that leaves a rank the least state."""
    return HybridSharding(FULLY_SHARDED if degrees.dp * degrees.cp > 1 else UNSHARDED, 1)


SIZES = (16 << 20, 128 << 20, 1 << 30)
"""Sizes that a search tries; the best Plans get more."""

ALL_SIZES = tuple((1 << 20) << power for power in range(11))
"""Sizes that the best Plans are tried with: 1 MiB to 1 GiB."""
_NEAR = 1.25  # a byte may take this many times as long as in the largest bucket


def usual_bucket(cluster: Cluster, plan: SettledPlan) -> int:
    """Return the smallest size whose time per byte is nearly that of the largest size.

    Args:
        cluster: The machines that it runs on.
        plan: A Plan with a fixed micro-batch; it says which ranks communicate, and how.
    """
    if plan.dp * plan.cp == 1 or plan.sharding.cuts_weights:
        return plan.bucket
    family, width = families_of(plan)[0], Layout.of(plan).width

    def seconds_of_a_byte(size: int) -> float:
        bucket = Bucket(size / width, 0, 0, family)
        return (reduce_seconds(bucket, cluster) + gather_seconds(bucket, width, cluster)) / size

    limit = _NEAR * seconds_of_a_byte(ALL_SIZES[-1])
    return next(size for size in ALL_SIZES if seconds_of_a_byte(size) <= limit)
