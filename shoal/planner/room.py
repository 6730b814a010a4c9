"""Bounds that no fullest rank of a Plan holds less than: reject most Plans that do not fit, in microseconds.

The first rank along `pp` holds the states of its layers, and their activations as often as its schedule does:

    (1 + FRAGMENTS) (states x parameters + sum over its stages of held x layers x kept) + reserved

Before the model is cut that is not known; but some rank has ceil(layers / pp) of them, and each for one
micro-batch at least.

`shoal.cost.memory` counts the ends too, what a backward holds for a moment, and all ranks. Where layers are
unlike, each counts as the least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.activations import block_memory
from shoal.cost.held import held_by_rank
from shoal.cost.layout import Layout
from shoal.cost.memory import FRAGMENTS
from shoal.cost.states import state_bytes
from shoal.plan import Plan
from shoal.plan.schedules import placement_of
from shoal.planner.space import Degrees, Sharding, Variant, leanest_sharding
from shoal.workload import Block, Workload

__all__ = ["LeastMemory"]


class _Layer(NamedTuple):
    """Of one layer on a rank: bytes kept of a micro-batch, and parameters."""

    kept: float
    dense: float
    experts: float


class LeastMemory:
    """The bounds, for a Workload on a Cluster; remembers what Plans share.

    Args:
        workload: What is trained.
        cluster: Where.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload = workload
        self._reserved = cluster.reserved
        self._kinds: list[Block] = list({id(layer): layer for layer in workload.layers}.values())
        self._layers: dict[Layout, _Layer] = {}

    def of(self, variant: Variant, sharding: Sharding, split: Sequence[int]) -> float:
        """Bytes that the first rank has at least.

        Args:
            variant: What its layers keep follows from.
            sharding: What its state is cut by.
            split: Layers of each stage.
        """
        layer = self._layer(variant.layout)
        counts: Sequence[int] = split
        held: Sequence[float] = (1.0,)
        degrees = variant.degrees
        if degrees.pp > 1:
            key = variant.schedule, degrees.pp, variant.virtual
            counts = [split[stage] for stage in _stages_of_first(*key)]
            held = _held_by_first(*key, variant.microbatches)
        kept = layer.kept * sum(count * times for count, times in zip(counts, held, strict=True))
        states = _states(layer, degrees, sharding, variant.layout.precision)
        return (1 + FRAGMENTS) * (sum(counts) * states + kept) + self._reserved

    def of_degrees(self, degrees: Degrees, layout: Layout) -> float:
        """Bytes that some rank has at least, under any schedule, split and sharding.

        Args:
            degrees: How the devices are shared out.
            layout: What its layers keep follows from.
        """
        layer = self._layer(layout)
        states = _states(layer, degrees, leanest_sharding(degrees), layout.precision)
        layers = math.ceil(len(self._workload.layers) / degrees.pp)
        return (1 + FRAGMENTS) * layers * (states + layer.kept) + self._reserved

    def _layer(self, layout: Layout) -> _Layer:
        found = self._layers.get(layout)
        if found is None:
            each = [block_memory(block, self._workload, layout, is_layer=True) for block in self._kinds]
            found = _Layer(
                min(block.kept for block in each),
                min(block.dense for block in each),
                min(block.experts for block in each),
            )
            self._layers[layout] = found
        return found


def _states(layer: _Layer, degrees: Degrees, sharding: Sharding, precision: str) -> float:
    """Bytes of a layer's."""
    shards = degrees.dp // sharding.replicate * degrees.cp if sharding.shard != "none" else 1
    states = layer.dense * _state_bytes(sharding.shard, precision, shards)
    if layer.experts:
        states += layer.experts * _state_bytes(sharding.shard, precision, shards / degrees.ep)
    return states


@lru_cache(maxsize=1 << 12)
def _state_bytes(shard: str, precision: str, shards: float) -> float:
    """Of a parameter."""
    return state_bytes(Plan(shard=shard, precision=precision), shards)


@lru_cache(maxsize=1 << 12)
def _stages_of_first(schedule: str, ranks: int, virtual: int) -> tuple[int, ...]:
    """The stages that the first rank has."""
    placement = placement_of(schedule, ranks, virtual)
    return tuple(stage for stage, rank in enumerate(placement) if rank == 0)


def _held_by_first(schedule: str, ranks: int, virtual: int, count: int) -> tuple[float, ...]:
    """By stage of the first rank, of how many micro-batches it holds activations at some moment."""
    return held_by_rank(schedule, ranks, virtual, count)[0][0].whole
