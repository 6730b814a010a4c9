"""Starts ranks on this machine that may be lost, and replaced, while the others train.

A member that fails is lost: the others form a new generation and go on, if enough are left. Meanwhile it is
started again, and joins in a later generation. See `shoal.launch.elastic.elastic_rank`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.elastic.elastic_launcher import Members
from shoal.launch.elastic.elastic_rank import AFTER, MEMBER
from shoal.launch.local.fork_server import Nursery
from shoal.launch.local.launcher import rank_environments, store_on_loopback
from shoal.launch.local.local_ranks import LocalRanks
from shoal.launch.local.signals import StopRequest, signals_noted
from shoal.listener import loopback
from shoal.scratch import scratch_folder

_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""So that NCCL's watchdog ends a process, and never a collective alone: what the device was given to do after
it would use what the collective left."""


@dataclass(frozen=True, slots=True)
class Elasticity:
    """How many members a training may lose.

    Attributes:
        least: Number of members with which it goes on.
        restarts: Number of times that lost members are started again, in total.
    """

    least: int
    restarts: int


def launch_elastic(
    command: Sequence[str],
    most: int,
    elasticity: Elasticity,
    environment: Mapping[str, str],
    *,
    timeout: float,
    logs: Path | None = None,
    events: Path | None = None,
    nursery: Nursery | None = None,
    grace: float | None = None,
) -> int:
    """Run a command as each of some members, of which some may be lost; otherwise like `launch`.

    SIGTERM to a member's process alone asks that member to leave: the others go on without it.

    Args:
        command: A program and its arguments, as for `launch`.
        most: Number of members to start.
        elasticity: How many may be lost.
        environment: What the members get beside this process's environment.
        timeout: Seconds that members wait for another in a collective; see `Members`.
        logs: Directory in which each member's output is kept, once the directory exists.
        events: JSON lines that tell which members were lost, left and came, and when; None for none. It is
            written once its folder exists.
        nursery: The Nursery that members are forked from; None to start a program for each.
        grace: Seconds from a signal until the system ends this process; None if it does not.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` after a signal if the state is saved.

    Raises:
        WorkerError: Too few members are left, or one failed because of wrong input; the error is that of the
            member that failed last, or first in the same moment.
    """
    with (
        scratch_folder() as folder,
        store_on_loopback() as store,
        signals_noted() as signals,
    ):
        environments = member_environments(str(folder), range(most), most, store.port, environment, nursery)
        with LocalRanks(command, environments, logs, nursery) as processes:
            least, restarts = elasticity.least, elasticity.restarts
            members = Members(processes, store, folder, least, restarts, events, timeout)
            return members.run(StopRequest(signals, grace))


def member_environments(
    folder: str,
    numbers: range,
    members: int,
    port: int,
    environment: Mapping[str, str],
    nursery: Nursery | None,
) -> dict[int, dict[str, str]]:
    """Return the environment of each member of a host; see `rank_environments`. The store is on loopback."""
    given = {**os.environ, AFTER: "-1", **environment}
    made = rank_environments(folder, numbers, members, (loopback(), port), given, nursery)
    return {number: {**each, **_NCCL, MEMBER: str(number)} for number, each in made.items()}
