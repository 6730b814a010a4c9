"""What each block of a pipeline stage does with the activations that its backward needs.

A block keeps them in memory, makes them again in backward (`recompute`), or has them in a file from forward
to backward (`offload=activations:file`). Both settings may name a number of the model's blocks: a stage has
its share, rounded up.

    stored      spread evenly over the stage, so that the file is written and read while other blocks compute
    recomputed  the first ones of the others, then the first ones of the stored: in backward they come last,
                when what other blocks kept is free again, so that what is made again adds nothing to the peak

A block that is both has in the file what recompute leaves of it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.plan.offload import Tiers
from shoal.plan.plan import Plan
from shoal.plan.recompute import Recompute


class BlockChoices(NamedTuple):
    """Blocks of a stage that do not keep their activations in memory, by their places in it.

    Attributes:
        recomputed: The blocks with the Plan's recompute policy.
        stored: The blocks with activations in a file.
    """

    recomputed: frozenset[int]
    stored: frozenset[int]


def block_choices(plan: Plan, blocks: int, every: int) -> BlockChoices:
    """Return which blocks of a stage recompute, and which have activations in a file.

    Args:
        plan: The Plan.
        blocks: Number of the stage's blocks.
        every: Number of the model's blocks.
    """
    return _chosen(plan.recomputed, plan.tiers, blocks, every)


@lru_cache(maxsize=1 << 12)
def _chosen(recompute: Recompute, tiers: Tiers, blocks: int, every: int) -> BlockChoices:
    number = tiers.stored_blocks(blocks, every)
    stored = [place * blocks // number for place in range(number)]
    others = [place for place in range(blocks) if place not in stored]
    again = (*others, *stored)[: recompute.count(blocks, every)]
    return BlockChoices(frozenset(again), frozenset(stored))
