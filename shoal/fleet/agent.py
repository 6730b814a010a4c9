"""The program that a fleet starts on a host, and what it is talked to over."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from shoal.fleet.hosts import Host
from shoal.signals import withheld_from_children

_ENDS = 5.0  # seconds for a program to end that has closed its output


@final
@dataclass(frozen=True, slots=True)
class Agent:
    """`python -m shoal.launch` on a host: the launcher of this host's ranks.

    Attributes:
        stream: Its stdin and stdout.
        how_ended: Returns how it ended, once its output has.
        close: Ends the connection, whatever becomes of the agent.
    """

    stream: socket.socket
    how_ended: Callable[[], str]
    close: Callable[[], object]


Said = Callable[[bytes], object]
"""Told of each line that a host says on stderr, from any thread."""

StartAgent = Callable[[Host, Said], Agent]
"""Starts an agent on a host."""


def start_program(command: Sequence[str], said: Said) -> Agent:
    """Start an agent by a program of this host, such as ssh.

    The program is a session of its own: Ctrl-C on the terminal reaches the fleet alone, which decides.

    Args:
        command: The program and its arguments.
        said: Told of each line of its stderr.
    """
    here, there = socket.socketpair()
    with there, withheld_from_children():
        pipe = there.fileno()
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.PIPE, start_new_session=True
        )

    def read() -> None:
        assert process.stderr is not None
        with process.stderr as stream:
            for line in stream:
                said(line)

    def how_ended() -> str:
        try:
            code = process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            return f"{command[0]} has closed its output"
        reader.join(_ENDS)
        return f"{command[0]} ended with exit code {code}"

    def close() -> None:
        with contextlib.suppress(OSError):
            here.shutdown(socket.SHUT_RDWR)
        process.kill()
        process.wait()

    reader = threading.Thread(target=read, name="shoal-stderr", daemon=True)
    reader.start()
    return Agent(here, how_ended, close)
