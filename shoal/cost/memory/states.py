"""Bytes that training with Adam keeps for each parameter from step to step.

    shard        weights     gradients   optimizer
    none         w           4           8 + m
    zero1        w           4           (8 + m) / s
    zero3-once   4 / s       4           8 / s
    zero2        w           4 / s       (8 + m) / s
    zero3        4 / s       4 / s       8 / s

These are bytes per parameter. s is the sharding degree, w the bytes of a weight, and m those of the
optimizer's own copy of the weight: in fp32 w = 4 and m = 0, in bf16 w = 2 and m = 4. With zero3 and
zero3-once that copy is the only one between two steps. Looser exchange keeps more: see `_of_exchange`. With
`offload` a part that is outside of the device counts as nothing; of the optimizer's these are the moments.
A frozen parameter has a weight alone, w bytes or with zero3 w / s.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.plan import Plan, Tiers

_FP32 = 4.0  # bytes


class States(NamedTuple):
    """Bytes per parameter on a rank.

    Attributes:
        weights: Bytes of the weights that compute, or of the shards that they are gathered from.
        gradients: Bytes of the sums of gradients.
        optimizer: Bytes of Adam's two moments, and of its copy of the weights if these have 16 bit.
    """

    weights: float
    gradients: float
    optimizer: float


def states_of(plan: Plan, shards: float, tiers: Tiers | None = None) -> States:
    """Return the bytes for each parameter that a rank has after tensor and expert parallelism.

    Args:
        plan: The Plan, which says precision and sharding.
        shards: Sharding degree: the number of ranks that a state is cut over.
        tiers: Where states are kept; None for the Plan's `offload` on a CPU.
    """
    tiers = plan.tiers.of_cpu if tiers is None else tiers
    shards = max(shards, 1)
    width, copy = (2.0, _FP32) if plan.element_bytes == 2 else (_FP32, 0.0)
    moments = 2 * _FP32 if tiers.optimizer == "device" else 0.0
    sharding = plan.sharding
    cut = shards if sharding.cuts_optimizer else 1
    weights = _FP32 / shards if sharding.cuts_weights else width
    gradients = _FP32 / shards if sharding.cuts_gradients else _FP32
    return States(
        weights if tiers.parameters == "device" else 0.0,
        gradients if tiers.gradients == "device" else 0.0,
        (moments if sharding.cuts_weights else moments + copy) / cut + _of_exchange(plan, cut),
    )


def frozen_bytes(plan: Plan, shards: float, tiers: Tiers) -> float:
    """Return the bytes for each frozen parameter that a rank has: a weight in the type of the compute.

    The arguments are those of `states_of`.
    """
    if tiers.parameters != "device":
        return 0.0
    return plan.element_bytes / (max(shards, 1) if plan.sharding.cuts_weights else 1)


def _of_exchange(plan: Plan, cut: float) -> float:
    """Return what looser exchange keeps of each parameter, where a rank owns one of `cut` parts.

    Local updates keep an anchor and a momentum. Error feedback keeps what it left out of each element that it
    sends: of what the rank owns between workers, and of everything among the ranks of one worker. A rank that
    servers join has no moments, and in their place what it sends and the values that it got.
    """
    exchange = plan.exchanged
    kept = 2 * _FP32 / cut if exchange.merges else 0.0
    if exchange.compresses and exchange.feedback:
        is_owned = exchange.merges or exchange.is_served or plan.replicas > 1
        kept += _FP32 / (cut if is_owned else 1)
    return kept


def state_bytes(plan: Plan, shards: float, tiers: Tiers | None = None) -> float:
    """Return the sum of `states_of`."""
    return sum(states_of(plan, shards, tiers))
