"""What compute is made of: the seconds that its FLOP need at the device's peak, and what is lost beyond them.

ideal       the FLOP of products and attention at the peak of the precision; causal attention has half
products    products take longer: their tiles and waves are not full, memory is slow, the clock is lower
attention   attention takes longer
passes      passes over memory, and the passes in which products' operands are cast to 8 bits
recompute   what backward computes again
host        the device waits for the host
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from shoal.cost.layout import Layout
from shoal.cost.time.block import block_cost
from shoal.cost.time.compute import operation_flop, operation_seconds
from shoal.cost.time.step import Costs
from shoal.workload import Attention, Block, Pass, Product


def compute_parts(costs: Costs, blocks: Sequence[Block], layout: Layout) -> Mapping[str, float]:
    """Return the seconds of compute of these blocks for one micro-batch, by the parts above.

    Args:
        costs: Costs of the blocks' workload.
        blocks: Blocks of one rank.
        layout: How they are laid over ranks.
    """
    parts: defaultdict[str, float] = defaultdict(float)
    for block, number in Counter(blocks).items():
        for name, seconds in _of_block(costs, block, layout).items():
            parts[name] += number * seconds
    return parts


def _of_block(costs: Costs, block: Block, layout: Layout) -> Mapping[str, float]:
    workload, cluster = costs.workload, costs.cluster
    device, made = cluster.device, block.under(costs.settled(layout).compile)
    is_layer = block is not workload.embedding and block is not workload.end
    laid = layout if is_layer or layout.precision != "fp8" else layout._replace(precision="bf16")
    parts: defaultdict[str, float] = defaultdict(float)
    for operation in made.operations:
        seconds = sum(operation_seconds(operation, device, laid))
        if isinstance(operation, Pass):
            parts["passes"] += seconds
            continue
        ideal = operation_flop(operation, laid) / device.flops(laid.precision)
        parts["ideal"] += ideal
        if isinstance(operation, Product):
            parts["products"] += seconds - ideal
        elif isinstance(operation, Attention):
            parts["attention"] += seconds - ideal
    plain = costs.settled(layout)._replace(recompute="none")
    alone = block_cost(block, workload.hidden, workload.length, cluster, plain, is_layer=is_layer).compute
    again = block_cost(
        block, workload.hidden, workload.length, cluster, costs.settled(layout), is_layer=is_layer
    ).compute
    parts["passes"] += sum(alone) - sum(parts.values())  # casts to 8 bits
    parts["recompute"] = sum(again) - sum(alone)
    parts["host"] = max(0.0, sum(costs.block(block, layout).compute) - sum(again))
    return parts
