"""Which degrees of a Plan divide each other."""

from __future__ import annotations

import math

from shoal.errors import PlanError
from shoal.plan.sharding import SHARDINGS, Sharding


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
