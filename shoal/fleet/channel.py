"""What a fleet talks to the agent of a host over.

It is no `shoal.channel.Channel`: ssh or Ray has proved who is at either end, a host need not reach the fleet
by itself, and what its shell prints comes along. So both ends send lines, of which some are messages
(`shoal.launch.messages`).
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Literal, final

from shoal.signals import withheld_from_children


@dataclass(frozen=True, slots=True)
class Event:
    """Something that came from a host.

    Attributes:
        host: The host's name.
        kind: "out" or "err" for a line of that stream; "ended" if nothing will come any more.
        line: The line, with its end; for "ended" the reason, as text.
    """

    host: str
    kind: Literal["out", "err", "ended"]
    line: bytes


class AgentChannel(ABC):
    """A connection to the agent of a host. What comes is told as Events, from any thread."""

    @abstractmethod
    def send(self, line: bytes) -> None:
        """Send a line to the agent; if it is gone, do nothing."""

    @abstractmethod
    def hang_up(self) -> None:
        """Tell the agent that nothing more is sent: its ranks save, and end."""

    @abstractmethod
    def close(self) -> None:
        """End the connection, whatever becomes of the agent."""


@final
class ProcessChannel(AgentChannel):
    """A channel over the stdin, stdout and stderr of a program, such as ssh.

    The program is a session of its own: Ctrl-C on the terminal reaches the fleet alone, which decides.

    Args:
        host: The host's name.
        command: The program and its arguments.
        told: Called with each Event.

    Attributes:
        pid: The program's process.
    """

    def __init__(self, host: str, command: Sequence[str], told: Callable[[Event], object]) -> None:
        self._host = host
        self._told = told
        with withheld_from_children():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._name = command[0]
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=("out", self._process.stdout), daemon=True),
            threading.Thread(target=self._read, args=("err", self._process.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def send(self, line: bytes) -> None:
        """Send a line to the agent; if it is gone, do nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def hang_up(self) -> None:
        """Tell the agent that nothing more is sent: its ranks save, and end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the program."""
        self.hang_up()
        self._process.kill()
        self._process.wait()

    def _read(self, kind: Literal["out", "err"], stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._told(Event(self._host, kind, line))

    def _wait(self) -> None:
        code = self._process.wait()
        for reader in self._readers:
            reader.join()
        self._told(Event(self._host, "ended", f"{self._name} ended with exit code {code}".encode()))
