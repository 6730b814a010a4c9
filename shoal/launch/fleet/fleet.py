"""A training on several hosts, started again when it fails.

After a failure the run goes on from its newest state. Hosts that failed less are taken first, so that a spare
one takes the place of one that failed; a host that failed often is left out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, final

from shoal.channel import Channel
from shoal.errors import ClusterError, ConfigError, WorkerError
from shoal.launch.elastic.host import SILENCE
from shoal.launch.elastic.host import Host as LinkedHost
from shoal.launch.elastic.linked_hosts import LinkedHosts
from shoal.launch.fleet.agent import Agent, Host, StartAgent
from shoal.launch.hosts.agent import ALONE
from shoal.launch.local import signals_noted
from shoal.launch.local.launcher import wait_for_end
from shoal.launch.local.output import pass_on
from shoal.launch.local.signals import StopRequest
from shoal.launch.submit import EXIT_STOPPED
from shoal.scratch import scratch_folder

_LOOK = 0.05  # seconds between looks at signals and deadlines
_CONNECT = 60.0  # seconds for an agent to come
_ROOM = 2.0  # seconds for processes to be gone
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


@final
class Attempt:
    """One start of all ranks. Leaving the context ends what is left on every host.

    Args:
        hosts: The hosts, in the order of their ranks.
        work: What is started.
        start_agent: Starts an agent on a host.
        signals: The signals that this process got, to which others are appended.

    Attributes:
        failed: The hosts that failed, once `run` has ended; empty if none did.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        work: Work,
        start_agent: StartAgent,
        signals: list[signal.Signals],
    ) -> None:
        self._stop = StopRequest(signals, work.grace, are_away=True)
        self._held: deque[tuple[bytes, int]] = deque(maxlen=_HELD)
        self._hosts: list[LinkedHost] = []
        self.failed: set[str] = set()
        secret = secrets.token_hex(32)
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(scratch_folder())
            self._linked = LinkedHosts(None, 0, 0, self._folder, {}, show=self._show)
            stack.callback(self._linked.end)
            for host in hosts:
                linked = LinkedHost(None, "", host.name)
                agent = start_agent(host, partial(self._linked.say, linked))
                stack.callback(agent.close)
                linked.link, linked.how_ended = Channel(agent.stream), agent.how_ended
                self._hosts.append(linked)
                job = {**_job(work, host, is_first=host is hosts[0]), "secret": secret}
                threading.Thread(target=self._meet, args=(linked, agent, job), daemon=True).start()
            self._stack = stack.pop_all()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has asked to end."""
        return self._stop.signal is not None

    @property
    def pause(self) -> float:
        """Seconds until ranks on hosts that were lost have ended, which may not know it yet."""
        lost = [host for host in self._hosts if host.gone is not None and host.is_begun]
        silent = [SILENCE - (time.monotonic() - host.heard) for host in lost if host in self._linked.silent]
        return ALONE + _ROOM + max([0.0, *silent]) if lost else 0.0

    def run(self) -> int:
        """Return the exit code of the training, once all ranks have ended.

        Raises:
            WorkerError: A rank failed, or a host; the error names which was first.
            ShoalError: An agent refused what it was given.
        """
        try:
            self._wait_for_hosts()
            ranks, store = sum(host.ranks for host in self._hosts), self._hosts[0].store
            self._linked.begin_in_order(self._hosts, ranks=ranks, store=store)
            try:
                code = wait_for_end(self._linked, self._stop, self._folder)
            except WorkerError as error:
                raise self._failure(error) from None
        finally:
            self._linked.end()
        if code == EXIT_STOPPED and not self.is_stopped:  # a host alone was told to end
            self.failed.update(host.address for host in self._hosts if host.is_leaving)
        for line, descriptor in self._held:
            pass_on(line, descriptor)
        return code

    def _meet(self, host: LinkedHost, agent: Agent, job: Mapping[str, Any]) -> None:
        """Start the agent's work, and listen to the agent until it is gone; on a thread of its own."""
        with contextlib.suppress(OSError):  # the link has ended, as is noted there
            agent.stream.sendall(json.dumps(job).encode() + b"\n")
            for line in _lines_before(job["token"].encode(), agent):
                self._linked.say(host, line, 1)
        self._linked.hear(host)

    def _wait_for_hosts(self) -> None:
        """Wait until all hosts have come.

        Raises:
            WorkerError: One did not, or a signal came.
            ConfigError: They cannot train together.
        """
        until = time.monotonic() + _CONNECT
        while late := [host for host in self._hosts if host not in self._linked.waiting]:
            self._linked.listen(_LOOK)
            self._stop.pass_on(self._linked)
            if self._stop.signal is not None:
                name = self._stop.signal.name
                raise WorkerError(0, f"ended by {name} before its state was saved", exit_code=130)
            lost = {host.address: host.gone.why for host in late if host.gone is not None}
            if not lost and time.monotonic() > until:
                lost = {host.address: f"did not start: nothing came within {_CONNECT:g} s" for host in late}
            self.failed.update(lost)
            for name, why in lost.items():
                raise WorkerError(0, f"host {name} {why}", detail=self._words_held())
        first = self._hosts[0]
        for host in self._hosts:
            if host.version != first.version:
                raise ConfigError(
                    f"{host.address} has Shoal {host.version}, and {first.address} has {first.version}",
                    possible="one version on all hosts",
                    change="install the same version everywhere",
                )
        addresses = [host.store[0] for host in self._hosts]
        if _is_loopback(addresses[0]) and not all(map(_is_loopback, addresses)):
            raise ConfigError(
                f"the ranks would meet at {addresses[0]}, which only {first.address} reaches",
                possible="an address of the first host that the others reach",
                change="give it as --address, or call the first host by a name that is not its loopback",
            )

    def _show(self, host: LinkedHost, lines: bytes, descriptor: int) -> None:
        """Pass lines on; hold back what comes of a failure, until its cause is told first."""
        is_there = host.is_begun or host in self._linked.waiting
        if is_there and set(self._linked.exit_codes().values()) <= {0, EXIT_STOPPED}:
            pass_on(lines, descriptor)
        else:
            self._held.extend((line, descriptor) for line in lines.splitlines(keepends=True))

    def _words_held(self) -> str:
        return b"".join(line for line, _ in self._held).decode(errors="replace").rstrip()

    def _failure(self, error: WorkerError) -> WorkerError:
        """Return the failure that came first, with the host and what the others said."""
        lost = [host for host in self._hosts if host.gone is not None]
        host = next(host for host in self._hosts if error.rank in host.numbers)
        self.failed.update(each.address for each in (host, *lost))
        reason, code = f"{error.reason} (on {host.address})", error.exit_code
        if host in lost:
            reason = error.reason
            if self._stop.signal is not None:
                name = self._stop.signal.name
                reason, code = f"ended by {name} before its state was saved; {reason}", 130
        detail = "\n".join(filter(None, (error.detail, self._words_held())))
        return WorkerError(error.rank, reason, detail=detail, exit_code=code)


def _job(work: Work, host: Host, *, is_first: bool) -> dict[str, Any]:
    """Return what the agent of a host is told first."""
    return {
        **asdict(work),
        "token": secrets.token_hex(16),
        "name": host.name,
        "ranks": host.ranks or work.ranks,
        "opens_store": is_first,
        "address": (work.address if is_first else "") or host.address,
        "port": work.port if is_first else 0,
    }


def _lines_before(token: bytes, agent: Agent) -> Iterator[bytes]:
    """Yield what a host's shell prints before a token, which is read too."""
    line = b""
    while not line.endswith(token) and (byte := agent.stream.recv(1)):
        line += byte
        if byte == b"\n":
            yield line
            line = b""
    if rest := line.removesuffix(token):
        yield rest


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


_NO_RETRY = (2, 130)  # exit codes after which another attempt would end the same way, or nobody wants one
_SOON = 60.0  # seconds: an attempt that fails sooner makes the next pause longer
_LONGEST = 300.0  # seconds of a pause


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How often a training is started again, and on which hosts.

    Attributes:
        least: Number of hosts that it needs.
        most: Number of hosts that it uses, if there are so many; others are spares.
        restarts: Number of times that it is started again, in total.
        pause: Seconds before it is started again; doubled after each attempt that fails within a minute.
        strikes: Failures after which a host is left out.
    """

    least: int
    most: int
    restarts: int = 0
    pause: float = 1.0
    strikes: int = 2

    def choose(self, hosts: Sequence[Host], failures: Counter[str]) -> list[Host]:
        """Return the hosts for the next attempt, in the order in which they were given.

        Args:
            hosts: All hosts.
            failures: How often each has failed.

        Raises:
            ClusterError: Too few are left.
        """
        left = [host for host in hosts if failures[host.name] < self.strikes]
        if len(left) < self.least:
            out = ", ".join(f"{host.name} ({failures[host.name]})" for host in hosts if host not in left)
            raise ClusterError(
                f"{len(left)} of {len(hosts)} hosts are left, and the training needs {self.least}"
                + (f"; left out after failures: {out}" if out else ""),
                possible="at least as many hosts as the training needs, and spares beyond",
                change="mend or replace hosts, give more of them, or need fewer with --nodes MIN:MAX",
            )
        best = set(sorted(left, key=lambda host: failures[host.name])[: self.most])
        return [host for host in hosts if host in best]


def train_on(
    hosts: Callable[[], Sequence[Host]],
    work: Work,
    policy: Policy,
    start_agent: StartAgent,
) -> int:
    """Train on some of these hosts, and start again after failures; return the exit code.

    Args:
        hosts: Returns the hosts that may be used now.
        work: What is started; it must go on from the newest state if there is one.
        policy: How often it is started again, and where.
        start_agent: Starts an agent on a host.

    Returns:
        0, or `EXIT_STOPPED` if a signal ended the training and its state is saved.

    Raises:
        WorkerError: The last attempt failed; the error names what failed first.
        ClusterError: Too few hosts are left.
        ShoalError: What was given cannot work on a host.
    """
    failures: Counter[str] = Counter()
    restarts, pause = policy.restarts, policy.pause
    with signals_noted() as signals:
        while True:
            chosen = policy.choose(hosts(), failures)
            began = time.monotonic()
            with Attempt(chosen, work, start_agent, signals) as attempt:
                failure: WorkerError | None = None
                try:
                    code = attempt.run()
                    # A host alone may be taken away: its ranks have saved, and others may go on.
                    if code != EXIT_STOPPED or not attempt.failed or not restarts:
                        return code
                    reason = "host " + ", ".join(sorted(attempt.failed)) + " was told to end"
                except WorkerError as error:
                    if error.exit_code in _NO_RETRY or not restarts:
                        raise
                    failure, reason = error, str(error)
            if attempt.is_stopped:
                return _ended(failure)
            failures.update(attempt.failed)
            restarts -= 1
            seconds = max(pause, attempt.pause)
            _say(f"{reason}; started again in {seconds:g} s; restarts left: {restarts}")
            if failure is not None and failure.detail:
                print(failure.detail, file=sys.stderr, flush=True)
            is_soon = time.monotonic() - began < _SOON
            pause = min(_LONGEST, 2 * pause) if is_soon else policy.pause
            if not _waited(seconds, signals):
                return _ended(failure)


def _ended(failure: WorkerError | None) -> int:
    """Return the exit code of a training that a signal ends between two attempts, or raise its failure."""
    if failure is not None:
        raise failure
    return EXIT_STOPPED


def _waited(seconds: float, signals: list[signal.Signals]) -> bool:
    """Wait, and return whether no signal came that asks to end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not {signal.SIGUSR2, signal.SIGTSTP}.issuperset(signals):
            return False
        time.sleep(_LOOK)
    return True


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
