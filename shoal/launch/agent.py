"""Starts a machine's ranks for a fleet: `python -m shoal.launch`, with messages on stdin and stdout.

See `shoal.launch.messages`. The agent outlives the fleet only until its ranks have saved.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

import torch

from shoal.collectives.secret_file import SECRET_FILE
from shoal.errors import ConfigError, ShoalError
from shoal.launch.launcher import launch_on_node, open_store
from shoal.launch.messages import NOW, Here, Task, from_line, to_line
from shoal.launch.node import Node
from shoal.launch.nursery import open_nursery
from shoal.launch.output import pass_on
from shoal.listener import loopback
from shoal.release import release
from shoal.scratch import scratch_folder
from shoal.signals import take_signals

ALONE = 10.0
"""Seconds for the ranks to save once the fleet is gone. Until then no other host may go on in their place."""

_HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SILENT = 15.0  # seconds after which a fleet that says nothing is gone
_BETWEEN = 0.2  # seconds between two signals, which else may come in either order
_AT_ONCE = 1 << 16  # bytes to read at once


def main() -> int:
    """Start the ranks of a Task, and tell how they ended; return the exit code of this process."""
    messages = _Lines(sys.stdin.fileno())
    task = from_line("", messages.next())
    if not isinstance(task, Task):
        print("shoal: no fleet has started this agent", file=sys.stderr)
        return 2
    try:
        _prepare(task)
        with _shared(task.secret), open_nursery(task.module) as nursery:
            address, ranks = task.address or own_address(), task.ranks or ranks_here()
            store = open_store(address, task.port) if task.opens_store else None
            port = 0 if store is None else store.port
            _tell(task, Here(version=release(), ranks=ranks, address=address, port=port))
            node = from_line(task.token, messages.next(_SILENT))
            if not isinstance(node, Node):  # the fleet does without this machine
                return 0
            threading.Thread(target=_obey, args=(task, messages), daemon=True).start()
            ended = launch_on_node(
                [sys.executable, "-m", "shoal", *task.words],
                ranks,
                node,
                logs=Path(task.logs) if task.logs else None,
                nursery=nursery,
                grace=task.grace,
            )
    except ShoalError as error:
        _tell(task, error)
        return error.exit_code
    _tell(task, ended)
    return 0


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


def _prepare(task: Task) -> None:
    """Take the environment and the working directory of a Task, and heed the signals that the fleet sends."""
    os.environ.update(task.environment)
    for number in _HEEDED:  # Ray's workers ignore some, and block others
        signal.signal(number, signal.SIG_DFL)
    take_signals()
    try:
        os.chdir(task.folder)
    except OSError as error:
        raise ConfigError(
            f"{task.folder} cannot be entered on {task.name}: {error.strerror}",
            possible="a directory that every host has",
            change="give another --folder",
        ) from error


@contextlib.contextmanager
def _shared(secret: str) -> Iterator[None]:
    """Let ranks find the secret of the store in a file that this user alone can read."""
    if os.environ.get(SECRET_FILE):
        yield
        return
    with scratch_folder() as folder:
        file = folder / "secret"
        file.touch(mode=0o600)
        file.write_text(secret)
        os.environ[SECRET_FILE] = str(file)
        yield


@final
class _Lines:
    """The lines that come from a descriptor, with a time-out."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = b""

    def next(self, seconds: float | None = None) -> bytes:
        """Return the next line; empty at the end, or if nothing comes for some seconds."""
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._descriptor], [], [], seconds)
            data = os.read(self._descriptor, _AT_ONCE) if ready else b""
            if not data:
                return b""
            self._read += data
        line, newline, self._read = self._read.partition(b"\n")
        return line + newline


def _obey(task: Task, messages: _Lines) -> None:
    """Send this process the signals that the fleet names. If the fleet is gone, the ranks save and end."""
    name = ""
    while name != NOW and (line := messages.next(_SILENT)):
        told = from_line(task.token, line)
        name = told if isinstance(told, str) else ""
        if name in signal.Signals.__members__:
            os.kill(os.getpid(), signal.Signals[name])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_BETWEEN if name == NOW else ALONE)
    os.kill(os.getpid(), signal.SIGINT)  # after another signal it means now


def ranks_here() -> int:
    """Return the number of ranks for this machine where none is given: one for each GPU, or one."""
    return max(1, torch.cuda.device_count())


def _tell(task: Task, value: object) -> None:
    sys.stdout.flush()
    pass_on(to_line(task.token, value), 1)
