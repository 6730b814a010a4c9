"""What data-parallel ranks send each other of a bucket's gradients, and the seconds of it.

Gradients are summed over the shards, and then over the replicas, each in `width` bytes, or compressed:
between workers where there are several, and otherwise between the shards (`shoal.parallel.exchange.sums`).
n elements over d ranks, with c bytes of a payload:

    kind              communication                          passes over memory, bytes an element
    int8, int4, fp8,  all-to-all of c, and all-gather of c   encode 28 and the payload, twice for the sums;
    sign                                                     decode 8 and the payload, twice
    sparse            all-gather of d c                      encode 28 and the payload, decode 12
    random            all-reduce of c                        32
    powersgd          all-reduce of both factors             48

Encoding reads the error memory and the gradient, and writes the sum, the payload and the new error memory.
With two ranks, all kinds but random and powersgd gather.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.collectives.network import collective_seconds
from shoal.cost.time.passes import stream_seconds
from shoal.plan import Compression, Group, Plan
from shoal.workload import Product, Workload

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
