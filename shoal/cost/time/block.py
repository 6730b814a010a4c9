"""Seconds of a block on one rank for one micro-batch, and the communications within it.

`joins.py` has the communications of tensor parallelism. Context parallelism sends keys and values round the
ring beside attention, or exchanges heads (Ulysses). Expert parallelism exchanges tokens twice in forward and
twice in backward. With recompute=full a layer's forward runs again, with its communications; embedding and
end are not recomputed. Without tensor parallelism the recompute stops at the last result that backward reads:
it leaves out the layer's last product, which is a fifth to a third of forward. Programs that recompute by
functions of their own (Megatron-LM, DeepSpeed) repeat the whole forward.

A selective recompute repeats passes, but no products and no attention. Where attention is not fused and
writes its scores to memory, it repeats attention alone (Korthikanti et al., arXiv:2205.05198).

With precision=fp8 the products of layers compute in 8 bits, and those of embedding and end in bf16.

`host.py` says how long the host takes to start a block's operations, and when the device waits for it.

Programs that send a token once to each node move fewer bytes between nodes for experts (`_sent_across`).

At each communication that no compute runs beside, ranks also wait for late ranks: see `synchronisations.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shoal.cluster import Cluster, Device
from shoal.cost.collectives.crossings import crossings
from shoal.cost.collectives.network import collective_seconds
from shoal.cost.layout import Layout
from shoal.cost.time.attention import attention_seconds
from shoal.cost.time.compute import Seconds, casting_seconds, host_seconds, operation_seconds
from shoal.cost.time.host import repeats, starting_seconds, waits_for_experts
from shoal.cost.time.joins import Join, joins_of
from shoal.cost.time.synchronisations import seconds_late
from shoal.plan import Group
from shoal.workload import Attention, Block, Part, Product


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds of a block on a rank for one micro-batch. A pair is forward and backward.

    Attributes:
        compute: Seconds of its operations; `input` includes the recompute.
        joins: Communications over tp.
        tensor: Exposed seconds of the communications over tp.
        context: Exposed seconds of the communications over cp.
        expert: Exposed seconds of the communications over ep.
        late: Seconds that ranks wait for late ranks at these communications.
        host: Seconds that the host takes to start the block's operations.
    """

    compute: Seconds
    joins: tuple[tuple[Join, ...], tuple[Join, ...]]
    tensor: tuple[float, float]
    context: tuple[float, float]
    expert: tuple[float, float]
    late: tuple[float, float]
    host: tuple[float, float] = (0.0, 0.0)

    @property
    def forward(self) -> float:
        """Seconds of forward, with its waits."""
        return self.compute.forward + self.tensor[0] + self.context[0] + self.expert[0] + self.late[0]

    @property
    def backward(self) -> float:
        """Seconds of backward, with its waits."""
        return self.compute.backward + self.tensor[1] + self.context[1] + self.expert[1] + self.late[1]


def block_cost(
    block: Block, hidden: int, length: int, cluster: Cluster, layout: Layout, *, is_layer: bool = True
) -> BlockCost:
    """Return the cost of a block.

    Args:
        block: A block of a Workload.
        hidden: Width of the stream.
        length: Tokens of a sample.
        cluster: The machines that it runs on. Ranks of tp are neighbours; those of cp are tp apart.
        layout: How the block is laid over ranks.
        is_layer: Whether the block is a layer, which may be recomputed, or else the embedding or the end.
    """
    recompute = layout.policy(block, is_layer=is_layer)
    if block.is_kept:
        layout = layout._replace(recompute="none")
    block = block.under(layout.compile)
    if layout.precision == "fp8" and not is_layer:
        layout = layout._replace(precision="bf16")
    stream = float(layout.width) * layout.microbatch * length / layout.cp * hidden
    forward, backward = _joins(block, stream, cluster, _of_joins(layout))
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
        _starting(block, cluster.device, Layout(1, ep=_experts_degree(block, layout)), recompute),
    )


_joins = lru_cache(maxsize=1 << 15)(joins_of)
_starting = lru_cache(maxsize=1 << 13)(starting_seconds)


def _of_operations(block: Block, layout: Layout) -> Layout:
    """Return the layout with only what the seconds of a block's operations depend on."""
    tensor = "plain" if layout.tensor == "plain" else "sequence"
    ep = _experts_degree(block, layout)
    return Layout(layout.microbatch, layout.tp, layout.cp, ep, tensor, precision=layout.precision)


def _of_joins(layout: Layout) -> Layout:
    """Return the layout with only what the communications of tensor parallelism depend on."""
    return Layout(
        layout.microbatch,
        layout.tp,
        layout.cp,
        tensor=layout.tensor,
        precision=layout.precision,
        apart=layout.apart,
    )


def _experts_degree(block: Block, layout: Layout) -> int:
    """Return ep, or 1 for a block without experts, which does not depend on it."""
    return layout.ep if has_experts(block) else 1


@lru_cache(maxsize=1 << 8)
def has_experts(block: Block) -> bool:
    """Return whether a block has operations of experts, which expert parallelism divides."""
    return any(not isinstance(each, Attention) and each.copies > 1 for each in block.operations)


class _Parts(NamedTuple):
    """Seconds of a block's operations that do not depend on what is recomputed.

    Attributes:
        total: Seconds of all operations.
        passes: Seconds of forward of the passes that a selective recompute repeats.
        products: Seconds of forward of the products.
        scores: Seconds of forward of attention that is not fused.
        unread: Seconds of forward that a full recompute leaves out.
    """

    total: Seconds
    passes: float
    products: float
    scores: float
    unread: float


def _compute(block: Block, cluster: Cluster, layout: Layout, recompute: str) -> Seconds:
    parts = _parts(block, cluster.device, _of_operations(block, layout))
    total, repeated = parts.total, 0.0
    if recompute == "full":
        repeated = total.forward - parts.unread
    elif recompute == "selective":
        repeated = parts.scores or parts.passes + block.remade * parts.products
    return Seconds(total.forward, total.input + repeated, total.weight)


@lru_cache(maxsize=1 << 15)
def _parts(block: Block, device: Device, layout: Layout) -> _Parts:
    forward = input = weight = 0.0
    passes = products = scores = 0.0
    for operation in block.operations:
        seconds = operation_seconds(operation, device, layout)
        each = [seconds]
        if layout.precision == "fp8" and block.sums and isinstance(operation, Product):
            each.append(casting_seconds(operation, device, layout))
        for one in each:
            forward, input, weight = forward + one.forward, input + one.input, weight + one.weight
        if repeats(operation):
            passes += seconds.forward
        elif isinstance(operation, Product):
            products += seconds.forward
    for attention in block.attentions:
        if not attention.fused:
            scores += attention_seconds(attention, device, layout)[0]
    waits = waits_for_experts(block, device, layout)
    total = Seconds(forward + waits[0], input + waits[1], weight)
    return _Parts(total, passes, products, scores, _unread(block, device, layout))


def _unread(block: Block, device: Device, layout: Layout) -> float:
    """Return the seconds of forward that a full recompute leaves out."""
    if not block.stops_early or layout.tp > 1:
        return 0.0
    return sum(operation_seconds(each, device, layout).forward for each in block.unread)


def _context(block: Block, length: int, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    if layout.cp == 1:
        return 0.0, 0.0
    forward = backward = 0.0
    group = layout.context_group
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
    group = layout.expert_group
    sent = nbytes * _sent_across(block, group, cluster)
    each = host_seconds(cluster) + collective_seconds("all_to_all", sent, group, cluster)
    return 2 * each, 2 * each * (2 if layout.recompute == "full" else 1)


def _sent_across(block: Block, group: Group, cluster: Cluster) -> float:
    """Return the share of the rows that ranks exchange if a token goes once to each node with its experts.

    With k experts, drawn evenly over n nodes, a token goes to `n (1 - (1 - 1/n)^k)` nodes. Links inside a
    node spread it there, which takes less time than the network needs.
    """
    sizes = tuple(level.devices for level in cluster.levels)
    outer = [lain[-1] for lain in crossings(group, sizes)]
    nodes = max(group.size // each.inside if each.level else 1 for each in outer)
    if nodes == 1 or not block.once_to_node:
        return 1.0
    reached = nodes * (1 - (1 - 1 / nodes) ** block.once_to_node)
    return min(1.0, reached / block.once_to_node)


def _late(
    block: Block, joins: Sequence[Join], work: float, cluster: Cluster, layout: Layout, rounds: int = 1
) -> float:
    """Return the seconds that ranks wait for late ranks in a pass.

    Args:
        block: The block.
        joins: The pass's communications over tp.
        work: Seconds of compute in the pass.
        cluster: The machines that it runs on.
        layout: How the block is laid over ranks.
        rounds: How often the pass communicates over cp and ep.
    """
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
