"""The members of a training, watched by the launcher that makes generations of them.

Each time round it takes note of members that ended, of hosts and members that came, and of requests. Then it
makes a generation if the members have changed, enough of them are there, and the hosts that cannot be reached
are too few to go on elsewhere. Without enough it waits for hosts, if there are several, and else ends.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch.distributed.distributed_c10d import Store

from shoal.errors import WorkerError
from shoal.launch.elastic.drain import Request, Requests
from shoal.launch.elastic.elastic_rank import AFTER
from shoal.launch.elastic.host import Host
from shoal.launch.elastic.linked_hosts import LinkedHosts
from shoal.launch.elastic.roster import Roster, Survivors
from shoal.launch.local.launcher import END, SETTLE, listen_for
from shoal.launch.local.local_ranks import LocalRanks
from shoal.launch.local.outcome import Causes
from shoal.launch.local.signals import SAVE, StopRequest
from shoal.launch.submit import EXIT_STOPPED
from shoal.spec.run import write_event

_MENDED = 5.0  # seconds in which the failure of a group shows its cause, such as a process that ends


@final
class LostGroup:
    """The newest group, once it has failed and no member of it has ended.

    Args:
        roster: The generations.
        causes: What is known of failures.
        timeout: Seconds that members wait for another in a collective.
        linked: The hosts, if there are several.
    """

    def __init__(self, roster: Roster, causes: Causes, timeout: float, linked: LinkedHosts | None) -> None:
        self._roster, self._causes, self._linked, self._timeout = roster, causes, linked, timeout
        self._since: float | None = None
        self._waited = 0  # members that have waited too long
        self._steps = -2  # that were made when the group before was lost

    def forget(self) -> None:
        """Take note that the newest group has not failed, or that its failure has a cause."""
        self._since = None

    def is_unexplained(self) -> bool:
        """Return whether it has failed for so long that no cause will show; hosts are asked meanwhile."""
        now, (waited, _) = time.monotonic(), self._roster.waited()
        if self._since is None and self._linked is not None:
            self._linked.ask_whom_they_reach()
        if self._since is None or waited != self._waited:
            self._since, self._waited = now, waited
        return now - self._since > _MENDED and (self._linked is None or self._linked.is_heard)

    def hanging(self) -> Sequence[int]:
        """Return the members for which the others have waited too long."""
        return self._roster.waited()[1]

    def apart(self) -> tuple[Host, Host] | None:
        """Return a host that cannot reach another one, and this one; None if all reach each other."""
        return None if self._linked is None else self._linked.apart()

    def why_stuck(self, restarts: int) -> str:
        """Return why no other group may be formed; "" if one may.

        Args:
            restarts: How often that is allowed.
        """
        before, self._steps = self._steps, self._roster.steps_when_broken()
        if self._steps > before and restarts:
            return ""
        when = f"after step {self._steps}" if self._steps > 0 else "before the first step"
        if self._steps <= before:
            lost = f"twice {when}, without a step between"
        else:
            lost = f"{when}, and no restart is left"
        return (
            f"the ranks have lost each other {lost}. A rank waits at most timeout={self._timeout:g} s in a "
            f"collective: give a larger one if the network is slow{self._causes.newest_hang()}"
        )


WAIT = 300.0
"""Seconds to wait for hosts, when too few are there."""

_LOOK = 0.02  # seconds between checks for ended ranks
_CALM = 0.1  # seconds between them while all ranks train on this host: the end of one wakes this process
_STOPPED = 10.0  # seconds after which a process that is stopped counts as lost
_COMES = 10.0  # seconds in which a rank that all others waited for before comes to the next generation;
_COMES_LATE = 30.0  # and over a network: a connection that was cut for 15 s is used again after up to 26 s
_CAUSE = 2.0  # seconds in which the end of a member shows for which a watchdog has aborted others
_SOON = 60.0  # seconds: a member that fails sooner after its start than this is left out the second time
_WRONG_INPUT = 2  # exit code of a rank that was given what cannot work
_GATHERED = 10.0  # seconds without a host or member that comes, after all had to stop
_REQUESTS = 0.5  # seconds between two looks for requests


@final
class Members:
    """The members of a training.

    Args:
        processes: The processes of all members.
        store: The store of the ranks.
        folder: Where members leave their outcomes.
        least: Number of members with which the training goes on.
        restarts: Number of times that lost members are started again, in total.
        events: JSON lines that tell which members were lost, left and came, and when; None for none. It is
            written once its folder exists.
        timeout: Seconds that members wait for another in a collective, and for one that does not come to a
            generation.
        linked: `processes`, if they are on several hosts.
    """

    def __init__(
        self,
        processes: LinkedHosts | LocalRanks,
        store: Store,
        folder: Path,
        least: int,
        restarts: int,
        events: Path | None,
        timeout: float,
        linked: LinkedHosts | None = None,
    ) -> None:
        self._processes = processes
        self._linked = linked
        self._roster = Roster(store)
        self._survivors = Survivors(self._roster)
        self._causes = Causes(folder)
        self._events = events
        self._least = least
        self._restarts = restarts
        self._timeout = timeout
        self._present = processes.running()
        self._known = set(self._present)  # members that were there at some time
        self._starting: set[int] = set()
        self._ended: set[int] = set()  # members whose end was noted since they were started
        self._started = dict.fromkeys(self._present, time.monotonic())
        self._early: set[int] = set()  # members that have failed soon after a start
        self._stopped_since: dict[int, float] = {}
        self._absent_since: float | None = None  # members that others wait for
        self._has_waited = False  # whether members of the newest generation have waited for another before
        self._signal: signal.Signals | None = None
        self._gone: set[int] = set()  # members that had ended when the signal came
        self._grouped: set[int] = set()  # members of the newest generation
        self._failure: WorkerError | None = None
        self._is_due = True  # whether a generation is to be made,
        self._is_broken = False  # after one that cannot go on
        self._is_halted = False  # whether all had to stop, so that nothing is won by haste
        self._came = 0.0  # time at which a host or a member came last
        self._waits_since: float | None = None  # for hosts
        self._lost = LostGroup(self._roster, self._causes, timeout, linked)
        self._is_stuck = False  # whether no other group can go on
        self._asked: set[int] = set()  # members that were asked to leave
        self._requests = Requests(None if events is None else events.parent)
        self._looked = 0.0  # time of the last look for requests

    def run(self, stop: StopRequest) -> int:
        """Watch until the training has ended; return its exit code."""
        while self._goes_on() and not (stop.is_late or self._is_stuck):
            self._processes.listen(_CALM if self._is_calm() else _LOOK)
            stop.pass_on(self._processes)
            if stop.signal is not None and self._signal is None:
                self._signal, self._gone = stop.signal, set(self._ended)
                if not self._is_lost:
                    self._failure = None  # what was survived before
            self._end_stopped()
            self._end_absent()
            if not self._note_ends():
                break
            self._take_hosts()
            self._take_ready()
            self._look_for_requests()
        if stop.is_now:
            self._processes.signal(signal.SIGKILL)
        return self._exit_code(stop)

    def _goes_on(self) -> bool:
        """Make a generation if one is due and can be; return whether to go on."""
        if self._signal is not None:
            grouped = [member for member in self._present if member in self._grouped]
            if grouped and self._is_due and not (self._is_broken or self._is_lost):
                self._form(grouped)  # for they wait for it, and may hold the state in memory only
            return not self._starting.issuperset(self._processes.running())
        can_go_on = self._linked is None or self._linked.has_quorum
        if self._is_due and (self._linked is None or self._linked.is_heard):
            all_end = self._is_broken and self._roster.starts_again
            if can_go_on and len(self._present) >= self._least and not (all_end or self._gathers()):
                self._form(self._present)
            elif all_end or (self._is_broken and self._linked is not None):
                self._survivors.announce([], self._present, is_broken=True)  # so that all stop and wait
                self._is_halted, self._is_broken = True, False
                if all_end:
                    self._survivors.end(self._present)
        here = len(self._present) + len(self._starting)
        if can_go_on and here >= self._least and here:
            self._waits_since = None
            return True
        if self._linked is None or (can_go_on and len(self._linked.hosts) >= self._linked.least):
            return False
        return self._waits_for_hosts(self._linked)

    @property
    def _is_lost(self) -> bool:
        """Whether no process has the state, since all end because of a loss."""
        return self._is_halted and self._roster.starts_again

    def _is_calm(self) -> bool:
        """Whether nothing is expected of the members but that they train."""
        is_local = isinstance(self._processes, LocalRanks) and self._processes.are_whole
        return is_local and not (self._starting or self._roster.awaits)

    def _gathers(self) -> bool:
        """Return whether others may still come after all had to stop; together they have more state."""
        if not self._is_halted:
            return False
        if self._linked is None or self._roster.starts_again:
            return self._survivors.are_awaited(self._starting, self._came)
        is_recent = time.monotonic() - self._came < _GATHERED
        return bool(self._starting) or (is_recent and not self._linked.is_whole)

    def _form(self, here: Sequence[int]) -> None:
        self._grouped, starting = set(here), len(self._starting)
        self._survivors.announce(here, here, is_broken=self._is_broken, starting=starting)
        self._is_due = self._is_broken = self._is_halted = False
        self._absent_since = None
        self._lost.forget()
        if self._linked is not None:
            self._linked.train()

    def _waits_for_hosts(self, linked: LinkedHosts) -> bool:
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
            few = f"{len(linked.hosts)} hosts are there, of at least {linked.least}"
            why = few if linked.has_quorum else "more than half of the hosts cannot be reached, and may go on"
            _say(f"{why}: training waits, at most {WAIT:g} s")
        return now - self._waits_since < WAIT

    def _note_ends(self) -> bool:
        """Take note of members that have ended; return whether the training goes on."""
        if (codes := self._new_ends()) and self._signal is None:
            time.sleep(_LOOK)  # another that failed first, or its outcome, may be on its way
            codes = self._new_ends()
            until = time.monotonic() + _CAUSE
            while self._are_aborted(codes) and time.monotonic() < until:
                self._processes.listen(_LOOK)
                codes = self._new_ends()
        if not codes:
            return True
        if 0 in codes.values():  # all steps are made
            listen_for(self._processes, END)
            return False
        # After a signal, one that was starting has had nothing to save, and has ended by the signal too.
        excused = self._starting if self._signal is not None else ()
        failed = {each: code for each, code in codes.items() if code != EXIT_STOPPED and each not in excused}
        self._ended.update(codes)
        self._is_due |= not set(codes).isdisjoint(self._present)
        self._present = [member for member in self._present if member not in codes]
        self._starting.difference_update(codes)
        follow = self._survivors.take(failed)
        failed = {member: code for member, code in failed.items() if member not in follow}
        if failed and not (self._signal is not None and self._is_lost):  # else the loss is the cause
            self._failure = self._causes.of(failed)
            if self._linked is not None:
                self._failure.host = self._linked.where(self._failure.rank)
        if self._signal is not None:
            return not failed
        for each in filter(self._can_start, follow):
            self._start(each)
        if gone := codes.keys() - failed.keys() - follow:
            self._note("left", gone)
            _say(f"{_named(gone)} left; now there are {len(self._present)}")
        if not failed:
            return True
        self._is_broken |= self._is_due and not self._is_lost
        self._has_waited = False
        if _WRONG_INPUT in failed.values():
            return False
        left = len(self._present) + len(follow)
        _say(f"{self._failure}; {left} go on, if they can")
        self._note("lost", failed, str(self._failure))
        self._start_again(failed)
        return True

    def _are_aborted(self, codes: Mapping[int, int]) -> bool:
        """Return whether all that have ended were aborted by a watchdog, as after the loss of another."""
        return self._roster.starts_again and set(codes.values()) == {-signal.SIGABRT}

    def _new_ends(self) -> dict[int, int]:
        codes = self._processes.exit_codes()
        return {member: code for member, code in codes.items() if member not in self._ended}

    def _start_again(self, failed: Mapping[int, int]) -> None:
        for member in filter(self._can_start, failed):
            is_early = time.monotonic() - self._started[member] < _SOON
            if self._restarts == 0 or (is_early and member in self._early):
                continue
            self._restarts -= 1
            if is_early:
                self._early.add(member)
            else:
                self._early.discard(member)
            self._start(member)
        if self._linked is not None and self._linked.has_spare:
            self._leave_out_failing(self._linked)

    def _can_start(self, member: int) -> bool:
        return member not in self._asked and (self._linked is None or self._linked.can_start(member))

    def _start(self, member: int) -> None:
        self._expect(member)
        self._processes.start_again(member, {AFTER: str(self._roster.newest)})

    def _leave_out_failing(self, linked: LinkedHosts) -> None:
        """End hosts none of whose members is started again, as others stand by."""
        for host in linked.hosts:
            there = self._starting.union(self._present)
            if host.link is not None and host.is_begun and there.isdisjoint(host.numbers):
                linked.leave_out(host, "its ranks have failed again and again")

    def _expect(self, member: int) -> None:
        """Forget what is known of a member, which is started."""
        self._roster.expect(member)
        self._causes.forget(member)
        self._ended.discard(member)
        self._asked.discard(member)
        self._starting.add(member)
        self._started[member] = time.monotonic()

    def _take_hosts(self) -> None:
        """Start the members of hosts that have come."""
        if self._linked is None or self._signal is not None:
            return
        for host in self._linked.start_new(self._roster.newest):
            self._early.difference_update(host.numbers)
            self._came = time.monotonic()
            for member in host.numbers:
                self._expect(member)

    def _take_ready(self) -> None:
        """Count members that have come."""
        ready = {member for member in self._starting if self._roster.is_ready(member)}
        if not ready or self._signal is not None:
            return
        self._starting -= ready
        self._came = time.monotonic()
        self._present = sorted([*self._present, *ready])
        self._is_due = True
        if len(self._present) >= self._least:
            again = " again" if ready <= self._known else ""
            there = "is there" if len(ready) == 1 else "are there"
            _say(f"{_named(ready)} {there}{again}; now there are {len(self._present)}")
        self._known |= ready
        self._note("came", ready)

    def _look_for_requests(self) -> None:
        """Obey requests to leave, and make a new generation if one has failed for no reason that shows."""
        now = time.monotonic()
        if now - self._looked < _REQUESTS or self._signal is not None:
            return
        self._looked = now
        for request in self._requests.take():
            self._ask_to_leave(request)
        if self._is_due or self._processes.stopped() or not self._roster.is_told_broken():
            self._lost.forget()
        elif self._lost.is_unexplained():
            self._form_again()

    def _form_again(self) -> None:
        """Form another group after one that was lost, without those who cannot take part."""
        if hanging := self._lost.hanging():
            for member in hanging:
                self._give_up(member, f"did not come to the other ranks for {self._timeout:g} s")
        elif pair := self._lost.apart():
            self._part(*pair)
        elif why := self._lost.why_stuck(self._restarts):
            self._end_with(why)
        else:
            self._restarts -= 1
            self._is_due = self._is_broken = self._has_waited = True
            _say(f"the ranks have lost each other, and form a group again{self._causes.new_hang()}")

    def _part(self, host: Host, other: Host) -> None:
        """Leave out a host that cannot reach another one, if enough ranks are left."""
        assert self._linked is not None, "there are hosts"
        why = f"it and {other} cannot reach each other"
        if len(self._present) - len(host.numbers) < self._least:
            self._end_with(f"{host}: {why}, and at least {self._least} ranks have to train")
        else:
            self._linked.leave_out(host, why)

    def _end_with(self, why: str) -> None:
        self._failure, self._is_stuck = WorkerError(-1, why), True

    def _ask_to_leave(self, request: Request) -> None:
        """Ask a rank, or the ranks of a host, to leave, if enough others are there; note the answer."""
        what, hosts = request.what, [] if self._linked is None else self._linked.hosts
        host = next((host for host in hosts if what in (host.address, host.name)), None)
        named = host.numbers if host is not None else [int(what)] if what.isdecimal() else []
        asked = [member for member in self._present if member in named]
        refused = ""
        if not asked:
            refused = f"{what} is neither a rank nor a host that is there"
        elif len(self._present) - len(asked) < self._least:
            refused = f"at least {self._least} ranks must stay, and {len(self._present)} are there"
            asked = []
        elif host is not None and self._linked is not None:
            self._linked.leave(host)
        else:
            self._processes.signal(signal.SIGTERM, asked)
        if asked:
            _say(f"`shoal drain` asks {_named(asked)} to leave")
        self._asked.update(asked)
        self._note("asked", asked, refused, request.number)

    def _note(self, event: str, members: Iterable[int], reason: str = "", request: str = "") -> None:
        if self._events is not None:
            more: Any = {name: text for name, text in (("reason", reason), ("request", request)) if text}
            write_event(self._events, event, members=sorted(members), present=self._present, **more)

    def _end_stopped(self) -> None:
        """End processes that were stopped for long: they hold up all others."""
        stopped = self._processes.stopped()
        now = time.monotonic()
        self._stopped_since = {member: self._stopped_since.get(member, now) for member in stopped}
        if late := self._survivors.late():
            self._processes.signal(signal.SIGKILL, late)
        if self._linked is not None and not self._linked.is_heard:
            self._stopped_since = {}  # what a host has told may be late
        for member, since in self._stopped_since.items():
            if now - since > _STOPPED:
                self._give_up(member, f"was stopped for {_STOPPED:g} s (by SIGSTOP, Ctrl-Z or a debugger)")

    def _end_absent(self) -> None:
        """End members that others wait for in vain: their code hangs, or keeps the interpreter's lock."""
        absent = self._roster.absent()
        is_heard = self._linked is None or self._linked.is_heard
        if not absent or not is_heard or self._is_due or self._signal is not None:
            self._absent_since = None
            return
        now = time.monotonic()
        self._absent_since = self._absent_since or now
        comes = _COMES if self._linked is None else _COMES_LATE
        patience = min(self._timeout, comes) if self._has_waited else self._timeout
        if now - self._absent_since <= patience:
            return
        for member in absent:
            is_known = self._has_waited and self._roster.is_numbered_by_rank
            cause = self._causes.hang_of(member) if is_known else ""
            self._give_up(member, f"did not come to the other ranks for {patience:g} s{cause}")

    def _give_up(self, member: int, why: str) -> None:
        self._causes.give_up(member, why)
        self._processes.signal(signal.SIGKILL, [member])

    def _wait_for_copies(self, stop: StopRequest) -> None:
        """Wait, once all steps are made, for members that still copy the last checkpoint or send values."""
        until = time.monotonic() + SAVE
        while not (stop.is_late or stop.is_now) and time.monotonic() < until:
            left = self._grouped - self._starting - set(self._processes.stopped())
            if left.isdisjoint(self._processes.running()):
                return
            self._processes.listen(_LOOK)
            stop.pass_on(self._processes)

    def _exit_code(self, stop: StopRequest) -> int:
        """End what is left, and return the exit code of the training."""
        has_failed = self._failure is not None and 0 not in self._processes.exit_codes().values()
        if has_failed and self._signal is None:
            self._roster.end()
        if self._failure is not None and self._processes.running():
            listen_for(self._processes, SETTLE)
        self._processes.signal(signal.SIGTERM)
        listen_for(self._processes, END)
        codes = self._processes.exit_codes()
        if 0 in codes.values():
            self._wait_for_copies(stop)
            return 0
        if self._failure is not None:
            raise self._failure
        if self._signal is not None:
            there = {member: code for member, code in codes.items() if member not in self._gone}
            return self._causes.after_signal(there, self._signal.name)
        return EXIT_STOPPED  # the last members were asked to leave, one by one


def _named(members: Collection[int]) -> str:
    return f"rank{'s' * (len(members) > 1)} {', '.join(map(str, sorted(members)))}"


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
