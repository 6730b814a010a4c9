"""A training on several hosts, started again when it fails.

After a failure the run goes on from its newest state. Hosts that failed less are taken first, so that a spare
one takes the place of one that failed; a host that failed often is left out.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.errors import ClusterError, WorkerError
from shoal.fleet.agent import StartAgent
from shoal.fleet.attempt import Attempt, Work
from shoal.fleet.hosts import Host
from shoal.launch import EXIT_STOPPED, signals_noted

_NO_RETRY = (2, 130)  # exit codes after which another attempt would end the same way, or nobody wants one
_SOON = 60.0  # seconds: an attempt that fails sooner makes the next pause longer
_LOOK = 0.05  # seconds between looks at signals
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
