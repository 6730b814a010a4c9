"""The part of `shoal train --nodes` that is about several hosts."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.local import least_and_most
from shoal.errors import ConfigError, PlanError
from shoal.scratch import scratch_folder
from shoal.values import encode

if TYPE_CHECKING:
    from shoal.launch.hosts import Meeting
    from shoal.launch.local import Nursery
    from shoal.train import Job

_PORT = 29500  # torchrun's
_MOST_GIVEN = 1 << 15  # characters of settings that are compared: a link's first message is short


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about several hosts to the command."""
    parser.add_argument(
        "--nodes",
        metavar="N|MIN:MAX",
        help="train on several hosts, on each of which this command is started; with MIN, hosts may fail "
        "while MIN are left: the others go on. Hosts that come later take free places, or stand by",
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="with --nodes: where the hosts meet, an address of the host that leads them; by default "
        f"MASTER_ADDR and MASTER_PORT, which is {_PORT} by default",
    )


def run_on_hosts(
    args: argparse.Namespace,
    settings: Sequence[str],
    job_for: Callable[[int], Job],
    least: int | None,
    nursery: Nursery | None,
) -> int:
    """Train on several hosts: lead them if this one has the rendezvous address, else follow.

    Args:
        args: The command line.
        settings: The settings that it gives, as for `load_config`.
        job_for: Returns the job for so many ranks, which is checked.
        least: Number of ranks on a host with which the training goes on; None for all.
        nursery: The Nursery that ranks are forked from; None to start a program for each.

    Raises:
        UserError: Something given cannot work; nothing was started.
        WorkerError: A rank failed, and the others could not go on.
        CommunicationError: Other hosts did not come, or the host that leads is gone.
    """
    from shoal.launch.hosts import follow, lead, open_meeting
    from shoal.train import FOLDER, memory_folder, nothing_left_to_do, settings_of

    address = _address(args)
    _require_common(address, args.nodes, _number_of_hosts(args)[1])
    listening = open_meeting(address)
    meeting = _meeting(args, address, leads=listening is not None)
    if listening is None:
        meeting = replace(meeting, settings=_given(args, settings))
    with memory_folder() as folder, scratch_folder() as scratch:
        given = {} if folder is None else {FOLDER: str(folder)}
        if listening is None:
            return follow(meeting, "shoal.train", given, memory=folder, nursery=nursery)
        with listening:
            job = job_for(meeting.most * meeting.ranks)
            _require_elastic(args, job)
            if text := nothing_left_to_do(job):
                print(text, file=sys.stderr)
                return 0
            meeting = replace(meeting, settings=settings_of(job.config))
            file = scratch / "job"
            file.write_bytes(encode(job))
            return lead(
                meeting,
                listening,
                [sys.executable, "-m", "shoal.train", str(file)],
                encode(job),
                given,
                least=meeting.least * (least or meeting.ranks),
                restarts=args.restarts,
                timeout=job.config.timeout,
                run=job.path,
                resumes=job.goes_on,
                memory=folder,
                nursery=nursery,
            )


def _given(args: argparse.Namespace, settings: Sequence[str]) -> dict[str, Any]:
    """Return the settings that this host is given: those of the host that leads are to be the same."""
    from shoal.train import load_config, located, settings_of, table_of

    try:
        config = located(load_config(args.config, settings))
    except ConfigError:
        if args.resume is None:
            raise
        return {}  # they may be right with those of the run
    given = settings_of(config, table_of(args.config, settings))
    return given if len(str(given)) < _MOST_GIVEN else {}


def _require_elastic(args: argparse.Namespace, job: Job) -> None:
    if job.is_served:
        raise PlanError(
            f"--nodes {args.nodes} was given with the Plan {job.plan}",
            possible="a Plan without parameter servers; with them, workers may be lost and join as it is",
            change="leave --nodes out, and start the workers with torchrun or --join",
        )


def _address(args: argparse.Namespace) -> tuple[str, int]:
    from shoal.collectives.options import split_address

    if args.rendezvous is not None:
        return split_address(args.rendezvous, "--rendezvous")
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT") or str(_PORT)
    if not host:
        raise ConfigError(
            f"--nodes {args.nodes} was given, and nothing says where the hosts meet",
            possible="--rendezvous HOST:PORT, or MASTER_ADDR",
            change="give the same address on all hosts: one of the host that shall lead them",
        )
    return split_address(f"{host}:{port}", "MASTER_ADDR:MASTER_PORT")


def _require_common(address: tuple[str, int], nodes: str, most: int) -> None:
    """Refuse an address that every host takes for its own, so that each would lead a run of its own.

    Processes of one machine that SHOAL_HOST_ID makes hosts may meet at a number such as 127.0.0.1.
    """
    try:
        meant = str(socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except OSError:
        return  # open_meeting names it
    own = ipaddress.ip_address(meant)
    is_trial = address[0] == meant and own.is_loopback and os.environ.get("SHOAL_HOST_ID")
    if most > 1 and (own.is_loopback or own.is_unspecified) and not is_trial:
        called = "" if address[0] == meant else f", which is {meant} here"
        raise ConfigError(
            f"--nodes {nodes} was given, and the hosts meet at {address[0]}{called}: each host would take it "
            "for itself, and lead a run of its own",
            possible="an address of one host that the others reach; for a trial on one machine, 127.0.0.1 "
            "with another SHOAL_HOST_ID for each process",
            change="give --rendezvous the address of the host that shall lead, such as 10.0.0.1:29500",
        )


def _number_of_hosts(args: argparse.Namespace) -> tuple[int, int]:
    hosts = least_and_most(args.nodes) or (0, 0)
    if not 1 <= hosts[0] <= hosts[1]:
        raise ConfigError(
            f"--nodes {args.nodes} is no number of hosts",
            possible="N, or MIN:MAX with 1 <= MIN <= MAX",
            change="write, for example, --nodes 4, or --nodes 2:4",
        )
    return hosts


def _meeting(args: argparse.Namespace, address: tuple[str, int], *, leads: bool) -> Meeting:
    from shoal.launch.hosts import Meeting, find_token

    hosts = _number_of_hosts(args)
    ranks = args.nproc if args.nproc is not None else _ranks_of_host()
    return Meeting(
        address=address,
        least=hosts[0],
        most=hosts[1],
        ranks=ranks,
        token=find_token(makes=leads),
        grace=args.grace,
        run="" if (run := given_run(args)) is None else str(run.absolute()),
    )


def given_run(args: argparse.Namespace) -> Path | None:
    """Return the directory of the run that `shoal train` was given; None if it is not in its arguments."""
    given = args.directory if args.directory is not None else args.resume
    if given in (None, "auto"):
        return None
    path = Path(given)
    return path.parent.parent if path.name.startswith("step-") else path


def _ranks_of_host() -> int:
    """Return one rank for each GPU of this host, or else for each core."""
    import torch

    return torch.cuda.device_count() or len(os.sched_getaffinity(0))
