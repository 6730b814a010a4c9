"""Costs of blocks with the device's waits for the host, and the choice that `compile=auto` leaves open.

The waits of a micro-batch follow from all blocks together (`compute.py`). They are shared out to the blocks
whose start takes the host longer than the device needs, in proportion to the difference.

Where devices differ, all ranks compile the same: what is quicker on the devices that take longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby

from shoal.predict.cost.device_kinds import views_of
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time.block import BlockCost, block_cost, has_experts
from shoal.predict.cost.time.compute import Stretch, waits_of
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import Block, Workload


class HostCosts:
    """Computes and caches the costs of a Workload's blocks on a Cluster of equal devices.

    Args:
        workload: The work of the model that is trained.
        cluster: The machines that it runs on.
        together: Costs on all kinds of devices of a Cluster, which settle what is compiled; this one is added
            to them. None if all devices are equal.
    """

    def __init__(self, workload: Workload, cluster: Cluster, together: list[HostCosts] | None = None) -> None:
        self._workload = workload
        self._cluster = cluster
        self._together = [] if together is None else together
        self._together.append(self)
        self._runs = [(block, sum(1 for _ in alike)) for block, alike in groupby(workload.pieces)]
        self._is_open = not cluster.cores and any(block.eager is not None for block, _ in self._runs)
        length = workload.length
        self._alone = cache(partial(block_cost, hidden=workload.hidden, length=length, cluster=cluster))
        self._stretches = cache(self._stretches_of)
        self._blocks, self.waits = cache(self._block), cache(self._waits_of)
        self._share, self._settled = cache(self._share_of), cache(self._settled_of)

    def block(self, block: Block, layout: Layout) -> BlockCost:
        """Return the cost of a block on a rank for one micro-batch."""
        return self._blocks(block, layout)

    def _block(self, block: Block, layout: Layout) -> BlockCost:
        settled = self.settled(layout)
        return _waiting(self._cost(block, settled), self._share(settled))

    def settled(self, layout: Layout) -> Layout:
        """Return the layout with compile=auto settled: the quicker of blocks and none for a micro-batch.

        On cores, and where the workload does not tell the two apart, nothing is compiled.
        """
        return self._settled(layout) if layout.compile == "auto" else layout

    def _settled_of(self, layout: Layout) -> Layout:
        choices = [layout._replace(compile=each) for each in ("blocks", "none")]
        return min(choices, key=self._longest) if self._is_open else choices[-1]

    def _waits_of(self, layout: Layout) -> float:
        """Return the seconds in which a device with all blocks waits for the host, for one micro-batch."""
        stretches = self._stretches(self.settled(layout))
        if self._workload.synchronises:
            # Johnson's formula takes a block as one piece, so it adds the whole start of the first one. The
            # device waits only for the first kernel of it.
            return min(waits_of(stretches), _beyond(stretches))
        return max(0.0, sum(each.number * (each.host - each.device) for each in stretches))

    def _longest(self, layout: Layout) -> float:
        """Return the seconds of a micro-batch on the kind of devices that takes longest."""
        return max(each.micro_batch(layout) for each in self._together)

    def micro_batch(self, layout: Layout) -> float:
        """Return the seconds of all blocks for one micro-batch on one rank after another.

        Args:
            layout: The layout, with its `compile` settled.
        """
        return self.waits(layout) + sum(each.number * each.device for each in self._stretches(layout))

    def _share_of(self, layout: Layout) -> float:
        """Return the waits of a micro-batch over what the host's seconds exceed the device's by, summed."""
        beyond = _beyond(self._stretches(layout))
        return self.waits(layout) / beyond if beyond else 0.0

    def _stretches_of(self, layout: Layout) -> Sequence[Stretch]:
        """Return the forwards of all blocks in order, and then their backwards."""
        costs = [(number, self._cost(block, layout)) for block, number in self._runs]
        forwards = [Stretch(number, cost.host[0], cost.forward) for number, cost in costs]
        backwards = [Stretch(number, cost.host[1], cost.backward) for number, cost in reversed(costs)]
        return (*forwards, *backwards)

    def _cost(self, block: Block, layout: Layout) -> BlockCost:
        """Return the cost of a block whose operations are all started in time."""
        workload = self._workload
        is_layer = block is not workload.embedding and block is not workload.end
        if not is_layer and layout.recompute != "none":
            layout = layout._replace(recompute="none")  # it applies to layers
        if layout.ep > 1 and layout.apart is None and not has_experts(block):
            layout = layout._replace(ep=1)
        return self._alone(block, layout=layout, is_layer=is_layer)


def host_costs(workload: Workload, cluster: Cluster) -> tuple[HostCosts, ...]:
    """Return the costs on each kind of a Cluster's devices (`shoal.predict.cost.device_kinds.views_of`)."""
    together: list[HostCosts] = []
    for view in views_of(cluster):
        HostCosts(workload, view, together)
    return tuple(together)


def settled_compile(workload: Workload, cluster: Cluster, plan: SettledPlan) -> str:
    """Return what a Plan's `compile` means on these machines: "blocks" or "none".

    On cores auto is none. On GPUs it is what makes forward and backward of a micro-batch quicker; if the
    workload does not tell the two apart, as that of a traced model, it is none.

    Args:
        workload: The work of the model that is trained, from `workload_on`.
        cluster: The machines that it runs on.
        plan: The Plan, with its micro-batch settled. If its `compile` is not auto, that is the result.
    """
    return host_costs(workload, cluster)[0].settled(Layout.of(plan)).compile


def _beyond(stretches: Sequence[Stretch]) -> float:
    """Return by how many seconds hosts take longer than devices, over the pieces where they do."""
    return sum(each.number * max(0.0, each.host - each.device) for each in stretches)


def _waiting(cost: BlockCost, share: float) -> BlockCost:
    """Return a cost with this share of the waits that the block would have alone."""
    forward = share * max(0.0, cost.host[0] - cost.forward)
    backward = share * max(0.0, cost.host[1] - cost.backward)
    if not forward and not backward:
        return cost
    compute = cost.compute
    longer = compute._replace(forward=compute.forward + forward, input=compute.input + backward)
    return replace(cost, compute=longer)
