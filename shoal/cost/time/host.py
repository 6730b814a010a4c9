"""Seconds that the host takes to start a device's operations, and when the device waits for it.

The host starts kernels one after another; the device runs them in that order, each when it is started and the
one before is done. The host does not wait for the device: while a long operation runs, it starts those that
follow. So the device waits only for what the host could not start ahead. For pieces i = 1..n of work between
two synchronisations, which take the host h and the device d seconds, the last is done after

    max over k of (h_1 + .. + h_k + d_k + .. + d_n)

(Johnson, "Optimal two- and three-stage production schedules", 1954). A program that synchronises before the
optimizer's update has such a stretch from the embedding to the end and back. `waits_of` gives what it takes
beyond the device's own seconds. In a program that never synchronises, steps follow one another, and take the
longer of the host's and of the device's seconds. There the host is ahead when a step ends: what the device
then does, such as the optimizer's update, hides as many seconds of its waits.

Each kernel takes the host `dispatch` seconds, which include Python, torch's dispatcher and autograd. A
product is one kernel for each of its weights, and twice as many in backward; fused attention is one, and
three. A gradient that torch adds to its sum in fp32 is one. The call of a compiled graph takes `graph`
seconds beside its kernels: guards, autograd's function, the outputs. An eager block with recompute=selective
is such a graph, whose operators run one by one.

Programs with fused kernels start the products and casts of each expert by themselves. The host starts none of
these ahead: it first reads how many rows each expert got. So the device waits for what the host takes beyond
the device's own seconds for all experts of a rank, in forward and in backward (`waits_for_experts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.cluster import Device
from shoal.cost.layout import Layout
from shoal.cost.time.compute import operation_seconds
from shoal.workload import Attention, Block, Operation, Pass, Product

_OF_ATTENTION = (1, 3)  # kernels of fused attention, forward and backward
_OF_UNFUSED = (4, 8)  # two products, softmax and dropout
_GRAPH = 6.0  # starts of operators that the call of a compiled graph takes, where no figure is known


class Stretch(NamedTuple):
    """Equal pieces of work in a row.

    Attributes:
        number: Number of pieces.
        host: Seconds that the host takes to start one.
        device: Seconds that the device takes for one.
    """

    number: int
    host: float
    device: float


def starting_seconds(
    block: Block, device: Device, layout: Layout, recompute: str = "none"
) -> tuple[float, float]:
    """Return the host's seconds for a block's forward and backward.

    Args:
        block: The block as it runs: compiled, or eager.
        device: Device whose host starts the operations.
        layout: How the block is laid over ranks.
        recompute: none, selective or full.
    """
    forward, backward = starts_of(block, layout, recompute)
    graphs = block.graphs
    if recompute == "selective" and block.sums and not graphs:
        graphs = 1
    calls = graphs * (device.graph or _GRAPH * device.dispatch)
    return forward * device.dispatch + calls, backward * device.dispatch + calls


def starts_of(block: Block, layout: Layout, recompute: str = "none") -> tuple[int, int]:
    """Return how many operations the host starts for a block's forward and backward.

    The arguments are those of `starting_seconds`.
    """
    forward, backward = 0, block.sums
    again = 0
    for operation in block.operations:
        started = _starts(operation, layout)
        forward += started[0]
        backward += started[1]
        if recompute == "full" or (recompute == "selective" and repeats(operation)):
            again += started[0]
    return forward, backward + again


def repeats(operation: Operation) -> bool:
    """Return whether a selective recompute makes an operation again: a pass, unless it says otherwise."""
    return isinstance(operation, Pass) and operation.again


def waits_for_experts(block: Block, device: Device, layout: Layout) -> tuple[float, float]:
    """Return the seconds of forward and backward in which a device waits for its experts' kernels to start.

    This is what the host takes to start them one by one, beyond what the device takes for them. It starts
    none ahead: it first reads how many rows each expert got.
    """
    waits = [0.0, 0.0]
    for operation in block.operations:
        if isinstance(operation, Attention) or not _is_started_by_expert(operation):
            continue
        seconds = operation_seconds(operation, device, layout)
        for index, started in enumerate(_starts(operation, layout)):
            waits[index] += started * device.dispatch - (seconds.backward if index else seconds.forward)
    return max(0.0, waits[0]), max(0.0, waits[1])


def _is_started_by_expert(operation: Product | Pass) -> bool:
    return operation.copies > 1 and not (isinstance(operation, Product) and operation.grouped)


def _starts(operation: Operation, layout: Layout) -> tuple[int, int]:
    """Return how many kernels the host starts for an operation's forward and backward."""
    if isinstance(operation, Attention):
        return _OF_ATTENTION if operation.fused else _OF_UNFUSED
    times = layout.experts(operation.copies) if _is_started_by_expert(operation) else 1
    if isinstance(operation, Product):
        return times * operation.matrices, (1 if operation.frozen else 2) * times * operation.matrices
    forward, backward = operation.launches
    return times * forward, times * backward


def waits_of(stretches: Sequence[Stretch]) -> float:
    """Return the seconds that the device waits for the host, over stretches of work in a row."""
    device = sum(each.number * each.device for each in stretches)
    longest = before = 0.0
    after = device
    for number, host, seconds in stretches:
        # Within a stretch of equal pieces, the first or the last decides.
        first = before + host + after
        last = before + number * host + after - (number - 1) * seconds
        longest = max(longest, first, last)
        before, after = before + number * host, after - number * seconds
    return longest - device
