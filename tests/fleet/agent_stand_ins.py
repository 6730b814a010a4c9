"""Agents that do as a test says, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import threading
from dataclasses import dataclass, field

from shoal.channel import Channel
from shoal.launch.fleet import Agent
from shoal.launch.local import Outcome
from shoal.launch.submit import EXIT_STOPPED

__all__ = [
    *("DONE", "LATE", "LOST", "SILENT", "UNREACHABLE", "WAITS"),
    *("Fails", "Network", "OldVersion", "ReachedAt", "Stops"),
]

DONE, LATE, LOST, SILENT, UNREACHABLE, WAITS = "done", "late", "lost", "silent", "unreachable", "waits"
STOPPING = {signal.SIGTERM, signal.SIGINT, signal.SIGKILL}


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
class ReachedAt:
    """Others reach the host at an address."""

    address: str


@dataclass(frozen=True)
class Stops:
    """The ranks save and end: this host was told to, or another one was."""

    is_told: bool = False


@dataclass
class Network:
    """What each host does in each attempt: by name, one after the other; the last one stays.

    Attributes:
        jobs: What each agent was told first.
        begun: What the hosts were told that began, by the secret of the attempt, and by name.
        heard: Whether a host has heard that the launcher is there; a late one comes then.
    """

    does: dict[str, list[object]]
    jobs: list[dict] = field(default_factory=list)
    begun: dict[str, dict[str, dict]] = field(default_factory=dict)
    heard: threading.Event = field(default_factory=threading.Event)

    @property
    def attempts(self):
        """What the hosts of each attempt were told that began, by name, in their order."""
        return [dict(sorted(each.items(), key=lambda told: told[1]["place"])) for each in self.begun.values()]

    def start_agent(self, host, said):
        script = self.does[host.name]
        does = script.pop(0) if len(script) > 1 else script[0]
        agent = _Agent(host.name, does, said, self)
        return Agent(agent.stream, lambda: "ssh ended with exit code 255", agent.close)

    def begins(self, name, told, secret):
        self.begun.setdefault(secret, {})[name] = told


class _Agent:
    def __init__(self, name, behaviour, said, network):
        self._name, self._behaviour, self._said, self._network = name, behaviour, said, network
        self.stream, self._there = socket.socketpair()
        self._ranks = range(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self._thread.join(120)

    def _run(self):
        with contextlib.suppress(OSError), self._there:
            self._serve()

    def _serve(self):
        with self._there.makefile("rb") as lines:
            job = json.loads(lines.readline())
        self._network.jobs.append(job)
        if self._behaviour == UNREACHABLE:
            self._said(b"no route to host\n")
            return
        if self._behaviour == LATE:
            assert self._network.heard.wait(120)
        self._there.sendall(b"welcome to this host\nand " + job["token"].encode())
        self._link = Channel(self._there)
        version = "0" if isinstance(self._behaviour, OldVersion) else "1"
        ranks = job["ranks"] or 1
        address = self._behaviour.address if isinstance(self._behaviour, ReachedAt) else "127.0.0.1"
        self._link.send({"kind": "host", "version": version, "ranks": ranks, "store": [address, 4000]})
        while True:
            told = self._link.receive()
            if not told:
                self._network.heard.set()
            elif told.get("do") == "begin":
                self._ranks = range(*told["numbers"])
                self._network.begins(self._name, told, job["secret"])
                self._link.send({"lines": [[self._ranks[0], 1, "begins"]]})
                if self._behaviour == LOST:
                    return
                self._act()
            elif told.get("do") == "signal" and self._behaviour == WAITS and told["number"] in STOPPING:
                self._end(EXIT_STOPPED)
            elif told.get("do") == "end" and self._behaviour != SILENT:
                self._link.send({"lines": [], "last": True})
                return

    def _act(self):
        does = self._behaviour
        if does in (DONE, LATE):
            self._end(0)
        elif isinstance(does, Stops):
            if does.is_told:
                self._link.send({"leaves": True})
            self._end(EXIT_STOPPED)
        elif isinstance(does, Fails):
            rank = self._ranks[0]
            failed = Outcome(rank=rank, **dataclasses.asdict(does))
            self._link.send({"ended": {str(rank): [does.exit_code, dataclasses.asdict(failed)]}})

    def _end(self, code):
        outcomes = [Outcome(rank=rank, exit_code=code) for rank in self._ranks]
        ended = {str(each.rank): [code, dataclasses.asdict(each)] for each in outcomes}
        self._link.send({"ended": ended})
