"""Trains as a member of a training whose ranks may be lost and come; see `shoal.launch.elastic.elastic_rank`.

The Plan of the members that are left of a training.

The layout of the model stays, with as many replicas as there are members for. A batch that does not divide
over them is cut by `shares`. If replicas have several ranks and one of them is broken, its other ranks would
have to wait until the lost ones are replaced. So two more Plans are looked for: the planner's, and the same
layout with another number of pipeline stages, so that the stages of a lost rank go to all others. One of them
is taken if it is predicted to be quicker by `_GAIN`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import math
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _world

from shoal.errors import CommunicationError, PlanError, UserError
from shoal.launch.elastic import Generation, Membership
from shoal.launch.local import StopSignal, World, meet
from shoal.launch.submit import EXIT_STOPPED
from shoal.models import mixtures_of
from shoal.parallel import require_layout
from shoal.predict.cost import Costs, Memories
from shoal.predict.simulate import played_seconds
from shoal.spec.plan import EQUAL, Plan, SettledPlan, Shares, divisors
from shoal.spec.run import Run
from shoal.spec.run.writer import name_group
from shoal.train.absolute_paths import shape_of
from shoal.train.auto_plan import choose_plan, machines_and_work, settled_stages, within_memory
from shoal.train.classes import require_data_parallel
from shoal.train.config import TrainConfig
from shoal.train.entry import execute_as_member
from shoal.train.job import Job, Resume
from shoal.train.rank_job import Regroup

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


_PATIENCE = 600.0  # seconds for the launcher to make another generation, for which it may wait for hosts
_PAUSE = 0.02  # seconds between two looks for the Plan of a generation
_NO_PLAN = "none"
_TRAINING = "training"


def execute_elastic(job: Job, world: World, membership: Membership, stop: StopSignal) -> int:
    """Train until the end, in one generation after another.

    Args:
        job: What all members were given.
        world: The members when the training began.
        membership: This process's side of the members.
        stop: Says whether this process was asked to stop, or to leave.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` if the run, or this member, was asked to stop.
    """
    store = meet(world, timeout=job.config.timeout)
    if membership.generation.number >= 0:  # if it ended by a signal, others would lose a group
        stop.heed()
    training = store.compare_set(_TRAINING, "", uuid.uuid4().hex).decode()
    membership.ready()
    failure: BaseException | None = None
    try:
        while (generation := membership.next(_PATIENCE, lambda: stop.received is not None)) is not None:
            name_group(training, generation.number)
            ended = _execute_in(generation, job, world, stop, membership, store)
            if isinstance(ended, int):
                with contextlib.suppress(RuntimeError):  # all is saved, whatever becomes of the others
                    _leave(None, membership)
                return ended
            failure = ended
            if stop.received is not None and failure is None:
                return EXIT_STOPPED
        if stop.received is not None and failure is None:  # it has never trained, so nothing is to save
            return EXIT_STOPPED
    finally:
        membership.close()
    raise failure or CommunicationError("the launcher made no other group of ranks")


def _execute_in(
    generation: Generation,
    job: Job,
    world: World,
    stop: StopSignal,
    membership: Membership,
    store: Store,
) -> int | BaseException | None:
    """Train in one generation; return the exit code, the error that ended it, or None if it was to end."""
    rank, plan = generation.members.index(membership.member), _plan_in(generation, job, membership, store)
    if plan is None:
        return None
    if rank >= plan.ranks:  # the Plan has no use for this one
        stop.heed()
        membership.stand_by(lambda: stop.received is not None)
        return None
    own = dataclasses.replace(job, plan=plan)
    if generation.number > 0 and (job.path / "run.json").is_file():
        own = dataclasses.replace(own, resume=Resume(Run(job.path), None))
    place = World(rank=rank, ranks=plan.ranks, local_rank=world.local_rank, master=world.master)
    failure: BaseException | None = None
    try:
        met = PrefixStore(f"ranks of {generation.number}", store)
        return execute_as_member(own, place, stop, membership, met)
    except Regroup:
        pass
    except Exception as error:
        if not (isinstance(error, CommunicationError) or membership.is_due):
            raise
        failure = error
    if failure is not None:
        membership.tell_broken()
        if membership.starts_again:  # and the launcher knows of no other rank that is lost
            raise failure
    _leave(failure, membership)
    return failure


def _plan_in(generation: Generation, job: Job, membership: Membership, store: Store) -> Plan | None:
    """Return the Plan of a generation, which its first member chooses, as predictions differ between hosts.

    None on all members if one of them is due in a newer generation before, or if there is no Plan.

    Raises:
        UserError: There is no Plan; on the first member.
    """
    members, key = generation.members, f"plan of {generation.number}"
    if len(members) >= job.plan.ranks:
        return job.plan
    told = ""
    if members[0] == membership.member:
        try:
            told = str(plan_for(job, len(members)))
        except UserError:
            store.set(key, _NO_PLAN)
            raise
        told = store.compare_set(key, "", told).decode()
    while not told:
        if membership.is_due:
            told = store.compare_set(key, "", _NO_PLAN).decode()
        elif store.check([key]):
            told = store.get(key).decode()
        else:
            time.sleep(_PAUSE)
    return None if told == _NO_PLAN else Plan.parse(told)


def _leave(failure: BaseException | None, membership: Membership) -> None:
    """Leave the process groups, and free what the generation held."""
    if failure is not None:
        _forget_frames(failure)
        _forget_backward()
        abort()
    if dist.is_initialized():
        dist.destroy_process_group()
    membership.leave()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the next Plan's tensors have other sizes
    with contextlib.suppress(OSError, AttributeError):  # another libc keeps what it will
        ctypes.CDLL(None).malloc_trim(0)


def _forget_frames(failure: BaseException) -> None:
    """Let a failure, and those that led to it, forget their frames, which hold tensors; keep their text."""
    waiting, seen = [failure], set[int]()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        if error.__traceback__ is not None:  # clear_frames would leave closures, which hold the layout
            error.add_note("".join(traceback.format_tb(error.__traceback__)))
            error.__traceback__ = None
        waiting += [each for each in (error.__cause__, error.__context__) if each is not None]


def _forget_backward() -> None:
    """Empty this thread's queue of autograd: an error leaves nodes there, and with them tensors.

    The next backward takes them out: this one.
    """
    torch.ones((), requires_grad=True).backward()


def abort() -> None:
    """End all communication of this process, from any thread.

    Never that of a group that reports no failures: its kernels would end, and what the device was given to do
    after them, such as the optimizer's step, would use what a broken off collective left.
    """
    for group in list(_world.pg_map):
        with contextlib.suppress(RuntimeError):  # it has ended just now
            group.abort()


def group_failure() -> str:
    """Return why a group of this process has failed, as only NCCL's watchdog knows; "" if none has."""
    for group in list(_world.pg_map):
        for device in group._device_types:
            with contextlib.suppress(RuntimeError):  # another backend, or a group that has ended just now
                look = getattr(group._get_backend(device), "get_error", None)
                if look is not None and (error := look().name) != "SUCCESS":
                    return str(error)
    return ""
