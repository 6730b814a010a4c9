"""Seconds of a block on one rank for one micro-batch, and the communications within it.

What tensor parallelism communicates is in `joins.py`. Context parallelism sends keys and values round the
ring beside attention, or exchanges heads (Ulysses). Experts are exchanged twice in forward and twice in
backward. With recompute=full a layer's forward is done again, communications and all; embedding and end are
not recomputed. Without tensor parallelism it ends with the last result that backward reads: the layer's last
product is not made again, which is a fifth to a third of forward. Programs that recompute by functions of
their own (Megatron-LM, DeepSpeed) make all of it.

A selective recompute does passes again, not products and attention; or, where attention is not fused and
writes its scores to memory, attention alone (Korthikanti et al., arXiv:2205.05198).

Where the host takes longer to start the operations than the device to do them, the host's time counts.

At each communication that no compute runs beside, ranks also wait for who is late: see `synchronisations.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cluster import Cluster, Device
from shoal.cost.collectives.network import collective_seconds
from shoal.cost.layout import Layout
from shoal.cost.time.compute import Seconds, attention_seconds, host_seconds, operation_seconds
from shoal.cost.time.joins import Join, joins_of
from shoal.cost.time.synchronisations import seconds_late
from shoal.plan.groups import context_group, expert_group
from shoal.workload import Block, Part, Pass, Product

__all__ = ["BlockCost", "block_cost"]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What a block takes on a rank for one micro-batch, in seconds.

    Attributes:
        compute: Of its operations, what is recomputed counting with `input`.
        joins: Communications over tp: in forward, in backward.
        tensor: Of these, what nothing hides.
        context: The same over cp.
        expert: The same over ep.
        late: What ranks wait for one another at all of these: in forward, in backward.
    """

    compute: Seconds
    joins: tuple[tuple[Join, ...], tuple[Join, ...]]
    tensor: tuple[float, float]
    context: tuple[float, float]
    expert: tuple[float, float]
    late: tuple[float, float]

    @property
    def forward(self) -> float:
        """Seconds of forward, with what it waits for."""
        return self.compute.forward + self.tensor[0] + self.context[0] + self.expert[0] + self.late[0]

    @property
    def backward(self) -> float:
        """Seconds of backward, with what it waits for."""
        return self.compute.backward + self.tensor[1] + self.context[1] + self.expert[1] + self.late[1]


def block_cost(
    block: Block, hidden: int, length: int, cluster: Cluster, layout: Layout, *, is_layer: bool = True
) -> BlockCost:
    """What a block takes.

    Args:
        block: Of a Workload.
        hidden: Width of the stream.
        length: Tokens of a sample.
        cluster: Where it runs; ranks of tp are neighbours, those of cp are tp apart.
        layout: How it is laid over ranks.
        is_layer: Whether it is one, which may be recomputed, and not the embedding or the end.
    """
    recompute = layout.recompute if is_layer else "none"
    stream = float(layout.width) * layout.microbatch * length / layout.cp * hidden
    forward, backward = joins_of(block, stream, cluster, layout)
    if recompute == "full":
        backward = (*forward, *backward)
    compute = _compute(block, cluster, layout, recompute)
    return BlockCost(
        compute,
        (forward, backward),
        (sum(join.seconds for join in forward), sum(join.seconds for join in backward)),
        _context(block, length, cluster, layout),
        _expert(block, cluster, layout),
        (
            _late(block, forward, compute.forward, cluster, layout),
            _late(block, backward, compute.backward, cluster, layout, 2 if recompute == "full" else 1),
        ),
    )


def _compute(block: Block, cluster: Cluster, layout: Layout, recompute: str) -> Seconds:
    device = cluster.device
    total = Seconds(0.0, 0.0, 0.0)
    passes = products = scores = 0.0
    kernels = 0
    for operation in block.operations:
        seconds = operation_seconds(operation, device, layout)
        total += seconds
        if isinstance(operation, Pass):
            passes += seconds.forward
        elif isinstance(operation, Product):
            products += seconds.forward
        kernels += operation.kernels if isinstance(operation, Pass) else 1
    for attention in block.attentions:
        if not attention.fused:
            scores += attention_seconds(attention, device, layout)[0]
    host = kernels * device.dispatch
    forward = max(total.forward, host)
    repeated = 0.0
    if recompute == "full":
        repeated = forward * (1 - _unread(block, device, layout) / total.forward)
    elif recompute == "selective":
        repeated = scores or passes + block.remade * products
    backward = max(total.backward, 2 * host)
    return Seconds(forward, backward - total.weight + repeated, total.weight)


def _unread(block: Block, device: Device, layout: Layout) -> float:
    """Seconds of forward that a full recompute leaves out."""
    if not block.stops_early or layout.tp > 1:
        return 0.0
    return sum(operation_seconds(each, device, layout).forward for each in block.unread)


def _context(block: Block, length: int, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    if layout.cp == 1:
        return 0.0, 0.0
    forward = backward = 0.0
    group = context_group(layout.tp, layout.cp)
    host = host_seconds(cluster)
    for attention in block.attentions:
        samples = layout.microbatch * length / layout.cp / layout.tp * layout.width
        keys = samples * attention.kv_heads * (attention.key_width + attention.value_width)
        if layout.context == "ulysses":
            heads = attention.heads * attention.value_width
            queries = samples * attention.heads * attention.key_width
            for nbytes in (queries, keys, samples * heads):
                forward += host + collective_seconds("all_to_all", nbytes, group, cluster)
            backward += forward
            continue
        beside = attention_seconds(attention, cluster.device, layout)
        sends = collective_seconds("all_gather", keys * layout.cp, group, cluster)
        forward += (layout.cp - 1) * host + max(0.0, sends - beside[0])
        backward += 2 * (layout.cp - 1) * host + max(0.0, 2 * sends - beside[1])
    return forward, backward + (forward if layout.recompute == "full" else 0.0)


def _expert(block: Block, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    if layout.ep == 1 or not block.routed:
        return 0.0, 0.0
    nbytes = float(layout.width) * block.routed * layout.share(Part.STREAM)
    each = collective_seconds("all_to_all", nbytes, expert_group(layout.tp, layout.ep), cluster)
    each += host_seconds(cluster)
    return 2 * each, 2 * each * (2 if layout.recompute == "full" else 1)


def _late(
    block: Block, joins: Sequence[Join], work: float, cluster: Cluster, layout: Layout, rounds: int = 1
) -> float:
    """In a pass with these joins and so much work; each round exchanges over cp and with experts."""
    if not cluster.noise:
        return 0.0
    joined = (each for join in joins for each in (*join.before, *join.behind))
    synchronisations = [(layout.tp, sum(not each.is_beside for each in joined))]
    if layout.cp > 1:
        exchanges = 2 if layout.context == "ulysses" else 1
        synchronisations.append((layout.cp, rounds * exchanges * sum(1 for _ in block.attentions)))
    if layout.ep > 1 and block.routed:
        synchronisations.append((layout.ep, 2 * rounds))
    return seconds_late(cluster.noise, work, synchronisations)
