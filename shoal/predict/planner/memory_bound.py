"""Lower bounds on peak memory: they reject most Plans that do not fit, in microseconds.

The first rank along `pp` holds the states of its layers, and their activations for each held micro-batch:

    (1 + FRAGMENTS) (states of its layers + sum over its stages of held x what these keep) + reserved

These are bytes of its own devices. Where devices differ, they count in proportion to the memory of the
Cluster's `device`, as `RankMemory.required` does.

Before the model is cut its layers are not known. But some rank has ceil(layers / pp) of them, and keeps the
activations of at least one micro-batch. If layers are unlike, some rank has at least the mean over ranks.

`shoal.predict.cost.memory.memory` also counts the ends, the temporary memory of a backward, and all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from shoal.predict.cost import Kinds, Layout
from shoal.predict.cost.memory import FRAGMENTS, WORKSPACES, activation_peaks, kept_bytes, state_bytes
from shoal.predict.planner.space import Degrees, HybridSharding, Variant
from shoal.spec.cluster import Cluster
from shoal.spec.plan import DEVICE, Plan, Tiers
from shoal.spec.plan.schedules import kind_of
from shoal.spec.workload import Block, Workload

_ROUNDING = 1.0  # a byte, by which rounding cannot make a bound of some GB too large


class Share(NamedTuple):
    """A lower bound on a rank's part of a model.

    Attributes:
        dense, experts: Parameters of its layers after tensor and expert parallelism.
        kept: Bytes that its layers keep from forward to backward, for all micro-batches.
        tightness: See `shoal.predict.cost.RankMemory`; a lower bound on the rank's.
    """

    dense: float
    experts: float
    kept: float
    tightness: float = 1.0


class StateBytes(NamedTuple):
    """Bytes of a parameter's states on a rank."""

    dense: float
    experts: float


class LeastMemory:
    """The bounds for a Workload on a Cluster; caches values that Plans share.

    Args:
        workload: The training.
        cluster: The machines that it runs on.
        tiers: Where Plans keep their state.
    """

    def __init__(self, workload: Workload, cluster: Cluster, tiers: Tiers = DEVICE) -> None:
        self._workload = workload
        self._tiers = tiers.of_cpu if cluster.cores else tiers
        self._reserved = cluster.reserved
        self._workspaces = 0.0 if cluster.cores else WORKSPACES
        self._kinds = Kinds(cluster) if cluster.parts else None
        self._blocks = tuple(Counter(workload.layers).items())
        self._before = [_counts_before(workload, block) for block, _ in self._blocks]
        self._is_alike = len(self._blocks) == 1
        self._layers, self._kept = cache(self._layers_by), cache(self._kept_by)

    def share(self, variant: Variant, split: Sequence[int]) -> Share:
        """Return the share of the first rank.

        Args:
            variant: The variant, which determines what layers keep.
            split: Layers of each stage.
        """
        stages: Sequence[int] = (0,)
        held: Sequence[float] = (1.0,)
        if variant.degrees.pp > 1:
            schedule, pp, virtual = variant.schedule, variant.degrees.pp, variant.virtual
            stages = _stages_of_first(schedule, pp, virtual)
            held = activation_peaks(schedule, pp, virtual, variant.microbatches)[0][0].whole
        if self._is_alike:
            (layer,) = self._layers(variant.layout)
            counts = [split[stage] for stage in stages]
            number, kept = sum(counts), sum(map(mul, counts, held)) * layer.kept
            return Share(
                number * layer.dense, number * layer.experts, kept, self._tightness(variant.degrees)[0]
            )
        stops = list(accumulate(split))
        dense = experts = kept = 0.0
        for layer, before in zip(self._layers(variant.layout), self._before, strict=True):
            counts = [before[stops[stage]] - before[stops[stage] - split[stage]] for stage in stages]
            dense += sum(counts) * layer.dense
            experts += sum(counts) * layer.experts
            kept += sum(map(mul, counts, held)) * layer.kept
        return Share(dense, experts, kept, self._tightness(variant.degrees)[0])

    def shares(self, beside_states: Iterable[tuple[float, float, float, float]]) -> list[Share]:
        """Return the shares of ranks from what `Memories.beside_states` says of them; `kept` is all of it."""
        more = self._workspaces / (1 + FRAGMENTS) - _ROUNDING
        return [
            Share(dense, experts, nbytes + more, tightness)
            for dense, experts, nbytes, tightness in beside_states
        ]

    def share_of_degrees(self, degrees: Degrees, layout: Layout) -> Share:
        """Return a share that some rank has at least, under any schedule and split.

        Args:
            degrees: The parallel degrees.
            layout: The layout, which determines what layers keep.
        """
        layers = self._layers(layout)
        if len(layers) == 1:
            number = math.ceil(len(self._workload.layers) / degrees.pp)
            dense, experts, kept = (number * each for each in layers[0][:3])
        else:
            of_blocks = [
                [number * each for each in layer[:3]]
                for layer, (_, number) in zip(layers, self._blocks, strict=True)
            ]
            dense, experts, kept = (sum(each) / degrees.pp for each in zip(*of_blocks, strict=True))
        return Share(dense, experts, kept, min(self._tightness(degrees)))

    def states(self, degrees: Degrees, sharding: HybridSharding, precision: str) -> StateBytes:
        """Return the bytes of each parameter's states on a rank."""
        shards = degrees.dp // sharding.replicate * degrees.cp if sharding.kind.cuts_optimizer else 1
        name, tiers = sharding.kind.name, self._tiers
        return StateBytes(
            _state_bytes(name, precision, tiers, shards),
            _state_bytes(name, precision, tiers, shards / degrees.ep),
        )

    def peak(self, share: Share, states: StateBytes) -> float:
        """Return the peak bytes of a rank with this share."""
        tensors = share.dense * states.dense + share.experts * states.experts + share.kept
        return ((1 + FRAGMENTS) * tensors + self._reserved) * share.tightness

    def for_states(self, share: Share, room: float) -> float:
        """Return the bytes, out of `room`, that a rank with this share has for its states."""
        return (room / share.tightness - self._reserved) / (1 + FRAGMENTS) - share.kept

    def _tightness(self, degrees: Degrees) -> Sequence[float]:
        """Return the tightness of each place along the pipeline, in the default order of axes, or of all."""
        if self._kinds is None:
            return (1.0,)
        stage = degrees.dp * degrees.cp * degrees.tp
        places = self._kinds.of_pipeline(degrees.pp, stage, stage * degrees.pp)
        return [self._kinds.tightness(each) for each in places]

    def _layers_by(self, layout: Layout) -> list[Share]:
        """Return the share of one layer of each kind, for one micro-batch."""
        kept = self._kept(layout._replace(ep=1, apart=None))
        tp, ep = layout.tp, layout.ep
        held = [block.under(layout.compile).parameters for block, _ in self._blocks]
        return [
            Share(each.whole + each.divided / tp, each.experts / ep, nbytes)
            for each, nbytes in zip(held, kept, strict=True)
        ]

    def _kept_by(self, layout: Layout) -> list[float]:
        """Return the bytes that a layer of each kind keeps; they do not depend on expert parallelism."""
        if self._tiers.activations != "device":
            return [0.0] * len(self._blocks)
        return [kept_bytes(block, self._workload, layout, is_layer=True) for block, _ in self._blocks]


def _counts_before(workload: Workload, kind: Block) -> list[int]:
    """Return how many layers of this kind stand before each place."""
    return list(accumulate((layer is kind for layer in workload.layers), initial=0))


@lru_cache(maxsize=1 << 12)
def _state_bytes(shard: str, precision: str, tiers: Tiers, shards: float) -> float:
    """Return the bytes of a parameter's states, cut over so many ranks."""
    return state_bytes(Plan(shard=shard, precision=precision), shards, tiers)


@lru_cache(maxsize=1 << 12)
def _stages_of_first(schedule: str, ranks: int, virtual: int) -> tuple[int, ...]:
    """Return the stages of the first rank."""
    placement = kind_of(schedule).placement(ranks, virtual)
    return tuple(stage for stage, rank in enumerate(placement) if rank == 0)
