"""Agents that do as a test says, in this process."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from shoal.fleet import AgentChannel, Event
from shoal.launch import EXIT_STOPPED, Ended, Here, Node, Outcome, Task, from_line, to_line

__all__ = ["DONE", "LOST", "UNREACHABLE", "WAITS", "Fails", "Network", "OldVersion", "Stops"]

DONE, LOST, UNREACHABLE, WAITS = "done", "lost", "unreachable", "waits"


@dataclass(frozen=True)
class Fails:
    """The first rank of the host fails."""

    error: str
    exit_code: int = 1
    in_collective: bool = False
    when: float = 1.0


@dataclass(frozen=True)
class OldVersion:
    """The agent is of another version."""


@dataclass(frozen=True)
class Stops:
    """The ranks save and end: this host was told to, or another one was."""

    signal: str = ""


@dataclass
class Network:
    """What each host does in each attempt: by name, one after the other; the last one stays."""

    does: dict[str, list[object]]
    attempts: list[dict[str, Node]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)

    def open_channel(self, host, told):
        script = self.does[host.name]
        return _Agent(host.name, script.pop(0) if len(script) > 1 else script[0], told, self)

    def placed(self, name, node):
        if node.number == 0:
            self.attempts.append({})
        self.attempts[-1][name] = node


class _Agent(AgentChannel):
    def __init__(self, name, behaviour, told, network):
        self._name, self._behaviour, self._told, self._network = name, behaviour, told, network
        self._token = ""
        self._node = None

    def send(self, line):
        message = from_line(self._token, line)
        if isinstance(message, Task):
            self._begin(message)
        elif isinstance(message, Node):
            self._node = message
            self._network.placed(self._name, message)
            self._act()
        elif message in (signal.SIGTERM.name, signal.SIGINT.name, "now") and self._behaviour == WAITS:
            self._end(EXIT_STOPPED, signal=message)

    def hang_up(self):
        pass

    def close(self):
        pass

    def _begin(self, task):
        self._network.tasks.append(task)
        self._token = task.token
        if self._behaviour == UNREACHABLE:
            self._told(Event(self._name, "err", b"no route to host\n"))
            self._told(Event(self._name, "ended", b"ssh ended with exit code 255"))
            return
        version = "0" if isinstance(self._behaviour, OldVersion) else "1"
        here = Here(version=version, ranks=task.ranks or 1, address="127.0.0.1", port=4000)
        self._tell(here)

    def _act(self):
        does = self._behaviour
        self._told(Event(self._name, "out", f"[{self._name} rank {self._node.first_rank}] begins\n".encode()))
        if does == DONE:
            self._end(0)
        elif does == LOST:
            self._told(Event(self._name, "ended", b"ssh ended with exit code 255"))
        elif isinstance(does, Stops):
            self._end(EXIT_STOPPED, signal=does.signal)
        elif isinstance(does, Fails):
            outcome = Outcome(
                rank=self._node.first_rank,
                exit_code=does.exit_code,
                error=does.error,
                in_collective=does.in_collective,
                when=does.when,
            )
            codes = {self._node.first_rank: does.exit_code}
            self._tell(Ended(ranks=(self._node.first_rank,), outcomes=[outcome], exit_codes=codes))

    def _end(self, code, signal=""):
        rank = self._node.first_rank
        outcomes = [Outcome(rank=rank, exit_code=code)]
        self._tell(Ended(ranks=(rank,), outcomes=outcomes, exit_codes={rank: code}, signal=signal))

    def _tell(self, value):
        self._told(Event(self._name, "out", to_line(self._token, value)))
