"""Starts ranks on several hosts that may be lost, and replaced, while the others train.

`shoal train --nodes` is started once on each host. The host that has the rendezvous address leads: its
launcher keeps the store of the ranks and makes generations (`elastic_launcher.py`). The others follow: they
start and watch their ranks as they are told, and tell how these end (`follower.py`). Each launcher has one
port, for those who know the run's token (`gate.py`).
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.collectives.options import interface_with
from shoal.errors import CommunicationError, ConfigError, ShoalError
from shoal.launch.elastic.elastic import member_environments
from shoal.launch.elastic.elastic_launcher import WAIT, Members
from shoal.launch.elastic.elastic_rank import PEER
from shoal.launch.elastic.host import Host
from shoal.launch.elastic.linked_hosts import LinkedHosts
from shoal.launch.hosts.gate import TOKEN_FILE, Gate, Pump, read_token, store_service
from shoal.launch.hosts.memory_files import files_service
from shoal.launch.local.fork_server import Nursery
from shoal.launch.local.launcher import store_on_loopback
from shoal.launch.local.local_ranks import LocalRanks
from shoal.launch.local.signals import StopRequest, signals_noted
from shoal.scratch import scratch_folder

_LOOK = 0.05  # seconds between looks for hosts
_LAST_CALL = 30.0  # seconds to wait for more hosts, when enough are there


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the hosts of a run meet, and how many.

    Attributes:
        address: Name or address, and port, of the host that leads.
        least: Number of hosts with which the training goes on.
        most: Number of hosts that train at a time; others stand by.
        ranks: Number of ranks on each host.
        token: The file of the run's token.
        grace: Seconds from a signal until the system ends this process; None if it does not.
        run: The absolute path of the run, if it was given.
        settings: The settings of the training: all of them if this host leads, else those it was given.
    """

    address: tuple[str, int]
    least: int
    most: int
    ranks: int
    token: Path
    grace: float | None = None
    run: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def open_meeting(address: tuple[str, int]) -> socket.socket | None:
    """Return a listening socket at the address where hosts meet; None if another host or process has it.

    Raises:
        ConfigError: The name has no address.
    """
    try:
        return socket.create_server(address, family=_family(address))
    except socket.gaierror as error:
        raise ConfigError(
            f"--rendezvous {address[0]}:{address[1]} has no address: {error}",
            possible="a name that every host can look up, or a numeric address",
            change="correct --rendezvous",
        ) from None
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
        return None


def lead(
    meeting: Meeting,
    listening: socket.socket,
    command: Sequence[str],
    job: bytes,
    environment: Mapping[str, str],
    *,
    least: int,
    restarts: int,
    timeout: float,
    run: Path,
    resumes: bool,
    memory: Path | None,
    nursery: Nursery | None,
) -> int:
    """Run a command as the ranks of all hosts, of which some may be lost; as the host that leads.

    Args:
        meeting: The hosts.
        listening: What `open_meeting` returned.
        command: A program and its arguments, of which the last is the file of the job.
        job: The content of that file, for other hosts.
        environment: What the ranks get beside this process's environment.
        least: Number of ranks with which the training goes on.
        restarts: Number of times that lost ranks are started again, in total.
        timeout: Seconds that ranks wait for another in a collective; see `Members`.
        run: The directory of the run, which all hosts see.
        resumes: Whether the run goes on, so that what other hosts have in memory may be of it.
        memory: The folder of checkpoints in this host's memory; None if there is none.
        nursery: The Nursery that ranks are forked from; None to start a program for each.

    Returns:
        The exit code, as `launch_elastic`.

    Raises:
        WorkerError: Too few ranks are left; the error is that of the rank that failed last.
        CommunicationError: Too few hosts came.
    """
    token = read_token(meeting.token)
    world = meeting.most * meeting.ranks
    with (
        scratch_folder() as folder,
        store_on_loopback() as store,
        signals_noted() as signals,
    ):
        pump = Pump()
        address = str(listening.getsockname()[0])
        own = Host(None, socket.gethostname(), address, meeting.ranks)
        own.run, own.settings = str(run.absolute()), meeting.settings
        told = {"job": job.hex(), "run": str(run), "ranks": world, "resumes": resumes, "leader": own.session}
        linked = LinkedHosts(own, meeting.least, meeting.most, folder, told, pump.end)
        services = {"host": linked.join, "store": store_service(store.port, pump, linked.is_open)}
        if memory is not None:
            services["files"] = files_service(memory)
        gate = Gate(listening, token, services)
        code, why = 1, ""
        print(f"shoal: this host leads; others join it at {address}:{gate.port}", file=sys.stderr, flush=True)
        try:
            _wait_for_hosts(linked, meeting, signals)
            around = {**environment, **surroundings(address, gate.port, meeting)}
            members = member_environments(str(folder), own.numbers, world, store.port, around, nursery)
            with LocalRanks(command, members, run / "log", nursery) as local:
                linked.begin(local)
                list(linked.start_new(-1))
                events = run / "members.jsonl"
                stop = StopRequest(signals, meeting.grace)
                of_run = Members(linked, store, folder, least, restarts, events, timeout, linked)
                code = of_run.run(stop)
            return code
        except ShoalError as error:
            code, why = error.exit_code, str(error)
            raise
        finally:
            linked.end(code, why)
            gate.close()
            pump.close()


def surroundings(address: str, port: int, meeting: Meeting) -> dict[str, str]:
    """Return what the environment of a host's ranks says of the host.

    Args:
        address: The address at which other hosts reach this one.
        port: The port of its gate.
        meeting: The hosts.
    """
    interface = os.environ.get("SHOAL_INTERFACE") or address
    gloo = os.environ.get("GLOO_SOCKET_IFNAME") or interface_with(address) or "lo"
    at = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return {
        "SHOAL_INTERFACE": interface,
        "GLOO_SOCKET_IFNAME": gloo,
        PEER: at,
        TOKEN_FILE: str(meeting.token.absolute()),
    }


def _wait_for_hosts(linked: LinkedHosts, meeting: Meeting, signals: list[Any]) -> None:
    """Wait until all hosts have come, or enough and no more for a while.

    Raises:
        CommunicationError: Too few came, or a signal did.
    """
    began = last = time.monotonic()
    there = 1
    while len(linked.hosts) < meeting.most:
        linked.listen(_LOOK)
        now = time.monotonic()
        if len(linked.hosts) != there:
            there, last = len(linked.hosts), now
            print(f"shoal: {there} of {meeting.most} hosts are there", file=sys.stderr, flush=True)
        if there >= meeting.least and now - last > _LAST_CALL:
            return
        if signals or now - began > WAIT:
            why = f"{signals[0].name} came" if signals else f"{WAIT:g} s have passed"
            raise CommunicationError(
                f"{there} hosts came to {meeting.address[0]}:{meeting.address[1]}, and at least "
                f"{meeting.least} are needed: {why}"
            )


def _family(address: tuple[str, int]) -> int:
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    return int(found[0][0])
