"""Buckets: the parameters of a stage that data-parallel ranks communicate together, and over which ranks.

`shoal.plan.groups` says which families of parameters there are, and which ranks keep them.

Buckets of each family are filled in the order of backward, up to `Plan.bucket` bytes of weights; the
embedding and the end have buckets of their own, and with cut weights every block has one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from shoal.plan import Group, Groups, Plan
from shoal.workload import Block, Parameters


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters that are sharded and summed over the same ranks.

    Attributes:
        kinds: Kinds of a block's parameters, as fields of `Parameters`.
        shards: The ranks that together hold one state.
        replicas: The ranks that hold the same shard.
    """

    kinds: tuple[str, ...]
    shards: Group
    replicas: Group

    def count(self, held: Parameters) -> int:
        """Return how many of a block's parameters are in this family, if a rank has `held` of the block."""
        return sum(getattr(held, kind) for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are reduced and gathered together.

    Attributes:
        parameters: Number of its parameters on the rank that are trained.
        first: Position of its first block in the stage. Forward first needs the bucket there, and backward
            completes its gradients there.
        last: Position of its last block. Backward first needs the bucket there.
        family: The family of its parameters, with the ranks that communicate them.
        number: Number of equal buckets; a large block has several.
        frozen: Number of other parameters on the rank that are gathered with them.
    """

    parameters: float
    first: int
    last: int
    family: Family
    number: int = 1
    frozen: float = 0.0


def families_of(plan: Plan) -> tuple[Family, ...]:
    """Return the families of a Plan's parameters, each with its ranks."""
    return families_over(Groups.of(plan), plan.tp, plan.ep)


def families_over(groups: Groups, tp: int, ep: int) -> tuple[Family, ...]:
    """Return the families of parameters over these groups, which have these degrees."""
    whole = ("whole",) if ep > 1 else ("whole", "experts")
    dense = ("divided", *(whole if tp == 1 else ()))
    families = [Family(dense, groups.dense.shards, groups.dense.summed)]
    if tp > 1:
        families.append(Family(whole, groups.whole.shards, groups.whole.summed))
    if ep > 1:
        families.append(Family(("experts",), groups.experts.shards, groups.experts.summed))
    return tuple(families)


def parameters_on_rank(parameters: Parameters, tp: int, ep: int) -> Parameters:
    """Return the number of a block's parameters on a rank, before sharding."""
    return Parameters(parameters.whole, parameters.divided // tp, parameters.experts // ep)


def owned_by_rank(held: Parameters, plan: Plan) -> float:
    """Return how many of the rank's parameters its optimizer updates: the rank's shard."""
    groups = Groups.of(plan)
    return (held.whole + held.divided) / groups.dense.shards.size + held.experts / groups.experts.shards.size


def buckets_of(blocks: Sequence[Block], roots: Container[int], plan: Plan, width: int) -> list[Bucket]:
    """Return the buckets of a stage, in the order in which backward completes them.

    Args:
        blocks: Blocks of the stage.
        roots: Positions of the embedding and the end.
        plan: The Plan, which says the sharding and the size of buckets.
        width: Bytes of a weight that computes.
    """
    by_block = plan.sharding.cuts_weights
    capacity = math.inf if by_block else plan.bucket / width
    held, frozen = held_by_block(blocks, plan.tp, plan.ep, by_block)
    filled: list[Bucket] = []
    for family in families_of(plan):
        counts = [family.count(each) for each in held]
        beside = [family.count(each) for each in frozen]
        filled += [
            Bucket(size - beside[first], first, last, family, number, beside[first])
            for size, first, last, number in fill(counts, roots, capacity, by_block)
        ]
    return sorted(filled, key=lambda bucket: -bucket.first)


def held_by_block(
    blocks: Sequence[Block], tp: int, ep: int, by_block: bool
) -> tuple[list[Parameters], list[Parameters]]:
    """Return the parameters on a rank that are communicated of each block, and those of them that are frozen.

    Frozen parameters are gathered where weights are cut, which is where each block is a bucket.
    """
    if not by_block:
        return [parameters_on_rank(block.parameters, tp, ep) for block in blocks], [Parameters()] * len(
            blocks
        )
    frozen = [parameters_on_rank(block.frozen, tp, ep) for block in blocks]
    trained = [parameters_on_rank(block.parameters, tp, ep) for block in blocks]
    return [sum(each, Parameters()) for each in zip(trained, frozen, strict=True)], frozen


def fill(
    counts: Sequence[int], roots: Container[int], capacity: float, by_block: bool
) -> list[tuple[float, int, int, int]]:
    """Return the buckets of one family: parameters, first and last block, and number of equal buckets.

    Args:
        counts: The family's parameters on the rank, by block.
        roots: Positions of the embedding and the end.
        capacity: Parameters at which a bucket is closed.
        by_block: Whether each block is a bucket.
    """
    sizes: list[float] = []
    places: list[tuple[int, int, int]] = []  # first, last, number
    is_open = False
    for position in reversed(range(len(counts))):
        count = float(counts[position])
        if not count:
            continue
        is_root = position in roots
        if is_open and not is_root and sizes[-1] + count <= capacity:
            sizes[-1] += count
            places[-1] = position, places[-1][1], 1
            continue
        number = 1 if by_block else math.ceil(count / capacity)
        sizes.append(count / number)
        places.append((position, position, number))
        is_open = not is_root and not by_block and number == 1
    return [(size, *place) for size, place in zip(sizes, places, strict=True)]
