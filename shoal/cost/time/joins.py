"""The communications of tensor parallelism within a block, and how much of them its products hide.

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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.collectives.network import collective_load, collective_seconds
from shoal.cost.layout import Layout
from shoal.cost.time.compute import Seconds, host_seconds, operation_seconds
from shoal.cost.time.passes import pass_seconds
from shoal.workload import Block, Part, Product

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
