"""Lower bounds on peak memory: they reject most Plans that do not fit, in microseconds.

The first rank along `pp` holds the states of its layers, and their activations for each held micro-batch:

    (1 + FRAGMENTS) (states of its layers + sum over its stages of held x what these keep) + reserved

Before the model is cut its layers are not known. But some rank has ceil(layers / pp) of them, and keeps the
activations of at least one micro-batch. If layers are unlike, some rank has at least the mean over ranks.

`shoal.cost.memory.memory` also counts the ends, the temporary memory of a backward, and all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost import Layout
from shoal.cost.memory import FRAGMENTS, activation_peaks, block_memory, state_bytes
from shoal.plan import Plan
from shoal.plan.schedules import kind_of
from shoal.planner.space import Degrees, HybridSharding, Variant
from shoal.workload import Block, Workload

__all__ = ["LeastMemory", "Share", "StateBytes"]


class Share(NamedTuple):
    """A lower bound on a rank's part of a model.

    Attributes:
        dense, experts: Parameters of its layers after tensor and expert parallelism.
        kept: Bytes that its layers keep from forward to backward, for all micro-batches.
    """

    dense: float
    experts: float
    kept: float


class StateBytes(NamedTuple):
    """Bytes of a parameter's states on a rank."""

    dense: float
    experts: float


class LeastMemory:
    """The bounds for a Workload on a Cluster; caches values that Plans share.

    Args:
        workload: The training.
        cluster: The machines that it runs on.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload = workload
        self._reserved = cluster.reserved
        self._kinds = tuple(Counter(workload.layers).items())
        self._before = [_counts_before(workload, block) for block, _ in self._kinds]
        self._layers: dict[Layout, list[Share]] = {}

    def share(self, variant: Variant, split: Sequence[int]) -> Share:
        """Return the share of the first rank.

        Args:
            variant: The variant, which determines what layers keep.
            split: Layers of each stage.
        """
        stages: Sequence[int] = (0,)
        held: Sequence[float] = (1.0,)
        if variant.degrees.pp > 1:
            key = variant.schedule, variant.degrees.pp, variant.virtual
            stages = _stages_of_first(*key)
            held = activation_peaks(*key, variant.microbatches)[0][0].whole
        stops = list(accumulate(split))
        dense = experts = kept = 0.0
        for layer, before in zip(self._layers_of(variant.layout), self._before, strict=True):
            counts = [before[stops[stage]] - before[stops[stage] - split[stage]] for stage in stages]
            dense += sum(counts) * layer.dense
            experts += sum(counts) * layer.experts
            kept += sum(map(mul, counts, held)) * layer.kept
        return Share(dense, experts, kept)

    def share_of_degrees(self, degrees: Degrees, layout: Layout) -> Share:
        """Return a share that some rank has at least, under any schedule and split.

        Args:
            degrees: The parallel degrees.
            layout: The layout, which determines what layers keep.
        """
        layers = self._layers_of(layout)
        if len(layers) == 1:
            number = math.ceil(len(self._workload.layers) / degrees.pp)
            return Share(*(number * each for each in layers[0]))
        of_kinds = [
            [number * each for each in layer] for layer, (_, number) in zip(layers, self._kinds, strict=True)
        ]
        return Share(*(sum(each) / degrees.pp for each in zip(*of_kinds, strict=True)))

    def states(self, degrees: Degrees, sharding: HybridSharding, precision: str) -> StateBytes:
        """Return the bytes of each parameter's states on a rank."""
        shards = degrees.dp // sharding.replicate * degrees.cp if sharding.kind.cuts_optimizer else 1
        plan = Plan(shard=sharding.kind.name, precision=precision)
        return StateBytes(state_bytes(plan, shards), state_bytes(plan, shards / degrees.ep))

    def peak(self, share: Share, states: StateBytes) -> float:
        """Return the peak bytes of a rank with this share."""
        tensors = share.dense * states.dense + share.experts * states.experts + share.kept
        return (1 + FRAGMENTS) * tensors + self._reserved

    def for_states(self, share: Share, room: float) -> float:
        """Return the bytes, out of `room`, that a rank with this share has for its states."""
        return (room - self._reserved) / (1 + FRAGMENTS) - share.kept

    def _layers_of(self, layout: Layout) -> list[Share]:
        """Return the share of one layer of each kind, for one micro-batch."""
        found = self._layers.get(layout)
        if found is None:
            each = [block_memory(block, self._workload, layout, is_layer=True) for block, _ in self._kinds]
            found = self._layers[layout] = [Share(one.dense, one.experts, one.kept) for one in each]
        return found


def _counts_before(workload: Workload, kind: Block) -> list[int]:
    """Return how many layers of this kind stand before each place."""
    return list(accumulate((layer is kind for layer in workload.layers), initial=0))


@lru_cache(maxsize=1 << 12)
def _stages_of_first(schedule: str, ranks: int, virtual: int) -> tuple[int, ...]:
    """Return the stages of the first rank."""
    placement = kind_of(schedule).placement(ranks, virtual)
    return tuple(stage for stage, rank in enumerate(placement) if rank == 0)
