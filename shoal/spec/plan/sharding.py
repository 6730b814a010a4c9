"""The shardings of data parallelism: what each cuts over ranks, and when it communicates.

    sharding     optimizer state   sums of gradients   weights   gradients are reduced   weights are gathered
    none         whole             whole               whole     once a step             never
    zero1        cut               whole               whole     once a step             once a step
    zero3-once   cut               whole               cut       once a step             every pass of a block
    zero2        cut               cut                 whole     every micro-batch       once a step
    zero3        cut               cut                 cut       every micro-batch       every pass of a block

The cuts decide the rest. A rank that holds a part of a sum has no memory for the whole, so it reduces with
every micro-batch. A rank that changes a part of the weights gathers the others. ZeRO: Rajbhandari et al.,
arXiv:1910.02054. zero3-once is FSDP2 with `set_requires_gradient_sync(False)` for all micro-batches but the
last.

To add a sharding, add an entry here and its strategy in `shoal.parallel.apply`. Costs, simulator and planner
ask a `Sharding`, and never compare names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import PlanError


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Sharding:
    """What data parallelism cuts over the ranks of a shard group. There is one object for each sharding.

    Attributes:
        name: The value of a Plan's `shard`.
        cuts_optimizer: Whether each rank keeps and updates a part of the optimizer's state.
        cuts_gradients: Whether each rank keeps a part of the sums of gradients.
        cuts_weights: Whether each rank keeps a part of the weights; each block gathers its own for each pass.
    """

    name: str
    cuts_optimizer: bool
    cuts_gradients: bool
    cuts_weights: bool

    @property
    def gathers_each_step(self) -> bool:
        """Whether the ranks gather updated weights once a step, and keep them."""
        return self.cuts_optimizer and not self.cuts_weights

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether every backward reduces gradients; if not, the last one of a step does."""
        return self.cuts_gradients

    @property
    def communicates_each_micro_batch(self) -> bool:
        """Whether every micro-batch reduces gradients or gathers weights."""
        return self.cuts_gradients or self.cuts_weights

    @property
    def bucket_is_memory(self) -> bool:
        """Whether a backward holds gradients in buckets of the Plan's size, beside the sums.

        If weights are cut, each block is a bucket; if sums are whole, buckets are parts of them.
        """
        return self.cuts_gradients and not self.cuts_weights


UNSHARDED = Sharding(name="none", cuts_optimizer=False, cuts_gradients=False, cuts_weights=False)
FULLY_SHARDED = Sharding(name="zero3", cuts_optimizer=True, cuts_gradients=True, cuts_weights=True)

SHARDINGS: Mapping[str, Sharding] = {
    each.name: each
    for each in (
        UNSHARDED,
        Sharding(name="zero1", cuts_optimizer=True, cuts_gradients=False, cuts_weights=False),
        Sharding(name="zero3-once", cuts_optimizer=True, cuts_gradients=False, cuts_weights=True),
        Sharding(name="zero2", cuts_optimizer=True, cuts_gradients=True, cuts_weights=False),
        FULLY_SHARDED,
    )
}
"""Every sharding, by name; later ones keep less on each of many ranks."""


def require_degrees(sharding: Sharding, *, dp: int, cp: int, ep: int, replicate: int) -> None:
    """Check that `replicate` and `ep` divide the ranks that they are carved out of.

    Raises:
        PlanError: One does not, or nothing is sharded and `replicate` is given.
    """
    if replicate > 1 and not sharding.cuts_optimizer:
        raise PlanError(
            f"replicate={replicate} was given, but shard=none keeps a whole replica on every rank",
            possible="replicate divides dp for hybrid sharding, with shard="
            + " or ".join(each.name for each in SHARDINGS.values() if each.cuts_optimizer),
            change=f"add shard=zero3, or leave out replicate={replicate}",
        )
    if dp % replicate:
        raise PlanError(
            f"replicate={replicate} does not divide dp={dp}",
            possible=f"replicate is one of {', '.join(map(str, divisors(dp)))}",
            change="choose one of these, or another dp",
        )
    if (dp * cp) % ep:
        raise PlanError(
            f"ep={ep} does not divide dp x cp = {dp * cp}",
            possible=f"ep is one of {', '.join(map(str, divisors(dp * cp)))}",
            change="choose one of these, or another dp",
        )
    shards = dp // replicate * cp
    if sharding.cuts_optimizer and shards % ep:
        raise PlanError(
            f"ep={ep} does not divide the {shards} ranks over which shard={sharding.name} shards a state",
            possible=f"ep is one of {', '.join(map(str, divisors(shards)))}",
            change="choose one of these, a smaller replicate, or shard=none",
        )


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]
