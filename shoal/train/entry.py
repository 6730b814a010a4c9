"""Execute a job as this process: as a rank, as a rank of a worker, as a member, or as a parameter server."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shoal.checkpoint import Coordinator, all_ranks
from shoal.errors import CommunicationError
from shoal.launch.elastic import Membership
from shoal.launch.local import StopSignal, World, choose_device, join
from shoal.parallel import own_device
from shoal.spec.run.writer import name_group
from shoal.train.job import Job, nothing_left_to_do
from shoal.train.rank_job import Execution, Regroup
from shoal.train.server_roles import Role, joined_role, serve, take_role
from shoal.train.snapshot import compute_deterministically

_LOST = 20.0  # seconds in which the launcher notes that a rank is lost, if that ended the communication
_OWN = 0.5  # and if something else went wrong, which is most likely this rank's own


def execute(choose: Callable[[], Job], world: World, stop: StopSignal) -> int:
    """Train, as one rank of `world`.

    Args:
        choose: Returns the job. Only rank 0's result is used; the other ranks receive it.
        world: The ranks.
        stop: Says whether this process was asked to stop.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` if a signal stopped the run and its state is saved.
    """
    first_choice = choose()
    if first_choice.is_served:
        role = joined_role(world, first_choice) if first_choice.joins else take_role(world, first_choice)
        return serve(role, stop) if role.server is not None else _execute_as_worker(role, stop)
    with _begun(first_choice, world) as (device, coordinator):
        job: Job = coordinator.all_gather_object(first_choice)[0]
        done: str = coordinator.all_gather_object(nothing_left_to_do(job) if world.rank == 0 else "")[0]
        if done and world.rank == 0:
            print(done, file=sys.stderr)
        code = 0 if done else Execution(job, world, device, coordinator).run(stop)
        _leave()
        return code


def execute_as_member(job: Job, world: World, stop: StopSignal, membership: Membership, store: Store) -> int:
    """Train as a rank of one generation of members; return the exit code.

    Args:
        job: The job, whose Plan is for these ranks.
        world: The ranks.
        stop: Says whether this process was asked to stop, or to leave.
        membership: Says whether the members change.
        store: The store in which these ranks meet.

    Raises:
        Regroup: The members change, or this one was asked to leave; the state is saved.
    """
    with _begun(job, world, store, membership.begin) as (device, coordinator):
        if done := coordinator.all_gather_object(nothing_left_to_do(job) if world.rank == 0 else "")[0]:
            print(done, file=sys.stderr)
            return 0
        execution = Execution(job, world, device, coordinator, membership=membership)
        try:
            return execution.run(stop)
        except Regroup:
            raise
        except Exception as error:
            is_of_another = isinstance(error, (CommunicationError, dist.DistError))
            if is_of_another:
                membership.tell_broken()  # now, since the next generation decides who keeps a replica
            seconds = _LOST if is_of_another else _OWN
            if membership.starts_again:  # the device may have computed with what a lost collective left
                membership.wait_for_end(seconds)
            else:
                execution.save_replica(seconds)
            raise


def _execute_as_worker(role: Role, stop: StopSignal) -> int:
    """Train as a rank of one worker of several that servers join; return the exit code."""
    if role.done:
        if role.is_first:
            print(role.done, file=sys.stderr)
        return 0
    name_group(hashlib.sha256(role.token.encode()).hexdigest(), role.first_rank)
    with _begun(role.job, role.world, role.ranks_meet) as (device, coordinator):
        code = Execution(role.job, role.world, device, coordinator, role).run(stop)
        _leave()
        return code


def _leave() -> None:
    """Leave the other ranks at the end of a training; after an error, one may be gone."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _begun(
    job: Job,
    world: World,
    store: Store | None = None,
    beforehand: Callable[[str], object] = lambda backend: None,
) -> Iterator[tuple[torch.device, Coordinator]]:
    """Enter the computation that a job asks for, with this rank's device, and with the ranks that it joined.

    Args:
        job: The job.
        world: The ranks.
        store: The store in which these ranks meet, if there is one.
        beforehand: Called with the backend, before the ranks connect.
    """
    device = own_device(choose_device(job.config.device, world.local_rank))
    with compute_deterministically() if job.config.deterministic else nullcontext():
        join(world, device, timeout=job.config.timeout, store=store, beforehand=beforehand)
        yield device, all_ranks()
