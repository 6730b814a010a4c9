"""Trains as a member of a training whose ranks may be lost and come; see `shoal.launch.membership`."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import traceback

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _world

from shoal.errors import CommunicationError, PlanError
from shoal.launch import EXIT_STOPPED, Generation, Membership, StopSignal, World, meet
from shoal.plan import Plan, SettledPlan
from shoal.run import Run
from shoal.train.automatic import choose_plan
from shoal.train.execute import execute_as_member
from shoal.train.execution import Regroup
from shoal.train.job import Job, Resume

__all__ = ["abort", "execute_elastic", "job_for"]

_PATIENCE = 600.0  # seconds for the launcher to make another generation, for which it may wait for hosts


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
    membership.ready()
    failure: BaseException | None = None
    try:
        while (generation := membership.next(_PATIENCE)) is not None:
            ended = _execute_in(generation, job, world, stop, membership, store)
            if isinstance(ended, int):
                return ended
            failure = ended
            if stop.received is not None and failure is None:
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
    own = job_for(job, len(generation.members), begins=generation.number == 0)
    rank = generation.members.index(membership.member)
    if rank >= own.plan.ranks:
        return None  # a spare one: the Plan has no use for it
    place = World(rank=rank, ranks=own.plan.ranks, local_rank=world.local_rank, master=world.master)
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
    _leave(failure)
    return failure


def job_for(job: Job, members: int, *, begins: bool = False) -> Job:
    """Return a job for another number of members: with fewer replicas, or another Plan if that cannot be.

    The batch stays. The run goes on from its newest state.

    Args:
        job: The job of all members.
        members: Number of members that are there.
        begins: Whether no state can be there yet, beside that of the job.

    Raises:
        PlanError: No Plan is legal for so few ranks.
    """
    if not begins and (job.path / "run.json").is_file():
        job = dataclasses.replace(job, resume=Resume(Run(job.path), None))
    plan = _with_fewer_replicas(job, members)
    if plan is None:
        plan = choose_plan(job.config, members, job.cluster).plan
    return dataclasses.replace(job, plan=plan)


def _with_fewer_replicas(job: Job, members: int) -> Plan | None:
    """Return the job's Plan with as many replicas of the model as there are members for; None if none is."""
    plan = job.plan
    of_model = plan.ranks // plan.dp
    for dp in range(min(plan.dp, members // of_model), 0, -1):
        for replicate in sorted({plan.replicate, dp * plan.replicate // plan.dp, 1}, reverse=True):
            if replicate < 1 or dp % replicate:
                continue
            try:
                return SettledPlan.of(plan.replace(dp=dp, replicate=replicate), job.config.batch)
            except PlanError:
                continue
    return None


def _leave(failure: BaseException | None) -> None:
    """Leave the process groups, and free what the generation held."""
    if failure is not None:
        _forget_frames(failure)
        abort()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another libc keeps what it will
        ctypes.CDLL(None).malloc_trim(0)


def _forget_frames(failure: BaseException) -> None:
    """Let the frames of a failure, and of those that led to it, forget what they hold: tensors."""
    waiting, seen = [failure], set[int]()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        waiting += [each for each in (error.__cause__, error.__context__) if each is not None]


def abort() -> None:
    """End all communication of this process, from any thread."""
    for group in list(_world.pg_map):
        with contextlib.suppress(RuntimeError):  # it has ended just now
            group.abort()
