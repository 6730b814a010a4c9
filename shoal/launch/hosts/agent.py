"""The launcher of a host that ssh or Ray starts: `python -m shoal.launch.hosts`.

Its first line of input is a JSON object that says what to start. It answers with the token that is in there.
From then on its stdin and stdout are the link to the launcher that leads: see
`shoal.launch.elastic.linked_hosts`. So what is secret, such as the store's secret and values of the
environment, is in no command line, and what a shell prints before the token is no message.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.channel import Channel, carried
from shoal.collectives.tcp_store import SECRET_FILE
from shoal.errors import ConfigError, ShoalError
from shoal.launch.hosts.follower import Following
from shoal.launch.local.fork_server import Nursery, open_nursery
from shoal.launch.local.launcher import open_store, rank_environments
from shoal.launch.local.local_ranks import LocalRanks
from shoal.launch.local.output import Relay, pass_on
from shoal.launch.local.signals import signals_noted
from shoal.limits import json_of
from shoal.listener import loopback
from shoal.release import release
from shoal.signals import take_signals
from shoal.values import encode

ALONE = 10.0
"""Seconds for the ranks to save once the fleet is gone. Until then no other host may go on in their place."""

_HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_AT_ONCE = 1 << 16  # bytes to read at once

_Job = Mapping[str, Any]


def main() -> int:
    """Run the ranks of this host as the launcher that leads tells it; return the exit code."""
    try:
        job = json_of(sys.stdin.buffer.readline())
        token = str(job["token"]).encode()
    except (ValueError, KeyError, TypeError):
        print("shoal: no fleet has started this agent", file=sys.stderr)
        return 2
    reading, writing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that messages alone go through the pipes,
    os.dup2(2, 1)  # and none to a rank that reads its stdin
    pass_on(token, writing)
    try:
        _prepare(job)
        with open_nursery("shoal.train") as nursery, _link(reading, writing) as link:
            return _follow(link, job, nursery)
    except ShoalError as error:
        with _link(reading, writing) as link:
            link.send({"refuses": encode(error).hex()})
        return error.exit_code


@contextlib.contextmanager
def _link(reading: int, writing: int) -> Iterator[Channel]:
    with carried(lambda: os.read(reading, _AT_ONCE), lambda data: pass_on(data, writing)) as stream:
        yield Channel(stream)


def _follow(link: Channel, job: _Job, nursery: Nursery | None) -> int:
    address = job["address"] or own_address()
    store = open_store(address, job["port"]) if job["opens_store"] else None
    about = {
        "version": release(),
        "ranks": job["ranks"] or ranks_here(),
        "store": [address, 0 if store is None else store.port],
    }
    with signals_noted() as signals:
        ended = Following(link, about, partial(_begin, job, nursery), job["grace"], ALONE).run(signals)
    return ended if isinstance(ended, int) else 1  # the fleet is gone


def _begin(
    job: _Job, nursery: Nursery | None, told: _Job, folder: Path, relay: Relay, _: contextlib.ExitStack
) -> LocalRanks:
    """Return the ranks of this host, which have started."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(job["secret"])
    environment = {**os.environ, SECRET_FILE: os.environ.get(SECRET_FILE) or str(secret)}
    (address, port), (place, hosts), numbers = told["store"], told["place"], range(*told["numbers"])
    environments = rank_environments(
        str(folder), numbers, told["ranks"], (address, port), environment, nursery, (place, hosts)
    )
    command = [sys.executable, "-m", "shoal", *job["words"]]
    logs = Path(job["logs"]) if job["logs"] else None
    return LocalRanks(command, environments, logs, nursery, [relay])


def own_address() -> str:
    """Return the address of this machine: the one that ssh was told, or else the one of its name."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        return connection[2]
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as trial:
                trial.bind(address)  # a name may have addresses that the machine lacks, as where only IPv6 is
                return str(address[0])
    return loopback()


def _prepare(job: _Job) -> None:
    """Take the environment and the working directory of a job, and heed signals."""
    os.environ.update(job["environment"])
    for number in _HEEDED:  # Ray's workers ignore some, and block others
        signal.signal(number, signal.SIG_DFL)
    take_signals()
    try:
        os.chdir(job["folder"])
    except OSError as error:
        raise ConfigError(
            f"{job['folder']} cannot be entered on {job['name']}: {error.strerror}",
            possible="a directory that every host has",
            change="give another --folder",
        ) from error


def ranks_here() -> int:
    """Return the number of ranks for this machine where none is given: one for each GPU, or one."""
    return max(1, torch.cuda.device_count())
