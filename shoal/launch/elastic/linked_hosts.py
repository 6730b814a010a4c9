"""The ranks of several hosts, as the launcher sees them that leads the run.

One launcher leads, and each other host has one that follows (`follower.py`) over a link to it. There are two
ways to start them:

    shoal train --nodes       starts a launcher on each host. The one at the rendezvous leads, and has ranks
                              too (`leader.py`). The others dial it. They may come and go
                              (`elastic_launcher.py`)
    shoal launch ssh or ray   leads without ranks of its own (`shoal/launch/fleet/`), and starts the others
                              (`agent.py`), whose stdin and stdout are the links. The hosts of the beginning
                              train to the end, as the ranks of one machine do (`launcher.wait_for_end`)

Over a link go, one JSON object each:

    to the host                                       from the host
      {"do": "stand by"}                                {"kind": "host", ...}               first of all
      {"do": "begin", "numbers", job...}                {"ended": {rank: [code, outcome]}, "hangs"}
      {"do": "start", "rank", "changes"}                {"stopped": [rank, ...]}
      {"do": "signal", "number", "ranks"}               {"leaves": true}
      {"do": "more"}                                    {"lines": [[rank, descriptor, text], ...]}
      {"do": "reach", "addresses": [[host, port], ...]} {"apart": [[host, port], ...]}
      {"do": "lost", "why"}                             {"closes": why}               before it closes
      {"do": "end", "code", "why"}                      {"lines": [...], "last": true}        last of all
                                                        {"refuses": error}            it cannot do that
      {} every second                                   {} every second

Lines are what its ranks have printed; the next ones come after "more". "hangs" are the verdicts of ranks that
waited too long.

A host is gone if its link ends, or if nothing came for `SILENCE` seconds. Its session ends then: what its
ranks still send to the store is refused, so that they cannot go on by themselves. It counts as ended only if
its system says that nobody listens at its port any more; else a network may be cut, and it may go on.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from shoal.channel import Channel
from shoal.errors import CommunicationError, ShoalError
from shoal.launch.elastic.host import BEAT, SILENCE, Gone, Host, end_of
from shoal.launch.local.local_ranks import LocalRanks
from shoal.launch.local.outcome import Outcome
from shoal.launch.local.output import NamedLines, pass_on
from shoal.launch.submit import EXIT_STOPPED
from shoal.values import decode

_LAST = 5.0  # seconds for the last lines of other hosts, when the run has ended
_FRESH = 3 * BEAT  # seconds since a host's last message in which it is known to be there
_LOST = -int(signal.SIGKILL)


@final
class LinkedHosts:
    """All ranks of a run, with the interface of `LocalRanks`, and the hosts that come and go.

    One thread for each host puts what it tells into a queue; `listen` takes it from there, so that everything
    else happens in the thread of the caller.

    Args:
        own: The host of this process; None if it has no ranks.
        least: Number of hosts with which the training goes on.
        most: Number of hosts that train at a time; others stand by.
        folder: Where outcomes of all ranks are put.
        job: What hosts are told when they begin; see `follow`.
        end_session: Told of each session that may use the store no longer.
        show: Shows what a host's ranks print: gets the host, the bytes and the file descriptor.

    Attributes:
        least: As given.
        waiting: The hosts that have come and have no ranks.
        silent: The hosts that did not answer when the run had ended.
    """

    def __init__(
        self,
        own: Host | None,
        least: int,
        most: int,
        folder: Path,
        job: Mapping[str, Any],
        end_session: Callable[[str], object] = lambda session: None,
        show: Callable[[Host, bytes, int], object] = lambda host, data, descriptor: pass_on(data, descriptor),
    ) -> None:
        self._own, self._most, self._folder, self._job = own, most, folder, job
        self._end_session, self._show = end_session, show
        self._places: dict[int, Host] = {}
        if own is not None:
            own.numbers, own.is_begun = range(own.ranks), True
            self._places[0] = own
        self.waiting: list[Host] = []
        self.silent: list[Host] = []
        self._linked: tuple[Host, ...] = ()  # a new one at each change: another thread reads it
        self._codes: dict[int, int] = {}  # of ranks of other hosts
        self._told: queue.Queue[tuple[Host, Mapping[str, Any] | Gone]] = queue.Queue()
        self._voters, self._dead = 1, 0
        self._local: LocalRanks | None = None
        self._is_ended = threading.Event()
        self.least = least
        threading.Thread(target=self._beat, name="shoal-beat", daemon=True).start()

    def running(self) -> list[int]:
        """Return the ranks that have not ended."""
        own = self._local.running() if self._local else []
        return sorted([*own, *(each for host in self._others for each in self._running(host))])

    def exit_codes(self) -> dict[int, int]:
        """Return the exit code of each rank that has ended, or whose host is gone."""
        return self._codes | (self._local.exit_codes() if self._local else {})

    def stopped(self) -> list[int]:
        """Return the ranks whose processes are stopped."""
        own = self._local.stopped() if self._local else []
        return sorted([*own, *(each for host in self._others for each in host.stopped)])

    def signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to those of some ranks that have not ended; by default to all."""
        if self._local is not None:
            self._local.signal(number, ranks)
        for host in self._others:
            if meant := [each for each in self._running(host) if ranks is None or each in ranks]:
                host.tell(do="signal", number=int(number), ranks=meant)

    def listen(self, seconds: float) -> None:
        """Pass on the next output of this host's ranks, and take what other hosts have told."""
        if self._local is not None:
            self._local.listen(seconds)
        else:
            time.sleep(seconds)
        shown = []
        while not self._told.empty():
            host, told = self._told.get()
            if isinstance(told, Mapping) and "lines" in told:
                self._show_lines(host, told["lines"])
                shown += [host] * host.is_begun  # what came before is not of its ranks
            else:
                self._take(host, told)
        for host in shown:  # no sooner, so that hosts that print without end do not keep this going
            host.tell(do="more")

    def where(self, rank: int) -> str:
        """Return the host of a rank, for people; empty if it is gone."""
        return next((str(host) for host in self.hosts if host.is_begun and rank in host.numbers), "")

    def can_start(self, rank: int) -> bool:
        """Return whether the host of a rank is there, and stays."""
        return any(host.is_begun and not host.is_leaving and rank in host.numbers for host in self.hosts)

    def start_again(self, rank: int, changes: Mapping[str, str]) -> None:
        """Start a rank that has ended once more."""
        if self._local is not None and self._own is not None and rank in self._own.numbers:
            self._local.start_again(rank, changes)
            return
        self._codes.pop(rank, None)
        for host in self._others:
            if rank in host.numbers:
                host.tell(do="start", rank=rank, changes=dict(changes))

    def begin(self, local: LocalRanks) -> None:
        """Take over the ranks of this host."""
        self._local = local

    def begin_in_order(self, hosts: Sequence[Host], **job: Any) -> None:
        """Start the ranks of hosts that wait, numbered in the order of the hosts."""
        first = 0
        for place, host in enumerate(hosts):
            self.waiting.remove(host)
            self._places[place], host.is_begun = host, True
            host.numbers = range(first, first + host.ranks)
            numbers = [first, first + host.ranks]
            host.tell(do="begin", numbers=numbers, place=[place, len(hosts)], **job)
            first += host.ranks

    def start_new(self, after: int) -> Iterator[Host]:
        """Start the ranks of hosts that got a place; yield each host before.

        Args:
            after: The newest generation.
        """
        for host in [host for host in self._others if not host.is_begun]:
            for rank in host.numbers:
                self._codes.pop(rank, None)
            yield host
            host.is_begun = True
            numbers = [host.numbers.start, host.numbers.stop]
            host.tell(do="begin", numbers=numbers, session=host.session, after=after, **self._job)

    @property
    def hosts(self) -> list[Host]:
        """The hosts that have ranks, in the order of these."""
        return [self._places[place] for place in sorted(self._places)]

    @property
    def has_spare(self) -> bool:
        """Whether a host stands by."""
        return bool(self.waiting)

    def leave(self, host: Host) -> None:
        """Ask the ranks of a host to leave; the host ends once they have, unless it is that of the store."""
        host.is_leaving = host.link is not None
        self.signal(signal.SIGTERM, host.numbers)

    def leave_out(self, host: Host, why: str) -> None:
        """End another host, and count its ranks as ended; one that stands by takes its place."""
        host.tell(do="end", code=1, why=why)
        self._lose(host, Gone(f"is left out: {why}", is_dead=True))

    def ask_whom_they_reach(self) -> None:
        """Ask the other hosts whether they reach each other; see `apart`."""
        for host in self._others:
            host.apart = []
            others = [[each.address, each.port] for each in self._others if each is not host]
            host.tell(do="reach", addresses=others)

    def apart(self) -> tuple[Host, Host] | None:
        """Return a host that cannot reach another one, and this one, as far as they have answered.

        It is one of the hosts that reach the fewest others.
        """
        by_address = {(host.address, host.port): host for host in self._others}
        pairs = [
            (host, other)
            for host in self._others
            for address in host.apart
            if (other := by_address.get(address)) is not None
        ]
        pairs += [(other, host) for host, other in pairs if (other, host) not in pairs]
        return max(pairs, key=lambda pair: sum(host is pair[0] for host, _ in pairs), default=None)

    @property
    def has_quorum(self) -> bool:
        """Whether hosts that cannot be reached are too few to go on elsewhere.

        Of the hosts that trained last, without those known to have ended, at least half are here. Half is
        enough, because only one half has the store.
        """
        return 2 * len(self._places) >= self._voters - self._dead

    @property
    def is_whole(self) -> bool:
        """Whether as many hosts are here as trained last."""
        return len(self._places) >= self._voters

    @property
    def is_heard(self) -> bool:
        """Whether all hosts that have ranks were heard just now."""
        now = time.monotonic()
        return all(now - host.heard < _FRESH for host in self._others)

    def train(self) -> None:
        """Take note that the hosts that are here now train together."""
        self._voters, self._dead = len(self._places), 0
        for host in self.hosts:
            host.votes = True

    def is_open(self, session: str) -> bool:
        """Return whether a session may use the store."""
        return any(host.session == session for host in self.hosts)

    def end(self, code: int = 0, why: str = "") -> None:
        """Tell all hosts that the run has ended, with which exit code, and why; show their last lines.

        A host that does not answer is lost if its ranks have not ended.
        """
        left = [] if self._is_ended.is_set() else list(self._linked)
        self._is_ended.set()
        for host in left:
            host.tell(do="end", code=code, why=why)
        until = time.monotonic() + _LAST
        with contextlib.suppress(queue.Empty):
            while left:
                host, told = self._told.get(timeout=max(0.0, until - time.monotonic()))
                if isinstance(told, Mapping):
                    self._show_lines(host, told.get("lines", []))
                if host in left and (isinstance(told, Gone) or "last" in told):
                    left.remove(host)
                    if isinstance(told, Gone) and self._running(host):
                        self._lose(host, told)
        self.silent += left
        for host in left:
            if self._running(host):
                self._lose(host, Gone("was lost: it does not answer", is_dead=False))

    def join(self, link: Channel, asked: Mapping[str, Any]) -> None:
        """Take up a host that has dialled, on the thread of its link."""
        self.hear(Host(link, "", str(link.socket.getpeername()[0])), asked)

    def hear(self, host: Host, first: Mapping[str, Any] | None = None) -> None:
        """Listen to a host until it is gone, on the thread of its link.

        Args:
            host: The host.
            first: Its first message, if that was received.
        """
        assert host.link is not None
        closes = ""
        try:
            while True:
                message, first = first or host.link.receive(), None
                host.heard = time.monotonic()
                closes = str(message.get("closes", closes))
                if "kind" in message:
                    host.introduce(message)
                    host.link.limit(SILENCE)
                if message:
                    self._told.put((host, message))
        except OSError as error:
            self._told.put((host, end_of(host, error, closes)))
        host.link.close()

    def say(self, host: Host, line: bytes, descriptor: int = 2) -> None:
        """Show a line that a host has said, and not its ranks; from any thread."""
        text = line.decode(errors="replace").removesuffix("\n")
        self._told.put((host, {"lines": [(None, descriptor, text)]}))

    @property
    def _others(self) -> list[Host]:
        return [host for host in self.hosts if host.link is not None]

    def _running(self, host: Host) -> list[int]:
        return [rank for rank in host.numbers if rank not in self._codes] if host.is_begun else []

    def _take(self, host: Host, told: Mapping[str, Any] | Gone) -> None:
        if isinstance(told, Mapping) and "kind" in told:
            self._welcome(host)
        elif isinstance(told, Mapping) and "refuses" in told:
            error = decode(bytes.fromhex(told["refuses"]))
            raise error if isinstance(error, ShoalError) else CommunicationError(f"{host} refuses: {error}")
        elif host not in self._places.values():  # it has come, or has ended as it was told to
            if isinstance(told, Gone):
                host.gone = host.gone or told
                self.waiting = [each for each in self.waiting if each is not host]
                self._forget(host)
        elif isinstance(told, Gone):
            self._lose(host, told)
        else:
            self._note(host, told)

    def _welcome(self, host: Host) -> None:
        if self._own is not None and (why := host.unlike(self._own)):
            print(f"shoal: {host} is refused: {why}", file=sys.stderr, flush=True)
            host.tell(do="end", code=2, why=why)
            return
        self.waiting.append(host)
        self._linked = (*self._linked, host)
        self._place()
        if host in self.waiting and self._own is not None:
            host.tell(do="stand by")
            print(f"shoal: {host} stands by", file=sys.stderr, flush=True)

    def _place(self) -> None:
        """Give hosts that stand by the places that are free."""
        for place in range(self._most):
            if self.waiting and place not in self._places:
                host = self._places[place] = self.waiting.pop(0)
                host.numbers = range(place * host.ranks, (place + 1) * host.ranks)

    def _note(self, host: Host, told: Mapping[str, Any]) -> None:
        for rank, (code, outcome) in told.get("ended", {}).items():
            if outcome is not None:
                Outcome(**outcome).write(self._folder)
            self._codes[int(rank)] = int(code)
        for name, verdict in told.get("hangs", {}).items():
            with contextlib.suppress(OSError):  # the folder may be full
                (self._folder / Path(name).name).write_text(verdict)
        if "stopped" in told:
            host.stopped = [int(rank) for rank in told["stopped"]]
        if "apart" in told:
            host.apart = [(str(address), int(port)) for address, port in told["apart"]]
        if "leaves" in told:
            self.leave(host)
        if host.is_leaving and not self._running(host) and self._own is not None:
            host.tell(do="end", code=EXIT_STOPPED, why="its ranks have left")
            self._remove(host, is_dead=True)

    def _lose(self, host: Host, gone: Gone) -> None:
        """Count the ranks of a host as ended, as it is gone."""
        host.gone = gone if self._running(host) else None
        for rank in self._running(host):
            Outcome(rank=rank, exit_code=1, error=f"{host} {gone.why}").write(self._folder)
            self._codes[rank] = _LOST
        if not gone.is_dead:
            host.tell(do="lost", why=f"for the host that leads it {gone.why}")
        self._remove(host, is_dead=gone.is_dead)

    def _remove(self, host: Host, *, is_dead: bool) -> None:
        place = next(place for place, each in self._places.items() if each is host)
        del self._places[place]
        self._forget(host)
        self._dead += is_dead and host.votes
        self._end_session(host.session)
        assert host.link is not None
        if not is_dead:
            host.link.close()
        self._place()

    def _forget(self, host: Host) -> None:
        self._linked = tuple(each for each in self._linked if each is not host)

    def _beat(self) -> None:
        while not self._is_ended.wait(BEAT):
            for host in self._linked:
                host.tell()

    def _show_lines(self, host: Host, lines: Sequence[tuple[int | None, int, str]]) -> None:
        for rank, descriptor, text in lines:
            named = NamedLines(rank, overwrites=os.isatty(descriptor), host=host.name or host.address)
            self._show(host, named.take(text.encode() + b"\n"), descriptor)
