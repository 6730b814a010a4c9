"""The program that a fleet starts on a host, and what it is talked to over."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from shoal.fleet.hosts import Host
from shoal.signals import withheld_from_children

_ENDS = 5.0  # seconds for a program to end that has closed its output

Said = Callable[[bytes], object]
"""Told of each line that a host says on stderr, from any thread."""


class Agent(ABC):
    """`python -m shoal.launch` on a host: the launcher of this host's ranks.

    Attributes:
        stream: Its stdin and stdout.
    """

    stream: socket.socket

    @abstractmethod
    def how_ended(self) -> str:
        """Return how it ended, once its output has."""

    @abstractmethod
    def close(self) -> None:
        """End the connection, whatever becomes of the agent."""


StartAgent = Callable[[Host, Said], Agent]
"""Starts an agent on a host."""


@final
class AgentProcess(Agent):
    """An agent that a program of this host leads to, such as ssh.

    The program is a session of its own: Ctrl-C on the terminal reaches the fleet alone, which decides.

    Args:
        command: The program and its arguments.
        said: Told of each line of its stderr.
    """

    def __init__(self, command: Sequence[str], said: Said) -> None:
        self.stream, there = socket.socketpair()
        with there, withheld_from_children():
            pipe = there.fileno()
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.PIPE, start_new_session=True
            )
        self._name, self._said = command[0], said
        self._reader = threading.Thread(target=self._read, name="shoal-stderr", daemon=True)
        self._reader.start()

    def how_ended(self) -> str:
        """Return how it ended, once its output has."""
        try:
            code = self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            return f"{self._name} has closed its output"
        self._reader.join(_ENDS)
        return f"{self._name} ended with exit code {code}"

    def close(self) -> None:
        """End the program."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._said(line)
