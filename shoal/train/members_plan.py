"""The Plan of the members that are left of a training.

The layout of the model stays, with as many replicas as there are members for. A batch that does not divide
over them is cut by `shares`. If replicas have several ranks and one of them is broken, its other ranks would
have to wait until the lost ones are replaced. So two more Plans are looked for: the planner's, and the same
layout with another number of pipeline stages, so that the stages of a lost rank go to all others. One of them
is taken if it is predicted to be quicker by `_GAIN`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from shoal.cost import Costs, Memories
from shoal.errors import PlanError, UserError
from shoal.models import mixtures_of
from shoal.parallel import require_layout
from shoal.plan import EQUAL, Plan, SettledPlan, Shares, divisors
from shoal.simulate import played_seconds
from shoal.train.automatic import choose_plan, machines_and_work, settled_stages
from shoal.train.classes import require_data_parallel
from shoal.train.config import TrainConfig
from shoal.train.free_memory import within_memory
from shoal.train.job import Job
from shoal.train.located import shape_of

# Judged, not measured.
_GAIN = 0.05  # share of a step by which another layout must be quicker
_MARGIN = 0.1  # share of a device's memory that another layout must leave free
_START = 0.125  # what each micro-batch takes beside its samples, as a share of the job's micro-batch
_TRIED = 8  # numbers of ranks for which the planner is asked, until it finds a Plan
_SIZES = 3  # Plans that are tried for each number of stages: other micro-batches, or fewer replicas


def plan_for(job: Job, members: int) -> Plan:
    """Return the Plan with which so many members train. It may have fewer ranks. The batch stays.

    Args:
        job: The job of all members, with its Plan.
        members: Number of members that are there.

    Raises:
        UserError: No Plan is legal for so few ranks, or none is known to be.
    """
    plan = _layout_for(job, members)
    if job.cluster is not None:
        with contextlib.suppress(Exception):  # as below; it is split when it is laid over ranks
            cluster = job.cluster.with_devices(plan.ranks)
            return settled_stages(job.config, SettledPlan.of(plan, job.config.batch), cluster)
    return plan


def _layout_for(job: Job, members: int) -> Plan:
    """Return the Plan of `plan_for`, whose stages may not be split yet."""
    plan = job.plan
    if members >= plan.ranks:
        return plan
    may_pad = cache(partial(_may_pad, job.config))
    kept = _with_stages(job, plan.pp, members, may_pad)
    if kept and (kept[0].ranks == members or plan.dp == plan.ranks):
        return kept[0]
    for pp in range(plan.pp - 1, 0, -1):
        kept = kept or _with_stages(job, pp, members, may_pad)
    if not kept:
        return _of_planner(job, members, 0)
    with contextlib.suppress(Exception):  # a prediction that fails must not end a training that could go on
        return _quickest(job, members, kept, may_pad)
    return kept[0]


def _may_pad(config: TrainConfig) -> bool:
    """Return whether ranks may be padded: with routers, not under every Plan."""
    return not mixtures_of(shape_of(config))


def _with_stages(job: Job, pp: int, members: int, may_pad: Callable[[], bool]) -> list[SettledPlan]:
    """Return Plans with `pp` stages for up to so many members; those whose ranks have least to do first."""
    plan, batch = job.plan, job.config.batch
    stages: dict[str, Any] = {} if pp == plan.pp else {"pp": pp, "virtual": None, "split": "cost"}
    if pp == 1 < plan.pp:
        stages |= {"schedule": "1f1b", "activations": None}
    most = batch // plan.dp if plan.microbatch is None else plan.microbatch

    def work(found: SettledPlan) -> float:
        """Return the work of a rank: samples, and those for which it waits, divided by the stages."""
        passes = found.microbatches_of(batch) + pp - 1
        return passes * (found.microbatch + _START * most) / pp

    found: list[SettledPlan] = []
    for dp in range(members // (plan.ranks // plan.dp // plan.pp) // pp, 0, -1):
        if found and min(map(work, found)) <= math.ceil(batch / dp) / pp:
            break  # fewer replicas have more to do
        for microbatch in divisors(batch):
            total = batch // microbatch
            if microbatch > most or total < dp:
                continue
            shares = str(Shares.even(total, dp)) if total % dp else EQUAL
            changed = _with_copies(plan, batch, **stages, dp=dp, microbatch=microbatch, shares=shares)
            found += [each for each in changed if not each.is_padded or may_pad()]
    return sorted(found, key=work)


def _with_copies(plan: Plan, batch: int, *, dp: int, **changes: Any) -> list[SettledPlan]:
    """Return the changed Plan with as many copies of a sharded state as keep its shards; none if illegal."""
    for replicate in reversed(divisors(dp)):
        if replicate > max(1, dp * plan.replicate // plan.dp):
            continue  # it would have fewer shards, and so larger ones
        with contextlib.suppress(PlanError):
            return [SettledPlan.of(plan.replace(**changes, dp=dp, replicate=replicate), batch)]
    return []


def _of_planner(job: Job, members: int, more_than: int) -> Plan:
    """Return the planner's Plan for as many members as one is legal for.

    Raises:
        UserError: There is none, or the machines or the model's work are not known.
    """
    plan = job.plan
    tried = range(members, max(more_than, members - _TRIED), -1)
    for ranks in tried:
        try:
            cluster = None if job.cluster is None else job.cluster.with_devices(ranks)
            found = choose_plan(job.config, ranks, cluster, plan.precision).plan
            return found.replace(reduce=plan.reduce, compile=plan.compile)
        except UserError:
            if ranks == tried[-1]:
                raise
    raise AssertionError("it is only called for more than `more_than` members")


def _quickest(job: Job, members: int, kept: Sequence[SettledPlan], may_pad: Callable[[], bool]) -> Plan:
    """Return the first of the kept Plans, or one that is predicted to be quicker by `_GAIN`.

    Raises:
        UserError: The machines are not known, or the model's work is not, or no Plan is legal.
    """
    config = job.config
    machines, model, workload = machines_and_work(config, members, job.cluster)
    machines = within_memory(config, machines, members)

    def suits(plan: Plan) -> bool:
        try:
            require_data_parallel(config, plan)
            require_layout(model, plan, config.sequence)
        except UserError:
            return False
        return True

    def seconds(plan: Plan, room: float) -> float:
        """Return the predicted seconds of a step; infinite if it needs more than this share of the memory."""
        here, settled = machines.with_devices(plan.ranks), SettledPlan.of(plan, config.batch)
        needed = Memories(workload, here).fullest(settled, config.batch).required
        if needed > room * here.device.memory:
            return math.inf
        return played_seconds(Costs(workload, here), settled, config.batch)

    kept = [plan for plan in kept if plan.pp == job.plan.pp or suits(plan)]
    if not kept:
        return _of_planner(job, members, 0)
    best: Plan = kept[0]
    least = (1 - _GAIN) * seconds(best, math.inf)
    for plan in (*kept[1:_SIZES], *_others(job, members, best.ranks, len(workload.layers), may_pad)):
        with contextlib.suppress(UserError):  # the machines do not suit it
            if suits(plan) and (took := seconds(plan, 1 - _MARGIN)) < least:
                least, best = took, plan
    return best


def _others(
    job: Job, members: int, more_than: int, layers: int, may_pad: Callable[[], bool]
) -> Iterator[Plan]:
    """Yield Plans on more ranks: with other numbers of stages, and the planner's if all average gradients."""
    plan = job.plan
    most = min(layers, members // (plan.ranks // plan.dp // plan.pp)) if plan.pp > 1 else 0
    for pp in range(most, 0, -1):
        if pp != plan.pp:
            staged = _with_stages(job, pp, members, may_pad)
            yield from [each for each in staged if each.ranks > more_than][:_SIZES]
    if plan.exchange in ("bucketed", "naive") and plan.compress == "none" and members > more_than:
        with contextlib.suppress(UserError):
            yield _of_planner(job, members, more_than)
