"""Buckets: the parameters of a stage that data-parallel ranks communicate together, and over which ranks.

`shoal.spec.plan.groups` says which families of parameters there are, and which ranks keep them.

Buckets of each family are filled in the order of backward, up to `Plan.bucket` bytes of weights; the
embedding and the end have buckets of their own, and with cut weights every block has one.

What ranks send
---------------

What data-parallel ranks send each other of a bucket's gradients, and the seconds of it.

Gradients are summed over the shards, and then over the replicas, each in `width` bytes, or compressed:
between workers where there are several, and otherwise between the shards
(`shoal.parallel.exchange.compressed_sums`). n elements over d ranks, with c bytes of a payload:

    kind              communication                          passes over memory, bytes an element
    int8, int4, fp8,  all-to-all of c, and all-gather of c   encode 28 and the payload, twice for the sums;
    sign                                                     decode 8 and the payload, twice
    sparse            all-gather of d c                      encode 28 and the payload, decode 12
    random            all-reduce of c                        32
    powersgd          all-reduce of both factors             48

Encoding reads the error memory and the gradient, and writes the sum, the payload and the new error memory.
With two ranks, all kinds but random and powersgd gather.

Seconds of buckets
------------------

Seconds of buckets of gradients and weights when nothing runs beside them, and their load on the device.

Gradients are copied to their bucket in the type of a Plan's `reduce`, and summed over the shards, then over
the replicas. A rank's shard is added in fp32 to its shard from earlier micro-batches. Weights are gathered
over the shards.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.predict.cost.collectives.network import collective_load, collective_seconds
from shoal.predict.cost.time.compute import stream_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Compression, Group, Groups, Plan
from shoal.spec.workload import Block, Parameters, Product, Workload


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


SUM_WIDTH = 4  # bytes of an element of a sum of gradients on a rank: fp32

_ENCODE, _DECODE, _BY_VALUE, _LOW_RANK, _CLEAR = 28, 8, 32, 48, 4
"""Bytes of memory that passes move for each element; see above."""

_LARGE = 1 << 22
"""Elements of a vector whose payload gives the bytes of one element."""


_NONE = Compression()


class Sum(NamedTuple):
    """One collective of a sum of gradients.

    Attributes:
        operation: Its name.
        nbytes: Bytes, counted as `collective_seconds` does.
        seconds: Seconds, with those of encoding and decoding.
        group: The ranks.
    """

    operation: str
    nbytes: float
    seconds: float
    group: Group


@dataclass(frozen=True, slots=True)
class Wire:
    """What ranks send of gradients.

    Attributes:
        width: Bytes of a gradient that is sent whole.
        compression: What is sent where a Plan compresses.
        is_between_workers: Whether it compresses the sums over replicas; otherwise those over shards.
        low_rank: For powersgd, the elements sent for each element of a matrix.
    """

    width: int = SUM_WIDTH
    compression: Compression = _NONE
    is_between_workers: bool = True
    low_rank: float = 0.0

    @classmethod
    def of(cls, plan: Plan, workload: Workload) -> Wire:
        """Return what ranks send of gradients under a Plan, after its dense steps."""
        width = 2 if plan.reduce == "bf16" else SUM_WIDTH
        exchange = plan.exchanged
        if not exchange.compresses or exchange.merges or exchange.is_served:
            return cls(width)
        compression = exchange.compression
        return cls(width, compression, plan.replicas > 1, low_rank_share(compression, workload))

    def sums(self, parameters: float, shards: Group, replicas: Group, cluster: Cluster) -> list[Sum]:
        """Return the collectives that sum the gradients of a bucket, in order.

        Args:
            parameters: Elements of the bucket.
            shards, replicas: The ranks of its family.
            cluster: The machines.
        """
        compresses = self.compression.kind != "none"
        found: list[Sum] = []
        if shards.size > 1:
            if compresses and not self.is_between_workers:
                found.append(self._scattered(parameters, shards, cluster))
            else:
                found.append(whole_sum("reduce_scatter", parameters * self.width, shards, cluster))
        if replicas.size > 1:
            owned = parameters / shards.size
            if compresses and self.is_between_workers:
                found += compressed_sums(owned, self.compression, self.low_rank, replicas, cluster)
            else:
                found.append(whole_sum("all_reduce", owned * self.width, replicas, cluster))
        return found

    def _scattered(self, parameters: float, group: Group, cluster: Cluster) -> Sum:
        payload = payload_bytes(self.compression, parameters)
        moved = (_ENCODE + _DECODE) * parameters + 2 * payload
        seconds = collective_seconds("all_to_all", payload, group, cluster)
        return Sum("all_to_all", payload, seconds + stream_seconds(cluster.device, moved, 4), group)


WHOLE = Wire()
"""Gradients that are sent in fp32."""


def compressed_sums(
    elements: float, compression: Compression, low_rank: float, group: Group, cluster: Cluster
) -> list[Sum]:
    """Return the collectives that sum a vector over a group, compressed, with the seconds of its passes.

    Args:
        elements: Length of the vector.
        compression: What is sent.
        low_rank: See `Wire`.
        group: The ranks.
        cluster: The machines.
    """
    device, size = cluster.device, group.size

    def made(operation: str, nbytes: float, moved: float) -> Sum:
        seconds = collective_seconds(operation, nbytes, group, cluster)
        return Sum(operation, nbytes, seconds + stream_seconds(device, moved, 4), group)

    if compression.kind == "powersgd":
        sent = SUM_WIDTH * elements * low_rank / 2
        return [made("all_reduce", sent, _LOW_RANK / 2 * elements) for _ in range(2)]
    payload = payload_bytes(compression, elements)
    if compression.kind == "random":
        return [made("all_reduce", payload, _BY_VALUE * elements)]
    if compression.is_quantised and size > 2:
        there = _ENCODE * elements + payload + _DECODE * elements + payload
        back = _ENCODE * elements / size + _DECODE * elements + payload
        return [made("all_to_all", payload, there), made("all_gather", payload, back)]
    decoded = size * decode_passes(compression, elements)
    moved = _CLEAR * elements + encode_passes(compression, elements) + decoded
    return [made("all_gather", size * payload, moved)]


def encode_passes(compression: Compression, elements: float) -> float:
    """Return the bytes of memory that moves when a vector is encoded with error memory."""
    return _ENCODE * elements + payload_bytes(compression, elements)


def decode_passes(compression: Compression, elements: float) -> float:
    """Return the bytes of memory that moves when a payload of a vector is decoded and added to another."""
    payload = payload_bytes(compression, elements)
    return payload + (_DECODE * elements if compression.is_quantised else payload)


def payload_bytes(compression: Compression, elements: float) -> float:
    """Return the bytes in which a vector is sent. For threshold, as if elements were normally distributed."""
    if compression.kind == "threshold":
        share = math.erfc(compression.number / math.sqrt(2))
        return elements * share * (SUM_WIDTH + 1.5)
    return elements * compression.payload(_LARGE) / _LARGE


def low_rank_share(compression: Compression, workload: Workload) -> float:
    """Return the elements sent for each element of the workload's parameters; 0 but for powersgd.

    A table that is looked up counts as the other matrices do. Vectors, such as norms, are sent whole.
    """
    if compression.kind != "powersgd":
        return 0.0
    rank, held, sent = compression.number, 0, 0
    for block in (*workload.layers, workload.end):
        matrices = 0
        for each in block.operations:
            if isinstance(each, Product) and not each.frozen:
                elements = each.inputs * each.outputs
                matrices += each.copies * elements
                sent += each.copies * min(rank * (each.matrices * each.inputs + each.outputs), elements)
        others = block.parameters.total
        vectors = others if others < matrices else others - matrices  # a tied head is not the end's own
        held, sent = held + matrices + vectors, sent + vectors
    return sent / held if held else 1.0


def whole_sum(operation: str, nbytes: float, group: Group, cluster: Cluster) -> Sum:
    """Return a collective of a vector that is sent whole."""
    return Sum(operation, nbytes, collective_seconds(operation, nbytes, group, cluster), group)


class BucketTimes(NamedTuple):
    """Seconds of buckets.

    Attributes:
        reduce: Seconds to sum their gradients.
        reduce_loaded: `reduce` times its load on the device (`network.collective_load`).
        gather: Seconds to gather their weights.
        gather_loaded: `gather` times its load on the device.
        copy: Seconds of the passes that copy gradients into them, and a rank's shard out of them.
    """

    reduce: float
    reduce_loaded: float
    gather: float
    gather_loaded: float
    copy: float


NOTHING = BucketTimes(0.0, 0.0, 0.0, 0.0, 0.0)
"""Times of no bucket."""


def bucket_times(bucket: Bucket, width: int, cluster: Cluster, wire: Wire = WHOLE) -> BucketTimes:
    """Return the times of all equal buckets together.

    Args:
        bucket: The bucket.
        width: Bytes of a weight, and of its gradient when backward has made it.
        cluster: The machines.
        wire: What ranks send each other of gradients.
    """
    load = collective_load(bucket.family.shards, cluster)
    sums = _sums(bucket, cluster, wire)
    gather = gather_seconds(bucket, width, cluster)
    return BucketTimes(
        bucket.number * sum(each.seconds for each in sums),
        bucket.number * sum(collective_load(each.group, cluster) * each.seconds for each in sums),
        gather,
        load * gather,
        copy_seconds(bucket, width, cluster, wire),
    )


def reduce_seconds(bucket: Bucket, cluster: Cluster, wire: Wire = WHOLE) -> float:
    """Return the seconds to sum the gradients of all equal buckets, over shards and then over replicas."""
    return bucket.number * sum(each.seconds for each in _sums(bucket, cluster, wire))


def gather_seconds(bucket: Bucket, width: int, cluster: Cluster) -> float:
    """Return the seconds to gather the weights, `width` bytes each, of all equal buckets."""
    nbytes = width * (bucket.parameters + bucket.frozen)
    return bucket.number * collective_seconds("all_gather", nbytes, bucket.family.shards, cluster)


def copy_seconds(bucket: Bucket, width: int, cluster: Cluster, wire: Wire = WHOLE) -> float:
    """Return the seconds of the passes that copy gradients into all equal buckets, and a rank's shard out.

    `width` and `wire` are those of `bucket_times`.
    """
    shards = bucket.family.shards.size
    if shards * bucket.family.replicas.size == 1:
        return 0.0
    sent = wire.width
    nbytes = (width + sent + (sent + 2 * SUM_WIDTH) / shards) * bucket.parameters
    return bucket.number * stream_seconds(cluster.device, nbytes, 2)


def _sums(bucket: Bucket, cluster: Cluster, wire: Wire) -> list[Sum]:
    """Return the collectives that sum one bucket's gradients; none if all its parameters are frozen."""
    if not bucket.parameters and bucket.frozen:
        return []
    family = bucket.family
    return wire.sums(bucket.parameters, family.shards, family.replicas, cluster)
