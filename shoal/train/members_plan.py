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
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

from torch import nn

from shoal.cluster import Cluster
from shoal.cost import Costs, Memories
from shoal.errors import PlanError, UserError
from shoal.parallel import require_layout
from shoal.plan import EQUAL, Plan, SettledPlan, Shares, divisors
from shoal.simulate import played_seconds
from shoal.train.automatic import choose_plan, this_host, workload_of_config
from shoal.train.classes import require_data_parallel
from shoal.train.config import TrainConfig
from shoal.train.free_memory import within_memory
from shoal.train.job import Job
from shoal.train.located import build_model, shape_of
from shoal.workload import Workload

__all__ = ["plan_for"]

_GAIN = 0.05  # share of a step by which another layout must be quicker
_TRIED = 8  # numbers of ranks for which the planner is asked, until it finds a Plan
_SIZES = 3  # Plans that are tried for each number of stages: other micro-batches, or fewer replicas
_START = 0.125  # what each micro-batch takes beside its samples, as a share of the job's micro-batch
_MARGIN = 0.1  # share of a device's memory that another layout must leave free


def plan_for(job: Job, members: int) -> Plan:
    """Return the Plan with which so many members train. It may have fewer ranks. The batch stays.

    Args:
        job: The job of all members, with its Plan.
        members: Number of members that are there.

    Raises:
        PlanError: No Plan is legal for so few ranks.
    """
    plan = job.plan
    if members >= plan.ranks:
        return plan
    kept = _with_stages(job, plan.pp, members)
    if not kept:
        return _of_planner(job, members, 0)
    if kept[0].ranks < members and plan.dp < plan.ranks:
        with contextlib.suppress(UserError):  # the machines, or the model's work, are not known
            return _quickest(job, members, kept)
    return kept[0]


def _with_stages(job: Job, pp: int, members: int) -> list[SettledPlan]:
    """Return Plans with `pp` stages for up to so many members; those whose ranks have least to do first."""
    plan, batch, model = job.plan, job.config.batch, cache(partial(shape_of, job.config))
    stages: dict[str, Any] = {} if pp == plan.pp else {"pp": pp, "virtual": None, "split": "cost"}
    if pp == 1 < plan.pp:
        stages |= {"schedule": "1f1b", "activations": None}
    most = batch // plan.dp if plan.microbatch is None else plan.microbatch

    def work(found: SettledPlan) -> float:
        """Return samples of a rank, with those for which it waits, times its share of the layers."""
        passes = found.microbatches_of(batch) + pp - 1
        return passes * (found.microbatch + _START * most) / pp

    found: list[SettledPlan] = []
    for dp in range(members // (plan.ranks // plan.dp // plan.pp) // pp, 0, -1):
        if found and work(min(found, key=work)) <= math.ceil(batch / dp) / pp:
            break  # fewer replicas have more to do
        for microbatch in divisors(batch):
            total = batch // microbatch
            if microbatch > most or total < dp:
                continue
            numbers = [total // dp + (index < total % dp) for index in range(dp)]
            shares = str(Shares.of(numbers)) if total % dp else EQUAL
            changed = _with_copies(plan, batch, **stages, dp=dp, microbatch=microbatch, shares=shares)
            found += [each for each in changed if not each.is_padded or _suits(job.config, model(), each)]
    return sorted(found, key=work)


def _suits(config: TrainConfig, model: nn.Module, plan: Plan) -> bool:
    """Return whether a Plan can train the configuration's model."""
    try:
        require_data_parallel(config, plan)
        require_layout(model, plan, config.sequence)
    except UserError:
        return False
    return True


def _with_copies(plan: Plan, batch: int, *, dp: int, **changes: Any) -> list[SettledPlan]:
    """Return the changed Plan with as many copies of a sharded state as keep its shards; none if illegal."""
    for replicate in reversed(divisors(dp)):
        if replicate > max(1, dp * plan.replicate // plan.dp):
            continue  # it would have fewer shards, and so larger ones
        with contextlib.suppress(PlanError):
            return [SettledPlan.of(plan.replace(**changes, dp=dp, replicate=replicate), batch)]
    return []


def _of_planner(job: Job, members: int, more_than: int) -> Plan:
    """Return the planner's Plan for as many members as one is legal for."""
    tried = range(members, max(more_than, members - _TRIED), -1)
    for ranks in tried:
        try:
            cluster = None if job.cluster is None else job.cluster.with_devices(ranks)
            return choose_plan(job.config, ranks, cluster, job.plan.precision).plan
        except UserError:
            if ranks == tried[-1]:
                raise
    raise AssertionError("there are no members")


def _quickest(job: Job, members: int, kept: Sequence[SettledPlan]) -> Plan:
    """Return the first of the kept Plans, or one that is predicted to be quicker by `_GAIN`.

    Raises:
        UserError: The machines are not known, or the model's work is not.
    """
    config = job.config
    machines = this_host(config, members) if job.cluster is None else job.cluster
    machines = within_memory(config, machines, members)
    model = build_model(config, "meta" if ":" not in config.model else "cpu")
    workload = workload_of_config(config, model, machines)
    best: Plan = kept[0]
    least = (1 - _GAIN) * _seconds(workload, machines, best, config.batch, math.inf)
    for plan in (*kept[1:_SIZES], *_others(job, members, best.ranks)):
        if not _suits(config, model, plan):
            continue
        with contextlib.suppress(UserError):  # the machines do not suit it
            seconds = _seconds(workload, machines, plan, config.batch, 1 - _MARGIN)
            if seconds < least:
                least, best = seconds, plan
    return best


def _others(job: Job, members: int, more_than: int) -> Iterator[Plan]:
    """Yield Plans with other numbers of stages, and the planner's, on more ranks than `more_than`."""
    plan = job.plan
    most = members // (plan.ranks // plan.dp // plan.pp) if plan.pp > 1 else 0
    for pp in range(most, 0, -1):
        if pp != plan.pp:
            staged = _with_stages(job, pp, members)
            yield from [each for each in staged if each.ranks > more_than][:_SIZES]
    with contextlib.suppress(UserError):
        yield _of_planner(job, members, more_than)


def _seconds(workload: Workload, machines: Cluster, plan: Plan, batch: int, room: float) -> float:
    """Return the predicted seconds of a step.

    Raises:
        UserError: The Plan does not suit the machines, or needs more than `room`, a share of their memory.
    """
    here, settled = machines.with_devices(plan.ranks), SettledPlan.of(plan, batch)
    needed = Memories(workload, here).fullest(settled, batch).required
    if needed > room * here.device.memory:
        raise PlanError(
            f"{plan} needs {needed:.3g} bytes on a device, of {here.device.memory:.3g}",
            possible="a Plan that leaves a tenth free",
            change="choose another Plan",
        )
    return played_seconds(Costs(workload, here), settled, batch)
