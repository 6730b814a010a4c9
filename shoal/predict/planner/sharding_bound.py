"""Lower bounds on a step under each sharding of the state, before a Plan is cut and timed.

    step >= (1 + late) max(passes, m micro-batch) + max(0, sums + update - waits)

`passes` are seconds without any communication of gradients and weights, and `stage_bound.py` bounds a
micro-batch with them. Then all ranks wait for the slowest, `late` of these seconds. After that each rank adds
up gradients and updates the parameters that it owns. Some rank has the mean over the ranks along the
pipeline, or more: less a parameter of each kind, because divided numbers are rounded down. These passes hide
what the device waited for the host before, where programs do not synchronise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache

from shoal.predict.cost import Costs, Layout
from shoal.predict.cost.time import straggler_share, update_outside
from shoal.predict.planner.memory_bound import LeastMemory, Share
from shoal.predict.planner.micro_batch_time import Work
from shoal.predict.planner.space import Degrees, Space
from shoal.predict.planner.stage_bound import (
    Communication,
    LeastDataParallel,
    Numbers,
    StageCommunication,
    Stages,
    least_of_stages,
)
from shoal.spec.plan import FULLY_SHARDED, Plan, SettledPlan
from shoal.spec.workload import Parameters

_MANY = Parameters(divided=10**9)


class LeastStep:
    """What the bounds for all degrees share.

    Args:
        space: The legal Plans.
        costs: Costs of steps.
        least_memory: Lower bounds on memory.

    Attributes:
        space, least_memory: As given.
        data_parallel: Lower bounds on the time of data-parallel communication.
        late: One more than the share of the passes that ranks wait for the slowest.
        parameters: Parameters of the whole model.
    """

    def __init__(self, space: Space, costs: Costs, least_memory: LeastMemory) -> None:
        self.space, self.least_memory = space, least_memory
        self._alone = SettledPlan(microbatch=1, precision=space.precision)
        self.data_parallel = LeastDataParallel(space.workload, space.cluster, self._alone.element_bytes)
        self._kinds = costs.all_at()
        self.late = 1 + straggler_share(Plan(dp=space.cluster.devices), space.cluster)
        self.parameters = sum([block.parameters for block in space.workload.pieces], Parameters())
        self._begin = min(kind.update(self._alone, Parameters()) for kind in self._kinds)
        self._update = min(kind.update(self._alone, _MANY) for kind in self._kinds) - self._begin
        self._offloaded = 0.0  # least seconds of a parameter's update outside of the device
        if space.tiers.moved:
            plan = self._alone.replace(shard=FULLY_SHARDED.name, offload=space.offload)
            outside = [update_outside(kind.cluster, plan, _MANY.total, 0.0) for kind in self._kinds]
            self._offloaded = min(outside) / _MANY.total
            if space.tiers.optimizer != "device" and not space.cluster.cores:
                self._begin = self._update = 0.0  # the host makes the update
        self._sums_of = lru_cache(maxsize=1 << 10)(self._sums)
        self._waits = cache(self._waits_of)

    def update(self, owned: float) -> float:
        """Return the least seconds to update as many parameters as a rank owns."""
        return max(self._begin + self._update * owned / _MANY.total, self._offloaded * owned)

    def sums(self, held: float, count: int) -> float:
        """Return the least seconds to add up the gradients of `count` micro-batches of so many parameters."""
        return self._sums_of(count) * held / _MANY.total

    def waits(self, layout: Layout) -> float:
        """Return the seconds in which a device with all blocks waits for the host, and other passes hide."""
        return 0.0 if self.space.workload.synchronises else self._waits(layout)

    def _waits_of(self, layout: Layout) -> float:
        return max(kind.hosts.waits(layout) for kind in self._kinds)

    def _sums(self, count: int) -> float:
        return min(kind.gradient_sums(self._alone, _MANY, count) for kind in self._kinds)


class Shardings:
    """The shardings of Plans with equal degrees, by number, with bounds on memory and time.

    Args:
        common: What the bounds for all degrees share.
        degrees: The parallel degrees.

    Attributes:
        every: The shardings.
        states: Bytes of a parameter's states on a rank, by sharding.
    """

    def __init__(self, common: LeastStep, degrees: Degrees) -> None:
        self._common = common
        self._degrees = degrees
        space, states = common.space, common.least_memory.states
        self.every = space.shardings(degrees)
        self.states = [states(degrees, each, space.precision) for each in self.every]
        self._communicates = [each.kind.communicates_each_micro_batch for each in self.every]
        self._communication: list[Communication | None] = [None] * len(self.every)
        self._after: dict[int, list[float]] = {}
        self._of_stages: dict[tuple[int, Numbers], StageCommunication] = {}

    def fitting(self, shares: Sequence[Share], room: float) -> Sequence[int]:
        """Return the shardings under which ranks with these shares may fit."""
        fitting: Sequence[int] = range(len(self.every))
        states = self.states
        for share in shares:
            dense, experts, *_ = share
            left = self._common.least_memory.for_states(share, room)
            if experts:
                fitting = [
                    each for each in fitting if dense * states[each][0] + experts * states[each][1] <= left
                ]
            else:
                fitting = [each for each in fitting if dense * states[each][0] <= left]
        return fitting

    def least(
        self, shardings: Sequence[int], count: int, passes: float, work: Work, layout: Layout | None
    ) -> float:
        """Return a lower bound on the seconds of a step, over these shardings.

        Args:
            shardings: Numbers of shardings.
            count: Micro-batches of a step.
            passes: A lower bound on the seconds of forwards and backwards, with any sharding.
            work: Times of blocks.
            layout: The layout of blocks, which says how long the device waits for the host; None for any.
        """
        (forward, backward), ranks = self._of_rank(work)
        after, late = self._after_passes(count), self._common.late
        waits = math.inf if layout is None else count * self._common.waits(layout) / self._degrees.pp
        least, whole = math.inf, late * passes
        for number in shardings:
            left = after[number] - waits
            found = whole + left if left > 0 else whole
            if found < least and self._communicates[number]:
                beside = self._communication[number] or self._communicated(number)
                first = beside.forward if beside.forward > forward else forward
                second = backward + beside.copies
                if beside.backward > second:
                    second = beside.backward
                each = count * (first + second) / ranks
                if each > passes:
                    found = late * each + left if left > 0 else late * each
            if found < least:
                least = found
                if least == whole:  # the least that any sharding can give
                    break
        return least

    def after_passes(self, number: int, split: tuple[int, ...]) -> float:
        """Return the least seconds in which a stage's gradients are reduced after all passes.

        Args:
            number: Number of the sharding.
            split: Number of layers of each stage.
        """
        return self._common.data_parallel.after_passes(self._degrees, self.every[number], split)

    def of_stages(self, number: int, stages: Stages, count: int) -> float:
        """Return a lower bound on the seconds of passes, with all communication of gradients and weights.

        Args:
            number: Number of the sharding.
            stages: The stages of a cut model.
            count: Micro-batches of a step.
        """
        sharding, of_stage = self.every[number], self._common.data_parallel.of_stage
        each = []
        for numbers in stages.numbers:
            key = number, numbers
            found = self._of_stages.get(key)
            if found is None:
                found = self._of_stages[key] = of_stage(self._degrees, sharding, numbers)
            each.append(found)
        return least_of_stages(stages, count, sharding, each)

    def _of_rank(self, work: Work) -> tuple[tuple[float, float], int]:
        """Return the forward and backward of the bounded ranks, and their number."""
        pp = self._degrees.pp
        layers = self._common.data_parallel.layers_of_rank(pp)
        if layers:
            return (layers * work.least.forward, layers * work.least.backward), 1
        return work.blocks, pp

    def _communicated(self, number: int) -> Communication:
        found = self._common.data_parallel.of_micro_batch(self._degrees, self.every[number])
        self._communication[number] = found
        return found

    def _after_passes(self, count: int) -> list[float]:
        """Return, by sharding, the least seconds of passes over parameters, if the device never waited."""
        found = self._after.get(count)
        if found is None:
            common, (_, tp, pp, _, ep) = self._common, self._degrees
            held = common.parameters
            dense = (held.whole + held.divided / tp) / pp - 1
            experts = max(0.0, held.experts / ep / pp - 1)
            found = self._after[count] = []
            for kind, replicate in self.every:
                shards = self._degrees.dp // replicate * self._degrees.cp if kind.cuts_optimizer else 1
                of_experts = experts / (shards / ep if kind.cuts_optimizer else 1)
                seconds = common.update(dense / shards + of_experts)
                if not (kind.cuts_gradients and shards > 1):
                    seconds += common.sums(dense + experts, count)
                found.append(seconds)
        return found
