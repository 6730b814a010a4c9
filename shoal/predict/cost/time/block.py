"""Seconds of a block on one rank for one micro-batch, and the communications within it.

Context parallelism sends keys and values round the ring beside attention, or exchanges heads (Ulysses).
Expert parallelism exchanges tokens twice in forward and twice in backward. With recompute=full a layer's
forward runs again, with its communications; embedding and end are not recomputed. Without tensor parallelism
the recompute stops at the last result that backward reads: it leaves out the layer's last product, which is a
fifth to a third of forward. Programs that recompute by functions of their own (Megatron-LM, DeepSpeed) repeat
the whole forward.

A selective recompute repeats passes, but no products and no attention. Where attention is not fused and
writes its scores to memory, it repeats attention alone (Korthikanti et al., arXiv:2205.05198).

With precision=fp8 the products of layers compute in 8 bits, and those of embedding and end in bf16.

Programs that send a token once to each node move fewer bytes between nodes for experts (`_sent_across`).

At each communication that no compute runs beside, ranks also wait for late ranks.

Tensor parallelism
------------------

The communications of tensor parallelism within a block, and how much of them its products hide.

Products that are divided by columns need the whole stream; products that are divided by rows give partial
sums. A layer has one join of the ranks of tp for each product by rows and the products by columns before it.
The end has products by columns alone, and the embedding looks up rows. The table shows what `shoal.parallel`
sends (Korthikanti et al., arXiv:2205.05198), and the products beside which it travels:

    tensor=            forward                              backward
    plain      columns                                      all-reduce, beside the weights' gradients
               rows    all-reduce
    sequence   columns all-gather                           all-gather, beside the input's gradient;
                                                            reduce-scatter, beside the weights' gradients
               rows    reduce-scatter                       all-gather
    async      as sequence, but the communications that sequence exposes go round a ring of n ranks in n
               parts, beside the parts of the product

A product hides a communication at most as long as the product takes. For a whole collective, `contention` of
the hidden seconds count nevertheless (less on links slower than the innermost). For one in parts, the
device's `overlap` is the share that can be hidden, by the products of all parts but one. The loss gathers two
fp32 numbers for each token from each rank.

On cores, the thread that computes also starts each communication, which takes as long as the starts of some
operators (`host_seconds`). A rank's part is copied to where parts are gathered. If a micro-batch has several
samples, the ranks' parts of one sequence do not lie together in memory. Then a pass puts in order the
gathered stream, the input of a product by rows, and in backward the gradients of products by columns.

Late ranks
----------

Seconds that ranks wait for one another when they synchronise many times in a step.

Work that takes all ranks the same time on average takes each rank a little more or less: because of
interrupts, other programs, the state of caches. Such delays add up like the steps of a random walk: after t
seconds a rank differs from the mean by a standard deviation of `noise` sqrt(t), where a Cluster's `noise` is
the deviation after one second. Ranks that synchronise n times in T seconds of work, and do nothing else until
the last rank is there, wait

    n m noise sqrt(T / n)  =  m noise sqrt(n T)

seconds, where m is the number of standard deviations by which the last rank is behind the mean. The wait
grows with the number of synchronisations. `jitter` is another thing: the variation of a whole step's pace.
Ranks wait for that once, however often they synchronise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shoal.predict.cost.collectives.link_use import crossings
from shoal.predict.cost.collectives.network import collective_load, collective_seconds
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time.compute import (
    Seconds,
    attention_seconds,
    casting_seconds,
    host_seconds,
    operation_seconds,
    pass_seconds,
    repeats,
    starting_seconds,
    waits_for_experts,
)
from shoal.predict.cost.time.jitter import normal_maximum
from shoal.spec.cluster import Cluster, Device
from shoal.spec.plan import Group
from shoal.spec.workload import Attention, Block, Part, Product

_OF_LOSS = 2 * 4  # bytes per token: the logarithm of its sum of exponentials, and its target's logit


class Joined(NamedTuple):
    """One communication over the ranks of tp.

    Attributes:
        name: Name that the runtime records, such as "all_gather:column".
        seconds: Exposed seconds.
        nbytes: Bytes of the whole buffer.
        is_beside: Whether products run beside it, so that they also hide the wait for late ranks.
    """

    name: str
    seconds: float
    nbytes: float
    is_beside: bool


class Join(NamedTuple):
    """The communications before and after one part of a block's compute."""

    before: tuple[Joined, ...]
    behind: tuple[Joined, ...]

    @property
    def seconds(self) -> float:
        """Total exposed seconds."""
        return sum(each.seconds for each in (*self.before, *self.behind))


@dataclass(frozen=True, slots=True)
class _Products:
    """The products that one join serves.

    Attributes:
        columns, rows: Seconds of the products by columns, and of that by rows; None if there is none.
        outputs: Number of outputs of the products by columns, on this rank for one token.
        inputs: Number of inputs of the product by rows, on this rank for one token.
        tokens: Number of tokens that the products, or the loss, see.
    """

    columns: Seconds | None
    rows: Seconds | None
    outputs: float = 0.0
    inputs: float = 0.0
    tokens: float = 0.0


def joins_of(
    block: Block, stream: float, cluster: Cluster, layout: Layout
) -> tuple[tuple[Join, ...], tuple[Join, ...]]:
    """Return the joins of a block's forward, and of its backward without the recompute.

    Args:
        block: A block of a Workload.
        stream: Bytes of a micro-batch's hidden state on all ranks of tp.
        cluster: The machines that it runs on; ranks of tp are neighbours.
        layout: How the block is laid over ranks.
    """
    if layout.tp == 1 or not block.joins:
        return (), ()
    wire = _Wire(stream, cluster, layout)
    found = list(_products(block, cluster, layout))
    forward = tuple(Join(wire.gather_forward(each), wire.scatter_forward(each)) for each in found)
    backward = tuple(Join(wire.gather_backward(each), wire.scatter_backward(each)) for each in found[::-1])
    return forward, backward


def _products(block: Block, cluster: Cluster, layout: Layout) -> Iterator[_Products]:
    """Yield the products of each join: those by columns, and the product by rows that ends it."""
    columns = None
    outputs = tokens = 0.0
    for operation in block.operations:
        if not isinstance(operation, Product) or not operation.is_divided:
            continue
        seconds = operation_seconds(operation, cluster.device, layout)
        if operation.part is Part.ROWS:
            yield _Products(columns, seconds, outputs, operation.inputs / layout.tp, tokens)
            columns, outputs = None, 0.0
        else:
            columns = seconds if columns is None else columns + seconds
            outputs += operation.outputs / layout.tp
            tokens = operation.rows * layout.microbatch / layout.cp
    if columns is not None:
        yield _Products(columns, None, outputs, 0.0, tokens)
    elif not any(isinstance(each, Product) for each in block.operations):
        yield _Products(None, Seconds(0.0, 0.0, 0.0))


class _Wire:
    """Computes the communications on each side of a join.

    Args:
        stream: Bytes of the hidden state.
        cluster: The machines that it runs on.
        layout: How the block is laid over ranks.
    """

    def __init__(self, stream: float, cluster: Cluster, layout: Layout) -> None:
        self._cluster = cluster
        self._device = cluster.device
        self._stream = stream
        self._group = layout.tensor_group
        self._contention = min(cluster.device.contention * collective_load(self._group, cluster), 1.0)
        self._is_split = layout.tensor != "plain"
        self._in_parts = layout.tensor == "async"
        self._ready = host_seconds(cluster)
        self._copied = pass_seconds(cluster.device, 2 * stream / layout.tp) if cluster.cores else 0.0
        self._width = layout.width
        self._is_put_in_order = cluster.cores > 0 and self._is_split and layout.microbatch > 1

    def gather_forward(self, products: _Products) -> tuple[Joined, ...]:
        """Return the communications before products by columns."""
        if products.columns is None or not self._is_split:
            return ()
        return (self._ordered(self._parts("all_gather", "column", products.columns.forward), self._stream),)

    def scatter_forward(self, products: _Products) -> tuple[Joined, ...]:
        """Return the communications after a product by rows, or after the loss."""
        if products.rows is None:
            return (self._whole("all_gather", "loss", nbytes=self._group.size * _OF_LOSS * products.tokens),)
        if not self._is_split:
            return (self._whole("all_reduce", "row" if products.columns else "embed"),)
        if products.columns is None:
            return (self._whole("reduce_scatter", "embed"),)
        return (
            self._ordered(
                self._parts("reduce_scatter", "row", products.rows.forward),
                self._width * products.tokens * products.inputs,
            ),
        )

    def gather_backward(self, products: _Products) -> tuple[Joined, ...]:
        """Return the communications before the backward of a product by rows."""
        if products.rows is None or not self._is_split:
            return ()
        if products.columns is None:
            return (self._whole("all_gather", "embed"),)
        return (self._ordered(self._parts("all_gather", "row", products.rows.backward), self._stream),)

    def scatter_backward(self, products: _Products) -> tuple[Joined, ...]:
        """Return the communications in and after the backward of products by columns."""
        if products.columns is None:
            return ()
        if not self._is_split:
            return (self._whole("all_reduce", "column", beside=products.columns.weight),)
        return (
            self._whole("all_gather", "column", beside=products.columns.input),
            self._ordered(
                self._whole("reduce_scatter", "column", beside=products.columns.weight),
                self._width * products.tokens * products.outputs,
            ),
        )

    def _whole(
        self, collective: str, name: str, *, beside: float = 0.0, nbytes: float | None = None
    ) -> Joined:
        """Return one whole collective, with `beside` seconds of products that run beside it."""
        nbytes = self._stream if nbytes is None else nbytes
        seconds = collective_seconds(collective, nbytes, self._group, self._cluster)
        hidden = (1 - self._contention) * min(seconds, beside)
        ready = self._ready + (self._copied if collective == "all_gather" else 0.0)
        return Joined(f"{collective}:{name}", ready + seconds - hidden, nbytes, beside > 0)

    def _parts(self, collective: str, name: str, beside: float) -> Joined:
        """Return one collective, in parts if tensor=async."""
        if not self._in_parts:
            return self._whole(collective, name)
        seconds = collective_seconds(collective, self._stream, self._group, self._cluster)
        ranks = self._group.size
        hidden = min(self._device.overlap * seconds, (ranks - 1) / ranks * beside)
        ready = (ranks - 1) * self._ready
        return Joined(f"shift:{name}", ready + seconds - hidden, self._stream, is_beside=True)

    def _ordered(self, joined: Joined, nbytes: float) -> Joined:
        """Add the pass that puts `nbytes` bytes in the order of ranks, or back, where one is needed."""
        if not self._is_put_in_order:
            return joined
        return joined._replace(seconds=joined.seconds + pass_seconds(self._device, 2 * nbytes))


@lru_cache
def behind_the_mean(ranks: int) -> float:
    """Return by how many standard deviations the last of so many ranks is behind their mean."""
    return normal_maximum(ranks, 1.0) - 1.0


def seconds_late(noise: float, work: float, synchronisations: Sequence[tuple[int, int]]) -> float:
    """Return the seconds that a rank waits for others during some work.

    Args:
        noise: The noise of the Cluster; see `shoal.spec.cluster.Cluster`.
        work: Seconds of the work.
        synchronisations: Pairs of how many ranks synchronise and how often, at equal intervals.
    """
    number = sum(times for _, times in synchronisations)
    if not noise or not number:
        return 0.0
    behind = sum(times * behind_the_mean(ranks) for ranks, times in synchronisations)
    return noise * behind * math.sqrt(work / number)


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
