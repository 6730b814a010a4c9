"""One start of all ranks of a training on several hosts, until they have ended."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from shoal.errors import CommunicationError, ConfigError, ShoalError, WorkerError
from shoal.fleet.channel import AgentChannel, Event
from shoal.fleet.hosts import Host
from shoal.launch import (
    EXIT_STOPPED,
    NOW,
    PING,
    SAME,
    SAVE,
    Ended,
    Here,
    Node,
    Task,
    from_line,
    pass_on,
    to_line,
)

_LOOK = 0.05  # seconds between looks at signals and deadlines
_CONNECT = 60.0  # seconds for an agent to come
_SETTLE = 1.5  # seconds for other hosts to end by themselves after the first failure
_END = 10.0  # seconds for other hosts to end their ranks after a failure
_MORE = 5.0  # seconds that agents have beyond the grace of their ranks
_NOW = 3.0  # seconds for agents after the second Ctrl-C
_PING = 4.0  # seconds between signs of life of this process
_HELD = 1000  # lines of a failure that are held back until its cause is known


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is started on each host.

    Attributes:
        words: Arguments of the program `shoal`.
        folder: The working directory on each host.
        environment: Variables that the ranks get.
        ranks: Number of ranks on each host; None for one for each GPU, or one.
        address: The first host's address, as the others reach it; empty to take that which ssh was told.
        port: Port at which the ranks meet; 0 for any that is free.
        logs: Directory in which each rank's output is kept.
        grace: Seconds from a signal until the ranks must have ended; None for the default.
    """

    words: Sequence[str]
    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None
    address: str = ""
    port: int = 0
    logs: str = ""
    grace: float | None = None


@dataclass(slots=True)
class _Agent:
    """The agent of a host, as far as is known."""

    channel: AgentChannel
    here: Here | None = None
    node: Node | None = None
    ended: Ended | None = None
    is_told: bool = False  # whether it was told to end its ranks because others failed
    lost: str = ""  # why nothing comes any more, although its ranks have not ended


@final
class Attempt:
    """One start of all ranks. Leaving the context ends what is left on every host.

    Args:
        hosts: The hosts, in the order of their ranks.
        work: What is started.
        open_channel: Starts an agent on a host.
        signals: The signals that this process got, to which others are appended.

    Attributes:
        failed: The hosts that failed, once `run` has ended; empty if none did.
        has_lost: Whether a host may be out of reach while its ranks still run.
        signal: The first signal that asked to end, also after a failure; empty if none did.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        work: Work,
        open_channel: Callable[[Host, Callable[[Event], object]], AgentChannel],
        signals: list[signal.Signals],
    ) -> None:
        self._hosts = hosts
        self._work = work
        self._signals = signals
        self._token = secrets.token_hex(16)
        self._secret = secrets.token_hex(32)
        self._events: queue.Queue[Event] = queue.Queue()  # a SimpleQueue waits for ever after a signal (3.11)
        self._agents: dict[str, _Agent] = {}
        self.signal = ""
        self._same_until = 0.0  # another Ctrl-C until then is the same one, passed on by a program above
        self._deadline = float("inf")
        self._failed_at: float | None = None
        self._pinged = 0.0
        self._held: list[tuple[bytes, int]] = []
        self.failed: set[str] = set()
        self.has_lost = False
        try:
            for host in hosts:
                self._agents[host.name] = _Agent(open_channel(host, self._events.put))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all agents, and what is left of their ranks."""
        for agent in self._waiting():
            if agent.node is None:
                agent.channel.hang_up()
            else:
                agent.channel.send(to_line(self._token, NOW))
        until = time.monotonic() + _NOW
        while any(agent.node for agent in self._waiting()) and time.monotonic() < until:
            with contextlib.suppress(ShoalError):
                self._take_events()
        for agent in self._agents.values():
            agent.channel.close()

    def _waiting(self) -> list[_Agent]:
        """The agents from which something may come."""
        return [agent for agent in self._agents.values() if agent.ended is None and not agent.lost]

    def run(self) -> int:
        """Return the exit code of the training, once all ranks have ended.

        Raises:
            WorkerError: A rank failed, or a host; the error names which was first.
            ShoalError: An agent refused what it was given.
        """
        for host, agent in zip(self._hosts, self._agents.values(), strict=True):
            agent.channel.send(to_line("", self._task(host, is_first=host is self._hosts[0])))
        until = time.monotonic() + _CONNECT
        while not all(agent.here for agent in self._agents.values()):
            self._take_events()
            late = [name for name, agent in self._agents.items() if agent.here is None]
            if any(self._agents[name].lost for name in late) or time.monotonic() > until:
                raise self._not_reached(late)
            if self.signal:
                raise WorkerError(0, f"ended by {self.signal} before its state was saved", exit_code=130)
        self._place()
        while not self._is_over():
            self._take_events()
        return self._exit_code()

    def _task(self, host: Host, *, is_first: bool) -> Task:
        work = self._work
        return Task(
            token=self._token,
            name=host.name,
            folder=work.folder,
            words=tuple(work.words),
            module="shoal.train",
            environment=dict(work.environment),
            secret=self._secret,
            ranks=host.ranks or work.ranks,
            opens_store=is_first,
            address=(work.address if is_first else "") or host.address,
            port=work.port if is_first else 0,
            logs=work.logs,
            grace=work.grace,
        )

    def _not_reached(self, late: Sequence[str]) -> WorkerError:
        lost = [name for name in late if self._agents[name].lost] or late
        self.failed.update(lost)
        reason = self._agents[lost[0]].lost or f"nothing came within {_CONNECT:g} s"
        return WorkerError(0, f"host {lost[0]} did not start: {reason}", detail=self._words_held())

    def _place(self) -> None:
        """Tell each agent its place."""
        heres = [agent.here for agent in self._agents.values() if agent.here is not None]
        version = heres[0].version
        for host, here in zip(self._hosts, heres, strict=True):
            if here.version != version:
                raise ConfigError(
                    f"{host.name} has Shoal {here.version}, and {self._hosts[0].name} has {version}",
                    possible="one version on all hosts",
                    change="install the same version everywhere",
                )
        master = heres[0].address, heres[0].port
        if _is_loopback(master[0]) and not all(_is_loopback(here.address) for here in heres):
            raise ConfigError(
                f"the ranks would meet at {master[0]}, which only {self._hosts[0].name} reaches",
                possible="an address of the first host that the others reach",
                change="give it as --address, or call the first host by a name that is not its loopback",
            )
        first, ranks = 0, sum(here.ranks for here in heres)
        for number, (agent, here) in enumerate(zip(self._agents.values(), heres, strict=True)):
            agent.node = Node(
                name=self._hosts[number].name,
                number=number,
                nodes=len(heres),
                first_rank=first,
                ranks=ranks,
                master=master,
            )
            first += here.ranks
            agent.channel.send(to_line(self._token, agent.node))

    def _is_over(self) -> bool:
        """Whether all has ended; end the other hosts after a failure."""
        waits = self._waiting()
        now = time.monotonic()
        if not waits or now > self._deadline:
            return True
        has_failed = any(agent.lost or _has_failed(agent.ended) for agent in self._agents.values())
        if has_failed and self._failed_at is None:
            self._failed_at = now
        if self._failed_at is not None and not self.signal and now > self._failed_at + _SETTLE:
            self._deadline = min(self._deadline, now + _END)
            self._failed_at = float("inf")
            for agent in waits:
                agent.is_told = True
                agent.channel.send(to_line(self._token, signal.SIGTERM.name))
        return False

    def _take_events(self) -> None:
        """Take what comes within a moment, and pass on the signals that came."""
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=_LOOK)
            while True:
                self._take(event)
                event = self._events.get_nowait()
        while self._signals:
            self._pass_on(self._signals.pop(0))
        if time.monotonic() > self._pinged + _PING:
            self._pinged = time.monotonic()
            for agent in self._waiting():
                if agent.node is not None:
                    agent.channel.send(to_line(self._token, PING))

    def _take(self, event: Event) -> None:
        agent = self._agents[event.host]
        if event.kind == "ended":
            agent.lost = "" if agent.ended is not None else event.line.decode()
            return
        message = from_line(self._token, event.line) if event.kind == "out" else None
        if isinstance(message, ShoalError):
            raise message
        if isinstance(message, Here):
            agent.here = message
        elif isinstance(message, Ended):
            agent.ended = message
        elif message is not None:
            raise CommunicationError(f"host {event.host} told {type(message).__name__}, which nobody asked")
        else:
            name = event.host.encode()
            is_named = event.line.startswith(b"[" + name + b" rank ")
            line = event.line if is_named else b"[" + name + b"] " + event.line
            self._show(line, 1 if event.kind == "out" else 2, is_held=agent.here is None)

    def _show(self, line: bytes, descriptor: int, *, is_held: bool) -> None:
        """Pass a line on; hold back what comes of a failure, until its cause is told first."""
        if is_held or self._failed_at is not None:
            self._held = [*self._held[-_HELD:], (line, descriptor)]
        else:
            pass_on(line, descriptor)

    def _words_held(self) -> str:
        return b"".join(line for line, _ in self._held).decode(errors="replace").rstrip()

    def _pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGTSTP:
            print("shoal: Ctrl-Z does not stop a training on several hosts", file=sys.stderr)
            return
        name = signal.SIGTERM.name if number == signal.SIGHUP else number.name
        for agent in self._agents.values():
            agent.channel.send(to_line(self._token, name))
        if number == signal.SIGUSR2:
            return
        if not self.signal:
            self.signal = number.name
            text = f"shoal: {number.name}: the ranks finish their step and save; Ctrl-C ends them at once"
            print(text, file=sys.stderr, flush=True)
            seconds = SAVE if self._work.grace is None else self._work.grace
            now = time.monotonic()
            self._deadline = now + seconds + _MORE
            self._same_until = now + SAME if number == signal.SIGINT else now
        elif number == signal.SIGINT and time.monotonic() >= self._same_until:
            self._deadline = min(self._deadline, time.monotonic() + _NOW)

    def _exit_code(self) -> int:
        """Return the exit code, or raise the failure that came first."""
        agents = self._agents
        for agent in self._waiting():
            agent.lost = "it does not answer"
        lost = {name: agent for name, agent in agents.items() if agent.lost}
        ended = [agent.ended for agent in agents.values() if agent.ended is not None]
        together = Ended(
            ranks=tuple(rank for each in ended for rank in each.ranks),
            outcomes=[outcome for each in ended for outcome in each.outcomes],
            exit_codes=self._exit_codes(),
            stopped=[rank for each in ended for rank in each.stopped],
            signal=self.signal,
            hang=next((each.hang for each in ended if each.hang is not None), None),
        )
        own = [outcome for outcome in together.outcomes if outcome.error and not outcome.in_collective]
        if lost and not own:
            name, agent = next(iter(lost.items()))
            self.failed.update(lost)
            self.has_lost = True
            assert agent.node is not None
            reason = f"host {name} was lost: {agent.lost}"
            if self.signal:
                reason = f"ended by {self.signal} before its state was saved; {reason}"
            code = 130 if self.signal else 1
            raise WorkerError(agent.node.first_rank, reason, detail=self._words_held(), exit_code=code)
        try:
            code = together.exit_code()
        except WorkerError as error:
            name = self._host_of(error.rank)
            self.failed.add(name)
            detail = "\n".join(filter(None, (error.detail, self._words_held())))
            raise WorkerError(
                error.rank, f"{error.reason} (on {name})", detail=detail, exit_code=error.exit_code
            ) from None
        if code == EXIT_STOPPED and not self.signal:  # a host alone was told to end
            self.failed.update(name for name, agent in agents.items() if agent.ended and agent.ended.signal)
        for line, descriptor in self._held:
            pass_on(line, descriptor)
        return code

    def _exit_codes(self) -> dict[int, int]:
        """Return the exit codes of ranks, but of those that were told to end because others had failed."""
        ended = [agent.ended for agent in self._agents.values() if not agent.is_told]
        return {rank: code for each in ended if each is not None for rank, code in each.exit_codes.items()}

    def _host_of(self, rank: int) -> str:
        nodes = [(name, agent.node) for name, agent in self._agents.items() if agent.node is not None]
        return [name for name, node in nodes if node.first_rank <= rank][-1]


def _has_failed(ended: Ended | None) -> bool:
    return ended is not None and not set(ended.exit_codes.values()) <= {0, EXIT_STOPPED}


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
