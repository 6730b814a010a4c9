"""Trains as a member of a training whose ranks may be lost and come; see `shoal.launch.membership`."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import time
import traceback
import uuid

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _world

from shoal.errors import CommunicationError, UserError
from shoal.launch import EXIT_STOPPED, Generation, Membership, StopSignal, World, meet
from shoal.plan import Plan
from shoal.run import Run
from shoal.run.writer import name_group
from shoal.train.execute import execute_as_member
from shoal.train.execution import Regroup
from shoal.train.job import Job, Resume
from shoal.train.members_plan import plan_for

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
